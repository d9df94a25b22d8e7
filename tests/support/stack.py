"""A whole stack in the test's own process: simulated workers, ZeroMQ, a frontend."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from prometheus_client import CollectorRegistry

from support.awake import Awake
from tokenwire.frontend.admin import AdminPlane
from tokenwire.frontend.config import parse_config
from tokenwire.frontend.doors import Door
from tokenwire.frontend.intake import Intake
from tokenwire.frontend.keys import Keys
from tokenwire.frontend.listener import Runner
from tokenwire.frontend.live import Live
from tokenwire.frontend.metrics import Metrics as FrontendMetrics
from tokenwire.frontend.model import load_model
from tokenwire.frontend.parsers import Parsers
from tokenwire.frontend.pool import Pool
from tokenwire.frontend.server import Server
from tokenwire.frontend.tokenizer import TextModel
from tokenwire.protocol.keys import KeyFiles
from tokenwire.protocol.messages import (
    ADMIN,
    CAPTURE,
    CAPTURE_TOLD,
    JOURNAL,
    KV_EVENTS,
    METRICS,
    ORPHANED_KV,
    PROTOCOL_VERSION,
    STATUS,
    Card,
    Role,
)
from tokenwire.protocol.tracing import Tracing
from tokenwire.worker.captures import Captures, CaptureSettings
from tokenwire.worker.config import JOURNAL_BYTES, JOURNAL_LIFE_S
from tokenwire.worker.exposition import Exposition
from tokenwire.worker.gate import Gate
from tokenwire.worker.journal import Journal
from tokenwire.worker.kv_blocks import CachedBlocks
from tokenwire.worker.link import Link
from tokenwire.worker.metrics import Metrics as WorkerMetrics, engine_families
from tokenwire.worker.service import Bounds, Service
from tokenwire.worker.sim.engine import SimEngine
from tokenwire.worker.sim.options import parse_options
from tokenwire.worker.timers import Timers

__all__ = [
    "MODEL_NAME",
    "Event",
    "Reply",
    "SimWorker",
    "Stack",
    "eventually",
    "frontend",
    "stack",
]

MODEL_NAME = "tiny"
BOUNDS = Bounds(
    max_requests=1000,
    max_queued_tokens=4 * 1024 * 1024,
    heartbeat_interval_s=0.1,
    heartbeat_timeout_s=4.0,
)
WAIT_S = 20.0  # any one condition; far above what it takes, below the timeout
LOOK_S = 0.01


async def eventually(condition: Callable[[], bool], what: str = "") -> None:
    """Return when *condition* holds; fail if it does not within ``WAIT_S`` awake."""
    awake = Awake()
    while not condition():
        if awake.seconds > WAIT_S:
            msg = f"never came true: {what or condition}"
            raise AssertionError(msg)
        await asyncio.sleep(LOOK_S)


@dataclass
class Event:
    """One server-sent event's JSON; None for ``[DONE]``."""

    body: dict[str, Any] | None
    id: str = ""  # of a resumable stream

    @property
    def nvext(self) -> dict[str, Any]:
        """The event's nvext, empty if it has none."""
        return dict((self.body or {}).get("nvext", {}))


@dataclass
class Reply:
    """What came back."""

    status: int
    headers: Mapping[str, str]  # names in any case
    text: str

    @property
    def json(self) -> dict[str, Any]:
        """The body, parsed."""
        return dict(json.loads(self.text))

    @property
    def error(self) -> dict[str, Any]:
        """The error object."""
        return dict(self.json["error"])

    @property
    def events(self) -> list[Event]:
        """The events of a stream."""
        events: list[Event] = []
        for block in self.text.split("\n\n")[:-1]:
            *before, last = block.split("\n")
            assert last.startswith("data: "), block
            data = last.removeprefix("data: ")
            fields = dict(line.split(": ", 1) for line in before)
            assert fields.keys() <= {"retry", "id", ""}, block  # "": a comment
            body = None if data == "[DONE]" else json.loads(data)
            events.append(Event(body, fields.get("id", "")))
        return events


