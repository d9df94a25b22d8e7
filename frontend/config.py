"""The frontend's settings: options, or environment variables, checked."""

from __future__ import annotations

import argparse
import os
import secrets
from collections.abc import Sequence

import msgspec

from tokenwire.protocol.keys import KeyFiles
from tokenwire.protocol.limits import HEARTBEAT_TIMEOUT_S, MAX_MESSAGE_BYTES
from tokenwire.protocol.settings import (
    SettingsParser,
    add_key_options,
    key_files,
    port,
    seconds,
    tcp_endpoint,
    whole_number,
)

from .access_settings import AccessSettings, access_settings, add_access_options
from .admin_settings import AdminSettings, add_admin_options, admin_settings
from .cores import allowed_cores
from .disaggregation import MAX_QUEUED_TOKENS, MIN_UNCACHED_TOKENS, RemotePrefill
from .encoding import MISSING, TokenizerBackend, is_installed
from .goodput import Objectives, add_goodput_options, objectives
from .nvext import Placement
from .observability import (
    Observability,
    add_observability_options,
    observability,
)
from .parser_settings import add_parser_options, parser_settings
from .parsers import ParserChoice
from .policy import Policy
from .pool import WORKER_WAIT_S
from .resume_settings import ResumeSettings, add_resume_options, resume_settings
from .routing_settings import RoutingSettings, add_routing_options, routing_settings
from .stall import FIRST_TOKEN_TIMEOUT_S, STALL_TIMEOUT_S

__all__ = ["Config", "parse_config"]

MAX_INFLIGHT_BODY_BYTES = 256 * 1024 * 1024
"""Bodies that arrive or are parsed: four of the largest, thousands of usual ones. Token
ids as JSON take up to seven times as much once they are parsed."""

MAX_QUEUE_REQUESTS = 4_096
"""Sequences that wait: as many as requests are served at once, so that a trainer's batch
fits. Each costs some tens of KiB here, and a connection."""

MAX_QUEUE_TOKENS = 4 * 1024 * 1024
"""Prompt tokens that wait: 36 bytes each as a list of numbers, 150 MiB in all."""

MAX_QUEUE_WAIT_S = 60.0
"""Under a lasting overload this is what every request waits, so for people it is to be
well below what is promised for the first token: they turn away after about 10 s. Trainers
and batch jobs send all at once and wait: a minute serves both, if neither well."""


MAX_PROCESSES = 64
"""A typing error must not start a thousand; each has a link to every worker."""


class Config(msgspec.Struct, frozen=True):
    """What a frontend runs with."""

    model: str  # a folder, or a hub id
    served_model_name: str
    tokenizer_backend: TokenizerBackend
    host: str
    port: int
    reuse_port: bool
    processes: int  # that serve; 1: the one that is started
    workers: tuple[str, ...]  # endpoints
    workers_file: str | None
    workers_dns: str | None  # NAME:PORT
    keys: KeyFiles
    frontend_id: str
    max_inflight_requests: int
    queue_here: bool  # else in the workers
    max_queue_requests: int
    max_queue_tokens: int
    max_queue_wait_s: float
    max_body_bytes: int
    max_inflight_body_bytes: int
    client_read_timeout_s: float
    client_write_timeout_s: float
    heartbeat_timeout_s: float
    stall_timeout_s: float
    first_token_timeout_s: float
    worker_wait_s: float
    remote_prefill: RemotePrefill
    routing: RoutingSettings
    shutdown_timeout_s: float
    observability: Observability
    policy: Policy
    parsers: ParserChoice
    access: AccessSettings
    admin: AdminSettings
    resume: ResumeSettings
    objectives: Objectives
    refuse_while_paused: bool  # else requests wait
    ui: bool  # whether there is the live page


