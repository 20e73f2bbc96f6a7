{{- define "caesura.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- /* KubeRay makes longer names of it, and a name of Kubernetes' has at most 63 characters. */ -}}
{{- $full := default (ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name)) .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- if not (regexMatch "^[a-z]([a-z0-9-]*[a-z0-9])?$" $full) -}}
{{- fail (printf "release name: names of services begin with %q, and a service's name begins with a letter and has only lower-case letters, digits and hyphens; rename the release, or set fullnameOverride" $full) -}}
{{- end -}}
{{- if has $full (list "true" "false" "null" "yes" "no" "on" "off" "y" "n") }}{{ fail (printf "fullnameOverride: %s is no name in YAML" $full) }}{{ end -}}
{{- $full -}}
{{- end -}}

{{- define "caesura.namespace" -}}
{{- default .Release.Namespace .Values.namespaceOverride | quote -}}
{{- end -}}

{{- /* A name that is resolved inside the Kubernetes cluster. Of: root, service. */ -}}
{{- define "caesura.host" -}}
{{- printf "%s.%s.svc" .service (default .root.Release.Namespace .root.Values.namespaceOverride) -}}
{{- end -}}

{{- define "caesura.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- /* Labels of pods: without versions, so that a new version of the chart alone restarts nothing. */ -}}
{{- define "caesura.podLabels" -}}
{{ include "caesura.selector" . }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "caesura.labels" -}}
{{ include "caesura.podLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "caesura.image" -}}
{{- $tag := ternary (printf ":%s" (default .fallback .image.tag)) (printf "@%s" .image.digest) (empty .image.digest) -}}
{{- printf "%s%s" .image.repository $tag | quote -}}
{{- end -}}

{{- define "caesura.keys.secret" -}}
{{- default (printf "%s-keys" (include "caesura.fullname" .)) .Values.keys.existingSecret | quote -}}
{{- end -}}

{{- define "caesura.rayAuth.secret" -}}
{{- default (printf "%s-ray" (include "caesura.fullname" .)) .Values.rayAuth.existingSecret | quote -}}
{{- end -}}

{{- define "caesura.modelClaim" -}}
{{- default (printf "%s-models" (include "caesura.fullname" .)) .Values.modelCache.existingClaim | quote -}}
{{- end -}}

{{- define "caesura.serveService" -}}
{{- printf "%s-serve-svc" (include "caesura.fullname" .) -}}
{{- end -}}
