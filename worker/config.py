"""The worker's settings, from the command line and the environment."""

from __future__ import annotations

import argparse
import os
import shlex
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tokenwire.protocol.keys import KeyFiles, stays_here
from tokenwire.protocol.limits import HEARTBEAT_INTERVAL_S, HEARTBEAT_TIMEOUT_S
from tokenwire.protocol.logs import LogSettings, add_log_options, log_settings
from tokenwire.protocol.messages import Role
from tokenwire.protocol.settings import (
    SettingsParser,
    add_key_options,
    key_files,
    port_or_off,
    seconds,
    whole_number,
)
from tokenwire.protocol.tracing import (
    TraceSettings,
    add_trace_options,
    trace_settings,
)
from tokenwire.worker.captures import CaptureSettings

from .capture_options import add_capture_options, capture_settings

__all__ = ["JOURNAL_BYTES", "JOURNAL_LIFE_S", "WorkerConfig", "parse_config"]

MAX_REQUESTS = 8_192
"""Open requests of a worker: twice the largest ``max_num_seqs`` in use. More would
wait for longer than a batch takes; another worker, or a 503, serves them better."""

MAX_QUEUED_TOKENS = 4 * 1024 * 1024
"""Prompt tokens that wait for prefill: 16 MiB of ids, minutes of work for any GPU."""

SHUTDOWN_TIMEOUT_S = 25.0
"""What runs may end by itself; 5 s below Kubernetes' usual grace period of 30 s."""

JOURNAL_BYTES = 256 * 1024 * 1024
"""What is kept of generations: at 4 bytes an id, 16,384 of them with 4,096 ids each."""

JOURNAL_LIFE_S = 600.0
"""A client that comes back does so within minutes; what a frontend asks for is lowered
to this."""

_IPC_PATH_BYTES = 107
"""``sockaddr_un.sun_path`` has 108 bytes with the zero at the end (unix(7))."""


@dataclass(slots=True, frozen=True)
class WorkerConfig:
    """How one worker runs."""

    engine: Literal["vllm", "sim"]
    role: Role
    model: str
    served_model_name: str
    weight_version: str
    listen: str
    keys: KeyFiles
    announce: str  # path; empty: none
    worker_id: str
    metrics_host: str
    metrics_port: int | None  # None: off
    max_requests: int
    max_queued_tokens: int
    heartbeat_interval_s: float
    heartbeat_timeout_s: float
    shutdown_timeout_s: float
    engine_args: tuple[str, ...]
    capture: CaptureSettings | None = None  # None: no hidden states
    exact_resume: bool = True
    kv_events: bool = True
    logs: LogSettings = field(default_factory=LogSettings)
    traces: TraceSettings = field(default_factory=TraceSettings)
    journal_bytes: int = JOURNAL_BYTES  # 0: nothing is kept
    journal_life_s: float = JOURNAL_LIFE_S