class SimWorker:
    """A worker with the simulated engine."""

    def __init__(
        self,
        model: Path,
        role: Role,
        name: str,
        options: Sequence[str],
        *,
        timers: Timers | None = None,
        bounds: Bounds = BOUNDS,
        keys: KeyFiles | None = None,
        listen: str = "tcp://127.0.0.1:0",
        capture: CaptureSettings | None = None,
        journal_bytes: int = JOURNAL_BYTES,
        kv_events: bool = False,
        tracing: Tracing | None = None,
    ) -> None:
        self._tracing = tracing
        self._journal_bytes = journal_bytes
        self.journal = Journal(journal_bytes, JOURNAL_LIFE_S)
        self._layers = [] if capture is None else list(capture.layers)
        saves = capture is not None and role is not Role.DECODE
        self.captures = Captures(capture) if capture is not None and saves else None
        self._sweeping: asyncio.Task[None] | None = None
        self.blocks = CachedBlocks() if kv_events else None
        self.engine = SimEngine(
            model=str(model),
            role=role,
            options=parse_options(options),
            timers=timers,
            captures=self.captures,
            blocks=self.blocks,
        )
        gate = None if keys is None else Gate(keys)
        self.link = Link(listen, gate=gate)
        self._timers = timers
        self._bounds = bounds
        self.role = role
        self.name = name
        self.registry = CollectorRegistry()  # what its own page has
        self._sha256 = load_model(str(model)).sha256
        self._tick: asyncio.Task[None] | None = None
        self.dead = False
        self.service: Service

    async def start(self, **card_fields: Any) -> None:
        """Load and listen."""
        engine = self.engine
        worker = self

        class Sink:
            def outputs(self, tokens: Any, finished: Any) -> None:
                if not worker.dead:
                    worker.service.outputs(tokens, finished)

            def died(self, reason: str) -> None:
                worker.service.died(reason)

        if self.captures is not None:
            self.captures.check()
            self._sweeping = asyncio.create_task(self.captures.run())
        info = await engine.start(Sink(), lambda _: None)
        card: dict[str, Any] = {
            "protocol_version": PROTOCOL_VERSION,
            "worker_id": self.name,
            "incarnation": f"{self.name}-1",
            "role": self.role,
            "model": MODEL_NAME,
            "max_model_len": info.max_model_len,
            "vocab_size": info.vocab_size,
            "block_size": info.block_size,
            "engine": info.engine,
            "engine_version": info.version,
            "tokenizer_sha256": self._sha256,
            "max_num_seqs": info.max_num_seqs,
            "connector": info.connector,
            "capabilities": [
                ORPHANED_KV,
                METRICS,
                ADMIN,
                STATUS,
                *([CAPTURE, CAPTURE_TOLD] if self.captures else []),
                *([JOURNAL] if self._journal_bytes else []),
                *([KV_EVENTS] if info.tells_blocks else []),
            ],
            "hidden_state_layers": self._layers,
            "connector_compatibility": info.connector_compatibility,
            "exactness": info.exactness,
        }
        registry = self.registry
        self.service = Service(
            card=Card(**{**card, **card_fields}),
            engine=engine,
            sender=self.link,
            timers=self._timers or asyncio.get_running_loop(),
            metrics=WorkerMetrics(MODEL_NAME, registry, as_vllm=True),
            bounds=self._bounds,
            exposition=Exposition(partial(engine_families, registry)),
            captures=self.captures,
            blocks=self.blocks,
            journal=self.journal,
            tracing=self._tracing,
        )
        self.link.start(self.service)
        self._tick = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            self.tick()
            await asyncio.sleep(0.05)

    def tick(self) -> None:
        """Do what time asks for."""
        self.link.tick()
        self.service.tick()

    @property
    def idle(self) -> bool:
        """Whether nothing runs, waits or holds KV."""
        load = self.engine.load()
        return (
            not self.service.num_requests
            and not load.num_running
            and not load.num_waiting
            and not load.kv_usage
        )

    async def die(self) -> None:
        """Be gone, as a killed process is: nothing more is said."""
        self.dead = True
        await self.stop()

    async def stop(self) -> None:
        """Leave nothing behind; harmless after ``die``."""
        for task in (self._tick, self._sweeping):
            if task is not None:
                task.cancel()
        await self.engine.stop()
        await asyncio.sleep(0)  # the ends of what ran go out
        self.link.close()


