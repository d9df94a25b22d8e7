"""The policies on the chart: a good release has no problem, and each slip has one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from chart_commands import COMMAND_POLICIES
from chart_manifests import pods_of
from chart_pods import POD_POLICIES
from chart_schemas import schema_problems
from chart_wiring import WIRING_POLICIES

from support.manifests import Json, found, release

POLICIES = {
    policy.__name__: policy
    for policy in (*POD_POLICIES, *WIRING_POLICIES, *COMMAND_POLICIES)
}

Change = Callable[[list[Json]], object]


def frontend(manifests: list[Json]) -> Json:
    """Return the frontends' pod."""
    spec: Json = found(manifests, "Deployment", "front")["spec"]["template"]["spec"]
    return spec


def worker(manifests: list[Json]) -> Json:
    """Return the workers' container."""
    spec = found(manifests, "StatefulSet", "work")["spec"]["template"]["spec"]
    container: Json = spec["containers"][0]
    return container


def follower(manifests: list[Json]) -> Json:
    """Return the container of a group's followers."""
    group = found(manifests, "LeaderWorkerSet", "group")["spec"]["leaderWorkerTemplate"]
    container: Json = group["workerTemplate"]["spec"]["containers"][0]
    return container


def of(kind: str, name: str) -> Callable[[list[Json]], Json]:
    """Return who finds an object's spec."""
    return lambda manifests: found(manifests, kind, name)["spec"]


def put(
    where: Callable[[list[Json]], Json], path: str, value: Any, *, add: bool = False
) -> Change:
    """Return a change that sets (or appends, *add*) what is at the dotted *path*."""

    def change(manifests: list[Json]) -> None:
        at: Any = where(manifests)
        *way, last = (
            int(p) if p.isdecimal() else p.replace("~1", "/") for p in path.split("/")
        )
        for part in way:
            at = at[part]
        if add:
            at[last].append(value)
        elif value is None:
            del at[last]
        else:
            at[last] = value

    return change


def args(where: Callable[[list[Json]], Json], old: str, new: str) -> Change:
    """Return a change of one argument."""

    def change(manifests: list[Json]) -> None:
        given: list[str] = where(manifests)["args"]
        given[given.index(old)] = new

    return change


def frontend_container(manifests: list[Json]) -> Json:
    """Return the frontends' container."""
    container: Json = frontend(manifests)["containers"][0]
    return container


def secret(manifests: list[Json]) -> None:
    """Have the chart make a secret."""
    manifests.append({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}})


def twice(manifests: list[Json]) -> None:
    """Have one object twice."""
    manifests.append(manifests[0])


def second_scaler(manifests: list[Json]) -> None:
    """Have two autoscalers of one workload."""
    scaler = found(manifests, "HorizontalPodAutoscaler", "front")
    manifests.append(scaler | {"metadata": {"name": "other"}})


DEPLOYMENT = of("Deployment", "front")
STATEFUL = of("StatefulSet", "work")
SERVICE = of("Service", "front")
BUDGET = of("PodDisruptionBudget", "work")
FRONT_POLICY = of("NetworkPolicy", "front")
WORK_POLICY = of("NetworkPolicy", "work")
VARIABLE = {"name": "TOKENWIRE_LOG_LEVL", "value": "info"}

