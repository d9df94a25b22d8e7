{{/* The settings of a model, of its pools, and what is wrong with them. */}}

{{/* One map over another: lists and scalars of the second win, false and 0 too.
sprig's own merge leaves out values that are empty. Takes (below, above); JSON. */}}
{{- define "tokenwire.over" -}}
{{- $result := deepCopy .below -}}
{{- range $key, $value := .above -}}
{{- if and (kindIs "map" $value) (kindIs "map" (get $result $key)) -}}
{{- $_ := set $result $key (include "tokenwire.over" (dict "below" (get $result $key) "above" $value) | fromJson) -}}
{{- else -}}
{{- $_ := set $result $key $value -}}
{{- end -}}
{{- end -}}
{{- toJson $result -}}
{{- end -}}

{{/* The settings of a model, as JSON: `defaults` with its own over them. Takes (root, name). */}}
{{- define "tokenwire.model" -}}
{{- $name := .name -}}
{{- if not (regexMatch "^[a-z]([a-z0-9-]{0,18}[a-z0-9])?$" $name) -}}
{{- fail (printf "models.%s: a name has at most 20 lower-case letters, digits and `-`" $name) -}}
{{- end -}}
{{- $own := default dict (get .root.Values.models $name) -}}
{{- $model := include "tokenwire.over" (dict "below" .root.Values.defaults "above" $own) | fromJson -}}
{{- $_ := set $model "name" $name -}}
{{- $_ := set $model "fullname" (printf "%s-%s" (include "tokenwire.fullname" .root) $name) -}}
{{- if not $model.servedModelName }}{{ $_ := set $model "servedModelName" $name }}{{ end -}}
{{- $_ := set $model "source" (default $model.model.path $model.model.hubId) -}}
{{- $plain := and (not $model.links.frontendKeysSecret) (not $model.links.workerKeysSecret) -}}
{{- $_ := set $model "plaintext" $plain -}}
{{- $pools := dict -}}
{{- range $role, $_ := $model.pools -}}
{{- $pool := include "tokenwire.over" (dict "below" $model.worker "above" (get $model.pools $role)) | fromJson -}}
{{- $_ := set $pool "role" $role -}}
{{- $_ := set $pool "fullname" (printf "%s-%s" $model.fullname $role) -}}
{{- if $pool.enabled }}{{ $_ := set $pools $role $pool }}{{ end -}}
{{- end -}}
{{- $_ := set $model "enabledPools" $pools -}}
{{- include "tokenwire.check" $model -}}
{{- toJson $model -}}
{{- end -}}

{{/* Refuse what would not run, in one sentence. */}}
{{- define "tokenwire.check" -}}
{{- $where := printf "models.%s" .name -}}
{{- if and .plaintext (eq .engine "vllm") (ne (toString .links.insecurePlaintext) "true") -}}
{{- fail (printf "%s: prompts would cross the cluster's network in plain text, and whoever reaches a worker could use its engine: give links.frontendKeysSecret and links.workerKeysSecret (docs/security.md), or links.insecurePlaintext=true" $where) -}}
{{- end -}}
{{- if and .plaintext (eq (toString .links.insecurePlaintext) "false") -}}
{{- fail (printf "%s: links.insecurePlaintext is false, so links.frontendKeysSecret and links.workerKeysSecret are needed" $where) -}}
{{- end -}}
{{- if ne (empty .links.frontendKeysSecret) (empty .links.workerKeysSecret) -}}
{{- fail (printf "%s: give both links.frontendKeysSecret and links.workerKeysSecret, or neither" $where) -}}
{{- end -}}
{{- if not (or (hasKey .enabledPools "decode") (hasKey .enabledPools "aggregated")) -}}
{{- fail (printf "%s: nothing would generate: enable pools.decode or pools.aggregated" $where) -}}
{{- end -}}
{{- if and (hasKey .enabledPools "prefill") (not (hasKey .enabledPools "decode")) -}}
{{- fail (printf "%s: prefill workers hand over to decode workers: enable pools.decode" $where) -}}
{{- end -}}
{{- if and .model.claim .model.hubId -}}
{{- fail (printf "%s: model.claim holds a folder, so give model.path, not model.hubId" $where) -}}
{{- end -}}
{{- if and .frontend.tls.clientCaSecret.name (not .frontend.tls.secret) -}}
{{- fail (printf "%s: frontend.tls.clientCaSecret needs frontend.tls.secret: without TLS nobody shows a certificate" $where) -}}
{{- end -}}
{{- if and .frontend.admin.enabled (not .frontend.admin.keySecret.name) -}}
{{- fail (printf "%s: the admin plane needs frontend.admin.keySecret.name: whoever reaches it can change the model" $where) -}}
{{- end -}}
{{- if and .capture.enabled (not .capture.layers) -}}
{{- fail (printf "%s: capture.enabled needs capture.layers" $where) -}}
{{- end -}}
{{- if .capture.job.enabled -}}
{{- if not (and .capture.enabled .capture.job.image.repository .capture.job.dataClaim) -}}
{{- fail (printf "%s: capture.job needs capture.enabled, capture.job.image.repository and capture.job.dataClaim" $where) -}}
{{- end -}}
{{- end -}}
{{- range $role, $pool := .enabledPools -}}
{{- if gt (int $pool.nodes) 1 -}}
{{- if ne $.engine "vllm" }}{{ fail (printf "%s.pools.%s: nodes above 1 are for engine vllm" $where $role) }}{{ end -}}
{{- if $.capture.enabled }}{{ fail (printf "%s.pools.%s: hidden states of an engine on several nodes are untried: set nodes to 1, or capture.enabled to false" $where $role) }}{{ end -}}
{{- end -}}
{{- if mod (include "tokenwire.worldSize" $pool | int) (int $pool.nodes) -}}
{{- fail (printf "%s.pools.%s: tensor x pipeline x data must be a multiple of nodes" $where $role) -}}
{{- end -}}
{{- if and (eq $.engine "vllm") (eq (toString (dig "limits" "memory" "" $pool.resources)) "1Gi") -}}
{{- fail (printf "%s.pools.%s: resources are those of the simulated engine: say what vLLM needs in worker.resources" $where $role) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* GPUs of one worker, on all its nodes. */}}
{{- define "tokenwire.worldSize" -}}
{{- mul (int .parallel.tensor) (int .parallel.pipeline) (int .parallel.data) -}}
{{- end -}}

