"""What a chart renders to, as objects: manifests, and the pods that they would start."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

__all__ = [
    "CHART",
    "ChartError",
    "Json",
    "Pod",
    "lint",
    "manifests_of",
    "name_of",
    "notes",
    "of_kind",
    "pods_of",
    "render",
    "selects",
]

CHART = Path(__file__).parents[1] / "deploy" / "helm" / "tokenwire"
RELEASE = "release"
NAMESPACE = "serving"

OPTIONAL_APIS = (
    "monitoring.coreos.com/v1",
    "keda.sh/v1alpha1",
    "leaderworkerset.x-k8s.io/v1",
    "gateway.networking.k8s.io/v1",
)

HELM_TIMEOUT_S = 60.0
"""It takes a fifth of a second; a machine may stand still."""

Json = dict[str, Any]  # a manifest, or a part of one


class ChartError(Exception):
    """helm refuses the chart or its values; its own words."""


@dataclass(slots=True, frozen=True)
class Pod:
    """What starts pods, and what these are like."""

    owner: Json
    name: str  # for people: kind/name, with the template where there are two
    labels: Mapping[str, str]
    spec: Json

    @property
    def kind(self) -> str:
        """The owner's kind."""
        return str(self.owner["kind"])

    @property
    def containers(self) -> list[Json]:
        """All containers, those that only begin included."""
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def ports(self) -> dict[str, int]:
        """Where it listens: numbers by name."""
        return {
            port["name"]: port["containerPort"]
            for container in self.containers
            for port in container.get("ports", [])
        }

    @property
    def command(self) -> str:
        """The program of its (first) container."""
        return str(self.spec["containers"][0].get("command", [""])[0])

    @property
    def is_server(self) -> bool:
        """Whether it is one of tokenwire's own processes, which serve."""
        return self.command in {"tokenwire-frontend", "tokenwire-worker"}


def lint(helm: Path, values: Path) -> str:
    """Return what `helm lint` says of the chart with *values*.

    Raises:
        ChartError: It found something.
    """
    return _helm(helm, "lint", "--strict", str(CHART), "--values", str(values))


def render(
    helm: Path, *values: Path, settings: Iterable[str] = (), chart: Path = CHART
) -> str:
    """Return the manifests of the chart, as YAML.

    Args:
        helm: The program.
        values: Files of values.
        settings: As `--set` has them.
        chart: Its folder.

    Raises:
        ChartError: helm refuses.
    """
    arguments = ["template", RELEASE, str(chart), "--namespace", NAMESPACE]
    for api in OPTIONAL_APIS:
        arguments += ["--api-versions", api]
    for file in values:
        arguments += ["--values", str(file)]
    for setting in settings:
        arguments += ["--set", setting]
    return _helm(helm, *arguments)


def notes(helm: Path, values: Path) -> str:
    """Return what an operator reads behind an install.

    Raises:
        ChartError: helm refuses.
    """
    # Without a cluster's address it stays here.
    alone = ("--dry-run=client", "--kubeconfig", "/dev/null")
    arguments = ("install", RELEASE, str(CHART), "--namespace", NAMESPACE, *alone)
    text = _helm(helm, *arguments, "--values", str(values))
    return text.partition("\nNOTES:\n")[2]


def manifests_of(text: str) -> list[Json]:
    """Return the objects in a stream of YAML documents."""
    return [cast("Json", one) for one in yaml.load_all(text, _LOADER) if one]


def pods_of(manifests: Iterable[Json]) -> Iterator[Pod]:
    """Yield all pods that *manifests* would start, one for each template."""
    for manifest in manifests:
        kind, spec = manifest["kind"], manifest.get("spec", {})
        if kind == "Pod":
            yield _pod(manifest, "", manifest)
        elif kind in {"Deployment", "StatefulSet", "Job"}:
            yield _pod(manifest, "", spec["template"])
        elif kind == "LeaderWorkerSet":
            group = spec["leaderWorkerTemplate"]
            for template in ("leaderTemplate", "workerTemplate"):
                yield _pod(manifest, f" ({template})", group[template])


def of_kind(manifests: Iterable[Json], *kinds: str) -> list[Json]:
    """Return those of *manifests* that are of one of *kinds*."""
    return [one for one in manifests if one["kind"] in kinds]


def name_of(manifest: Json) -> str:
    """Return kind and name, for people."""
    return f"{manifest['kind']}/{manifest['metadata']['name']}"


def selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Return whether *selector* (matchLabels) takes what has *labels*."""
    return selector.items() <= labels.items()


def _pod(owner: Json, suffix: str, template: Json) -> Pod:
    labels = template.get("metadata", {}).get("labels", {})
    return Pod(owner, name_of(owner) + suffix, labels, template["spec"])


def _helm(helm: Path, *arguments: str) -> str:
    ran = subprocess.run(
        [str(helm), *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=HELM_TIMEOUT_S,
    )
    if ran.returncode:
        raise ChartError((ran.stderr + ran.stdout).strip())
    return ran.stdout


_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster
