{{- /* The data of a Secret that the chart made before, as YAML; empty: there is none, and one may be made.

It is refused where no cluster can be asked, because each rendering would then make other keys and passwords. The ConfigMap
kube-root-ca.crt is in every namespace. Of: root, secret, key (of the values, which names an existing Secret). */ -}}
{{- define "caesura.kept" -}}
{{- $namespace := default .root.Release.Namespace .root.Values.namespaceOverride -}}
{{- $data := dig "data" dict (lookup "v1" "Secret" $namespace .secret) -}}
{{- if not (or $data (eq .root.Values.generateSecrets "always") (lookup "v1" "ConfigMap" $namespace "kube-root-ca.crt")) -}}
{{- fail (printf "%s: the chart makes a Secret only if it can see whether there is one, which it cannot in `helm template`, in Argo CD, or while the namespace %s does not exist. Name an existing Secret here, create the namespace before `helm install`, or set generateSecrets: always" .key $namespace) -}}
{{- end -}}
{{- with $data }}{{ toYaml . }}{{ end -}}
{{- end -}}
