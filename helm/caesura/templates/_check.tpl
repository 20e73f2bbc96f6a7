{{- /* What cannot work is refused while it is rendered, and not by a pod that never starts. */ -}}
{{- define "caesura.check" -}}
{{- if not .Values.workerGroups }}{{ fail "workerGroups: at least one group is needed" }}{{ end -}}
{{- include "caesura.checkScaling" . -}}
{{- include "caesura.checkGpus" . -}}
{{- include "caesura.checkReach" . -}}
{{- include "caesura.checkStorage" . -}}
{{- end -}}

{{- /* Keys of the models whose number of replicas follows the load (config.replicas.max), one a line. */ -}}
{{- define "caesura.elasticModels" -}}
{{- if dig "replicas" "max" 0 .Values.config }}config.replicas{{ end }}
{{- range $id, $model := dig "models" dict .Values.config }}{{ if dig "replicas" "max" 0 $model }}
config.models.{{ $id }}.replicas{{ end }}{{ end }}
{{- end -}}

{{- /* "true" if Ray's autoscaler adds and removes workers, since the number of replicas changes; else empty. */ -}}
{{- define "caesura.scalesWorkers" -}}
{{- if or .Values.autoscaling.enabled (include "caesura.elasticModels" . | trim) }}true{{ end -}}
{{- end -}}

{{- /* As Caesura refuses them when it starts. Of: key, of (the replicas of a model). */ -}}
{{- define "caesura.checkBounds" -}}
{{- $min := get .of "min" -}}
{{- $max := get .of "max" | int -}}
{{- $ranks := dig "data_parallel_size" 1 .of | int -}}
{{- if and (not $max) (hasKey .of "min") (not (kindIs "invalid" $min)) }}{{ fail (printf "%s.min: needs max, the largest number of replicas" .key) }}{{ end -}}
{{- if and $max (gt (int $min) $max) }}{{ fail (printf "%s.min: %d exceeds max (%d)" .key (int $min) $max) }}{{ end -}}
{{- if and $max (gt $ranks 1) }}{{ fail (printf "%s.data_parallel_size: %d needs a fixed count, without max: groups of ranks do not follow the load" .key $ranks) }}{{ end -}}
{{- end -}}

{{- define "caesura.checkScaling" -}}
{{- include "caesura.checkBounds" (dict "key" "config.replicas" "of" (dig "replicas" dict .Values.config)) -}}
{{- range $id, $model := dig "models" dict .Values.config }}{{ include "caesura.checkBounds" (dict "key" (printf "config.models.%s.replicas" $id) "of" (dig "replicas" dict $model)) }}{{ end -}}
{{- $scaling := .Values.autoscaling -}}
{{- $elastic := include "caesura.elasticModels" . | trim | splitList "\n" | compact -}}
{{- if and $scaling.enabled $elastic -}}
{{- fail (printf "autoscaling.enabled: KEDA and %s.max would both decide the number of replicas; remove one of them" (first $elastic)) -}}
{{- end -}}
{{- $ranks := dig "replicas" "data_parallel_size" 1 .Values.config | int -}}
{{- if and $scaling.enabled (gt $ranks 1) -}}
{{- fail (printf "autoscaling.enabled: config.replicas.data_parallel_size (%d) needs a fixed count, since groups of ranks do not follow the load" $ranks) -}}
{{- end -}}
{{- if include "caesura.scalesWorkers" . -}}
{{- if gt (int $scaling.minReplicas) (int $scaling.maxReplicas) }}{{ fail (printf "autoscaling.minReplicas: %d exceeds autoscaling.maxReplicas (%d)" (int $scaling.minReplicas) (int $scaling.maxReplicas)) }}{{ end -}}
{{- range $name, $group := .Values.workerGroups -}}
{{- $least := include "caesura.group.least" (dict "root" $ "group" $group) | int -}}
{{- $most := include "caesura.group.most" (dict "root" $ "group" $group) | int -}}
{{- if gt $least $most }}{{ fail (printf "workerGroups.%s.minReplicas: %d exceeds maxReplicas (%d)" $name $least $most) }}{{ end -}}
{{- if or (lt (int $group.replicas) $least) (gt (int $group.replicas) $most) }}{{ fail (printf "workerGroups.%s.replicas: %d is not between minReplicas (%d) and maxReplicas (%d)" $name (int $group.replicas) $least $most) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- $incremental := eq .Values.upgrade.strategy "NewClusterWithIncrementalUpgrade" -}}
{{- if $incremental -}}
{{- $_ := required "upgrade.incremental.gatewayClassName: incremental upgrades shift traffic at a Gateway; name its class" .Values.upgrade.incremental.gatewayClassName -}}
{{- if not (include "caesura.scalesWorkers" .) }}{{ fail "upgrade.strategy: incremental upgrades need autoscaling.enabled or config.replicas.max" }}{{ end -}}
{{- if or .Values.ingress.enabled .Values.httpRoute.enabled .Values.inferencePool.enabled }}{{ fail "upgrade.strategy: KubeRay makes the Gateway and the HTTPRoute of an incremental upgrade itself; set ingress.enabled, httpRoute.enabled and inferencePool.enabled to false" }}{{ end -}}
{{- end -}}
{{- end -}}

