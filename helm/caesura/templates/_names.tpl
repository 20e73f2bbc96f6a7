{{- define "caesura.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- /* KubeRay makes longer names of it, and a name of Kubernetes' has at most 63 characters. */ -}}
{{- default (ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name)) .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "caesura.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "caesura.labels" -}}
{{ include "caesura.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "caesura.image" -}}
{{- $tag := ternary (printf ":%s" (default .fallback .image.tag)) (printf "@%s" .image.digest) (empty .image.digest) -}}
{{- printf "%s%s" .image.repository $tag -}}
{{- end -}}

{{- define "caesura.redis.secret" -}}
{{- default (printf "%s-redis" (include "caesura.fullname" .)) .Values.redis.existingSecret -}}
{{- end -}}

{{- define "caesura.redis.needsPassword" -}}
{{- if or .Values.redis.bundled .Values.redis.external.password }}yes{{ end -}}
{{- end -}}

{{- define "caesura.redis.host" -}}
{{- if .Values.redis.bundled -}}
{{- printf "%s-redis.%s.svc" (include "caesura.fullname" .) .Release.Namespace -}}
{{- else -}}
{{- required "redis.external.host: name the Redis, or set redis.bundled" .Values.redis.external.host -}}
{{- end -}}
{{- end -}}

{{- define "caesura.redis.port" -}}
{{- ternary 6379 (int .Values.redis.external.port) .Values.redis.bundled -}}
{{- end -}}

{{- define "caesura.redis.scheme" -}}
{{- ternary "rediss" "redis" (and (not .Values.redis.bundled) .Values.redis.external.tls) -}}
{{- end -}}

{{- define "caesura.redis.address" -}}
{{- printf "%s://%s:%s" (include "caesura.redis.scheme" .) (include "caesura.redis.host" .) (include "caesura.redis.port" .) -}}
{{- end -}}

{{- define "caesura.keys.secret" -}}
{{- default (printf "%s-keys" (include "caesura.fullname" .)) .Values.keys.existingSecret -}}
{{- end -}}

{{- define "caesura.rayAuth.secret" -}}
{{- default (printf "%s-ray" (include "caesura.fullname" .)) .Values.rayAuth.existingSecret -}}
{{- end -}}

{{- define "caesura.modelClaim" -}}
{{- default (printf "%s-models" (include "caesura.fullname" .)) .Values.modelCache.existingClaim -}}
{{- end -}}

{{- define "caesura.serveService" -}}
{{- printf "%s-serve-svc" (include "caesura.fullname" .) -}}
{{- end -}}

{{- /* What runs in the chart's containers never is root, gains nothing, and writes only into its own volumes. */ -}}
{{- define "caesura.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.podSecurity.runAsUser }}
runAsGroup: {{ .Values.podSecurity.runAsGroup }}
fsGroup: {{ .Values.podSecurity.fsGroup }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "caesura.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end -}}
