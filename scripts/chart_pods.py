"""Policies on single pods: what they may, what they get, how they are probed and stopped."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from chart_manifests import Json, Pod, pods_of

from tokenwire.worker.app import ABORT_WAIT_S, ENGINE_STOP_S

__all__ = ["POD_POLICIES"]

LIVENESS = "/live"
READINESS = "/ready"

FRONTEND_END_S = 10.0
"""Processes of a frontend that do not end are killed so long after the drain."""

WORKER_END_S = ABORT_WAIT_S + ENGINE_STOP_S
"""What a worker takes at most behind its drain: to give up what runs, and to stop."""

_SECRET_NAME = re.compile(r"(?i)(token|key|password|secret|credential)s?$")
_PINNED = re.compile(r"(@sha256:[0-9a-f]{64}|:[\w][\w.-]*)$")


def no_privileges(manifests: Sequence[Json]) -> Iterator[str]:
    """No root, no capabilities, no host, a read-only root, the runtime's seccomp profile."""
    for pod in pods_of(manifests):
        security = pod.spec.get("securityContext", {})
        if security.get("runAsNonRoot") is not True:
            yield f"{pod.name}: runAsNonRoot is not set"
        if not security.get("runAsUser"):
            yield f"{pod.name}: it runs as the image's user, or as root"
        if security.get("seccompProfile", {}).get("type") != "RuntimeDefault":
            yield f"{pod.name}: seccomp is not the runtime's default"
        for host in ("hostNetwork", "hostPID", "hostIPC"):
            if pod.spec.get(host):
                yield f"{pod.name}: {host}"
        for volume in pod.spec.get("volumes", []):
            if "hostPath" in volume:
                yield f"{pod.name}: volume {volume['name']} is a path of the host"
        for container in pod.containers:
            yield from _container_privileges(pod, container)


def _container_privileges(pod: Pod, container: Json) -> Iterator[str]:
    who = f"{pod.name}, {container['name']}"
    own = container.get("securityContext", {})
    if own.get("allowPrivilegeEscalation") is not False:
        yield f"{who}: privileges can be escalated"
    if own.get("readOnlyRootFilesystem") is not True:
        yield f"{who}: its root can be written"
    if own.get("privileged"):
        yield f"{who}: privileged"
    if own.get("runAsUser") == 0 or own.get("runAsNonRoot") is False:
        yield f"{who}: it runs as root"
    capabilities = own.get("capabilities", {})
    if capabilities.get("drop") != ["ALL"] or capabilities.get("add"):
        yield f"{who}: it has capabilities"


def nothing_from_the_cluster(manifests: Sequence[Json]) -> Iterator[str]:
    """No token of Kubernetes; no variables of Services, which could be options of ours."""
    for pod in pods_of(manifests):
        if pod.spec.get("automountServiceAccountToken") is not False:
            yield f"{pod.name}: it gets a token for Kubernetes"
        if pod.spec.get("enableServiceLinks") is not False:
            yield (
                f"{pod.name}: a Service called tokenwire would set TOKENWIRE_PORT: "
                "enableServiceLinks must be false"
            )


def writes_go_to_volumes(manifests: Sequence[Json]) -> Iterator[str]:
    """Folders that the environment names are on volumes, since roots are read-only."""
    for pod in pods_of(manifests):
        for container in pod.containers:
            mounts = {
                mount["mountPath"]
                for mount in container.get("volumeMounts", [])
                if not mount.get("readOnly")
            }
            for variable in container.get("env", []):
                name, value = variable["name"], variable.get("value", "")
                if name.endswith(("HOME", "_DIR", "CACHE_ROOT")) and not any(
                    PurePosixPath(value).is_relative_to(mount) for mount in mounts
                ):
                    yield f"{pod.name}: {name}={value} cannot be written"


def volumes_are_there(manifests: Sequence[Json]) -> Iterator[str]:
    """Each mount has its volume, each volume its mount, and no path has two."""
    for pod in pods_of(manifests):
        volumes = [volume["name"] for volume in pod.spec.get("volumes", [])]
        if len(set(volumes)) < len(volumes):
            yield f"{pod.name}: two volumes have one name"
        mounted: set[str] = set()
        for container in pod.containers:
            mounts = container.get("volumeMounts", [])
            mounted.update(mount["name"] for mount in mounts)
            paths = [mount["mountPath"] for mount in mounts]
            if len(set(paths)) < len(paths):
                yield f"{pod.name}: two volumes are mounted at one path"
        for name in sorted(mounted ^ set(volumes)):
            what = "is not there" if name in mounted else "is not mounted"
            yield f"{pod.name}: volume {name} {what}"