@dataclass
class Stack:
    """A running stack and a client of it."""

    url: str
    pool: Pool
    model: TextModel
    client: aiohttp.ClientSession
    app: web.Application
    intake: Intake
    live: Live
    admin: str = ""  # the admin plane's URL
    probes: str = ""  # what ``--metrics-listen`` serves
    runner: Runner | None = None
    parsers: Parsers | None = None
    workers: list[SimWorker] = field(default_factory=list[SimWorker])

    async def know(self, workers: Sequence[SimWorker]) -> None:
        """Connect to *workers*, which are there already, and wait for them."""
        self.workers = list(workers)
        self.pool.set_endpoints([worker.link.endpoint for worker in workers])
        await eventually(
            lambda: sum(len(self.pool.usable(role)) for role in Role) == len(workers),
            "workers ready",
        )

    async def post(
        self, path: str, body: Any, headers: dict[str, str] | None = None
    ) -> Reply:
        """POST JSON, or bytes as they are, and read the whole answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **(headers or {})}
        url = self.url + path
        async with self.client.post(url, data=io.BytesIO(data), headers=sent) as answer:
            return await _reply(answer)

    async def get(self, path: str) -> Reply:
        """GET, and read the whole answer."""
        async with self.client.get(self.url + path) as answer:
            return await _reply(answer)

    async def complete(self, **body: Any) -> Reply:
        """POST a completion."""
        return await self.post("/v1/completions", body)

    async def chat(self, text: str = "hello", **body: Any) -> Reply:
        """POST a chat with one message."""
        messages = [{"role": "user", "content": text}]
        return await self.post("/v1/chat/completions", {"messages": messages, **body})

    async def idle(self) -> None:
        """Return when no worker has anything left."""
        await eventually(lambda: all(w.idle for w in self.workers), "workers idle")


async def _reply(answer: aiohttp.ClientResponse) -> Reply:
    return Reply(answer.status, answer.headers, await answer.text())


@contextlib.asynccontextmanager
async def frontend(
    model: Path,
    arguments: Sequence[str] = (),
    executor: Executor | None = None,
    parsers: Parsers | None = None,
    tracing: Tracing | None = None,
) -> AsyncGenerator[Stack]:
    """Run a frontend that knows no worker yet; stop it in the end."""
    config = parse_config(
        [
            *("--model", str(model), "--served-model-name", MODEL_NAME),
            *("--port", "0", "--worker", "tcp://127.0.0.1:1"),
            # Prompts of tests are short, and hand-overs are what they are about.
            *("--remote-prefill-min-tokens", "0", *arguments),
        ]
    )
    text_model = load_model(str(model), executor)
    keys = Keys.read(config)
    pool = Pool(
        model=MODEL_NAME,
        tokenizer_sha256=text_model.sha256,
        frontend_id="test",
        heartbeat_timeout_s=config.heartbeat_timeout_s,
        stall_timeout_s=config.stall_timeout_s,
        first_token_timeout_s=config.first_token_timeout_s,
        wait_s=config.worker_wait_s,
        remote_prefill=config.remote_prefill,
        routing=config.routing,
        keyring=keys.keyring,
    )
    metrics = FrontendMetrics(MODEL_NAME, config.objectives)
    server = Server(
        config, text_model, pool, metrics, 0, parsers, keys, tracing=tracing
    )
    app = server.application()
    limits, refused = config.access.limits, metrics.connection_refused
    plane = AdminPlane(
        config.admin, keys.admin, pool, metrics, server.models, server.health
    )
    runner = Runner(app, limits, refused)
    has_guard = keys.admin.is_set or keys.admin_tls is not None
    around = server.around(config.admin.host, has_guard=has_guard)
    admin = Runner(plane.application(around), limits, refused)
    probes = Runner(server.probes(), limits, refused)
    doors = {
        "http": Door("listening on", runner, keys.tls),
        "admin": Door("admin plane on", admin, keys.admin_tls),
        "probes": Door("metrics on", probes),
    }
    run = asyncio.create_task(pool.run())
    try:
        urls = {name: await door.open("127.0.0.1", 0) for name, door in doors.items()}
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as client:
            yield Stack(
                urls["http"],
                pool,
                text_model,
                client,
                app,
                server.intake,
                server.live,
                urls["admin"],
                urls["probes"],
                runner,
                parsers,
            )
    finally:
        run.cancel()
        for door in doors.values():
            await door.runner.cleanup()
        pool.close()


@contextlib.asynccontextmanager
async def stack(
    model: Path,
    roles: Sequence[Role] = (Role.AGGREGATED,),
    options: Sequence[str] = ("--step-ms", "0"),
    arguments: Sequence[str] = (),
    executor: Executor | None = None,
    parsers: Parsers | None = None,
    capture: CaptureSettings | None = None,
    tracing: Tracing | None = None,
    worker_tracing: Tracing | None = None,
) -> AsyncGenerator[Stack]:
    """Run workers of *roles* and a frontend; stop them in the end.

    Long work of the frontend goes to *executor*.
    """
    workers = [
        SimWorker(
            *(model, role, f"{role.value}-{n}", options),
            capture=capture,
            tracing=worker_tracing,
        )
        for n, role in enumerate(roles)
    ]
    try:
        async with frontend(model, arguments, executor, parsers, tracing) as running:
            for worker in workers:
                await worker.start()
            await running.know(workers)
            yield running
    finally:
        for worker in workers:
            await worker.stop()
