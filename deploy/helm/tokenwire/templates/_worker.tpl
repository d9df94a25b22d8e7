{{/* The pods of workers: leaders, which are `tokenwire-worker`, and followers on more nodes. */}}

{{/* Engine arguments that follow from the values, one a line, as a YAML list of vLLM's options.
Takes (model, pool). Leaders and followers of a group must have the same. */}}
{{- define "tokenwire.vllmArguments" -}}
{{- $pool := .pool -}}
{{- if gt (int $pool.parallel.tensor) 1 }}
- --tensor-parallel-size={{ $pool.parallel.tensor | int }}
{{- end }}
{{- if gt (int $pool.parallel.pipeline) 1 }}
- --pipeline-parallel-size={{ $pool.parallel.pipeline | int }}
{{- end }}
{{- if gt (int $pool.parallel.data) 1 }}
- --data-parallel-size={{ $pool.parallel.data | int }}
{{- end }}
{{- with .model.frontend.reasoningParser }}
- --reasoning-parser={{ . }}
{{- end }}
{{- if gt (int $pool.nodes) 1 }}
- --nnodes={{ $pool.nodes | int }}
- --master-addr=$(LWS_LEADER_ADDRESS)
- --master-port=29501
{{- if ne $pool.role "aggregated" }}
- '--kv-transfer-config={"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
{{- end }}
{{- end }}
{{- range $pool.engineArgs }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{/* What stands behind `--`. */}}
{{- define "tokenwire.engineArguments" -}}
{{- if eq .model.engine "vllm" }}
{{- include "tokenwire.vllmArguments" . }}
{{- if gt (int .pool.nodes) 1 }}
- --node-rank=0
{{- end }}
{{- else }}
{{- if eq .pool.role "prefill" }}
- --side-channel-host=$(POD_IP)
- --side-channel-port=5600
{{- end }}
{{- range .pool.engineArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "tokenwire.workerEnv" -}}
{{- include "tokenwire.commonEnv" .root }}
{{- include "tokenwire.hubEnv" .model }}
{{- if eq .model.engine "vllm" }}
- name: VLLM_HOST_IP
  value: $(POD_IP)
- name: VLLM_CACHE_ROOT
  value: /cache/vllm
- name: TRITON_CACHE_DIR
  value: /cache/triton
{{- if ne .pool.role "aggregated" }}
- name: VLLM_NIXL_SIDE_CHANNEL_HOST
  value: $(POD_IP)
- name: VLLM_NIXL_SIDE_CHANNEL_PORT
  value: "5600"
{{- end }}
{{- end }}
{{- with .pool.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "tokenwire.workerResources" -}}
{{- $resources := deepCopy .pool.resources -}}
{{- if and (eq .model.engine "vllm") .pool.gpuResource -}}
{{- $gpus := div (include "tokenwire.worldSize" .pool | int) (int .pool.nodes) -}}
{{- range list "requests" "limits" -}}
{{- $_ := set $resources . (merge (dict $.pool.gpuResource $gpus) (default dict (get $resources .))) -}}
{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "tokenwire.workerMounts" -}}
{{- include "tokenwire.mounts" (dict "model" .model "keys" .keys) }}
- {name: shm, mountPath: /dev/shm}
{{- if include "tokenwire.cacheClaim" .model }}
- {name: hub, mountPath: /cache/huggingface}
{{- end }}
{{- if and .model.capture.enabled (ne .pool.role "decode") }}
- {name: states, mountPath: {{ .model.capture.path }}}
{{- end }}
{{- with .pool.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* What leader and follower have in common. Takes (root, model, pool, keys, follower). */}}
{{- define "tokenwire.workerPod" -}}
{{- $pool := .pool -}}
{{- $model := .model -}}
{{ include "tokenwire.podHead" .root }}
securityContext:
  {{- $security := include "tokenwire.podSecurity" .root | fromYaml }}
  {{- if $model.capture.enabled }}{{ $_ := set $security "fsGroup" ($model.capture.group | int64) }}{{ end }}
  {{- toYaml $security | nindent 2 }}
