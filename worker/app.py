"""The command ``tokenwire-worker``: one engine, one socket, from start to exit.

The life of the process: ``startup``, ``main_loop``, ``shutdown``. Each phase is a line
``tokenwire-worker: PHASE (SECONDS s)`` on stderr, for people and for supervisors. Exit
codes: 0 after a signal, 1 if the engine or a socket failed, 2 for a bad setting.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Generator, Sequence
from pathlib import Path

import uvloop

from tokenwire.protocol.announce import Announce, announce
from tokenwire.protocol.files import UnusableFile
from tokenwire.protocol.keys import INSECURE
from tokenwire.protocol.logs import about, is_json, log_as
from tokenwire.protocol.process import raise_file_limit
from tokenwire.protocol.restart import BAD_SETTINGS
from tokenwire.protocol.tracing import Tracing, start_tracing
from tokenwire.protocol.watchdog import watch_loop
from tokenwire.worker.captures import Captures
from tokenwire.worker.engine import (
    Engine,
    EngineFinished,
    EngineSink,
    EngineStartError,
    EngineTokens,
)
from tokenwire.worker.kv_blocks import CachedBlocks

from .admission import Bounds
from .card import make_card
from .config import WorkerConfig, parse_config
from .engine_factory import make_captures, make_engine
from .exposition import Exposition
from .gate import Gate
from .health import Health
from .journal import Journal
from .link import Link, LinkError
from .listener import MetricsServer, serve_metrics
from .metrics import Metrics, engine_families
from .service import Service
from .timers import LoopTimers

__all__ = ["Worker", "main"]

_phases = logging.getLogger("tokenwire.worker")

TICKS_PER_HEARTBEAT = 4
"""A beat is at most a quarter late, and a lost frontend is noticed as soon as that."""

ABORT_WAIT_S = 5.0
"""How long an engine may take to end what shutdown has cancelled."""

HELD_KV_WAIT_S = 5.0
"""How long KV that was handed over may wait to be read: a read takes milliseconds, and
without it the decode worker has to compute the prompt."""

ENGINE_STOP_S = 15.0
"""How long an engine may take to stop: vLLM waits up to 10 s for its processes."""

GC_THRESHOLDS = (50_000, 20, 100)
"""A step of 4096 sequences makes some 16,000 objects that die with it. With Python's
700 each step is several collections, a third of the time at 2000 sequences (measured)."""

FORCED_EXIT_S = 5.0
"""After a second signal the process is gone by then, whatever hangs."""


class Worker:
    """One engine behind one link."""

    def __init__(
        self,
        config: WorkerConfig,
        engine: Engine,
        captures: Captures | None = None,
        blocks: CachedBlocks | None = None,
        started_at: float | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._tracing = tracing
        self._config = config
        self._engine = engine
        self._captures = captures
        self._blocks = blocks
        self._sweeping: asyncio.Task[None] | None = None
        self._started_at = time.monotonic() if started_at is None else started_at
        self._wake = asyncio.Event()  # a signal has come, or the service calls
        self._num_signals = 0
        self._link: Link | None = None
        self._service: Service | None = None
        self._metrics: MetricsServer | None = None
        self._health = Health()
        self._exposition = Exposition(engine_families)
        self._announced = False

    def interrupt(self) -> None:
        """Stop gracefully; called again, at once."""
        self._num_signals += 1
        self._wake.set()
        if self._num_signals > 1:
            watchdog = threading.Timer(FORCED_EXIT_S, os._exit, (1,))
            watchdog.daemon = True
            watchdog.start()

    async def run(self) -> int:
        """Live, and return the exit code."""
        code = 0
        try:
            service = await self._startup_unless_stopped()
            if service is not None:
                await self._main_loop(service)
                code = int(service.dead_reason is not None)
        except UnusableFile as error:  # of keys, at the start
            self._say(f"failed: {error}")
            code = BAD_SETTINGS
        except (EngineStartError, LinkError, OSError) as error:
            self._say(f"failed: {error}")
            code = 1
        finally:
            await self._shutdown()
        return code

    # -- startup --------------------------------------------------------------------

    async def _startup_unless_stopped(self) -> Service | None:
        """Start up, and return the service, or None if a signal came first."""
        startup = asyncio.create_task(self._startup())
        signalled = asyncio.create_task(self._wake.wait())
        try:
            await asyncio.wait(
                {startup, signalled}, return_when=asyncio.FIRST_COMPLETED
            )
            return startup.result() if startup.done() else None
        finally:
            for task in (startup, signalled):
                task.cancel()
            await asyncio.wait({startup, signalled}, timeout=ENGINE_STOP_S)

    async def _startup(self) -> Service:
        config = self._config
        # First what fails at once if it does: an engine may load for minutes.
        link = self._link = Link(
            config.listen,
            heartbeat_timeout_s=config.heartbeat_timeout_s,
            gate=None if config.keys.is_plaintext else Gate(config.keys),
        )
        if config.metrics_port is not None:
            self._metrics = serve_metrics(
                config.metrics_host, config.metrics_port, self._health
            )
        if self._captures is not None:
            self._captures.check()
            self._sweeping = asyncio.create_task(self._captures.run())
        sink = _LateSink()
        info = await self._engine.start(sink, self._say)
        if self._blocks is not None:
            self._blocks.resize(info.num_kv_blocks)
        service = self._service = Service(
            card=make_card(config, info, captures=self._captures is not None),
            engine=self._engine,
            sender=link,
            timers=LoopTimers(),
            metrics=Metrics(config.served_model_name, as_vllm=info.engine == "sim"),
            bounds=Bounds(
                max_requests=config.max_requests,
                max_queued_tokens=config.max_queued_tokens,
                heartbeat_interval_s=config.heartbeat_interval_s,
                heartbeat_timeout_s=config.heartbeat_timeout_s,
            ),
            exposition=self._exposition,
            captures=self._captures,
            journal=Journal(config.journal_bytes, config.journal_life_s),
            blocks=self._blocks,
            tracing=self._tracing,
        )
        service.on_change = self._wake.set
        sink.connect(service)
        link.start(service)
        _calm_collector()
        self._health.serving()
        self._announce(link.endpoint)
        self._say(f"serving {config.served_model_name} at {link.endpoint}")
        return service

    def _announce(self, endpoint: str) -> None:
        """Write where this worker is."""
        if not self._config.announce:
            return
        worker = Announce(
            endpoint=endpoint,
            worker_id=self._config.worker_id,
            role=self._config.role.value,
            pid=os.getpid(),
            model=self._config.served_model_name,
            metrics=None if self._metrics is None else self._metrics.url,
        )
        announce(Path(self._config.announce), worker)
        self._announced = True

    def _withdraw(self) -> None:
        if self._announced:
            Path(self._config.announce).unlink(missing_ok=True)

    # -- main loop ------------------------------------------------------------------

    async def _main_loop(self, service: Service) -> None:
        """Tick until a signal comes or the engine dies."""
        watching = asyncio.create_task(watch_loop(self._config.heartbeat_timeout_s))
        try:
            while not self._num_signals and service.dead_reason is None:
                await self._tick(service)
        finally:
            watching.cancel()

    async def _tick(self, service: Service) -> None:
        if self._link is not None:
            self._link.tick()
        service.tick()
        self._health.beat()
        self._wake.clear()
        interval_s = self._config.heartbeat_interval_s / TICKS_PER_HEARTBEAT
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(interval_s):
                await self._wake.wait()

    # -- shutdown -------------------------------------------------------------------

    async def _shutdown(self) -> None:
        """Announce no more, let requests end, stop the engine, close the link."""
        service = self._service
        self._health.stopping()
        self._withdraw()
        if service is not None and service.dead_reason is None:
            await self._drain(service)
        self._say("stopping the engine")
        try:
            async with asyncio.timeout(ENGINE_STOP_S):
                await self._engine.stop()
        except TimeoutError:
            self._say(f"the engine has not stopped within {ENGINE_STOP_S} s")
        if service is not None:
            service.end_all()
        self._exposition.close()
        if self._sweeping is not None:
            self._sweeping.cancel()
        if self._link is not None:
            self._link.close()
        if self._metrics is not None:
            self._metrics.close()
        self._say("stopped")

    async def _drain(self, service: Service) -> None:
        """Take nothing new; wait for what runs; then send it elsewhere."""
        service.drain()
        self._say(f"draining {service.num_requests} requests")
        deadline = time.monotonic() + self._config.shutdown_timeout_s
        while service.num_requests and time.monotonic() < deadline:
            if self._num_signals > 1 or service.dead_reason is not None:
                break
            await self._tick(service)
        if not service.num_requests:
            await self._let_kv_be_read(service)
            return
        self._say(f"giving up {service.num_requests} requests")
        service.evict_all()
        deadline = time.monotonic() + ABORT_WAIT_S
        while service.num_requests and time.monotonic() < deadline:
            await self._tick(service)

    async def _let_kv_be_read(self, service: Service) -> None:
        """Wait while prompts that were handed over are still held."""
        deadline = time.monotonic() + HELD_KV_WAIT_S
        if self._engine.load().kv_usage:
            self._say("waiting for KV that was handed over to be read")
        while self._engine.load().kv_usage and time.monotonic() < deadline:
            if self._num_signals > 1 or service.dead_reason is not None:
                break
            await self._tick(service)

    def _say(self, phase: str) -> None:
        _tell(phase, time.monotonic() - self._started_at)


def _tell(phase: str, elapsed_s: float | None = None) -> None:
    """Say a phase, for people and for supervisors: as a line of its own, or as JSON."""
    if is_json():
        fields = {} if elapsed_s is None else {"elapsed_s": round(elapsed_s, 1)}
        _phases.info("%s", phase, extra=about({"phase": phase, **fields}))
        return
    since = "" if elapsed_s is None else f" ({elapsed_s:.1f} s)"
    print(f"tokenwire-worker: {phase}{since}", file=sys.stderr, flush=True)


class _LateSink:
    """Passes an engine's outputs to a service that is made after the engine started."""

    def __init__(self) -> None:
        self._sink: EngineSink | None = None
        self._dead_reason: str | None = None

    def connect(self, sink: EngineSink) -> None:
        """Pass everything to *sink* from now on."""
        self._sink = sink
        if self._dead_reason is not None:
            sink.died(self._dead_reason)

    def outputs(
        self, tokens: list[EngineTokens], finished: list[EngineFinished]
    ) -> None:
        """Pass on; before there is a service there is no request either."""
        if self._sink is not None:
            self._sink.outputs(tokens, finished)

    def died(self, reason: str) -> None:
        """Pass on, or keep until there is somebody to tell."""
        if self._sink is not None:
            self._sink.died(reason)
        self._dead_reason = reason


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a worker until a signal comes or its engine dies; return the exit code."""
    started_at = time.monotonic()
    config = parse_config(arguments)
    who = {"worker": config.worker_id, "role": config.role.value}
    log_as(config.logs, "%(asctime)s %(levelname)s %(name)s: %(message)s", who)
    _tell("starting", 0.0)
    if config.keys.insecure_plaintext:
        logging.getLogger(__name__).warning(INSECURE)
    raise_file_limit()
    try:
        captures = make_captures(config)
        blocks = CachedBlocks() if config.kv_events else None
        engine = make_engine(config, captures, blocks)
    except EngineStartError as error:
        _tell(f"failed: {error}")
        return 1
    with _fork_server(config):
        tracing = start_tracing(config.traces, "tokenwire-worker", config.worker_id)
        try:
            living = _live(config, engine, captures, blocks, started_at, tracing)
            return uvloop.run(living)
        finally:
            if tracing is not None:
                tracing.close()


@contextlib.contextmanager
def _fork_server(config: WorkerConfig) -> Generator[None]:
    """Have what the engine's process is forked from, while nothing else is there yet."""
    if config.engine != "vllm":
        yield
        return
    from .vllm.fork_server import forking
    from .vllm.json_logs import log_as_json

    if is_json():
        log_as_json(config.worker_id)  # which vLLM reads when it is imported
    _tell("importing vLLM", 0.0)
    with forking(config.role):
        yield


async def _live(
    config: WorkerConfig,
    engine: Engine,
    captures: Captures | None,
    blocks: CachedBlocks | None,
    started_at: float,
    tracing: Tracing | None,
) -> int:
    worker = Worker(config, engine, captures, blocks, started_at, tracing)
    with _signals(worker):
        return await worker.run()


@contextlib.contextmanager
def _signals(worker: Worker) -> Generator[None]:
    """Give SIGTERM and SIGINT to *worker* while it lives."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, worker.interrupt)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _calm_collector() -> None:
    """Make garbage collections rare: the hot path makes no cycles.

    What start-up has made lives as long as the process: it is not looked at again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