def parse_config(arguments: Sequence[str] | None = None) -> Config:
    """Return the settings of *arguments* (default: the command line).

    Raises:
        SystemExit: 2 after one sentence, if a value is bad.
    """
    parser = SettingsParser(
        prog="tokenwire-frontend",
        description="Speaks OpenAI's HTTP API and routes to tokenwire workers.",
    )
    add = parser.add_argument
    add(
        "--model",
        required=True,
        help="model folder or hub id, for tokenizer and template",
    )
    add("--served-model-name", help="name in requests and answers (default: --model)")
    add(
        "--tokenizer-backend",
        choices=[one.value for one in TokenizerBackend],
        default=TokenizerBackend.TOKENIZERS.value,
        help="what encodes prompts; fastokens is quicker, and is used if it agrees with "
        "tokenizers on texts of the model's vocabulary (default: %(default)s)",
    )
    add(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: %(default)s)",
    )
    add("--port", type=port, default=8000, help="port; 0: any free one (default: 8000)")
    add(
        "--reuse-port",
        action="store_true",
        help="share the port with other frontends on this machine",
    )
    add(
        "--processes",
        type=_processes,
        default=1,
        metavar="N|auto",
        help="processes that serve the port, each with the bounds below; auto, or 0: one "
        "for each core that this one may use (default: 1)",
    )
    add(
        "--worker",
        action="append",
        default=[],
        type=tcp_endpoint,
        metavar="tcp://HOST:PORT",
        help="a worker; repeatable",
    )
    add(
        "--workers-file",
        metavar="FILE",
        help="JSON list of workers, watched for changes",
    )
    add(
        "--workers-dns",
        metavar="NAME:PORT",
        type=_name_and_port,
        help="a name whose addresses are the workers, resolved again and again",
    )
    add("--frontend-id", help="this frontend's name in logs (default: random)")
    add(
        "--max-inflight-requests",
        type=whole_number(1),
        default=4096,
        help="requests served at once, waiting ones included; more get 429 "
        "(default: %(default)s)",
    )
    _add_queue(parser)
    add(
        "--max-body-bytes",
        type=whole_number(1),
        default=MAX_MESSAGE_BYTES,
        help="larger request bodies get 413 (default: %(default)s)",
    )
    add(
        "--max-inflight-body-bytes",
        type=whole_number(1),
        default=MAX_INFLIGHT_BODY_BYTES,
        metavar="N",
        help="bodies held at once until they are parsed; more get 429 "
        "(default: %(default)s)",
    )
    add(
        "--client-read-timeout-s",
        type=seconds(),
        default=60.0,
        metavar="S",
        help="a request whose body takes longer to arrive gets 408 (default: %(default)s)",
    )
    add(
        "--client-write-timeout-s",
        type=seconds(),
        default=60.0,
        metavar="S",
        help="a client that reads nothing for so long is dropped (default: %(default)s)",
    )
    add(
        "--shutdown-timeout-s",
        type=seconds(),
        default=30.0,
        metavar="S",
        help="how long running requests may go on after SIGTERM (default: %(default)s)",
    )
    add(
        "--token-ids-placement",
        choices=[placement.value for placement in Placement],
        default=Placement.AUTO.value,
        help="where token ids stand beside nvext: auto: in vLLM's places for requests "
        "with return_token_ids (default: %(default)s)",
    )
    add(
        "--unknown-fields",
        choices=["reject", "ignore"],
        default="reject",
        help="what happens to request fields that nobody knows (default: %(default)s)",
    )
    add(
        "--trust-request-chat-template",
        action="store_true",
        help="let requests bring their own chat_template",
    )
    add(
        "--ui",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="the live page, /ui: workers, requests in flight without their text, a "
        "playground (default: on)",
    )
    add_observability_options(parser)
    add_key_options(
        parser,
        "--curve-worker-keys",
        "public keys of the workers: one for all, or KEY tcp://HOST:PORT; watched for "
        "changes",
    )
    _add_workers(parser)
    add_routing_options(parser)
    add_parser_options(parser)
    add_access_options(parser)
    add_admin_options(parser)
    add_resume_options(parser)
    add_goodput_options(parser)
    given = parser.parse_settings(arguments)
    sources = [given.worker, given.workers_file, given.workers_dns]
    if sum(map(bool, sources)) != 1:
        parser.error("give one of --worker, --workers-file and --workers-dns")
    return Config(
        model=given.model,
        served_model_name=given.served_model_name or given.model,
        tokenizer_backend=_tokenizer_backend(parser, given.tokenizer_backend),
        host=given.host,
        port=given.port,
        reuse_port=given.reuse_port,
        processes=given.processes,
        workers=tuple(given.worker),
        workers_file=given.workers_file,
        workers_dns=given.workers_dns,
        keys=key_files(parser, given),
        frontend_id=given.frontend_id
        or f"frontend-{os.getpid()}-{secrets.token_hex(2)}",
        max_inflight_requests=given.max_inflight_requests,
        queue_here=given.queue_at == "frontend",
        max_queue_requests=given.max_queue_requests,
        max_queue_tokens=given.max_queue_tokens,
        max_queue_wait_s=given.max_queue_wait_s,
        max_body_bytes=given.max_body_bytes,
        max_inflight_body_bytes=given.max_inflight_body_bytes,
        heartbeat_timeout_s=given.heartbeat_timeout_s,
        client_read_timeout_s=given.client_read_timeout_s,
        stall_timeout_s=given.stall_timeout_s,
        first_token_timeout_s=given.first_token_timeout_s,
        worker_wait_s=given.worker_wait_s,
        remote_prefill=RemotePrefill(
            given.remote_prefill_min_tokens, given.remote_prefill_max_queued_tokens
        ),
        routing=routing_settings(given),
        client_write_timeout_s=given.client_write_timeout_s,
        shutdown_timeout_s=given.shutdown_timeout_s,
        observability=observability(parser, given),
        policy=Policy(
            placement=Placement(given.token_ids_placement),
            ignore_unknown_fields=given.unknown_fields == "ignore",
            trust_chat_template=given.trust_request_chat_template,
            exclude_tools=given.exclude_tools_when_tool_choice_none,
        ),
        parsers=parser_settings(parser, given),
        access=access_settings(parser, given),
        admin=admin_settings(parser, given),
        resume=resume_settings(given),
        objectives=objectives(given),
        refuse_while_paused=given.while_paused == "refuse",
        ui=given.ui,
    )


