{{- define "kvsteer.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* The release's name, with the chart's where that is not in it. */}}
{{- define "kvsteer.fullname" -}}
{{- $name := include "kvsteer.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "kvsteer.account" -}}
{{- default (ternary (include "kvsteer.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name -}}
{{- end -}}

{{- define "kvsteer.selector" -}}
app.kubernetes.io/name: {{ include "kvsteer.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kvsteer.labels" -}}
{{ include "kvsteer.selector" . }}
app.kubernetes.io/part-of: kvsteer
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "kvsteer.valkey" -}}
{{- printf "%s-valkey" (include "kvsteer.fullname" . | trunc 56 | trimSuffix "-") -}}
{{- end -}}

{{/* Where the routers meet, by the values under `sharing`; empty if these do not say. */}}
{{- define "kvsteer.meeting" -}}
{{- if .Values.sharing.valkey -}}
valkey://{{ include "kvsteer.valkey" . }}:6379
{{- else -}}
{{- .Values.sharing.url -}}
{{- end -}}
{{- end -}}

{{/* The name of the Secret with the fleet's secret. */}}
{{- define "kvsteer.fleet" -}}
{{- default (printf "%s-sharing" (include "kvsteer.fullname" . | trunc 55 | trimSuffix "-")) .Values.sharing.secret -}}
{{- end -}}

{{- define "kvsteer.check" -}}
{{- if and .Values.sharing.valkey .Values.sharing.url -}}
{{- fail "sharing: set valkey or url, not both" -}}
{{- end -}}
{{- if and .Values.sharing.url (not .Values.sharing.secret) -}}
{{- fail "sharing.secret: missing: the name of a Secret whose key `secret` is the fleet's" -}}
{{- end -}}
{{- if and (gt (int .Values.replicas) 1) (not (include "kvsteer.meeting" .)) (not .Values.config.sharing) -}}
{{- fail "replicas: more than one router has to share: set sharing.valkey, sharing.url or config.sharing (docs/several-routers.md)" -}}
{{- end -}}
{{- end -}}

{{/* The router's configuration, with the mounted certificate, secret and token where there are any. */}}
{{- define "kvsteer.config" -}}
{{- $config := deepCopy .Values.config -}}
{{- if .Values.tls.secret -}}
{{- $tls := dict "certificate" "/etc/kvsteer-tls/tls.crt" "key" "/etc/kvsteer-tls/tls.key" -}}
{{- $config = mustMergeOverwrite (dict "extproc" (dict "tls" $tls)) $config -}}
{{- end -}}
{{- with include "kvsteer.meeting" . -}}
{{- $sharing := dict "url" . "secret_file" "/etc/kvsteer-sharing/secret" -}}
{{- $config = mustMergeOverwrite (dict "extproc" (dict "leave_ms" 5000) "sharing" $sharing) $config -}}
{{- end -}}
{{- if .Values.probe.secret -}}
{{- $probe := dict "listen" "0.0.0.0:9092" "token_file" "/etc/kvsteer-probe/token" -}}
{{- $config = mustMergeOverwrite (dict "probe" $probe) $config -}}
{{- end -}}
{{- toYaml $config -}}
{{- end -}}
