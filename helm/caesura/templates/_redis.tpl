{{- define "caesura.redis.secret" -}}
{{- default (printf "%s-redis" (include "caesura.fullname" .)) .Values.redis.existingSecret | quote -}}
{{- end -}}

{{- /* Bytes of data that the chart's own Redis takes, by which Caesura sees that it is nearly full. */ -}}
{{- define "caesura.redis.maxBytes" -}}
{{- $key := "redis.resources.limits.memory" -}}
{{- $limit := required (printf "%s: the Redis of the chart needs a limit, of which 65%% is for data" $key) .Values.redis.resources.limits.memory -}}
{{- div (mul (include "caesura.bytes" (dict "key" $key "quantity" $limit) | int64) 65) 100 -}}
{{- end -}}

{{- define "caesura.redis.needsPassword" -}}
{{- if or .Values.redis.bundled .Values.redis.external.password }}yes{{ end -}}
{{- end -}}

{{- define "caesura.redis.username" -}}
{{- if not .Values.redis.bundled }}{{ .Values.redis.external.username }}{{ end -}}
{{- end -}}

{{- /* The file of the external Redis' own certificate authority; empty: those that the image trusts. */ -}}
{{- define "caesura.redis.ca" -}}
{{- if and (not .Values.redis.bundled) .Values.redis.external.caSecret.name }}/etc/caesura/redis-ca/ca.crt{{ end -}}
{{- end -}}

{{- define "caesura.redis.host" -}}
{{- if .Values.redis.bundled -}}
{{- include "caesura.host" (dict "root" . "service" (printf "%s-redis" (include "caesura.fullname" .))) -}}
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

{{- /* Of Ray, whose username and password are fields of their own. */ -}}
{{- define "caesura.redis.address" -}}
{{- printf "%s://%s:%s" (include "caesura.redis.scheme" .) (include "caesura.redis.host" .) (include "caesura.redis.port" .) -}}
{{- end -}}

{{- /* Of Caesura. */ -}}
{{- define "caesura.redis.url" -}}
{{- $user := include "caesura.redis.username" . -}}
{{- $at := "" -}}
{{- if $user }}{{ $at = printf "%s@" ($user | urlquery | replace "+" "%20") }}{{ end -}}
{{- $query := list -}}
{{- if include "caesura.redis.needsPassword" . }}{{ $query = append $query "password_file=/etc/caesura/redis/password" }}{{ end -}}
{{- with include "caesura.redis.ca" . }}{{ $query = append $query (printf "ssl_ca_certs=%s" .) }}{{ end -}}
{{- $database := ternary 0 (int .Values.redis.external.database) .Values.redis.bundled -}}
{{- printf "%s://%s%s:%s/%d" (include "caesura.redis.scheme" .) $at (include "caesura.redis.host" .) (include "caesura.redis.port" .) $database -}}
{{- if $query }}?{{ join "&" $query }}{{ end -}}
{{- end -}}