{{- /* Bounds on the pods of a worker group. If Ray does not scale them, both are its replicas. Of: root, group. */ -}}
{{- define "caesura.group.least" -}}
{{- ternary (get .group "minReplicas") .group.replicas (and (include "caesura.scalesWorkers" .root | eq "true") (hasKey .group "minReplicas")) | int -}}
{{- end -}}
{{- define "caesura.group.most" -}}
{{- ternary (get .group "maxReplicas") .group.replicas (and (include "caesura.scalesWorkers" .root | eq "true") (hasKey .group "maxReplicas")) | int -}}
{{- end -}}

{{- /* Each model fits into the pods of a group, alone or as a part of several nodes, and all fit together. */ -}}
{{- define "caesura.checkGpus" -}}
{{- $there := 0 -}}
{{- range $name, $group := .Values.workerGroups -}}
{{- $there = add $there (mul (int (default 0 $group.gpus)) (include "caesura.group.most" (dict "root" $ "group" $group) | int)) -}}
{{- end -}}
{{- $replicas := dict "config.replicas" (dig "replicas" dict .Values.config) -}}
{{- range $id, $model := dig "models" dict .Values.config }}{{ $_ := set $replicas (printf "config.models.%s.replicas" $id) (dig "replicas" dict $model) }}{{ end -}}
{{- $wanted := 0 -}}
{{- range $key, $of := $replicas -}}
{{- if eq "gpu" (dig "accelerator" "cpu" $of) -}}
{{- $size := dig "tensor_parallel_size" 1 $of | int -}}
{{- $count := default (dig "count" 1 $of) (dig "max" 0 $of) | int -}}
{{- if and $.Values.autoscaling.enabled (eq $key "config.replicas") }}{{ $count = int $.Values.autoscaling.maxReplicas }}{{ end -}}
{{- $wanted = add $wanted (mul $size (dig "pipeline_parallel_size" 1 $of | int) (dig "data_parallel_size" 1 $of | int) $count) -}}
{{- $fits := list -}}
{{- range $name, $group := $.Values.workerGroups -}}
{{- $gpus := int (default 0 $group.gpus) -}}
{{- if gt $gpus 0 }}{{ if or (eq 0 (int (mod $gpus $size))) (eq 0 (int (mod $size $gpus))) }}{{ $fits = append $fits $name }}{{ end }}{{ end -}}
{{- end -}}
{{- if not $fits }}{{ fail (printf "workerGroups: no group has gpus that are a multiple or a divisor of %s.tensor_parallel_size (%d): a replica would be split unevenly over pods" $key $size) }}{{ end -}}
{{- include "caesura.checkHostTier" (dict "root" $ "fits" $fits "key" $key "of" $of "count" $count) -}}
{{- end -}}
{{- end -}}
{{- if lt (int $there) (int $wanted) -}}
{{- fail (printf "workerGroups: the models of config want %d GPUs%s, all workers together have %d" (int $wanted) (ternary " at autoscaling.maxReplicas" "" .Values.autoscaling.enabled) (int $there)) -}}
{{- end -}}
{{- end -}}

{{- /* vLLM keeps the host tiers of a pod in its /dev/shm. Of: root, fits (names of groups), key, of (its replicas), count. */ -}}
{{- define "caesura.checkHostTier" -}}
{{- $tier := default 0 (dig "cpu_offload_bytes" 0 .of) | int64 -}}
{{- $devices := mul (dig "tensor_parallel_size" 1 .of | int) (dig "pipeline_parallel_size" 1 .of | int) -}}
{{- $ranks := mul .count (dig "data_parallel_size" 1 .of | int) -}}
{{- $small := "" -}}
{{- $enough := eq $tier 0 -}}
{{- range $name := .fits -}}
{{- if not $enough -}}
{{- $group := get $.root.Values.workerGroups $name -}}
{{- $key := printf "workerGroups.%s.sharedMemory" $name -}}
{{- $size := default "1Gi" $group.sharedMemory -}}
{{- /* A pod has several replicas, or a part of one. */ -}}
{{- $needed := div (mul $tier (int $group.gpus)) $devices -}}
{{- if ge (int $group.gpus) (int $devices) }}{{ $needed = mul $tier (min (div (int $group.gpus) $devices) $ranks) }}{{ end -}}
{{- $enough = ge (include "caesura.bytes" (dict "key" $key "quantity" $size) | int64) $needed -}}
{{- $small = printf "%s: %s has less than %d bytes, which %s.cpu_offload_bytes takes in a pod" $key $size $needed $.key -}}
{{- end -}}
{{- end -}}
{{- if not $enough }}{{ fail $small }}{{ end -}}
{{- end -}}

