"""Manifests against the schemas of their kinds, as strictly as the API server is.

Kubernetes' own are in PyPI's `kubernetes-validate`, for each of its versions; those of other
projects are in deploy/helm/crds.yaml, as far as the chart uses them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import jsonschema_rs
import yaml
from chart_manifests import CHART, Json, name_of

__all__ = ["VERSIONS", "schema_problems"]

VERSIONS = ("1.30.0", "1.37.0")
"""Of Kubernetes: the oldest that the chart takes (Chart.yaml), and the newest there is."""

DEFINITIONS = "/api/_definitions.json"


def schema_problems(
    manifests: Iterable[Json], versions: Iterable[str] = VERSIONS
) -> Iterator[str]:
    """Yield a sentence for each thing in *manifests* that a schema does not have."""
    for manifest in manifests:
        found: dict[str, None] = {}
        for version in versions:
            for problem in _problems(manifest, version):
                found.setdefault(problem)
        yield from found


def _problems(manifest: Json, version: str) -> Iterator[str]:
    kind, api = str(manifest["kind"]), str(manifest["apiVersion"])
    validator = _validator(kind, api, version)
    if validator is None:
        yield f"{name_of(manifest)}: no schema of {api} {kind} is known"
        return
    for error in validator.iter_errors(manifest):
        path = ".".join(map(str, error.instance_path))
        yield f"{name_of(manifest)}: {path}: {error.message[:300]}"


@cache
def _validator(kind: str, api: str, version: str) -> Any:
    """Return the validator of a kind, None if it has no schema."""
    folder = _folder(version)
    schema = _crds().get(f"{api} {kind}")
    if schema is None:
        group, _, name = api.rpartition("/")
        prefix = f"{group.partition('.')[0]}-{name}" if group else name
        path = folder / f"{kind.lower()}-{prefix}.json"
        if not path.exists():
            return None
        schema = cast("Json", json.loads(path.read_text()))
    return jsonschema_rs.Draft202012Validator(
        schema, base_uri="file:///api/kind.json", registry=_registry(version)
    )


@cache
def _registry(version: str) -> jsonschema_rs.Registry:
    definitions = json.loads((_folder(version) / "_definitions.json").read_text())
    return jsonschema_rs.Registry([(f"file://{DEFINITIONS}", definitions)])


@cache
def _crds() -> dict[str, Json]:
    """Return our schemas by API version and kind, made whole."""
    kinds: Json = yaml.safe_load((CHART.parent / "crds.yaml").read_text())
    metadata = {
        "$ref": f"{DEFINITIONS}#/$defs/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
    }
    return {
        name: {
            "type": "object",
            "additionalProperties": False,
            "required": ["apiVersion", "kind", "metadata", "spec"],
            "properties": {
                "apiVersion": {"const": name.split()[0]},
                "kind": {"const": name.split()[1]},
                "metadata": metadata,
                "spec": kind["spec"],
            },
        }
        for name, kind in kinds.items()
    }


def _folder(version: str) -> Path:
    spec = find_spec("kubernetes_validate")
    if spec is None or not spec.submodule_search_locations:
        msg = "kubernetes-validate is not installed: make setup-dev"
        raise RuntimeError(msg)
    (package,) = spec.submodule_search_locations
    return Path(package) / "kubernetes-json-schema" / f"v{version}-local-strict"
