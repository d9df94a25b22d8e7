"""Policies on what belongs together: selectors, names, scaling, disruption, the network."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, cast

from chart_manifests import Json, Pod, name_of, of_kind, pods_of, selects

__all__ = ["WIRING_POLICIES", "admitted_ports"]

MAX_NAME_CHARS = 63
"""Of a label's value (RFC 1123): names of objects and pods become such."""

SUFFIX_CHARS = 11
"""What controllers put behind a workload's name: `-` and a hash of ten (StatefulSet)."""

WORKLOADS = ("Deployment", "StatefulSet", "LeaderWorkerSet")


def selectors_match(manifests: Sequence[Json]) -> Iterator[str]:
    """A workload selects its own pods and no other's."""
    pods = list(pods_of(manifests))
    for pod in pods:
        selector = pod.owner["spec"].get("selector", {}).get("matchLabels")
        if selector is None:
            continue
        if not selects(selector, pod.labels):
            yield f"{pod.name}: its selector does not match its own pods"
        for other in pods:
            if other.owner is not pod.owner and selects(selector, other.labels):
                yield f"{pod.name}: its selector takes pods of {other.name}, too"


def services_have_pods(manifests: Sequence[Json]) -> Iterator[str]:
    """A Service selects pods of one kind of process, and its ports are theirs."""
    for service in of_kind(manifests, "Service"):
        name, spec = name_of(service), service["spec"]
        chosen = [p for p in pods_of(manifests) if selects(spec["selector"], p.labels)]
        if not chosen:
            yield f"{name}: it selects nothing"
        if len({pod.command for pod in chosen}) > 1:
            yield f"{name}: it selects different processes"
        for port in spec["ports"]:
            target = port.get("targetPort", port["port"])
            for pod in chosen:
                if target not in pod.ports and target not in pod.ports.values():
                    yield f"{name}: {pod.name} has no port {target}"


def monitors_find_something(manifests: Sequence[Json]) -> Iterator[str]:
    """What Prometheus is told to look at is there, with the port."""
    for monitor in of_kind(manifests, "ServiceMonitor", "PodMonitor"):
        selector = monitor["spec"]["selector"]["matchLabels"]
        found: list[set[str]]
        if monitor["kind"] == "ServiceMonitor":
            found = [
                {port["name"] for port in service["spec"]["ports"]}
                for service in of_kind(manifests, "Service")
                if selects(selector, service["metadata"]["labels"])
            ]
            endpoints = monitor["spec"]["endpoints"]
        else:
            found = [
                set(pod.ports)
                for pod in pods_of(manifests)
                if selects(selector, pod.labels)
            ]
            endpoints = monitor["spec"]["podMetricsEndpoints"]
        if not found:
            yield f"{name_of(monitor)}: it selects nothing"
        for endpoint in endpoints:
            if not all(endpoint["port"] in ports for ports in found):
                yield f"{name_of(monitor)}: port {endpoint['port']} is not everywhere"


def scaling_has_the_last_word(manifests: Sequence[Json]) -> Iterator[str]:
    """Replicas are set by the workload or by an autoscaler, and by one of these."""
    scaled: list[tuple[str, str]] = []
    for scaler in of_kind(manifests, "HorizontalPodAutoscaler", "ScaledObject"):
        target = scaler["spec"]["scaleTargetRef"]
        scaled.append((target["kind"], target["name"]))
    there = {
        (one["kind"], one["metadata"]["name"]): one
        for one in of_kind(manifests, *WORKLOADS)
    }
    for kind, name in scaled:
        if scaled.count((kind, name)) > 1:
            yield f"{kind}/{name} has two autoscalers"
        if (kind, name) not in there:
            yield f"an autoscaler's target, {kind}/{name}, is not there"
    for key, workload in there.items():
        if ("replicas" in workload["spec"]) == (key in scaled):
            what = "too, by itself" if key in scaled else "by nobody"
            yield f"{name_of(workload)}: replicas are set {what}"


def drains_are_not_blocked(manifests: Sequence[Json]) -> Iterator[str]:
    """A budget lets at least one pod go, and is for the pods of one workload."""
    pods = list(pods_of(manifests))
    for budget in of_kind(manifests, "PodDisruptionBudget"):
        name, spec = name_of(budget), budget["spec"]
        if "minAvailable" in spec:
            yield f"{name}: minAvailable keeps a node from being drained"
        if spec.get("maxUnavailable", 0) in (0, "0%", "0"):
            yield f"{name}: no pod may ever go"
        selector = spec["selector"]["matchLabels"]
        owners = {name_of(p.owner) for p in pods if selects(selector, p.labels)}
        if len(owners) != 1:
            yield f"{name}: it is for {sorted(owners) or 'nothing'}"


def the_network_is_covered(manifests: Sequence[Json]) -> Iterator[str]:
    """Each pod is under a policy both ways, and each port of a server is let in to."""
    policies = of_kind(manifests, "NetworkPolicy")
    if not policies:
        return
    for pod in pods_of(manifests):
        mine = [p for p in policies if _selected(p["spec"]["podSelector"], pod)]
        types = {kind for one in mine for kind in one["spec"]["policyTypes"]}
        if types != {"Ingress", "Egress"}:
            yield f"{pod.name}: no policy says who may reach it, or whom it may"
        if not pod.is_server:
            continue
        admitted = admitted_ports(mine)
        for name, number in pod.ports.items():
            if not admitted & {name, number, "*"}:
                yield f"{pod.name}: nobody may reach its port {name}"


def admitted_ports(policies: Sequence[Json]) -> set[Any]:
    """Return the ports that somebody may reach; `*`: all."""
    admitted: set[Any] = set()
    for policy in policies:
        for rule in policy["spec"].get("ingress", []):
            admitted.update(port["port"] for port in rule.get("ports", []))
            if "ports" not in rule:
                admitted.add("*")
    return admitted


def metrics_are_not_for_everybody(manifests: Sequence[Json]) -> Iterator[str]:
    """They tell names of models, adapters and keys: no rule lets all namespaces in."""
    for policy in of_kind(manifests, "NetworkPolicy"):
        for rule in policy["spec"].get("ingress", []):
            if not any(port["port"] == "metrics" for port in rule.get("ports", [])):
                continue
            peers: list[Json] = rule.get("from") or [{"namespaceSelector": {}}]
            if any(peer.get("namespaceSelector") == {} for peer in peers):
                yield f"{policy['metadata']['name']}: everybody may read its metrics"


def links_get_through(manifests: Sequence[Json]) -> Iterator[str]:
    """What each side may send is what the other lets in: links, hand-overs, clients."""
    policies = of_kind(manifests, "NetworkPolicy")
    if not policies:
        return
    pods = list(pods_of(manifests))
    for source in pods:
        for target in pods:
            for port in _needed(source, target):
                if not _allowed(policies, source, target, port):
                    yield f"{source.name} may not reach port {port} of {target.name}"


def _needed(source: Pod, target: Pod) -> Iterator[str]:
    """Yield the ports of *target* that *source* must reach."""
    model = "tokenwire.dev/model"
    if source.labels.get(model) != target.labels.get(model):
        return
    commands = (source.command, target.command)
    if commands == ("tokenwire-frontend", "tokenwire-worker"):
        yield "link"
    if commands == ("tokenwire-worker", "tokenwire-worker"):
        yield from {"handover"} & set(target.ports)
    if source.labels.get("tokenwire.dev/part") == "client":
        yield from {"http"} & set(target.ports)


def _allowed(policies: Sequence[Json], source: Pod, target: Pod, port: str) -> bool:
    ways = (("ingress", "from", target, source), ("egress", "to", source, target))
    for direction, peers, subject, other in ways:
        mine = [p for p in policies if _selected(p["spec"]["podSelector"], subject)]
        rules = [r for p in mine for r in p["spec"].get(direction, [])]
        number = target.ports[port]
        if mine and not any(
            _port_fits(rule, port, number) and _peer_fits(rule.get(peers), other)
            for rule in rules
        ):
            return False
    return True


def _port_fits(rule: Json, name: str, number: int) -> bool:
    ports = rule.get("ports")
    return not ports or any(port["port"] in (name, number) for port in ports)


def _peer_fits(peers: list[Json] | None, pod: Pod) -> bool:
    """Whether a pod of this namespace is one of *peers*; None: everybody is."""
    return not peers or any(
        "podSelector" in peer
        and "namespaceSelector" not in peer
        and _selected(peer["podSelector"], pod)
        for peer in peers
    )


def _selected(selector: Json, pod: Pod) -> bool:
    return selects(selector.get("matchLabels", {}), pod.labels)


def references_are_there(manifests: Sequence[Json]) -> Iterator[str]:
    """Objects of the chart that others name by their names exist."""
    there = {(one["kind"], one["metadata"]["name"]) for one in manifests}
    services = {
        one["metadata"]["name"]: one["spec"] for one in of_kind(manifests, "Service")
    }
    for pod in pods_of(manifests):
        account = pod.spec.get("serviceAccountName", "default")
        if account != "default" and ("ServiceAccount", account) not in there:
            yield f"{pod.name}: ServiceAccount/{account} is not there"
    for workload in of_kind(manifests, "StatefulSet"):
        name = workload["spec"]["serviceName"]
        if services.get(name, {}).get("clusterIP") != "None":
            yield f"{name_of(workload)}: {name} is no headless Service"
    for outside in of_kind(manifests, "Ingress", "HTTPRoute"):
        for name, port in _backends(outside):
            ports = services.get(name, {}).get("ports", [])
            if not any(port in (one["port"], one["name"]) for one in ports):
                yield f"{name_of(outside)}: no Service {name} with port {port}"


def _backends(outside: Json) -> Iterator[tuple[str, Any]]:
    for rule in outside["spec"]["rules"]:
        for backend in rule.get("backendRefs", []):
            yield backend["name"], backend["port"]
        for path in rule.get("http", {}).get("paths", []):
            service = path["backend"]["service"]
            port = cast("Json", service["port"])
            yield service["name"], port.get("name", port.get("number"))


def names_fit(manifests: Sequence[Json]) -> Iterator[str]:
    """Names are there once, and short enough for what controllers make of them."""
    seen: set[str] = set()
    for manifest in manifests:
        name = name_of(manifest)
        if name in seen:
            yield f"{name} is there twice"
        seen.add(name)
        own = str(manifest["metadata"]["name"])
        room = MAX_NAME_CHARS - (SUFFIX_CHARS if manifest["kind"] in WORKLOADS else 0)
        if len(own) > room or not re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", own):
            yield f"{name}: not a name of at most {room} letters, digits and `-`"


WIRING_POLICIES = (
    selectors_match,
    services_have_pods,
    monitors_find_something,
    scaling_has_the_last_word,
    drains_are_not_blocked,
    the_network_is_covered,
    metrics_are_not_for_everybody,
    links_get_through,
    references_are_there,
    names_fit,
)
