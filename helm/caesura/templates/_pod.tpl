{{- /* A pod of the Ray cluster. Of: root, component, group (a head or a worker group). */ -}}
{{- define "caesura.rayPod" -}}
{{- $root := .root -}}
{{- $isHead := eq .component "head" -}}
{{- $values := $root.Values -}}
metadata:
  labels:
    {{- include "caesura.podLabels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
    {{- with .group.podLabels }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- /* KubeRay's comparison of clusters leaves tolerations out, so that their digest stands where it looks. */}}
  {{- $annotations := dict }}
  {{- with .group.tolerations }}{{ $_ := set $annotations "checksum/tolerations" (toJson . | sha256sum | trunc 16) }}{{ end }}
  {{- with mergeOverwrite $annotations (default dict .group.podAnnotations) }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "caesura.fullname" $root }}{{ if $isHead }}-head{{ end }}
  {{- /* Ray's autoscaler, beside the head, is the only one that talks to Kubernetes. */}}
  automountServiceAccountToken: {{ and $isHead (include "caesura.scalesWorkers" $root | eq "true") }}
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ if $isHead }}60{{ else }}{{ add (include "caesura.leave" $root | int64) 30 }}{{ end }}
  securityContext: {{- include "caesura.podSecurity" $root | nindent 4 }}
  {{- with $values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with include "caesura.place" .group }}{{ . | nindent 2 }}{{ end }}
  {{- if .group.topologySpreadConstraints }}
  topologySpreadConstraints: {{- toYaml .group.topologySpreadConstraints | nindent 4 }}
  {{- else if not $isHead }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "caesura.selector" $root | nindent 10 }}
          app.kubernetes.io/component: worker
  {{- end }}
  {{- if and (not $isHead) $values.modelCache.download.enabled }}
  initContainers:
    - name: wait-for-models
      image: {{ include "caesura.image" (dict "image" $values.image "fallback" $root.Chart.AppVersion) }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      command: [sh, -c, 'until [ -e "$0" ]; do sleep 5; done', {{ include "caesura.downloaded" $root }}]
      securityContext: {{- include "caesura.containerSecurity" $root | nindent 8 }}
      resources:
        requests: {cpu: 10m, memory: 16Mi}
        limits: {cpu: 100m, memory: 32Mi}
      volumeMounts:
        - {name: models, mountPath: /models, readOnly: true}
  {{- end }}
  containers:
    - name: ray-{{ .component }}
      image: {{ include "caesura.image" (dict "image" $values.image "fallback" $root.Chart.AppVersion) }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      securityContext: {{- include "caesura.containerSecurity" $root | nindent 8 }}
      ports:
        {{- if $isHead }}
        - {name: gcs-server, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        - {name: client, containerPort: 10001}
        {{- end }}
        - {name: serve, containerPort: 8000}
        - {name: metrics, containerPort: 8080}
      env:
        {{- $own := include "caesura.env" $root }}
        {{- $own | nindent 8 }}
        {{- include "caesura.userEnv" (dict "own" $own "entries" $values.env "key" "env") | nindent 8 }}
      {{- with $values.envFrom }}
      envFrom: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- /* KubeRay's own probes call wget, which an image need not have. */}}
      startupProbe:
        httpGet: {path: /api/healthz, port: 52365}
        periodSeconds: 5
        failureThreshold: 60
      livenessProbe:
        httpGet: {path: /api/healthz, port: 52365}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 12
      readinessProbe:
        {{- if $isHead }}
        httpGet: {path: /api/healthz, port: 52365}
        {{- else }}
        httpGet: {path: /-/healthz, port: 8000}
        {{- end }}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ ternary 10 1 $isHead }}
      lifecycle:
        preStop:
          exec:
            {{- if $isHead }}
            command: [ray, stop]
            {{- else }}
            command: [python, /etc/caesura/scripts/drain.py, {{ include "caesura.leave" $root | quote }}]
            {{- end }}
      resources: {{- include "caesura.resources" .group | nindent 8 }}
      volumeMounts: {{- include "caesura.mounts" (dict "root" $root "isHead" $isHead) | nindent 8 }}
  volumes: {{- include "caesura.volumes" (dict "root" $root "group" .group) | nindent 4 }}
{{- end -}}

