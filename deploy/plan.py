"""Which processes to run, with which arguments and environment; decides, runs nothing."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Protocol

__all__ = [
    "BadPlan",
    "Commands",
    "FrontendSpec",
    "Machine",
    "Plan",
    "TokenwireCommands",
    "WorkerSpec",
    "child_environment",
    "make_plan",
    "worker_environment",
]

_OWN_VARIABLES = frozenset(
    "TOKENWIRE_" + name
    for name in (
        *("ENGINE", "MODEL", "SERVED_MODEL_NAME", "HOST", "PORT", "LOG_DIR"),
        *("PREFILL", "DECODE", "AGGREGATED", "FRONTENDS", "PROCESSES"),
        *("START_TIMEOUT_S", "LOG_FORMAT"),
        *("ROLE", "WORKER_ID", "LISTEN", "ANNOUNCE", "METRICS_PORT"),
        *("CAPTURE_HIDDEN_STATES", "CAPTURE_LAYERS"),
        *("WORKER", "WORKERS_FILE", "WORKERS_DNS", "REUSE_PORT"),
        *("CURVE", "CURVE_SECRET_KEY", "CURVE_ALLOWED_KEYS", "CURVE_WORKER_KEYS"),
    )
)
"""Settings that this program makes for its children, so that theirs must not come from
the environment: TOKENWIRE_WORKER would contradict the workers file. All others pass."""


_DEFAULTS = {
    "PYTHONUNBUFFERED": "1",  # progress must not sit in a buffer
    # Requests may end by themselves for half the time until the supervisor kills.
    "TOKENWIRE_SHUTDOWN_TIMEOUT_S": "5",
}


class BadPlan(Exception):
    """These settings run nothing useful; one sentence."""


TLS_VARIABLE = "TOKENWIRE_TLS_CERT"
METRICS_VARIABLE = "TOKENWIRE_METRICS_LISTEN"
"""Settings of the frontends that say how they can be asked whether they serve."""

PROBE_HOST = "127.0.0.1"

FRONTEND = "frontend"
FIRST_FRONTEND = f"{FRONTEND}-0"
"""It has the admin plane, if ``TOKENWIRE_ADMIN_PORT`` turns that on."""


@dataclass(slots=True, frozen=True)
class WorkerSpec:
    """One worker to run."""

    name: str  # also its worker id
    role: str  # "prefill" | "decode" | "aggregated"
    env: Mapping[str, str] = field(default_factory=dict[str, str])  # on top of ours


@dataclass(slots=True, frozen=True)
class FrontendSpec:
    """One frontend to run."""

    name: str


@dataclass(slots=True, frozen=True)
class Plan:
    """All that runs, and where it serves."""

    workers: Sequence[WorkerSpec]
    frontends: Sequence[FrontendSpec]
    host: str
    port: int
    served_model_name: str
    probed: tuple[str, int] | None = None  # where probes are answered; None: there
    tls: bool = False  # is spoken there


class Commands(Protocol):
    """Makes command lines."""

    def worker(self, spec: WorkerSpec, announce: Path) -> list[str]:
        """Return the command of a worker that writes *announce* once it is ready."""
        ...

    def frontend(self, spec: FrontendSpec, workers_file: Path) -> list[str]:
        """Return the command of a frontend that follows *workers_file*."""
        ...


@dataclass(slots=True, frozen=True)
class Machine:
    """What this machine offers."""

    num_cores: int
    num_gpus: int


@dataclass(slots=True, frozen=True)
class TokenwireCommands:
    """The commands of tokenwire's own worker and frontend."""

    engine: str  # "vllm" | "sim"
    model: str
    served_model_name: str
    host: str
    port: int
    num_frontends: int
    engine_arguments: Sequence[str] = ()
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    capture_folder: str | None = None  # where hidden states are saved
    capture_layers: str | None = None  # as the worker's option has them
    keys: Path | None = None  # folder of the pairs ``frontend`` and ``worker``
    processes: str = "1"  # of each frontend, as its option has it
    probe_port: int | None = None  # on loopback, where clients are spoken to over TLS
    log_format: str = "text"

    def worker(self, spec: WorkerSpec, announce: Path) -> list[str]:
        """Return the command of a worker."""
        command = [
            *(sys.executable, "-m", "tokenwire.worker"),
            *("--engine", self.engine, "--role", spec.role),
            *("--model", self.model, "--served-model-name", self.served_model_name),
            *("--worker-id", spec.name, "--listen", "tcp://127.0.0.1:0"),
            *("--announce", str(announce), "--metrics-port", "0"),
        ]
        command += self._keys("worker", "--curve-allowed-keys", "frontend")
        command += self._log_format()
        if self.capture_layers and self.capture_folder:
            # Decode workers keep the layers alone; they make nothing of the folder.
            command += ["--capture-hidden-states", self.capture_folder]
            command += ["--capture-layers", self.capture_layers]
        engine_arguments = [*self._engine_parser(), *self.engine_arguments]
        if engine_arguments:
            command += ["--", *engine_arguments]
        return command

    def frontend(self, spec: FrontendSpec, workers_file: Path) -> list[str]:
        """Return the command of a frontend."""
        command = [
            *(sys.executable, "-m", "tokenwire.frontend"),
            *("--model", self.model, "--served-model-name", self.served_model_name),
            *("--host", self.host, "--port", str(self.port)),
            *("--workers-file", str(workers_file)),
            *self._keys("frontend", "--curve-worker-keys", "worker"),
            *self._log_format(),
        ]
        if self.tool_call_parser:
            command += ["--tool-call-parser", self.tool_call_parser]
        if self.reasoning_parser:
            command += ["--reasoning-parser", self.reasoning_parser]
        if self.processes != "1":
            command += ["--processes", self.processes]
        if self.num_frontends > 1:
            command.append("--reuse-port")
        if self.probe_port is not None:
            command += ["--metrics-listen", f"{PROBE_HOST}:{self.probe_port}"]
        if spec.name != FIRST_FRONTEND:
            # Its port is one frontend's; what it does, all learn from the workers.
            command += ["--admin-port", "off"]
        return command

    def _engine_parser(self) -> list[str]:
        """Return vLLM's argument to apply grammars behind reasoning, not to it.

        The operator's arguments follow it, so that his own wins.
        """
        if self.engine != "vllm" or not self.reasoning_parser:
            return []
        return ["--reasoning-parser", self.reasoning_parser]

    def _log_format(self) -> list[str]:
        return [] if self.log_format == "text" else ["--log-format", self.log_format]

    def _keys(self, own: str, peer_option: str, peer: str) -> list[str]:
        if self.keys is None:
            return []
        return [
            *("--curve-secret-key", str(self.keys / f"{own}.secret")),
            *(peer_option, str(self.keys / f"{peer}.public")),
        ]


