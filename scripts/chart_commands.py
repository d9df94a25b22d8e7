"""Policies on command lines: each is read by the very parser that will read it.

A chart that renders can still start processes that end with exit code 2. So every command of
ours is parsed as its process does it, with its environment, and what comes out is compared:
ports with what the pod declares, names and keys of frontends with those of their workers.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from chart_manifests import Json, Pod, of_kind, pods_of, selects

from tokenwire.frontend.config import Config, parse_config as parse_frontend
from tokenwire.worker.config import WorkerConfig, parse_config as parse_worker
from tokenwire.worker.sim.options import parse_options

__all__ = ["COMMAND_POLICIES", "BadCommand", "environment_of", "expanded", "parsed"]

PREFIX = "TOKENWIRE_"
VARIABLE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")

FIELDS = {"metadata.name": "pod-0", "status.podIP": "10.0.0.7"}
"""What Kubernetes would put for a `fieldRef`."""

FROM_CONTROLLER = {
    "LWS_LEADER_ADDRESS": "leader.group.serving",
    "LWS_GROUP_SIZE": "2",
    "LWS_WORKER_INDEX": "1",
}
"""What LeaderWorkerSet's controller adds to the pods of a group."""

OTHERS = {
    "HF_HOME", "HF_HUB_OFFLINE", "HF_TOKEN", "HOME", "NCCL_DEBUG", "OTEL_TRACES_SAMPLER",
    "OTEL_TRACES_SAMPLER_ARG", "POD_IP", "POD_NAME", "PYTHONUNBUFFERED",
    "TRITON_CACHE_DIR", "UCX_NET_DEVICES", "XDG_CACHE_HOME",
}  # fmt: skip
"""Variables that are neither ours nor vLLM's, and mean something."""

T = TypeVar("T")


class BadCommand(Exception):
    """A process would not start; its own words."""