def _tokenizer_backend(parser: SettingsParser, name: str) -> TokenizerBackend:
    backend = TokenizerBackend(name)
    if backend is TokenizerBackend.FASTOKENS and not is_installed():
        parser.error(MISSING)
    return backend


def _add_workers(parser: SettingsParser) -> None:
    """Add the options of failure detection and of the hand-over."""
    add = parser.add_argument
    add(
        "--heartbeat-timeout-s",
        type=seconds(),
        default=HEARTBEAT_TIMEOUT_S,
        metavar="S",
        help="a worker that is silent for so long is lost; a closed connection is "
        "noticed at once (default: %(default)s)",
    )
    add(
        "--stall-timeout-s",
        type=seconds(),
        default=STALL_TIMEOUT_S,
        metavar="S",
        help="a worker whose outputs get no token for so long is taken for stalled, "
        "later where its steps are long (default: %(default)s)",
    )
    add(
        "--first-token-timeout-s",
        type=seconds(),
        default=FIRST_TOKEN_TIMEOUT_S,
        metavar="S",
        help="the same for a worker none of whose requests has a token yet: they may "
        "wait for long prompts (default: %(default)s)",
    )
    add(
        "--worker-wait-s",
        type=seconds(),
        default=WORKER_WAIT_S,
        metavar="S",
        help="how long a running request waits for a worker when all have failed "
        "(default: %(default)s)",
    )
    add(
        "--remote-prefill-min-tokens",
        type=whole_number(0),
        default=MIN_UNCACHED_TOKENS,
        metavar="N",
        help="a prompt goes to a prefill worker if the decode worker would have to "
        "compute so many tokens of it; 0: always (default: %(default)s)",
    )
    add(
        "--remote-prefill-max-queued-tokens",
        type=whole_number(0),
        default=MAX_QUEUED_TOKENS,
        metavar="N",
        help="with more prompt tokens than that waiting at every prefill worker, the "
        "decode worker computes the prompt (default: %(default)s)",
    )


def _add_queue(parser: SettingsParser) -> None:
    """Add the bounds of what waits for room at the workers."""
    add = parser.add_argument
    add(
        "--queue-at",
        choices=["frontend", "worker"],
        default="frontend",
        help="where requests wait when the workers are full; worker: in their engines, "
        "whose own scheduler orders them (default: %(default)s)",
    )
    add(
        "--max-queue-requests",
        type=whole_number(1),
        default=MAX_QUEUE_REQUESTS,
        metavar="N",
        help="sequences (one per prompt and choice) that wait; more get 429 "
        "(default: %(default)s)",
    )
    add(
        "--max-queue-tokens",
        type=whole_number(1),
        default=MAX_QUEUE_TOKENS,
        metavar="N",
        help="prompt tokens of these; more get 429 (default: %(default)s)",
    )
    add(
        "--max-queue-wait-s",
        type=seconds(),
        default=MAX_QUEUE_WAIT_S,
        metavar="S",
        help="requests that wait longer, or would, get 503 (default: %(default)s)",
    )


def _processes(text: str) -> int:
    number = 0 if text == "auto" else whole_number(0)(text)
    if number > MAX_PROCESSES:
        msg = f"{text} is above {MAX_PROCESSES}"
        raise argparse.ArgumentTypeError(msg)
    return number or min(allowed_cores(), MAX_PROCESSES)


def _name_and_port(text: str) -> str:
    name, _, port = text.rpartition(":")
    if not name or not port.isdecimal() or not 0 < int(port) <= 65_535:
        msg = f"{text!r} is not NAME:PORT"
        raise argparse.ArgumentTypeError(msg)
    return text
