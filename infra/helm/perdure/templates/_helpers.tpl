{{- define "perdure.image" -}}
{{ .Values.image.repository }}{{ if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ .Values.image.tag }}{{ end }}
{{- end -}}

{{- define "perdure.env" -}}
- {name: TEMPORAL_ADDRESS, value: {{ .Values.temporal.address | quote }}}
- {name: TEMPORAL_NAMESPACE, value: {{ .Values.temporal.namespace | quote }}}
- {name: PERDURE_STORE, value: {{ .Values.store | quote }}}
- {name: PERDURE_S3_ENDPOINT_URL, value: {{ .Values.s3EndpointUrl | quote }}}
- {name: PERDURE_HOME, value: /home/perdure/home}
- {name: PERDURE_GATEWAY__URL, value: "http://{{ .Release.Name }}-gateway:18001"}
{{- range $name, $value := .Values.settings }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end -}}

{{- define "perdure.contained" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "perdure.pod" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- end -}}
