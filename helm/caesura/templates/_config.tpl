{{- /* Caesura's configuration, as YAML: the values' and what the chart knows. */ -}}
{{- define "caesura.config" -}}
{{- $config := deepCopy .Values.config -}}
{{- $url := printf "%s/0" (include "caesura.redis.address" .) -}}
{{- if include "caesura.redis.needsPassword" . -}}
{{- $url = printf "%s?password_file=/etc/caesura/redis/password" $url -}}
{{- end -}}
{{- $known := dict "redis" (dict "url" $url) "http" (dict "host" "0.0.0.0" "port" 8000) -}}
{{- if .Values.keys.enabled -}}
{{- $_ := set $known "auth" (dict "file" "/etc/caesura/keys/keys.yaml") -}}
{{- end -}}
{{- mergeOverwrite $config $known | toYaml -}}
{{- end -}}

{{- /* Seconds: the longest turn. */ -}}
{{- define "caesura.longestTurn" -}}
{{- dig "http" "request_timeout_s" 1200 .Values.config | ceil | int64 -}}
{{- end -}}

{{- define "caesura.grace" -}}
{{- add (include "caesura.longestTurn" . | int64) (int64 .Values.drain.marginSeconds) -}}
{{- end -}}

{{- /* Seconds that a worker has to leave: until its replicas are elsewhere, and their turns have ended. */ -}}
{{- define "caesura.leave" -}}
{{- add (include "caesura.grace" . | int64) (int64 .Values.drain.replacementSeconds) -}}
{{- end -}}

{{- /* Sources of models that come from a hub, one a line. */ -}}
{{- define "caesura.hubModels" -}}
{{- $sources := list (dig "model" "source" "tiny" .Values.config) -}}
{{- range $model := dig "models" dict .Values.config }}{{- $sources = append $sources (dig "source" "tiny" $model) -}}{{- end -}}
{{- range $source := uniq $sources -}}
{{- if not (or (eq $source "tiny") (regexMatch "^[/.~]" $source)) }}
{{ $source }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "caesura.serveConfig" -}}
proxy_location: EveryNode
http_options:
  host: 0.0.0.0
  port: 8000
logging_config:
  log_level: WARNING
  encoding: JSON
  enable_access_log: false
applications:
  - name: caesura
    route_prefix: /
    import_path: cluster.app:build
    {{- if .Values.autoscaling.enabled }}
    external_scaler_enabled: true
    {{- end }}
    args:
      {{- include "caesura.config" . | nindent 6 }}
{{- end -}}

{{- /* What cannot work is refused while it is rendered, and not by a pod that never starts. */ -}}
{{- define "caesura.check" -}}
{{- $replicas := dig "replicas" dict .Values.config -}}
{{- $size := dig "tensor_parallel_size" 1 $replicas | int -}}
{{- $onGpu := eq "gpu" (dig "accelerator" "cpu" $replicas) -}}
{{- $there := 0 -}}
{{- if not .Values.workerGroups }}{{ fail "workerGroups: at least one group is needed" }}{{ end -}}
{{- range $name, $group := .Values.workerGroups -}}
{{- $gpus := int (default 0 $group.gpus) -}}
{{- if and $onGpu (gt $gpus 0) -}}
{{- if mod $gpus $size }}{{ fail (printf "workerGroups.%s.gpus: %d devices are not a multiple of config.replicas.tensor_parallel_size (%d): a replica would be split over pods" $name $gpus $size) }}{{ end -}}
{{- $there = add $there (mul $gpus (int $group.replicas)) -}}
{{- end -}}
{{- end -}}
{{- $wanted := mul $size (dig "count" 1 $replicas | int) -}}
{{- if and $onGpu (not .Values.autoscaling.enabled) (lt (int $there) (int $wanted)) -}}
{{- fail (printf "workerGroups: config.replicas wants %d GPUs, all workers together have %d" $wanted $there) -}}
{{- end -}}
{{- $incremental := eq .Values.upgrade.strategy "NewClusterWithIncrementalUpgrade" -}}
{{- if $incremental -}}
{{- $_ := required "upgrade.incremental.gatewayClassName: incremental upgrades shift traffic at a Gateway; name its class" .Values.upgrade.incremental.gatewayClassName -}}
{{- if not .Values.autoscaling.enabled }}{{ fail "upgrade.strategy: incremental upgrades need autoscaling.enabled" }}{{ end -}}
{{- if or .Values.ingress.enabled .Values.httpRoute.enabled }}{{ fail "upgrade.strategy: KubeRay makes the Gateway and the HTTPRoute of an incremental upgrade itself; set ingress.enabled and httpRoute.enabled to false" }}{{ end -}}
{{- end -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.tlsSecret) (not .Values.ingress.insecure) }}{{ fail "ingress.tlsSecret: keys would travel unencrypted; name a TLS Secret, or set ingress.insecure" }}{{ end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) (not .Values.httpRoute.gateway.create) }}{{ fail "httpRoute.parentRefs: name a Gateway, or set httpRoute.gateway.create" }}{{ end -}}
{{- if .Values.httpRoute.gateway.create -}}
{{- $_ := required "httpRoute.gateway.className: which class makes the Gateway?" .Values.httpRoute.gateway.className -}}
{{- $_ := required "httpRoute.gateway.tlsSecret: the Gateway's listener is HTTPS; name a TLS Secret" .Values.httpRoute.gateway.tlsSecret -}}
{{- end -}}
{{- if and .Values.modelCache.download.enabled (not .Values.modelCache.enabled) }}{{ fail "modelCache.download: needs modelCache.enabled" }}{{ end -}}
{{- if and .Values.modelCache.download.enabled .Values.modelCache.readOnly }}{{ fail "modelCache.readOnly: a download cannot be written there" }}{{ end -}}
{{- if and .Values.networkPolicy.enabled .Values.autoscaling.enabled (not .Values.networkPolicy.kubernetesApi.cidrs) }}{{ fail "networkPolicy.kubernetesApi.cidrs: Ray's autoscaler asks the Kubernetes API; say where it is" }}{{ end -}}
{{- if and .Values.networkPolicy.enabled (not .Values.redis.bundled) (not .Values.redis.external.cidrs) }}{{ fail "redis.external.cidrs: say where the Redis is, so that the NetworkPolicy lets it be reached" }}{{ end -}}
{{- if and (not .Values.redis.bundled) .Values.redis.external.password (not .Values.redis.existingSecret) }}{{ fail "redis.existingSecret: a Secret with the external Redis' password; or set redis.external.password: false" }}{{ end -}}
{{- end -}}
