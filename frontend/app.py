"""``tokenwire-frontend``: startup, serve, drain, shutdown."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import uvloop
from aiohttp import web

from tokenwire.protocol.keys import INSECURE, KeyFileError
from tokenwire.protocol.process import raise_file_limit
from tokenwire.protocol.watchdog import watch_loop

from .acceptor import SharedSite
from .admin import AdminPlane
from .admin_key import AdminKey
from .config import Config, parse_config
from .discovery import discover
from .keyring import Keyring
from .listener import Runner
from .metrics import Metrics
from .model import ModelError, load_model
from .parsers import ParserError, Parsers, load_parsers
from .pool import Pool
from .processes import run_processes
from .resume_keys import ResumeKeys
from .server import Server
from .share import Share
from .tokenizer import TextModel

__all__ = ["log_as", "main", "run", "serve"]

_log = logging.getLogger("tokenwire.frontend")

LONG_WORK_THREADS = 2
"""Long requests prepared at once; the tokenizer itself lets the GIL go."""

SWITCH_INTERVAL_S = 0.001
"""How long a thread with long work may keep the GIL from the event loop: Python's 5 ms
would be added to each of its turns (5.3 ms measured, 1.2 ms so)."""


def main() -> None:
    """Run a frontend; the console script."""
    config = parse_config()
    log_as(config)
    if config.processes == 1:
        run(config)
        return
    raise_file_limit()
    try:
        sys.exit(run_processes(config, sys.argv[1:]))
    except OSError as error:
        sys.exit(f"tokenwire-frontend: {error}")


def log_as(config: Config, who: str = "") -> None:
    """Log to standard error, each line with *who* before what."""
    logging.basicConfig(
        level=config.log_level.upper(),
        format=f"%(asctime)s %(levelname)s {who}%(name)s: %(message)s",
    )


def run(config: Config, share: Share | None = None) -> None:
    """Run a frontend, or one process of it.

    Raises:
        SystemExit: It cannot start; one sentence says why.
    """
    raise_file_limit()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        keyring = Keyring.read(config.keys)
        admin_key = AdminKey.read(config.admin.key_file)
        resume_keys = ResumeKeys(config.resume.key_file)
    except KeyFileError as error:
        sys.exit(f"tokenwire-frontend: {error}")
    if config.keys.insecure_plaintext:
        _log.warning(INSECURE)
    executor = ThreadPoolExecutor(LONG_WORK_THREADS, "long-work")
    try:
        model = load_model(config.model, executor)
    except ModelError as error:
        sys.exit(f"tokenwire-frontend: {error}")
    parsers = None
    if config.parsers:
        try:
            parsers = load_parsers(config.parsers, model.folder)
        except ParserError as error:
            sys.stderr.write(f"tokenwire-frontend: {error}\n")
            sys.exit(2)  # a bad setting, as from the option parser
    try:
        uvloop.run(
            serve(config, model, keyring, admin_key, resume_keys, parsers, share)
        )
    except OSError as error:
        sys.exit(f"tokenwire-frontend: {error}")
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


async def serve(
    config: Config,
    model: TextModel,
    keyring: Keyring,
    admin_key: AdminKey,
    resume_keys: ResumeKeys,
    parsers: Parsers | None = None,
    share: Share | None = None,
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
        keyring=keyring,
    )
    started = int(time.time()) if share is None else share.started
    server = Server(config, model, pool, metrics, started, parsers, resume_keys, share)
    runners = [_runner(server.application())]
    try:
        await _open(config, runners[0], share)
        if config.admin.port is not None and (share is None or share.admin_listeners):
            plane = AdminPlane(
                config.admin, admin_key, pool, metrics, server.models, server.health
            )
            runners.append(_runner(plane.application(server.errors)))
            await _open_admin(config, runners[1], share)
        # What start-up made stays: full collections need not walk over it again.
        gc.collect()
        gc.freeze()
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(pool.run()),
                tasks.create_task(discover(config, pool.set_endpoints)),
                tasks.create_task(watch_loop(config.heartbeat_timeout_s)),
            ]
            if share is not None:
                speaking = share.run(server.is_ready, metrics.exposition, end_now)
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


def _runner(app: web.Application) -> Runner:
    return Runner(
        app,
        handler_cancellation=True,  # a client that leaves cancels its handler
        access_log=None,
        shutdown_timeout=1.0,  # requests had their time before
    )


async def _open(config: Config, runner: Runner, share: Share | None) -> None:
    """Take connections, on a socket of our own or on those that were inherited."""
    if share is None:
        host, port = await _listen(
            runner, config.host, config.port, reuse_port=config.reuse_port
        )
        _log.info("listening on http://%s:%s", host, port)
        return
    runner.on_count = share.count
    await runner.setup()
    share.sit(ready=False)
    for listener in share.listeners:
        await SharedSite(runner, listener, share.turn).start()


async def _open_admin(config: Config, runner: Runner, share: Share | None) -> None:
    """The same for the admin plane, which one process has."""
    if share is None:
        host, port = await _listen(runner, config.admin.host, config.admin.port or 0)
        _log.info("admin plane on http://%s:%s", host, port)
        return
    await runner.setup()
    for listener in share.admin_listeners:
        await web.SockSite(runner, listener).start()


async def _listen(
    runner: Runner, host: str, port: int, *, reuse_port: bool = False
) -> tuple[str, int]:
    """Listen, and return where.

    Raises:
        OSError: The address cannot be listened on; it says which.
    """
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, reuse_port=reuse_port or None).start()
    except OSError as error:
        msg = f"cannot listen on {host}:{port}: {error.strerror or error}"
        raise OSError(msg) from error
    bound: tuple[str, int] = runner.addresses[0][:2]
    return bound
