{{/* Names, labels, and what pods have in common. */}}

{{- define "tokenwire.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 30 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 30 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 30 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "tokenwire.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "tokenwire.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* What selects all pods of a release. */}}
{{- define "tokenwire.releaseSelector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Labels of every object. */}}
{{- define "tokenwire.labels" -}}
{{ include "tokenwire.releaseSelector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Labels of what belongs to a model. Takes (root, name, component). */}}
{{- define "tokenwire.modelLabels" -}}
{{ include "tokenwire.labels" .root }}
tokenwire.dev/model: {{ .name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end -}}

{{/* Labels of a component's pods: no versions, or each release of the chart would restart all
engines. Takes (root, name, component). */}}
{{- define "tokenwire.podLabels" -}}
{{ include "tokenwire.selector" . }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* What selects a component's pods. Takes (root, name, component). */}}
{{- define "tokenwire.selector" -}}
{{ include "tokenwire.releaseSelector" .root }}
tokenwire.dev/model: {{ .name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* What selects all workers of a model, followers of a group included. Takes (root, name). */}}
{{- define "tokenwire.workersSelector" -}}
{{ include "tokenwire.releaseSelector" .root }}
tokenwire.dev/model: {{ .name }}
tokenwire.dev/part: worker
{{- end -}}

{{/* Takes (root, image, suffix), the suffix for tags that are made here. */}}
{{- define "tokenwire.image" -}}
{{- $tag := default (printf "%s%s" .root.Chart.AppVersion (default "" .suffix)) .image.tag | toString -}}
{{- if not .image.repository }}{{ fail "an image needs a repository" }}{{ end -}}
{{- if .image.digest -}}
{{- printf "%s@%s" .image.repository .image.digest -}}
{{- else if eq $tag "latest" -}}
{{- fail (printf "%s:latest says nothing of what runs: give a tag or a digest" .image.repository) -}}
{{- else -}}
{{- printf "%s:%s" .image.repository $tag -}}
{{- end -}}
{{- end -}}

{{- define "tokenwire.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.runAsUser | int64 }}
runAsGroup: {{ .Values.runAsGroup | int64 }}
fsGroup: {{ .Values.runAsGroup | int64 }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "tokenwire.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* What every pod's spec begins with. A Service called "tokenwire" would otherwise set
TOKENWIRE_PORT in each pod of its namespace, which is an option of ours. */}}
{{- define "tokenwire.podHead" -}}
serviceAccountName: {{ include "tokenwire.serviceAccount" . }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Where pods go. Takes (selector, of), where of has spread, affinity, and so on. */}}
{{- define "tokenwire.placement" -}}
{{- if ne .of.spread "none" }}
topologySpreadConstraints:
{{- $when := ternary "DoNotSchedule" "ScheduleAnyway" (eq .of.spread "hard") }}
{{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: {{ $when }}
    labelSelector:
      matchLabels:
        {{- $.selector | nindent 8 }}
{{- end }}
{{- end }}
{{- with .of.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .of.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end -}}

{{/* Options that all processes have. */}}
{{- define "tokenwire.commonOptions" -}}
- --log-format={{ .Values.logging.format }}
- --log-level={{ .Values.logging.level }}
{{- with .Values.tracing.endpoint }}
- --otlp-traces-endpoint={{ . }}
{{- end }}
{{- end -}}

{{/* Environment of every pod of ours. */}}
{{- define "tokenwire.commonEnv" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: HOME
  value: /cache
- name: XDG_CACHE_HOME
  value: /cache
- name: HF_HOME
  value: /cache/huggingface
- name: PYTHONUNBUFFERED
  value: "1"
{{- if .Values.tracing.endpoint }}
- name: OTEL_TRACES_SAMPLER
  value: parentbased_traceidratio
- name: OTEL_TRACES_SAMPLER_ARG
  value: {{ .Values.tracing.ratio | quote }}
{{- end }}
{{- end -}}
