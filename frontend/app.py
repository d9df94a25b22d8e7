"""``tokenwire-frontend``: startup, serve, drain, shutdown."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import uvloop
from aiohttp import web

from tokenwire.protocol.files import UnusableFile
from tokenwire.protocol.keys import INSECURE, stays_here
from tokenwire.protocol.logs import end_for_setting, exits_as_lines, log_as
from tokenwire.protocol.process import num_files, raise_file_limit
from tokenwire.protocol.tracing import Tracing, start_tracing
from tokenwire.protocol.watchdog import watch_loop

from .acceptor import MIN_OPENING, OPENING_SHARE
from .access_log import warn_of_prompts
from .admin import AdminPlane
from .config import Config, parse_config
from .connections import ConnectionLimits
from .discovery import discover
from .doors import Door
from .keys import Keys
from .ledger import Ledger
from .listener import Runner
from .metrics import Metrics
from .model import ModelError, NoModelYet, load_model
from .parsers import ParserError, Parsers, load_parsers
from .pool import Pool
from .processes import run_processes
from .server import Server
from .share import Share
from .tls import Tls
from .tokenizer import TextModel

__all__ = ["begin_log", "main", "run", "serve"]

_log = logging.getLogger("tokenwire.frontend")

YOUNG_OBJECTS = 10_000
"""Objects that are made before the youngest are looked through: those of some 20 requests.
Python's 700 has that done for every second request, which finds next to nothing."""

LONG_WORK_THREADS = 2
"""Long requests prepared at once; the tokenizer itself lets the GIL go."""

SWITCH_INTERVAL_S = 0.001
"""How long a thread with long work may keep the GIL from the event loop: Python's 5 ms
would be added to each of its turns (5.3 ms measured, 1.2 ms so)."""

OPERATOR_CONNECTIONS = 64
"""Of the admin plane, and of ``--metrics-listen``: trainers, probes, a scraper or two."""

OWN_FILES = 128 + 2 * (OPERATOR_CONNECTIONS + MIN_OPENING)
"""Descriptors beside those of clients: of the process, of links to some 50 workers, and
of its operator's connections."""

OPEN_TO_ALL = (
    "--host %s without --api-keys: whoever reaches it may use the models"  # and no more
)


def main() -> None:
    """Run a frontend; the console script."""
    config = parse_config()
    begin_log(config)
    with exits_as_lines(_log):
        if config.processes == 1:
            run(config)
            return
        raise_file_limit()
        try:
            sys.exit(run_processes(config, sys.argv[1:]))
        except OSError as error:
            sys.exit(f"tokenwire-frontend: {error}")


def begin_log(config: Config, process: int | None = None) -> None:
    """Log to standard error; one of several *process*es says which it is."""
    who = "" if process is None else f"process-{process} "
    fields = {"frontend": config.frontend_id}
    if process is not None:
        fields["process"] = f"process-{process}"
    log_as(
        config.observability.logs,
        f"%(asctime)s %(levelname)s {who}%(name)s: %(message)s",
        fields,
    )


def run(config: Config, share: Share | None = None) -> None:
    """Run a frontend, or one process of it.

    Raises:
        SystemExit: It cannot start; one sentence says why.
    """
    tracing = start_tracing(
        config.observability.traces, "tokenwire-frontend", config.frontend_id
    )
    try:
        _run(config, share, tracing)
    finally:
        if tracing is not None:
            tracing.close()


def _run(config: Config, share: Share | None, tracing: Tracing | None) -> None:
    raise_file_limit()
    if config.observability.log_prompts:
        warn_of_prompts()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        keys = Keys.read(config)
    except UnusableFile as error:
        end_for_setting(
            _log, f"tokenwire-frontend: {error}; mend the file, or the option"
        )
    if config.keys.insecure_plaintext:
        _log.warning(INSECURE)
    if keys.api is None and not stays_here(f"tcp://{config.host}:0"):
        _log.warning(OPEN_TO_ALL, config.host)
    executor = ThreadPoolExecutor(LONG_WORK_THREADS, "long-work")
    try:
        model = load_model(config.model, executor, config.tokenizer_backend)
    except NoModelYet as error:
        sys.exit(f"tokenwire-frontend: {error}")
    except ModelError as error:
        end_for_setting(_log, f"tokenwire-frontend: {error}")
    parsers = None
    if config.parsers:
        try:
            parsers = load_parsers(config.parsers, model.folder)
        except ParserError as error:
            end_for_setting(_log, f"tokenwire-frontend: {error}")
    try:
        uvloop.run(serve(config, model, keys, parsers, share, tracing))
    except OSError as error:
        sys.exit(f"tokenwire-frontend: {error}")
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


