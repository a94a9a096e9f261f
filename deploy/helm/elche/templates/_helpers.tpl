{{/* Labels of all objects but those of single components, as kustomize gives them. */}}
{{- define "elche.metadata" -}}
namespace: {{ .Release.Namespace }}
labels: {app.kubernetes.io/part-of: elche}
{{- end }}

{{/* The coordinators' addresses. */}}
{{- define "elche.coordinators" -}}
elche-coordinator-0.elche-coordinator:7717{{ if .Values.postgresql.enabled }},elche-coordinator-1.elche-coordinator:7717{{ end }}
{{- end }}

{{/* Whether pods share a volume for what jobs leave. */}}
{{- define "elche.sharesArtifacts" -}}
{{- if and .Values.artifacts.enabled (not .Values.artifacts.url) }}yes{{ end }}
{{- end }}

{{/* What all pods have. */}}
{{- define "elche.pod" -}}
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: 7717
  runAsGroup: 7717
  fsGroup: 7717
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Which pods are agents, of all classes. */}}
{{- define "elche.agents" -}}
{{- if .Values.pools }}
matchExpressions:
  - {key: app.kubernetes.io/name, operator: In, values: [elche-agent{{ range $class, $_ := .Values.pools }}, elche-agent-{{ $class }}{{ end }}]}
{{- else }}
matchLabels: {app.kubernetes.io/name: elche-agent}
{{- end }}
{{- end }}

{{/* Where pods of one kind run. */}}
{{- define "elche.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{- define "elche.security" -}}
{allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
{{- end }}