{{- /* Where a pod runs, and who places it there. Of: head, a worker group or Redis. */ -}}
{{- define "caesura.place" -}}
{{- $place := dict -}}
{{- range $key := list "runtimeClassName" "priorityClassName" "schedulerName" "nodeSelector" "tolerations" "affinity" -}}
{{- with get $ $key }}{{ $_ := set $place $key . }}{{ end -}}
{{- end -}}
{{- if $place }}{{ toYaml $place }}{{ end -}}
{{- end -}}

{{- /* What runs in the chart's containers never is root, gains nothing, and writes only into its own volumes. */ -}}
{{- define "caesura.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.podSecurity.runAsUser }}
runAsGroup: {{ .Values.podSecurity.runAsGroup }}
fsGroup: {{ .Values.podSecurity.fsGroup }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {{- toYaml .Values.podSecurity.seccompProfile | nindent 2 }}
{{- end -}}

{{- define "caesura.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities: {drop: [ALL]}
seccompProfile: {{- toYaml .Values.podSecurity.seccompProfile | nindent 2 }}
{{- end -}}

{{- define "caesura.resources" -}}
{{- $resources := deepCopy .resources -}}
{{- $gpus := int (default 0 .gpus) -}}
{{- if gt $gpus 0 -}}
{{- $device := dict (default "nvidia.com/gpu" .gpuResource) $gpus -}}
{{- $resources = mergeOverwrite $resources (dict "requests" $device "limits" (deepCopy $device)) -}}
{{- end -}}
{{ toYaml $resources }}
{{- end -}}

{{- define "caesura.env" -}}
{{- $values := .Values -}}
- {name: HOME, value: /home/caesura}
{{- with dig "logs" "format" "" $values.config }}
- {name: CAESURA_LOG_FORMAT, value: {{ . }}}
{{- end }}
- {name: DO_NOT_TRACK, value: "1"}
- {name: VLLM_NO_USAGE_STATS, value: "1"}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: RAYLLM_ENABLE_WORKER_PROCESS_SETUP_HOOK, value: "0"}
- {name: RAY_enable_worker_prestart, value: "0"}
- {name: RAY_prestart_worker_first_driver, value: "0"}
- {name: RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO, value: "0"}
- {name: RAY_worker_niceness, value: "0"}
- {name: MALLOC_ARENA_MAX, value: "2"}
- {name: RAY_JEMALLOC_LIB_PATH, value: ""}
- {name: RAY_task_events_report_interval_ms, value: "0"}
- {name: RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH, value: cluster.proxy.middleware.middlewares}
- {name: RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH, value: cluster.local.serve_clock.never_back}
- {name: CAESURA_MAX_IN_FLIGHT, value: {{ dig "http" "max_concurrent_requests" 1024 $values.config | int64 | quote }}}
- {name: RAY_SERVE_ENABLE_HA_PROXY, value: "1"}
- {name: RAY_SERVE_HAPROXY_TUNE_BUFSIZE, value: {{ add (dig "http" "max_header_bytes" 32768 $values.config | int64) 16384 | quote }}}
{{- /* After a change of the ingresses, the HAProxy before it ends its requests. It takes no more seconds than this. */}}
- {name: RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S, value: {{ min (include "caesura.longestRequest" . | int64) 2147483 | quote }}}
- {name: RAY_SERVE_HAPROXY_CONFIG_FILE_LOC, value: /tmp/haproxy.cfg}
- {name: RAY_SERVE_HAPROXY_SOCKET_PATH, value: /tmp/haproxy-admin.sock}
- {name: RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH, value: /tmp/haproxy-metrics.sock}
- {name: RAY_SERVE_HAPROXY_SERVER_STATE_BASE, value: /tmp}
- {name: RAY_SERVE_HAPROXY_SERVER_STATE_FILE, value: /tmp/haproxy-server-state}
{{- with include "caesura.redis.ca" . }}
- {name: RAY_REDIS_CA_CERT, value: {{ . }}}
{{- end }}
{{- if $values.modelCache.enabled }}
- {name: HF_HOME, value: /models/huggingface}
{{- if or $values.modelCache.readOnly $values.modelCache.download.enabled }}
- {name: HF_HUB_OFFLINE, value: "1"}
# Code that comes with a model is copied there, and HF_HOME is read-only.
- {name: HF_MODULES_CACHE, value: /tmp/huggingface-modules}
{{- end }}
{{- end }}
{{- end -}}

{{- /* The user's entries of env. The API server takes a name once only. Of: own (the chart's entries, as YAML), entries, key. */ -}}
{{- define "caesura.userEnv" -}}
{{- $key := .key -}}
{{- $taken := list -}}
{{- range fromYamlArray .own }}{{ $taken = append $taken .name }}{{ end -}}
{{- $operator := list "RAY_ADDRESS" "RAY_REDIS_ADDRESS" "REDIS_PASSWORD" "REDIS_USERNAME" "RAY_AUTH_MODE" "RAY_AUTH_TOKEN" "RAY_enable_autoscaler_v2" -}}
{{- range $entry := .entries -}}
{{- if has $entry.name $taken }}{{ fail (printf "%s: %s is set by the chart, or stands there twice" $key $entry.name) }}{{ end -}}
{{- if has $entry.name $operator }}{{ fail (printf "%s: %s is set by KubeRay from redis, rayAuth or autoscaling; use those keys" $key $entry.name) }}{{ end -}}
{{- $taken = append $taken $entry.name -}}
{{- end -}}
{{- with .entries }}{{ toYaml . }}{{ end -}}
{{- end -}}

{{- define "caesura.mounts" -}}
{{- $values := .root.Values -}}
- {name: tmp, mountPath: /tmp}
- {name: home, mountPath: /home/caesura}
- {name: shm, mountPath: /dev/shm}
- {name: scripts, mountPath: /etc/caesura/scripts, readOnly: true}
{{- if include "caesura.redis.needsPassword" .root }}
- {name: redis-password, mountPath: /etc/caesura/redis, readOnly: true}
{{- end }}
{{- if include "caesura.redis.ca" .root }}
- {name: redis-ca, mountPath: /etc/caesura/redis-ca, readOnly: true}
{{- end }}
{{- if $values.keys.enabled }}
- {name: keys, mountPath: /etc/caesura/keys, readOnly: true}
{{- end }}
{{- if and $values.modelCache.enabled (not .isHead) }}
- name: models
  mountPath: /models
  readOnly: {{ or $values.modelCache.readOnly $values.modelCache.download.enabled }}
{{- end }}
{{- if and $values.kvVolume (not .isHead) }}
- {name: kv, mountPath: /kv}
{{- end }}
{{- with $values.extraVolumeMounts }}{{ toYaml . | nindent 0 }}{{ end }}
{{- end -}}

{{- define "caesura.volumes" -}}
{{- $values := .root.Values -}}
- {name: tmp, emptyDir: {}}
- {name: home, emptyDir: {}}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ default "1Gi" .group.sharedMemory | quote }}}
- name: scripts
  configMap: {name: {{ include "caesura.fullname" .root }}-scripts}
{{- if include "caesura.redis.needsPassword" .root }}
- name: redis-password
  secret:
    secretName: {{ include "caesura.redis.secret" .root }}
    items: [{key: password, path: password}]
{{- end }}
{{- if include "caesura.redis.ca" .root }}
- name: redis-ca
  secret:
    secretName: {{ $values.redis.external.caSecret.name | quote }}
    items: [{key: {{ $values.redis.external.caSecret.key | quote }}, path: ca.crt}]
{{- end }}
{{- if $values.keys.enabled }}
- name: keys
  secret:
    secretName: {{ include "caesura.keys.secret" .root }}
    items: [{key: keys.yaml, path: keys.yaml}]
{{- end }}
{{- if $values.modelCache.enabled }}
- name: models
  persistentVolumeClaim: {claimName: {{ include "caesura.modelClaim" .root }}}
{{- end }}
{{- with $values.kvVolume }}
- {{ merge (dict "name" "kv") . | toYaml | nindent 2 | trim }}
{{- end }}
{{- with $values.extraVolumes }}{{ toYaml . | nindent 0 }}{{ end }}
{{- end -}}