SLIPS: list[tuple[str, Change]] = [
    ("no_privileges", put(frontend, "securityContext/runAsNonRoot", False)),
    ("no_privileges", put(frontend, "securityContext/runAsUser", 0)),
    ("no_privileges", put(frontend, "securityContext/seccompProfile", None)),
    ("no_privileges", put(frontend, "hostNetwork", True)),
    ("no_privileges", put(frontend, "volumes/1", {"name": "cache", "hostPath": {}})),
    ("no_privileges", put(worker, "securityContext/allowPrivilegeEscalation", None)),
    ("no_privileges", put(worker, "securityContext/readOnlyRootFilesystem", False)),
    ("no_privileges", put(worker, "securityContext/privileged", True)),
    ("no_privileges", put(worker, "securityContext/runAsUser", 0)),
    ("no_privileges", put(worker, "securityContext/capabilities/add", ["IPC_LOCK"])),
    ("no_privileges", put(worker, "securityContext/capabilities/drop", [])),
    ("nothing_from_the_cluster", put(frontend, "enableServiceLinks", None)),
    ("nothing_from_the_cluster", put(frontend, "automountServiceAccountToken", True)),
    ("writes_go_to_volumes", put(worker, "env/2/value", "/root")),
    ("volumes_are_there", put(worker, "volumeMounts/0/name", "other")),
    ("volumes_are_there", put(worker, "volumeMounts/0/mountPath", "/cache")),
    ("volumes_are_there", put(frontend, "volumes", {"name": "cache"}, add=True)),
    ("resources_are_set", put(worker, "resources/limits/memory", None)),
    ("resources_are_set", put(worker, "resources/requests/cpu", None)),
    ("resources_are_set", put(worker, "resources/limits/nvidia.com~1gpu", 2)),
    ("probes_are_there", put(worker, "startupProbe", None)),
    ("probes_are_there", put(frontend_container, "livenessProbe/httpGet/path", "/ready")),
    ("probes_are_there", put(frontend_container, "livenessProbe/httpGet/path", "/health")),
    ("probes_are_there", put(frontend_container, "readinessProbe/httpGet/path", "/live")),
    ("probes_are_there", put(frontend_container, "startupProbe/httpGet/path", "/ready")),
    ("probes_are_there", put(worker, "livenessProbe/httpGet/port", "http")),
    ("stopping_fits_the_grace_period", put(frontend, "terminationGracePeriodSeconds", 44)),
    ("stopping_fits_the_grace_period", put(frontend, "terminationGracePeriodSeconds", None)),
    ("stopping_fits_the_grace_period", put(frontend_container, "lifecycle", None)),
    ("stopping_fits_the_grace_period", args(worker, "--shutdown-timeout-s=25", "--kv-events")),
    ("stopping_fits_the_grace_period", args(worker, "--shutdown-timeout-s=25", "--shutdown-timeout-s=41")),
    ("secrets_by_reference", secret),
    ("secrets_by_reference", put(worker, "env/1", {"name": "HF_TOKEN", "value": "hf_x"})),
    ("secrets_by_reference", put(frontend, "volumes/0/secret/defaultMode", 0o444)),
    ("images_are_pinned", put(worker, "image", "tokenwire/worker")),
    ("images_are_pinned", put(worker, "image", "localhost:5000/worker")),
    ("images_are_pinned", put(worker, "image", "tokenwire/worker:latest")),
    ("selectors_match", put(DEPLOYMENT, "selector/matchLabels/x", "y")),
    ("selectors_match", put(DEPLOYMENT, "selector/matchLabels", {"tokenwire.dev/model": "m"})),
    ("services_have_pods", put(SERVICE, "selector", {"x": "y"})),
    ("services_have_pods", put(SERVICE, "selector", {"tokenwire.dev/model": "m"})),
    ("services_have_pods", put(SERVICE, "ports/0/targetPort", "web")),
    ("monitors_find_something", put(of("ServiceMonitor", "front"), "selector/matchLabels/x", "y")),
    ("monitors_find_something", put(of("ServiceMonitor", "front"), "endpoints/0/port", "web")),
    ("monitors_find_something", put(of("PodMonitor", "work"), "podMetricsEndpoints/0/port", "http")),
    ("scaling_has_the_last_word", put(DEPLOYMENT, "replicas", 2)),
    ("scaling_has_the_last_word", put(STATEFUL, "replicas", None)),
    ("scaling_has_the_last_word", put(of("HorizontalPodAutoscaler", "front"), "scaleTargetRef/name", "x")),
    ("scaling_has_the_last_word", second_scaler),
    ("drains_are_not_blocked", put(BUDGET, "maxUnavailable", 0)),
    ("drains_are_not_blocked", put(BUDGET, "minAvailable", 1)),
    ("drains_are_not_blocked", put(BUDGET, "selector/matchLabels", {"x": "y"})),
    ("drains_are_not_blocked", put(BUDGET, "selector/matchLabels", {"tokenwire.dev/model": "m"})),
    ("the_network_is_covered", put(FRONT_POLICY, "podSelector/matchLabels/x", "y")),
    ("the_network_is_covered", put(FRONT_POLICY, "ingress/0/ports/0/port", 9000)),
    ("metrics_are_not_for_everybody", put(WORK_POLICY, "ingress/1/from", None)),
    ("metrics_are_not_for_everybody", put(WORK_POLICY, "ingress/1/from/0/namespaceSelector", {})),
    ("links_get_through", put(FRONT_POLICY, "egress/0/ports/0/port", 5556)),
    ("links_get_through", put(WORK_POLICY, "ingress/0/from/0/podSelector/matchLabels/x", "y")),
    ("links_get_through", put(WORK_POLICY, "ingress/2", None)),
    ("references_are_there", put(frontend, "serviceAccountName", "other")),
    ("references_are_there", put(STATEFUL, "serviceName", "front")),
    ("references_are_there", put(of("HTTPRoute", "front"), "rules/0/backendRefs/0/port", 81)),
    ("names_fit", twice),
    ("names_fit", lambda m: found(m, "StatefulSet", "work")["metadata"].update(name="w" * 53)),
    ("commands_are_understood", args(worker, "--role=decode", "--rolle=decode")),
    ("commands_are_understood", args(worker, "--role=decode", "--role=prefill")),
    ("commands_are_understood", args(worker, "--insecure-plaintext", "--kv-events")),
    ("commands_are_understood", args(worker, "--step-ms=5", "--stepms=5")),
    ("commands_are_understood", args(worker, "--worker-id=$(POD_NAME)", "--worker-id=$(NAME)")),
    ("commands_are_understood", put(worker, "ports/0/containerPort", 5556)),
    ("commands_are_understood", put(worker, "env/3/value", "loud")),
    ("frontends_fit_their_workers", args(frontend_container, "--workers-dns=workers:5555", "--workers-dns=other:5555")),
    ("frontends_fit_their_workers", args(frontend_container, "--workers-dns=workers:5555", "--workers-dns=workers:5556")),
    ("frontends_fit_their_workers", args(frontend_container, "--model=m", "--model=n")),
    ("variables_exist", put(worker, "env", VARIABLE, add=True)),
    ("variables_exist", put(worker, "env", {"name": "HF_HOM", "value": "/cache"}, add=True)),
    ("groups_agree", put(follower, "args/2", "--nnodes=3")),
    ("groups_agree", put(follower, "args/1", "--no-headless")),
]  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES)
def test_a_good_release_is_against_no_policy(policy: str) -> None:
    """What the slips below begin with."""
    assert list(POLICIES[policy](release())) == []