async def serve(
    config: Config,
    model: TextModel,
    keys: Keys,
    parsers: Parsers | None = None,
    share: Share | None = None,
    tracing: Tracing | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM, then let requests end; a second signal forces.

    One of several processes (*share*) also ends with its parent, at once.

    Raises:
        OSError: The address cannot be listened on.
    """
    stop = asyncio.Event()
    force = asyncio.Event()

    def on_signal() -> None:
        (force if stop.is_set() else stop).set()

    def end_now() -> None:
        stop.set()
        force.set()

    loop = asyncio.get_running_loop()
    if share is None:
        loop.add_signal_handler(signal.SIGINT, on_signal)
        loop.add_signal_handler(signal.SIGTERM, on_signal)
    else:
        # systemd sends SIGTERM to all processes of a service, and the parent to its own:
        # a second one says nothing new. A parent in a hurry sends SIGINT.
        loop.add_signal_handler(signal.SIGTERM, stop.set)
        loop.add_signal_handler(signal.SIGINT, end_now)
    metrics = Metrics(config.served_model_name, config.objectives)
    pool = Pool(
        model=config.served_model_name,
        tokenizer_sha256=model.sha256,
        frontend_id=config.frontend_id,
        heartbeat_timeout_s=config.heartbeat_timeout_s,
        stall_timeout_s=config.stall_timeout_s,
        first_token_timeout_s=config.first_token_timeout_s,
        wait_s=config.worker_wait_s,
        remote_prefill=config.remote_prefill,
        routing=config.routing,
        keyring=keys.keyring,
    )
    started = int(time.time()) if share is None else share.started
    ledger = Ledger.create() if share is None else share.ledger
    server = Server(
        *(config, model, pool, metrics, started, parsers, keys, share),
        ledger=ledger,
        tracing=tracing,
    )
    limits = _limits(config)
    few = min(OPERATOR_CONNECTIONS, limits.max_connections)
    operators = msgspec.structs.replace(limits, max_connections=few)
    runners: list[Runner] = []

    def door(
        what: str,
        app: web.Application,
        tls: Tls | None = None,
        limits: ConnectionLimits = operators,
    ) -> Door:
        runner = Runner(
            app,
            limits,
            metrics.connection_refused,
            shutdown_timeout=1.0,  # requests had their time before
        )
        runners.append(runner)
        return Door(what, runner, tls)

    try:
        main_door = door("listening on", server.application(), keys.tls, limits)
        metrics.num_connections.set_function(main_door.runner.connections.__len__)
        if share is None:
            await main_door.open(config.host, config.port, reuse_port=config.reuse_port)
        else:
            main_door.runner.on_count = share.count
            share.sit(ready=False)
            await main_door.share(share.listeners, share.turn)
        if config.access.metrics_listen is not None:
            probes = door("metrics on", server.probes())
            if share is None:
                await probes.open(
                    *config.access.metrics_listen, reuse_port=config.reuse_port
                )
            else:
                await probes.share(share.metrics_listeners)
        if config.admin.port is not None and (share is None or share.admin_listeners):
            plane = AdminPlane(
                config.admin, keys.admin, pool, metrics, server.models, server.health
            )
            has_guard = keys.admin.is_set or keys.admin_tls is not None
            around = server.around(config.admin.host, has_guard=has_guard)
            app = plane.application(around)
            admin = door("admin plane on", app, keys.admin_tls)
            if share is None:
                await admin.open(config.admin.host, config.admin.port)
            else:
                await admin.share(share.admin_listeners)
        # What start-up made stays: full collections need not walk over it again.
        gc.collect()
        gc.freeze()
        gc.set_threshold(YOUNG_OBJECTS)
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(pool.run()),
                tasks.create_task(discover(config, pool.set_endpoints)),
                tasks.create_task(watch_loop(config.heartbeat_timeout_s)),
            ]
            if share is not None:
                speaking = share.run(server.is_ready, server.own_page, end_now)
                background.append(tasks.create_task(speaking))
            await stop.wait()
            if share is not None:
                share.sit(ready=False)  # the others take what comes now
            await server.intake.drain(config.shutdown_timeout_s, force)
            for task in background:
                task.cancel()
    finally:
        for runner in runners:
            await runner.cleanup()
        pool.close()


def _limits(config: Config) -> ConnectionLimits:
    """Return what connections may do, and no more of them than there are descriptors."""
    limits = config.access.limits
    most = num_files() - OWN_FILES
    if config.access.tls is not None:  # of them, those in their handshake
        most = most * OPENING_SHARE // (OPENING_SHARE + 1)
    most = max(1, most)
    if most >= limits.max_connections:
        return limits
    _log.warning("connections are bounded by the limit of open files, to %d", most)
    return msgspec.structs.replace(limits, max_connections=most)