{{- define "caesura.checkReach" -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.tlsSecret) (not .Values.ingress.insecure) }}{{ fail "ingress.tlsSecret: keys would travel unencrypted; name a TLS Secret, or set ingress.insecure" }}{{ end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) (not .Values.httpRoute.gateway.create) }}{{ fail "httpRoute.parentRefs: name a Gateway, or set httpRoute.gateway.create" }}{{ end -}}
{{- if .Values.httpRoute.gateway.create -}}
{{- $_ := required "httpRoute.gateway.className: which class makes the Gateway?" .Values.httpRoute.gateway.className -}}
{{- $_ := required "httpRoute.gateway.tlsSecret: the Gateway's listener is HTTPS; name a TLS Secret" .Values.httpRoute.gateway.tlsSecret -}}
{{- end -}}
{{- if .Values.inferencePool.enabled -}}
{{- $_ := required "inferencePool.endpointPicker.name: name the Service of an endpoint picker" .Values.inferencePool.endpointPicker.name -}}
{{- if not (.Capabilities.APIVersions.Has "inference.networking.k8s.io/v1/InferencePool") }}{{ fail "inferencePool.enabled: the cluster has no InferencePool (inference.networking.k8s.io/v1); install its CRD, or give --api-versions to `helm template`" }}{{ end -}}
{{- end -}}
{{- if and .Values.service.loadBalancerClass (ne .Values.service.type "LoadBalancer") }}{{ fail "service.loadBalancerClass: needs service.type: LoadBalancer" }}{{ end -}}
{{- if and .Values.networkPolicy.enabled (include "caesura.scalesWorkers" .) (not .Values.networkPolicy.kubernetesApi.cidrs) (not .Values.networkPolicy.kubernetesApi.peers) }}{{ fail "networkPolicy.kubernetesApi.cidrs: Ray's autoscaler asks the Kubernetes API; say where it is, there or in peers" }}{{ end -}}
{{- if and .Values.networkPolicy.enabled (not .Values.redis.bundled) (not .Values.redis.external.cidrs) (not .Values.redis.external.peers) }}{{ fail "redis.external.cidrs: say where the Redis is, there or in peers, so that the NetworkPolicy lets it be reached" }}{{ end -}}
{{- end -}}

{{- define "caesura.checkStorage" -}}
{{- $redis := .Values.redis -}}
{{- if and .Values.modelCache.download.enabled (not .Values.modelCache.enabled) }}{{ fail "modelCache.download: needs modelCache.enabled" }}{{ end -}}
{{- if and .Values.modelCache.download.enabled .Values.networkPolicy.enabled (not .Values.modelCache.download.cidrs) (not .Values.modelCache.download.peers) }}{{ fail "modelCache.download.cidrs: the NetworkPolicy lets the download reach nothing; list cidrs or peers" }}{{ end -}}
{{- if and .Values.modelCache.download.enabled .Values.modelCache.readOnly }}{{ fail "modelCache.readOnly: a download cannot be written there" }}{{ end -}}
{{- if and (not $redis.bundled) $redis.external.password (not $redis.existingSecret) }}{{ fail "redis.existingSecret: a Secret with the external Redis' password; or set redis.external.password: false" }}{{ end -}}
{{- if and (not $redis.bundled) $redis.external.username (not $redis.external.password) }}{{ fail "redis.external.username: needs redis.external.password" }}{{ end -}}
{{- if and (not $redis.bundled) $redis.external.caSecret.name (not $redis.external.tls) }}{{ fail "redis.external.caSecret: needs redis.external.tls" }}{{ end -}}
{{- $own := list "tmp" "home" "shm" "scripts" "redis-password" "redis-ca" "keys" "models" "kv" -}}
{{- if not .Values.kvVolume -}}
{{- range $replicas := prepend (values (default dict .Values.config.models)) .Values.config -}}
{{- $disk := default dict (default dict $replicas.replicas).disk_tier -}}
{{- if and $disk (regexMatch "^/kv(/|$)" (default "" $disk.path)) }}{{ fail "config.replicas.disk_tier.path: /kv needs kvVolume" }}{{ end -}}
{{- end -}}
{{- end -}}
{{- range .Values.extraVolumes -}}
{{- if has .name $own }}{{ fail (printf "extraVolumes: %s is a volume of the chart, or stands there twice" .name) }}{{ end -}}
{{- $own = append $own .name -}}
{{- end -}}
{{- $paths := list -}}
{{- range fromYamlArray (include "caesura.mounts" (dict "root" (dict "Values" (omit .Values "extraVolumeMounts") "Chart" .Chart "Release" .Release "Capabilities" .Capabilities "Template" .Template) "isHead" false)) }}{{ $paths = append $paths .mountPath }}{{ end -}}
{{- range .Values.extraVolumeMounts -}}
{{- $mount := . -}}
{{- $path := clean (default "" $mount.mountPath) -}}
{{- if has $path $paths }}{{ fail (printf "extraVolumeMounts: %s is a path of the chart, or stands there twice" $mount.mountPath) }}{{ end -}}
{{- $paths = append $paths $path -}}
{{- $there := false -}}
{{- range $.Values.extraVolumes }}{{ if eq .name $mount.name }}{{ $there = true }}{{ end }}{{ end -}}
{{- if not $there }}{{ fail (printf "extraVolumeMounts: extraVolumes has no volume %s" .name) }}{{ end -}}
{{- end -}}
{{- end -}}