def environment_of(
    container: Json, owner_kind: str = "", fields: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the variables of a container, with what is only known in a cluster made up.

    Args:
        container: As a pod has it.
        owner_kind: Of the pod's owner.
        fields: What fields of the pod are, where that matters.
    """
    pod = FIELDS | dict(fields or {})
    known = dict(FROM_CONTROLLER) if owner_kind == "LeaderWorkerSet" else {}
    for variable in container.get("env", []):
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            value = pod[source["fieldRef"]["fieldPath"]]
        elif source:
            value = "from-a-secret"
        else:
            value = expanded(variable.get("value", ""), known)
        known[variable["name"]] = value
    return known


def expanded(text: str, known: Mapping[str, str]) -> str:
    """Return *text* with `$(NAME)` replaced, as Kubernetes does it: unknown ones stay."""
    return VARIABLE.sub(lambda match: known.get(match[1], match[0]), text)


def parsed(pod: Pod) -> Config | WorkerConfig:
    """Return what a process of ours makes of its command line.

    Raises:
        BadCommand: It would end at once, or a variable in it is not there.
    """
    (container,) = pod.containers
    environment = environment_of(container, pod.kind)
    arguments = [expanded(one, environment) for one in container.get("args", [])]
    for argument in arguments:
        if left := VARIABLE.search(argument):
            msg = f"{left[0]} is not set"
            raise BadCommand(msg)
    with _alone(environment):
        if pod.command == "tokenwire-frontend":
            return _read(parse_frontend, arguments)
        config = _read(parse_worker, arguments)
        if config.engine == "sim":
            _read(parse_options, config.engine_args)
        return config


def _read(parse: Callable[[Sequence[str]], T], arguments: Sequence[str]) -> T:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return parse(arguments)
    except SystemExit:
        raise BadCommand(said.getvalue().strip()) from None


@contextlib.contextmanager
def _alone(environment: Mapping[str, str]) -> Generator[None]:
    """Give the parsers *environment* instead of this process's."""
    kept = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


def commands_are_understood(manifests: Sequence[Json]) -> Iterator[str]:
    """Each process takes its command line and environment, and listens where it says."""
    for pod in _servers(manifests):
        try:
            config = parsed(pod)
        except BadCommand as error:
            yield f"{pod.name}: {error}"
            continue
        listens = _listens(config)
        declared = {pod.ports[name] for name in pod.ports if name != "handover"}
        for port in sorted(listens ^ declared):
            what = "is not declared" if port in listens else "is declared, and nobody's"
            yield f"{pod.name}: port {port} {what}"
        if isinstance(config, WorkerConfig):
            component = pod.labels.get("app.kubernetes.io/component")
            if config.role.value != component:
                yield f"{pod.name}: a {config.role.value} worker in the pool {component}"


def _listens(config: Config | WorkerConfig) -> set[int]:
    if isinstance(config, WorkerConfig):
        ports = {int(config.listen.rpartition(":")[2])}
        return ports if config.metrics_port is None else ports | {config.metrics_port}
    ports = {config.port}
    if config.access.metrics_listen is not None:
        ports.add(config.access.metrics_listen[1])
    return ports if config.admin.port is None else ports | {config.admin.port}


def frontends_fit_their_workers(manifests: Sequence[Json]) -> Iterator[str]:
    """The name that a frontend asks resolves to its model's workers, which are as it is."""
    for pod in _servers(manifests, "tokenwire-frontend"):
        frontend = _parsed_or_none(pod)
        if not isinstance(frontend, Config):
            continue
        host, _, port = (frontend.workers_dns or "").rpartition(":")
        workers = _found(manifests, host)
        if not workers:
            yield f"{pod.name}: {host} resolves to nothing"
        for worker in workers:
            config = _parsed_or_none(worker)
            if not isinstance(config, WorkerConfig):
                continue
            if config.listen.rpartition(":")[2] != port:
                yield f"{worker.name}: it does not listen at port {port}"
            if config.served_model_name != frontend.served_model_name:
                yield f"{worker.name}: it serves {config.served_model_name}"
            if config.model != frontend.model:
                yield f"{worker.name}: its model is {config.model}, not {frontend.model}"
            if config.keys.is_plaintext != frontend.keys.is_plaintext:
                yield f"{worker.name}: one side encrypts, the other does not"


def _found(manifests: Sequence[Json], host: str) -> list[Pod]:
    """Return the pods whose addresses *host* would resolve to."""
    for service in of_kind(manifests, "Service"):
        if service["metadata"]["name"] == host:
            selector = service["spec"]["selector"]
            return [p for p in pods_of(manifests) if selects(selector, p.labels)]
    return []


def variables_exist(manifests: Sequence[Json]) -> Iterator[str]:
    """Each variable is an option of its process, or vLLM's, or known by its meaning.

    A slip of the pen in a variable is ignored by whoever would have read it.
    """
    for pod in pods_of(manifests):
        for container in pod.containers:
            for variable in container.get("env", []):
                name = str(variable["name"])
                if name.startswith(PREFIX):
                    known = name in _own_variables(pod.command)
                elif name.startswith("VLLM_"):
                    known = name in _vllm_text("envs.py", name)
                else:
                    known = name in OTHERS or not pod.is_server
                if not known:
                    yield f"{pod.name}: nobody reads {name}"


@cache
def _own_variables(command: str) -> frozenset[str]:
    """Return the variables that *command* reads, from its own help."""
    parse: Callable[[Sequence[str]], Any] = (
        parse_frontend if command == "tokenwire-frontend" else parse_worker
    )
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        parse(["--help"])
    # argparse breaks lines at hyphens, of which variables have none.
    return frozenset(re.findall(rf"{PREFIX}[A-Z0-9_]+", said.getvalue()))


def engine_arguments_exist(manifests: Sequence[Json]) -> Iterator[str]:
    """VLLM's options are there, where a vLLM is installed to be looked into."""
    for pod in pods_of(manifests):
        for container in pod.containers:
            arguments = container.get("args", [])
            if pod.command == "tokenwire-worker":
                if "--engine=vllm" not in arguments or "--" not in arguments:
                    continue
                arguments = arguments[arguments.index("--") + 1 :]
            elif pod.command != "vllm":
                continue
            for argument in arguments:
                if not argument.startswith("--"):
                    continue
                option = argument.partition("=")[0]
                files = ("engine/arg_utils.py", "entrypoints/launchers/cli_args.py")
                if not any(option in _vllm_text(file, option) for file in files):
                    yield f"{pod.name}: vLLM has no {option}"


def groups_agree(manifests: Sequence[Json]) -> Iterator[str]:
    """A group's followers have the engine arguments of their leader, but for the rank."""
    leaders: dict[str, tuple[str, ...]] = {}
    for pod in pods_of(manifests):
        if pod.kind != "LeaderWorkerSet":
            continue
        (container,) = pod.containers
        own = [a for a in container["args"] if not a.startswith("--node-rank=")]
        group = pod.owner["metadata"]["name"]
        if pod.command == "tokenwire-worker":
            leaders[group] = tuple(own[own.index("--") + 1 :])
        elif tuple(own[2:]) != leaders.get(group) or own[1] != "--headless":
            yield f"{pod.name}: other engine arguments than its leader's"


@cache
def _vllm_text(file: str, wanted: str) -> str:
    """Return a source file of the installed vLLM; without one, *wanted*: all is well."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return wanted
    path = Path(spec.submodule_search_locations[0]) / file
    return path.read_text() if path.exists() else wanted


def _servers(manifests: Sequence[Json], command: str = "") -> Iterator[Pod]:
    for pod in pods_of(manifests):
        if pod.is_server and command in ("", pod.command):
            yield pod


def _parsed_or_none(pod: Pod) -> Config | WorkerConfig | None:
    try:
        return parsed(pod)
    except BadCommand:
        return None  # told by another policy


COMMAND_POLICIES = (
    commands_are_understood,
    frontends_fit_their_workers,
    variables_exist,
    engine_arguments_exist,
    groups_agree,
)