def resources_are_set(manifests: Sequence[Json]) -> Iterator[str]:
    """CPU and memory are asked for, memory is bounded, devices are asked for as bounded."""
    for pod in pods_of(manifests):
        for container in pod.containers:
            resources = container.get("resources", {})
            requests, limits = (
                resources.get(kind, {}) for kind in ("requests", "limits")
            )
            for name in ("cpu", "memory"):
                if name not in requests:
                    yield f"{pod.name}: no {name} is asked for"
            if "memory" not in limits:
                yield f"{pod.name}: memory has no limit"
            for name in requests:
                if "/" in name and limits.get(name) != requests[name]:
                    yield f"{pod.name}: {name}: request and limit differ"


def probes_are_there(manifests: Sequence[Json]) -> Iterator[str]:
    """Servers have all three; being live depends on the process alone, being ready not."""
    for pod in pods_of(manifests):
        if not pod.is_server:
            continue
        for container in pod.containers:
            ports = {port["name"] for port in container.get("ports", [])}
            wanted = {
                "startupProbe": {LIVENESS, READINESS},
                "livenessProbe": {LIVENESS},
                "readinessProbe": {READINESS},
            }
            for probe, paths in wanted.items():
                get = container.get(probe, {}).get("httpGet")
                if get is None:
                    yield f"{pod.name}: no {probe} by HTTP"
                elif get["path"] not in paths:
                    yield f"{pod.name}: {probe} asks {get['path']}, which depends on others"
                elif get["port"] not in ports:
                    yield f"{pod.name}: {probe} asks port {get['port']}, which is none"
            if (
                pod.command == "tokenwire-frontend"
                and container.get("startupProbe", {}).get("httpGet", {}).get("path")
                == READINESS
            ):
                yield f"{pod.name}: startupProbe waits for workers"


def stopping_fits_the_grace_period(manifests: Sequence[Json]) -> Iterator[str]:
    """PreStop, drain and end fit before SIGKILL; a frontend leaves its Service first."""
    for pod in pods_of(manifests):
        if not pod.is_server:
            continue
        (container,) = pod.containers
        wait = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {})
        wait_s = float(wait.get("seconds", 0))
        prefix = "--shutdown-timeout-s="
        drains = [
            float(argument.removeprefix(prefix))
            for argument in container.get("args", [])
            if argument.startswith(prefix)
        ]
        if len(drains) != 1:
            yield f"{pod.name}: how long it drains is not said once"
            continue
        is_frontend = pod.command == "tokenwire-frontend"
        if is_frontend and wait_s < 1:
            yield f"{pod.name}: no preStop: requests still come when it refuses them"
        needs_s = wait_s + drains[0] + (FRONTEND_END_S if is_frontend else WORKER_END_S)
        grace_s = pod.spec.get("terminationGracePeriodSeconds", 30)
        if grace_s < needs_s:
            yield f"{pod.name}: it is killed after {grace_s} s, and may need {needs_s:g}"


def secrets_by_reference(manifests: Sequence[Json]) -> Iterator[str]:
    """No secret is in a manifest; files of secrets are for their user alone."""
    for manifest in manifests:
        if manifest["kind"] == "Secret":
            yield f"Secret/{manifest['metadata']['name']} is made by the chart"
    for pod in pods_of(manifests):
        for container in pod.containers:
            for variable in container.get("env", []):
                if variable.get("value") and _SECRET_NAME.search(variable["name"]):
                    yield f"{pod.name}: {variable['name']} is written down"
        for volume in pod.spec.get("volumes", []):
            if "secret" in volume and volume["secret"].get("defaultMode") != 0o400:
                yield f"{pod.name}: the secret of volume {volume['name']} is open to others"


def images_are_pinned(manifests: Sequence[Json]) -> Iterator[str]:
    """By a digest, or by a tag that means one thing."""
    for pod in pods_of(manifests):
        for container in pod.containers:
            image = container["image"].rpartition("/")[2]
            if not _PINNED.search(image) or image.endswith(":latest"):
                yield f"{pod.name}: image {container['image']} says nothing of what runs"


POD_POLICIES = (
    no_privileges,
    nothing_from_the_cluster,
    writes_go_to_volumes,
    volumes_are_there,
    resources_are_set,
    probes_are_there,
    stopping_fits_the_grace_period,
    secrets_by_reference,
    images_are_pinned,
)