@pytest.mark.parametrize(("policy", "slip"), SLIPS)
def test_each_slip_is_against_its_policy(policy: str, slip: Change) -> None:
    """A check that finds nothing would let it through."""
    manifests = release()
    slip(manifests)
    assert list(POLICIES[policy](manifests)), policy


def test_every_policy_has_a_slip() -> None:
    """But the one on vLLM's options, which needs a vLLM to look into."""
    without = POLICIES.keys() - {policy for policy, _ in SLIPS}
    assert without == {"engine_arguments_exist"}


def test_pods_of_every_workload_are_looked_at() -> None:
    """Groups have two templates."""
    names = [pod.name for pod in pods_of(release())]
    assert names == [
        "Deployment/front",
        "StatefulSet/work",
        "LeaderWorkerSet/group (leaderTemplate)",
        "LeaderWorkerSet/group (workerTemplate)",
    ]


def test_a_field_that_a_kind_does_not_have_is_a_problem() -> None:
    """Of Kubernetes' own kinds, and of those whose schema is ours."""
    manifests = release()
    assert [p for p in schema_problems(manifests) if "Budget" in p] == []
    BUDGET(manifests)["maxUnavailible"] = 1
    of("HTTPRoute", "front")(manifests)["hosts"] = []
    manifests.append({"apiVersion": "x/v1", "kind": "Y", "metadata": {"name": "z"}})
    problems = "\n".join(schema_problems(manifests))
    assert "maxUnavailible" in problems
    assert "hosts" in problems
    assert "no schema of x/v1 Y" in problems