{{/* Volumes of who reads a model: caches, the model, keys. Takes (model, keys, cacheSize). */}}
{{- define "tokenwire.volumes" -}}
- name: tmp
  emptyDir: {sizeLimit: 1Gi}
- name: cache
  emptyDir: {sizeLimit: {{ .cacheSize }}}
{{- with .model.model.claim }}
- name: models
  persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
{{- end }}
{{- with .keys }}
- name: link-keys
  secret: {secretName: {{ . }}, defaultMode: 0400}
{{- end }}
{{- end -}}

{{/* The same, as mounts. */}}
{{- define "tokenwire.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /cache}
{{- if .model.model.claim }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- if .keys }}
- {name: link-keys, mountPath: /etc/tokenwire/link, readOnly: true}
{{- end }}
{{- end -}}

{{/* Secrets of a frontend, as JSON, by the folder below /etc/tokenwire that they are mounted at. */}}
{{- define "tokenwire.frontendSecrets" -}}
{{- $secrets := dict "api-keys" .apiKeysSecret.name "tls" .tls.secret "client-ca" .tls.clientCaSecret.name "resume" .resumeKeysSecret.name -}}
{{- if .admin.enabled }}{{ $_ := set $secrets "admin" .admin.keySecret.name }}{{ end -}}
{{- range $folder, $secret := $secrets }}{{ if not $secret }}{{ $_ := unset $secrets $folder }}{{ end }}{{ end -}}
{{- toJson $secrets -}}
{{- end -}}

{{/* How a model's frontends are asked. */}}
{{- define "tokenwire.scheme" -}}
{{- ternary "https" "http" (not (empty .frontend.tls.secret)) -}}
{{- end -}}

{{/* The hub's token. */}}
{{- define "tokenwire.hubEnv" -}}
{{- if .model.hubTokenSecret.name }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .model.hubTokenSecret.name }}, key: {{ .model.hubTokenSecret.key }}}}
{{- end }}
{{- if not .model.hubId }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- end }}
{{- end -}}

{{/* Replicas, unless something else sets them. */}}
{{- define "tokenwire.replicas" -}}
{{- if eq .autoscaling.mode "none" }}
replicas: {{ .replicas | int }}
{{- end }}
{{- end -}}

{{/* Wait before SIGTERM, by Kubernetes itself: images need no shell for it. */}}
{{- define "tokenwire.preStop" -}}
{{- if gt (int .preStopSeconds) 0 }}
lifecycle:
  preStop:
    sleep: {seconds: {{ .preStopSeconds | int }}}
{{- end }}
{{- end -}}

{{/* Claim of the model's cache, or nothing. */}}
{{- define "tokenwire.cacheClaim" -}}
{{- if .model.cache.claim }}{{ .model.cache.claim }}{{ else if .model.cache.size }}{{ .fullname }}-hub{{ end -}}
{{- end -}}

{{- define "tokenwire.captureClaim" -}}
{{- default (printf "%s-states" .fullname) .capture.claim -}}
{{- end -}}