# preStop, then the drain, then 20 s to give up what runs and to stop the engine, and 5 s to spare.
terminationGracePeriodSeconds: {{ add (int $pool.preStopSeconds) (int $pool.shutdownTimeoutSeconds) 25 }}
{{- $scope := dict "root" .root "name" $model.name "component" $pool.role }}
{{- include "tokenwire.placement" (dict "of" $pool "selector" (include "tokenwire.selector" $scope)) }}
containers:
  - name: worker
    image: {{ include "tokenwire.image" (dict "root" .root "image" $pool.image "suffix" (include "tokenwire.imageSuffix" .)) }}
    imagePullPolicy: {{ $pool.image.pullPolicy }}
    {{- if .follower }}
    # vLLM alone: the leader's tokenwire-worker speaks to frontends for the whole group.
    command: [vllm, serve]
    args:
      - {{ $model.source }}
      - --headless
      {{- include "tokenwire.vllmArguments" . | nindent 6 }}
      - --node-rank=$(LWS_WORKER_INDEX)
    {{- else }}
    command: [tokenwire-worker]
    args:
      - --engine={{ $model.engine }}
      - --role={{ $pool.role }}
      - --model={{ $model.source }}
      - --served-model-name={{ $model.servedModelName }}
      - --worker-id=$(POD_NAME)
      {{- include "tokenwire.commonOptions" .root | nindent 6 }}
      - --listen=tcp://0.0.0.0:5555
      - --metrics-host=0.0.0.0
      - --metrics-port=9555
      - --shutdown-timeout-s={{ $pool.shutdownTimeoutSeconds | int }}
      {{- if $model.plaintext }}
      - --insecure-plaintext
      {{- else }}
      - --curve-secret-key=/etc/tokenwire/link/secret
      - --curve-allowed-keys=/etc/tokenwire/link/allowed
      {{- end }}
      {{- if $model.capture.enabled }}
      - --capture-hidden-states={{ $model.capture.path }}
      - --capture-layers={{ range $i, $layer := $model.capture.layers }}{{ if $i }},{{ end }}{{ $layer | int }}{{ end }}
      - --capture-file-mode={{ $model.capture.fileMode }}
      - --capture-file-group={{ $model.capture.group | int64 }}
      - --capture-ttl-s={{ $model.capture.ttlSeconds | int }}
      - --capture-max-bytes={{ $model.capture.maxBytes | int64 }}
      {{- end }}
      {{- if gt (int $pool.nodes) 1 }}
      # Followers run vLLM's own worker class.
      - --no-exact-resume
      {{- end }}
      {{- with $pool.args }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
      {{- with include "tokenwire.engineArguments" . | trim }}
      - --
      {{- . | nindent 6 }}
      {{- end }}
    {{- end }}
    env:
      {{- include "tokenwire.workerEnv" . | nindent 6 }}
    {{- if not .follower }}
    ports:
      - {name: link, containerPort: 5555}
      - {name: metrics, containerPort: 9555}
      {{- if ne $pool.role "aggregated" }}
      - {name: handover, containerPort: 5600}
      {{- end }}
    # A worker is live while its event loop turns, or its engine loads; whether anybody asks it
    # anything changes nothing. It is ready while it serves.
    startupProbe:
      httpGet: {path: /ready, port: metrics}
      periodSeconds: 5
      timeoutSeconds: 5
      failureThreshold: {{ max 1 (div (int $pool.startupSeconds) 5) }}
    livenessProbe:
      httpGet: {path: /live, port: metrics}
      periodSeconds: 10
      timeoutSeconds: 5
      failureThreshold: 6
    readinessProbe:
      httpGet: {path: /ready, port: metrics}
      periodSeconds: 5
      timeoutSeconds: 5
      failureThreshold: 2
    {{- end }}
    {{- if .follower }}
    # While the leader drains: it cannot go on without its followers.
    {{- include "tokenwire.preStop" (dict "preStopSeconds" (add (int $pool.preStopSeconds) (int $pool.shutdownTimeoutSeconds))) | nindent 4 }}
    {{- else }}
    {{- include "tokenwire.preStop" $pool | nindent 4 }}
    {{- end }}
    resources:
      {{- include "tokenwire.workerResources" . | nindent 6 }}
    securityContext:
      {{- include "tokenwire.containerSecurity" .root | nindent 6 }}
    volumeMounts:
      {{- include "tokenwire.workerMounts" . | nindent 6 }}
volumes:
  {{- include "tokenwire.volumes" (dict "model" $model "keys" .keys "cacheSize" $pool.cacheSize) | nindent 2 }}
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: {{ $pool.shmSize }}}
  {{- with include "tokenwire.cacheClaim" $model }}
  - name: hub
    persistentVolumeClaim: {claimName: {{ . }}}
  {{- end }}
  {{- if and $model.capture.enabled (ne $pool.role "decode") }}
  - name: states
    persistentVolumeClaim: {claimName: {{ include "tokenwire.captureClaim" $model }}}
  {{- end }}
  {{- with $pool.extraVolumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* Labels of a worker's pod. Those of leaders have `serves`, by which frontends find them. */}}
{{- define "tokenwire.workerPodLabels" -}}
{{ include "tokenwire.podLabels" (dict "root" .root "name" .model.name "component" .pool.role) }}
tokenwire.dev/part: worker
{{- if not .follower }}
tokenwire.dev/serves: "true"
{{- end }}
{{- with .pool.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Which of the worker's images, where no tag is given. */}}
{{- define "tokenwire.imageSuffix" -}}
{{- if ne .model.engine "vllm" }}-sim{{ else if .pool.gpuResource }}-gpu{{ else }}-cpu{{ end -}}
{{- end -}}