def make_plan(
    commands: TokenwireCommands,
    *,
    num_prefill: int | None,
    num_decode: int | None,
    num_aggregated: int | None,
    machine: Machine,
    environ: Mapping[str, str],
) -> Plan:
    """Return what to run; with no count at all, one prefill and one decode worker.

    Raises:
        BadPlan: No worker could answer a request with these counts.
    """
    if num_prefill is None and num_decode is None and not num_aggregated:
        num_prefill = num_decode = 1
    counts = {
        "prefill": num_prefill or 0,
        "decode": num_decode or 0,
        "aggregated": num_aggregated or 0,
    }
    if not counts["decode"] and not counts["aggregated"]:
        msg = "nothing would generate: --decode or --aggregated must be at least 1"
        raise BadPlan(msg)
    if counts["prefill"] and not counts["decode"]:
        msg = "prefill workers hand over to decode workers: --decode must be at least 1"
        raise BadPlan(msg)
    if bool(commands.capture_folder) != bool(commands.capture_layers):
        msg = "--capture-hidden-states and --capture-layers go together"
        raise BadPlan(msg)
    if not commands.num_frontends:
        msg = "nothing would listen: --frontends must be at least 1"
        raise BadPlan(msg)
    named = [(f"{role}-{i}", role) for role, n in counts.items() for i in range(n)]
    workers = [
        WorkerSpec(
            name,
            role,
            worker_environment(
                position,
                len(named),
                engine=commands.engine,
                gpus_per_worker=gpus_per_worker(commands.engine_arguments),
                machine=machine,
                environ=environ,
            ),
        )
        for position, (name, role) in enumerate(named)
    ]
    return Plan(
        workers=workers,
        frontends=[
            FrontendSpec(f"{FRONTEND}-{i}") for i in range(commands.num_frontends)
        ],
        host=commands.host,
        port=commands.port,
        served_model_name=commands.served_model_name,
        probed=_probed(commands, environ),
        tls=bool(environ.get(TLS_VARIABLE)),
    )


def _probed(
    commands: TokenwireCommands, environ: Mapping[str, str]
) -> tuple[str, int] | None:
    """Return where frontends answer probes in plain text, if not where they serve.

    Raises:
        BadPlan: They would at a port that nobody knows.
    """
    if commands.probe_port is not None:
        return PROBE_HOST, commands.probe_port
    host, _, port = environ.get(METRICS_VARIABLE, "").rpartition(":")
    if not host:
        return None
    if not port.isdecimal() or not int(port):
        msg = f"{METRICS_VARIABLE} needs a port: frontends are asked there"
        raise BadPlan(msg)
    return host, int(port)


def worker_environment(
    position: int,
    num_workers: int,
    *,
    engine: str,
    gpus_per_worker: int,
    machine: Machine,
    environ: Mapping[str, str],
) -> dict[str, str]:
    """Return the variables that let *num_workers* engines share this machine.

    What the operator has set stays. Without a GPU, vLLM binds its threads to the same
    cores in every engine unless told not to, and each engine takes all cores.
    """
    if engine != "vllm" or num_workers < 2:
        return {}
    wanted: dict[str, str] = {}
    if machine.num_gpus:
        # Not run on a machine with GPUs yet.
        first = position * gpus_per_worker
        gpus = [(first + i) % machine.num_gpus for i in range(gpus_per_worker)]
        wanted["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    else:
        wanted["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        wanted["OMP_NUM_THREADS"] = str(max(1, machine.num_cores // num_workers))
    return {name: value for name, value in wanted.items() if not environ.get(name)}


def gpus_per_worker(engine_arguments: Sequence[str]) -> int:
    """Return how many GPUs vLLM takes with these arguments."""
    flags = {
        **dict.fromkeys(("--tensor-parallel-size", "-tp"), "tensor"),
        **dict.fromkeys(("--pipeline-parallel-size", "-pp"), "pipeline"),
        **dict.fromkeys(("--data-parallel-size", "-dp"), "data"),
    }
    sizes: dict[str, int] = {}
    words = [word for argument in engine_arguments for word in argument.split("=", 1)]
    for flag, value in pairwise(words):
        dimension = flags.get(flag.replace("_", "-"))
        if dimension and value.isdecimal():
            sizes[dimension] = max(1, int(value))
    total = 1
    for size in sizes.values():
        total *= size
    return total


def child_environment(
    environ: Mapping[str, str], extra: Mapping[str, str]
) -> dict[str, str]:
    """Return a child's environment: ours, less the settings made here, plus *extra*.

    Defaults of ours give way to *environ*.
    """
    passed = {k: v for k, v in environ.items() if k not in _OWN_VARIABLES}
    return {**_DEFAULTS, **passed, **extra}
