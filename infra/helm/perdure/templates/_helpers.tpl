{{- define "perdure.image" -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag }}{{ end }}
{{- end -}}

{{- define "perdure.env" -}}
{{- range $name := list "PERDURE_HOME" "PERDURE_GATEWAY__HOST" "PERDURE_GATEWAY__PORT" "PERDURE_METRICS__HOST" "PERDURE_METRICS__PORT" "PERDURE_DEPLOYMENT__BUILD_ID" }}
{{- if hasKey $.Values.settings $name }}{{ fail (printf "settings.%s: the chart sets it; remove it (values.yaml has build and metricsPort)" $name) }}{{ end }}
{{- end }}
{{- $ours := dict "PERDURE_HOME" "/home/perdure/home" "PERDURE_STORE" .Values.store "PERDURE_S3_ENDPOINT_URL" .Values.s3EndpointUrl "PERDURE_GATEWAY__URL" (printf "http://%s-gateway:18001" .Release.Name) "TEMPORAL_ADDRESS" .Values.temporal.address "TEMPORAL_NAMESPACE" .Values.temporal.namespace }}
{{- range $name, $value := mergeOverwrite $ours .Values.settings }}
- {name: {{ $name }}, value: {{ if kindIs "string" $value }}{{ $value | quote }}{{ else }}{{ $value | toJson | quote }}{{ end }}}
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
imagePullSecrets: {{ toJson .Values.imagePullSecrets }}
{{- end -}}

{{- define "perdure.placement" -}}
nodeSelector: {{ toJson .Values.nodeSelector }}
tolerations: {{ toJson .Values.tolerations }}
{{- end -}}

{{- define "perdure.mounts" -}}
- {name: user, mountPath: /home/perdure}
- {name: tmp, mountPath: /tmp}
{{- range .Values.volumeMounts }}
- {{ toJson . }}
{{- end }}
{{- end -}}

{{- define "perdure.volumes" -}}
- {name: user, emptyDir: {}}
- {name: tmp, emptyDir: {}}
{{- range .Values.volumes }}
- {{ toJson . }}
{{- end }}
{{- end -}}

{{- define "perdure.account" -}}
{{ .Values.serviceAccountName | default (printf "%s-worker" .Release.Name) }}
{{- end -}}

{{- define "perdure.probe" -}}
exec:
  command:
    - python
    - -c
    - |
      import socket, sys
      asked = socket.socket(socket.AF_UNIX)
      asked.settimeout(5)
      asked.connect(sys.argv[1])
      asked.sendall(f"GET {sys.argv[2]} HTTP/1.1\r\n\r\n".encode())
      sys.exit(b" 200 " not in asked.recv(64))
    - {{ .socket }}
    - {{ .path }}
periodSeconds: 15
timeoutSeconds: 10
{{- end -}}
