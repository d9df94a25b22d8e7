"""A small release, as a chart would render it: what policies find nothing wrong with."""

from __future__ import annotations

import json
from typing import Any

import yaml

__all__ = ["Json", "found", "release"]

Json = dict[str, Any]

_TEXT = """
- apiVersion: v1
  kind: ServiceAccount
  metadata: {name: app}
- apiVersion: v1
  kind: Service
  metadata: {name: front, labels: {is: http}}
  spec:
    selector: {app.kubernetes.io/component: frontend}
    ports: [{name: http, port: 80, targetPort: http}]
- apiVersion: v1
  kind: Service
  metadata: {name: workers, labels: {}}
  spec:
    clusterIP: None
    selector: {tokenwire.dev/serves: yes-it-does}
    ports: [{name: link, port: 5555, targetPort: link}]
- apiVersion: apps/v1
  kind: Deployment
  metadata: {name: front}
  spec:
    selector: {matchLabels: {app.kubernetes.io/component: frontend}}
    template:
      metadata: {labels: {app.kubernetes.io/component: frontend, tokenwire.dev/model: m}}
      spec: &pod
        serviceAccountName: app
        automountServiceAccountToken: false
        enableServiceLinks: false
        terminationGracePeriodSeconds: 60
        securityContext: {runAsNonRoot: true, runAsUser: 10001, seccompProfile: {type: RuntimeDefault}}
        volumes: [{name: keys, secret: {secretName: keys, defaultMode: 256}}, {name: cache, emptyDir: {}}]
        containers:
          - &container
            name: frontend
            image: tokenwire/frontend:0.1.0
            command: [tokenwire-frontend]
            args: [--model=m, --host=0.0.0.0, --port=8000, "--workers-dns=workers:5555", --insecure-plaintext, --shutdown-timeout-s=30]
            env:
              - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
              - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: hub, key: token}}}
              - {name: HOME, value: /cache}
              - {name: TOKENWIRE_HEARTBEAT_TIMEOUT_S, value: "4"}
            ports: [{name: http, containerPort: 8000}]
            startupProbe: &live {httpGet: {path: /live, port: http}}
            livenessProbe: *live
            readinessProbe: {httpGet: {path: /ready, port: http}}
            lifecycle: {preStop: {sleep: {seconds: 5}}}
            resources: {requests: {cpu: 1, memory: 1Gi}, limits: {memory: 1Gi}}
            securityContext: {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
            volumeMounts: [{name: keys, mountPath: /keys, readOnly: true}, {name: cache, mountPath: /cache}]
- apiVersion: apps/v1
  kind: StatefulSet
  metadata: {name: work}
  spec:
    replicas: 2
    serviceName: workers
    selector: {matchLabels: {app.kubernetes.io/component: decode}}
    template:
      metadata: {labels: {app.kubernetes.io/component: decode, tokenwire.dev/part: worker, tokenwire.dev/serves: yes-it-does, tokenwire.dev/model: m}}
      spec:
        <<: *pod
        containers:
          - <<: *container
            name: worker
            command: [tokenwire-worker]
            args: [--engine=sim, --role=decode, --model=m, --worker-id=$(POD_NAME), "--listen=tcp://0.0.0.0:5555", --metrics-host=0.0.0.0, --metrics-port=9555, --insecure-plaintext, --shutdown-timeout-s=25, --, --step-ms=5]
            ports: [{name: link, containerPort: 5555}, {name: metrics, containerPort: 9555}, {name: handover, containerPort: 5600}]
            startupProbe: &ready {httpGet: {path: /ready, port: metrics}}
            livenessProbe: {httpGet: {path: /live, port: metrics}}
            readinessProbe: *ready
            resources: {requests: {cpu: 1, memory: 1Gi, nvidia.com/gpu: 1}, limits: {memory: 1Gi, nvidia.com/gpu: 1}}
- apiVersion: leaderworkerset.x-k8s.io/v1
  kind: LeaderWorkerSet
  metadata: {name: group}
  spec:
    replicas: 1
    leaderWorkerTemplate:
      size: 2
      leaderTemplate:
        metadata: {labels: {app.kubernetes.io/component: prefill, tokenwire.dev/part: worker, tokenwire.dev/serves: yes-it-does, tokenwire.dev/model: m}}
        spec:
          <<: *pod
          containers:
            - <<: *container
              name: worker
              command: [tokenwire-worker]
              args: [--engine=vllm, --role=prefill, --model=m, "--listen=tcp://0.0.0.0:5555", --metrics-port=9555, --insecure-plaintext, --shutdown-timeout-s=25, --, --nnodes=2, --node-rank=0]
              ports: [{name: link, containerPort: 5555}, {name: metrics, containerPort: 9555}]
              startupProbe: *ready
              livenessProbe: {httpGet: {path: /live, port: metrics}}
              readinessProbe: *ready
      workerTemplate:
        metadata: {labels: {app.kubernetes.io/component: prefill, tokenwire.dev/model: m, tokenwire.dev/part: worker}}
        spec:
          <<: *pod
          containers:
            - <<: *container
              name: worker
              command: [vllm, serve]
              args: [m, --headless, --nnodes=2, --node-rank=$(LWS_WORKER_INDEX)]
- apiVersion: autoscaling/v2
  kind: HorizontalPodAutoscaler
  metadata: {name: front}
  spec: {scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: front}}
- apiVersion: policy/v1
  kind: PodDisruptionBudget
  metadata: {name: work}
  spec:
    maxUnavailable: 1
    selector: {matchLabels: {app.kubernetes.io/component: decode}}
- apiVersion: monitoring.coreos.com/v1
  kind: ServiceMonitor
  metadata: {name: front}
  spec: {selector: {matchLabels: {is: http}}, endpoints: [{port: http}]}
- apiVersion: monitoring.coreos.com/v1
  kind: PodMonitor
  metadata: {name: work}
  spec: {selector: {matchLabels: {tokenwire.dev/serves: yes-it-does}}, podMetricsEndpoints: [{port: metrics}]}
- apiVersion: networking.k8s.io/v1
  kind: NetworkPolicy
  metadata: {name: front}
  spec:
    podSelector: {matchLabels: {app.kubernetes.io/component: frontend}}
    policyTypes: [Ingress, Egress]
    ingress: [{ports: [{port: http}]}]
    egress: [{ports: [{port: 5555}], to: [{podSelector: {matchLabels: {tokenwire.dev/part: worker}}}]}]
- apiVersion: networking.k8s.io/v1
  kind: NetworkPolicy
  metadata: {name: work}
  spec:
    podSelector: {matchLabels: {tokenwire.dev/part: worker}}
    policyTypes: [Ingress, Egress]
    ingress:
      - {ports: [{port: link}], from: [{podSelector: {matchLabels: {app.kubernetes.io/component: frontend}}}]}
      - {ports: [{port: metrics}], from: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}]}
      - {from: [{podSelector: {matchLabels: {tokenwire.dev/part: worker}}}]}
    egress: [{to: [{podSelector: {matchLabels: {tokenwire.dev/part: worker}}}]}]
- apiVersion: gateway.networking.k8s.io/v1
  kind: HTTPRoute
  metadata: {name: front}
  spec: {parentRefs: [{name: gateway}], rules: [{backendRefs: [{name: front, port: 80}]}]}
"""


def release() -> list[Json]:
    """Return its objects, new ones at each call and none shared between two."""
    # By way of JSON: there, nothing that YAML's anchors share stays shared.
    objects: list[Json] = json.loads(json.dumps(yaml.safe_load(_TEXT)))
    return objects


def found(manifests: list[Json], kind: str, name: str) -> Json:
    """Return one of *manifests*."""
    (one,) = (
        manifest
        for manifest in manifests
        if manifest["kind"] == kind and manifest["metadata"]["name"] == name
    )
    return one
