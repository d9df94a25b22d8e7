"""Fakes for the worker's parts: a clock that is turned by hand, and those that record.

``RecordingSink`` checks the engine's laws as it records, so that every test that uses
it also tests those.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable

from support.awake import within
from tokenwire.protocol.admin import Action
from tokenwire.protocol.codec import encode
from tokenwire.protocol.messages import (
    Batch,
    Finished,
    FromWorker,
    JsonObject,
    Leg,
    Role,
    Sampling,
    Tokens,
)
from tokenwire.worker.engine import (
    AdminOutcome,
    EngineFinished,
    EngineInfo,
    EngineLoad,
    EngineRequest,
    EngineSink,
    EngineTokens,
    Progress,
)
from tokenwire.worker.sim.engine import SimEngine
from tokenwire.worker.sim.options import parse_options

__all__ = [
    "FakeEngine",
    "FakeTimers",
    "RecordingSender",
    "RecordingSink",
    "engine_request",
    "start_sim",
]


class FakeTimers:
    """Time that passes when ``run`` or ``advance`` is called, and not otherwise."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def time(self) -> float:
        """Return the time."""
        return self.now

    def call_at(self, when: float, callback: Callable[[], None], /) -> object:
        """Call *callback* when the time has come to *when*."""
        heapq.heappush(self._calls, (when, next(self._count), callback))
        return None

    def call_soon(self, callback: Callable[[], None], /) -> object:
        """Call *callback* before time passes."""
        return self.call_at(self.now, callback)

    def advance(self, seconds: float) -> None:
        """Let time pass, and call what falls due, each at its time."""
        until = self.now + seconds
        while self._calls and self._calls[0][0] <= until:
            when, _, callback = heapq.heappop(self._calls)
            self.now = max(self.now, when)
            callback()
        self.now = until

    def settle(self) -> None:
        """Call what is due now."""
        self.advance(0.0)

    def run(self, condition: Callable[[], bool], limit_s: float = 600.0) -> None:
        """Let time pass from call to call until *condition* holds."""
        give_up_at = self.now + limit_s
        while not condition():
            assert self._calls, "nothing is due any more, and it is not so"
            assert self.now < give_up_at, f"not so within {limit_s} s"
            when, _, callback = heapq.heappop(self._calls)
            self.now = max(self.now, when)
            callback()


class RecordingSink:
    """An ``EngineSink`` that keeps everything, and fails if an engine's law is broken."""

    def __init__(self) -> None:
        self.ids: dict[str, list[int]] = {}
        self.batches: dict[str, list[EngineTokens]] = {}
        self.ends: dict[str, EngineFinished] = {}
        self.end_order: list[str] = []
        self.num_outputs = 0
        self.num_tokens = 0
        self.dead: str | None = None
        self._changed = asyncio.Event()

    def outputs(
        self, tokens: list[EngineTokens], finished: list[EngineFinished]
    ) -> None:
        """Record a step's outputs."""
        self.num_outputs += 1
        for new in tokens:
            assert new.token_ids, "empty tokens"
            assert new.request_id not in self.ends, "tokens after the end"
            self.num_tokens += len(new.token_ids)
            self.ids.setdefault(new.request_id, []).extend(new.token_ids)
            self.batches.setdefault(new.request_id, []).append(new)
        for end in finished:
            assert end.request_id not in self.ends, "a second end"
            self.ends[end.request_id] = end
            self.end_order.append(end.request_id)
        self._changed.set()

    def died(self, reason: str) -> None:
        """Record the death."""
        self.dead = reason
        self._changed.set()

    async def until(self, condition: Callable[[], bool], limit_s: float = 60.0) -> None:
        """Wait until *condition* holds; it is asked after every output."""
        async with within(limit_s):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def end(self, request_id: str) -> EngineFinished:
        """Wait for the end of a request, and return it."""
        await self.until(lambda: request_id in self.ends)
        return self.ends[request_id]


class FakeEngine:
    """An ``Engine`` that does nothing by itself; the test speaks to its sink."""

    def __init__(self) -> None:
        self.submitted: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.released: list[tuple[str, JsonObject]] = []
        self.administered: list[tuple[Action, Callable[[AdminOutcome], None]]] = []
        self.current_load = EngineLoad()
        self.refusal = ""  # of any action

    async def start(self, sink: EngineSink, progress: Progress) -> EngineInfo:
        """Not used: the service is given a card."""
        raise NotImplementedError

    def submit(self, request: EngineRequest) -> None:
        """Record *request*."""
        self.submitted.append(request)

    def abort(self, request_id: str) -> None:
        """Record the abort."""
        self.aborted.append(request_id)

    def release_kv(self, request_id: str, handover: JsonObject) -> None:
        """Record the release."""
        self.released.append((request_id, handover))

    def unable(self, action: Action) -> str:
        """Return what the test has set."""
        del action
        return self.refusal

    def administer(
        self, action: Action, timeout_s: float, done: Callable[[AdminOutcome], None]
    ) -> None:
        """Record *action*; the test says how it ended."""
        del timeout_s
        self.administered.append((action, done))

    def load(self) -> EngineLoad:
        """Return what the test has set."""
        return self.current_load

    async def stop(self) -> None:
        """Not used."""
        raise NotImplementedError


class RecordingSender:
    """A link that keeps what is sent; it encodes each message, as the real one does."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, FromWorker]] = []
        self.unreachable: set[bytes] = set()

    def send(self, identity: bytes, message: FromWorker) -> bool:
        """Record *message*, unless the peer is unreachable."""
        encode(message)
        if identity in self.unreachable:
            return False
        self.sent.append((identity, message))
        return True

    def take(self, identity: bytes) -> list[FromWorker]:
        """Return what was sent to *identity* since the last call."""
        taken = [message for peer, message in self.sent if peer == identity]
        self.sent = [entry for entry in self.sent if entry[0] != identity]
        return taken

    def batches(self, identity: bytes) -> list[Batch]:
        """Return the Batches among what ``take`` returns."""
        return [m for m in self.take(identity) if isinstance(m, Batch)]

    def items(self, identity: bytes) -> tuple[list[Tokens], list[Finished]]:
        """Return the items of the Batches among what ``take`` returns."""
        batches = self.batches(identity)
        return (
            [item for batch in batches for item in batch.tokens],
            [end for batch in batches for end in batch.finished],
        )


def engine_request(
    request_id: str = "r",
    prompt: list[int] | None = None,
    *,
    leg: Leg = Leg.FULL,
    handover: JsonObject | None = None,
    priority: int = 0,
    cache_salt: str | None = None,
    sampling: Sampling | None = None,
    max_tokens: int = 4,
    num_prior: int = 0,
) -> EngineRequest:
    """Return a request with the usual values where none are given."""
    return EngineRequest(
        request_id=request_id,
        token_ids=list(range(100, 120)) if prompt is None else prompt,
        sampling=Sampling(max_tokens=max_tokens) if sampling is None else sampling,
        leg=leg,
        handover=handover,
        priority=priority,
        cache_salt=cache_salt,
        num_prior=num_prior,
    )


async def start_sim(
    *options: str,
    model: str = "no-folder",
    role: Role = Role.AGGREGATED,
    timers: FakeTimers | None = None,
) -> tuple[SimEngine, RecordingSink, EngineInfo]:
    """Return a started simulated engine, its sink, and what it serves."""
    engine = SimEngine(
        model=model, role=role, options=parse_options(options), timers=timers
    )
    sink = RecordingSink()
    info = await engine.start(sink, lambda _phase: None)
    return engine, sink, info