def parse_config(arguments: Sequence[str] | None = None) -> WorkerConfig:
    """Return the settings in *arguments* (default: ``sys.argv``) and the environment.

    Everything behind ``--`` is the engine's and is not looked at.

    Raises:
        SystemExit: 2 on a bad value, 0 after ``--help``.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    own, engine_args = given, list[str]()
    if "--" in given:
        at = given.index("--")
        own, engine_args = given[:at], given[at + 1 :]
    parser = _parser()
    settings = parser.parse_settings(own)
    if settings.heartbeat_timeout_s <= settings.heartbeat_interval_s:
        parser.error("--heartbeat-timeout-s must be above --heartbeat-interval-s")
    try:
        extra_args = shlex.split(settings.engine_args)
    except ValueError as error:
        parser.error(f"argument --engine-args: {error}")
    keys = key_files(parser, settings)
    is_open = keys.is_plaintext and not stays_here(settings.listen)
    if is_open and not keys.insecure_plaintext:
        parser.error(
            f"--listen {settings.listen} without keys would let everyone who reaches it "
            "use the engine: give --curve-secret-key and --curve-allowed-keys (make them "
            "with tokenwire-keys), or --insecure-plaintext"
        )
    return WorkerConfig(
        engine=settings.engine,
        role=Role(settings.role),
        model=settings.model,
        served_model_name=settings.served_model_name or settings.model,
        weight_version=settings.weight_version,
        listen=settings.listen,
        keys=keys,
        announce=settings.announce,
        worker_id=settings.worker_id or _own_name(settings.role),
        metrics_host=settings.metrics_host,
        metrics_port=settings.metrics_port,
        max_requests=settings.max_requests,
        max_queued_tokens=settings.max_queued_tokens,
        heartbeat_interval_s=settings.heartbeat_interval_s,
        heartbeat_timeout_s=settings.heartbeat_timeout_s,
        shutdown_timeout_s=settings.shutdown_timeout_s,
        engine_args=(*extra_args, *engine_args),
        capture=capture_settings(parser, settings),
        exact_resume=settings.exact_resume,
        kv_events=settings.kv_events,
        journal_bytes=settings.journal_bytes,
        journal_life_s=settings.journal_life_s,
        logs=log_settings(settings),
        traces=trace_settings(parser, settings),
    )


def _parser() -> SettingsParser:
    parser = SettingsParser(
        prog="tokenwire-worker",
        usage="%(prog)s --engine vllm|sim --role ROLE --model MODEL [options] "
        "[-- engine arguments]",
        description="Serve token ids from one engine to frontends over ZeroMQ.",
        epilog="Every option can also be set by the variable in brackets. Arguments "
        "behind -- go to the engine as they are: vLLM's engine arguments, or "
        "--engine sim -- --help for the simulated engine's.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--engine",
        choices=("vllm", "sim"),
        default="vllm",
        help="the engine (default: vllm)",
    )
    add(
        "--role",
        choices=[role.value for role in Role],
        required=True,
        help="prefill, decode or aggregated",
    )
    add("--model", required=True, type=_text, help="path or id of the model")
    add(
        "--served-model-name",
        default="",
        metavar="NAME",
        help="the name that frontends ask for (default: MODEL)",
    )
    add(
        "--weight-version",
        default="default",
        metavar="NAME",
        help="what responses call the weights, for trainers (default: %(default)s)",
    )
    add(
        "--listen",
        default="tcp://127.0.0.1:0",
        type=_endpoint,
        metavar="ENDPOINT",
        help="where frontends connect; port 0: any free one "
        "(default: tcp://127.0.0.1:0)",
    )
    add_key_options(
        parser,
        "--curve-allowed-keys",
        "public keys of the frontends that may connect, one a line; watched for changes",
    )
    add(
        "--announce",
        default="",
        metavar="FILE",
        help="write a JSON object with the endpoint there while the worker serves",
    )
    add(
        "--worker-id",
        default="",
        metavar="NAME",
        help="name of this worker in logs and responses (default: made up)",
    )
    add(
        "--metrics-host",
        default="127.0.0.1",
        metavar="HOST",
        help="address of the metrics (default: 127.0.0.1)",
    )
    add(
        "--metrics-port",
        default=None,
        type=port_or_off,
        metavar="PORT|off",
        help="port of the metrics; 0: any free one (default: off)",
    )
    add(
        "--max-requests",
        default=MAX_REQUESTS,
        type=whole_number(1),
        metavar="N",
        help=f"open requests; more are refused as busy (default: {MAX_REQUESTS})",
    )
    add(
        "--max-queued-tokens",
        default=MAX_QUEUED_TOKENS,
        type=whole_number(1),
        metavar="N",
        help="prompt tokens that wait for prefill; more are refused as busy "
        f"(default: {MAX_QUEUED_TOKENS})",
    )
    add(
        "--heartbeat-interval-s",
        default=HEARTBEAT_INTERVAL_S,
        type=seconds(zero=True),
        metavar="S",
        help=f"period of Load messages (default: {HEARTBEAT_INTERVAL_S})",
    )
    add(
        "--heartbeat-timeout-s",
        default=HEARTBEAT_TIMEOUT_S,
        type=seconds(zero=True),
        metavar="S",
        help=f"silence after which a frontend is lost (default: {HEARTBEAT_TIMEOUT_S})",
    )
    add(
        "--shutdown-timeout-s",
        default=SHUTDOWN_TIMEOUT_S,
        type=seconds(zero=True),
        metavar="S",
        help="how long running requests may go on after SIGTERM or Ctrl-C "
        f"(default: {SHUTDOWN_TIMEOUT_S})",
    )
    add_capture_options(parser)
    add(
        "--exact-resume",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="go on exactly behind output of other workers, if the engine can "
        "(default: on)",
    )
    add(
        "--kv-events",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="tell frontends which KV blocks are cached here, so that they can route by it "
        "(default: on)",
    )
    add(
        "--journal-bytes",
        default=JOURNAL_BYTES,
        type=whole_number(0),
        metavar="N",
        help="bytes for resumable generations, so that a client that comes back is told "
        f"what it missed; 0: none (default: {JOURNAL_BYTES})",
    )
    add(
        "--journal-life-s",
        default=JOURNAL_LIFE_S,
        type=seconds(),
        metavar="S",
        help="how long they stay at most that have ended, or that nobody follows "
        f"(default: {JOURNAL_LIFE_S})",
    )
    add_log_options(parser)
    add_trace_options(parser)
    add(
        "--engine-args",
        default="",
        metavar="ARGS",
        help="engine arguments in one string, before those behind --",
    )
    return parser


def _own_name(role: str) -> str:
    return f"{role}-{socket.gethostname()}-{os.getpid()}"


def _text(text: str) -> str:
    if not text:
        msg = "must not be empty"
        raise argparse.ArgumentTypeError(msg)
    return text


def _endpoint(text: str) -> str:
    if text.startswith("tcp://") and ":" in text[6:]:
        return text
    if text.startswith("ipc://"):
        if len(text[6:].encode()) > _IPC_PATH_BYTES:
            msg = f"{text!r}: a path of at most {_IPC_PATH_BYTES} bytes"
            raise argparse.ArgumentTypeError(msg)
        return text
    msg = f"{text!r} is not tcp://HOST:PORT or ipc://PATH"
    raise argparse.ArgumentTypeError(msg)
