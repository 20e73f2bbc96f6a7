{{- /* Caesura's configuration, as YAML: the values' and what the chart knows. */ -}}
{{- define "caesura.config" -}}
{{- $config := deepCopy .Values.config -}}
{{- $known := dict "redis" (dict "url" (include "caesura.redis.url" .)) "http" (dict "host" "0.0.0.0" "port" 8000) -}}
{{- if .Values.keys.enabled -}}
{{- $_ := set $known "auth" (dict "file" "/etc/caesura/keys/keys.yaml") -}}
{{- end -}}
{{- if and (not (hasKey (default dict .Values.config.http) "ingress_replicas")) (ge (include "caesura.workerCpus" . | float64) 8.0) -}}
{{- $_ := set $known.http "ingress_replicas" 2 -}}
{{- end -}}
{{- /* A preset's number of replicas gives way to bounds. */ -}}
{{- range $of := prepend (values (dig "models" dict $config)) $config -}}
{{- if dig "replicas" "max" 0 $of }}{{ $_ := unset $of.replicas "count" }}{{ end -}}
{{- end -}}
{{- mergeOverwrite $config $known | toYaml -}}
{{- end -}}

{{- /* CPUs that all workers request at the start. */ -}}
{{- define "caesura.workerCpus" -}}
{{- $cpus := 0.0 -}}
{{- range $group := .Values.workerGroups -}}
{{- if $group -}}
{{- $cpu := dig "resources" "requests" "cpu" "0" $group | toString -}}
{{- $each := ternary (divf (trimSuffix "m" $cpu | float64) 1000.0) ($cpu | float64) (hasSuffix "m" $cpu) -}}
{{- $cpus = addf $cpus (mulf $each (float64 (ternary $group.replicas 1 (hasKey $group "replicas")))) -}}
{{- end -}}
{{- end -}}
{{- $cpus -}}
{{- end -}}

{{- /* Seconds: the longest turn. */ -}}
{{- define "caesura.longestTurn" -}}
{{- dig "http" "request_timeout_s" 1200 .Values.config | ceil | int64 -}}
{{- end -}}

{{- /* Seconds: the longest request, which is a turn or a whole run, and the margin. */ -}}
{{- define "caesura.longestRequest" -}}
{{- $run := dig "programs" "max_wall_s" 3600 .Values.config | ceil | int64 -}}
{{- add (max (include "caesura.longestTurn" . | int64) $run) (int64 .Values.drain.marginSeconds) -}}
{{- end -}}

{{- define "caesura.grace" -}}
{{- add (include "caesura.longestTurn" . | int64) (int64 .Values.drain.marginSeconds) -}}
{{- end -}}

{{- /* Seconds that a worker has to leave: until its replicas are elsewhere, and their turns have ended. */ -}}
{{- define "caesura.leave" -}}
{{- add (include "caesura.grace" . | int64) (int64 .Values.drain.replacementSeconds) -}}
{{- end -}}

{{- /* What the models load from a hub, one a line, REPOSITORY or REPOSITORY@REVISION: their sources, LoRA adapters and
draft models; with " (no weights)": tokenizers and configurations of other repositories. */ -}}
{{- define "caesura.hubModels" -}}
{{- $models := list (merge (dict "engine" (dig "engine" dict .Values.config)) (dig "model" dict .Values.config)) -}}
{{- range $model := dig "models" dict .Values.config }}{{ $models = append $models $model }}{{ end -}}
{{- $sources := list -}}
{{- range $model := $models -}}
{{- $engine := default dict $model.engine -}}
{{- $sources = append $sources (list (dig "source" "tiny" $model) $engine.revision) -}}
{{- range $adapter := dig "adapters" dict $model }}{{ $sources = append $sources (list $adapter.path) }}{{ end -}}
{{- $speculative := $engine.speculative_config -}}
{{- if kindIs "map" $speculative }}{{ $sources = append $sources (list $speculative.model $speculative.revision) }}{{ end -}}
{{- $sources = append $sources (list $engine.tokenizer $engine.tokenizer_revision " (no weights)") -}}
{{- $sources = append $sources (list $engine.hf_config_path $engine.revision " (no weights)") -}}
{{- end -}}
{{- $lines := list -}}
{{- range $source := $sources -}}
{{- $repository := default "" (first $source) -}}
{{- /* The words are vLLM's, for methods without a draft model. */ -}}
{{- if not (or (has $repository (list "" "tiny" "ngram" "[ngram]" "suffix")) (regexMatch "^[/.~]" $repository)) -}}
{{- $revision := index (append $source "") 1 -}}
{{- $lines = append $lines (printf "%s%s%s" $repository (ternary (printf "@%v" $revision) "" (not (empty $revision))) (index (concat $source (list "" "")) 2)) -}}
{{- end -}}
{{- end -}}
{{- range $line := $lines | uniq }}
{{ $line }}
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
