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

{{/* The router's configuration, with the mounted certificate where there is one. */}}
{{- define "kvsteer.config" -}}
{{- $config := deepCopy .Values.config -}}
{{- if .Values.tls.secret -}}
{{- $tls := dict "certificate" "/etc/kvsteer-tls/tls.crt" "key" "/etc/kvsteer-tls/tls.key" -}}
{{- $config = mustMergeOverwrite (dict "extproc" (dict "tls" $tls)) $config -}}
{{- end -}}
{{- toYaml $config -}}
{{- end -}}
