"""Sees every message of a case, and has each fault strike at its point, once."""

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec
from faults_client import Answer
from faults_parts import Case, Point, Strike
from faults_proxy import Proxy, Verdict
from faults_stage import LeapingLoop, Stage, turn_date

from tokenwire.protocol.codec import encode
from tokenwire.protocol.messages import (
    Batch,
    EngineDead,
    FromFrontend,
    FromWorker,
    Leg,
    OrphanedKV,
    ReleaseKV,
    Submit,
)
from tokenwire.protocol.tokens import TOKEN_BYTES

__all__ = ["Director"]

Event = tuple[str, int | None, str | None, int]
"""What passes: name, request, leg, and the how manieth."""

_TAGS: dict[type, str] = {
    ReleaseKV: "release", EngineDead: "dead", OrphanedKV: "orphan",
}  # fmt: skip
"""What plans call a message; others go by the tag that they have on the wire."""


def _name(message: FromFrontend | FromWorker) -> str:
    return _TAGS.get(type(message), str(message.__struct_config__.tag))


class Director:
    """Sees every message, and has each strike happen at its point, once."""

    def __init__(self, case: Case) -> None:
        self.stage: Stage
        self.clients: dict[int, asyncio.Task[Answer]] = {}
        self.left: set[int] = set()
        self.num_struck = 0
        self._pending = list(case.strikes)
        self._seen: Counter[tuple[str, int | None, str | None]] = Counter()
        self._legs: dict[str, tuple[int, Leg]] = {}
        self._prefill: dict[int, str] = {}  # by request: the worker that has it
        self._output: dict[int, str] = {}
        self._started = False

    def begin(self) -> None:
        """Take note that the requests begin: from now on messages count."""
        self._started = True

    def passes(
        self, proxy: Proxy, message: FromFrontend | FromWorker, body: bytes
    ) -> Verdict:
        """Return what becomes of *message*."""
        verdict = Verdict([body])
        if not self._started:
            return verdict
        for event in self._events(proxy, message):
            for strike in [
                one for one in self._pending if self._hits(one.point, event)
            ]:
                self._pending.remove(strike)
                self.num_struck += 1
                self._strike(strike, event[1], proxy, message, verdict)
        return verdict

    def _events(self, proxy: Proxy, message: FromFrontend | FromWorker) -> list[Event]:
        """Return what *message* means: name, request, leg, and the how manieth."""
        tag = _name(message)
        if isinstance(message, Submit):
            return [self._count(tag, None, None), *self._submitted(proxy, message)]
        if isinstance(message, Batch):
            return [self._count(tag, None, None), *self._brought(message)]
        return [self._count(tag, None, None)]

    def _submitted(self, proxy: Proxy, message: Submit) -> list[Event]:
        request = int((message.cache_salt or "0").rpartition("/")[2])
        self._legs[message.request_id] = request, message.leg
        where = self._prefill if message.leg is Leg.PREFILL else self._output
        where[request] = proxy.worker
        return [self._count("submit", request, message.leg.value)]

    def _brought(self, batch: Batch) -> list[Event]:
        events: list[Event] = []
        for item in batch.tokens:
            request, leg = self._legs.get(item.request_id, (None, None))
            if leg is not Leg.PREFILL:
                count = len(item.token_ids) // TOKEN_BYTES
                events += [self._count("tokens", request, None) for _ in range(count)]
        for end in batch.finished:
            request, leg = self._legs.get(end.request_id, (None, None))
            name = "prefilled" if leg is Leg.PREFILL else "finished"
            events.append(self._count(name, request, None))
        return events

    def _count(self, name: str, request: int | None, leg: str | None) -> Event:
        self._seen[name, request, leg] += 1
        return name, request, leg, self._seen[name, request, leg]

    def _hits(self, point: Point, event: Event) -> bool:
        return event == (point.message, point.request, point.leg, point.count)

    def _strike(
        self,
        strike: Strike,
        request: int | None,
        proxy: Proxy,
        message: FromFrontend | FromWorker,
        verdict: Verdict,
    ) -> None:
        body = encode(message)
        match strike.action:
            case "drop":
                verdict.bodies = []
            case "repeat":
                verdict.bodies = verdict.bodies * 2
            case "swap":
                verdict.swap = True
            case "truncate":
                verdict.bodies = [body[: len(body) // 2]]
            case "garble":
                verdict.bodies = [b"\xc1" + body[1:]]  # a byte that msgpack never has
            case "hold":
                verdict.hold_s = strike.value
            case "strip":
                verdict.bodies = [encode(_stripped(message))]
            case _:
                self._strike_process(strike, request, proxy, verdict)

    def _strike_process(
        self, strike: Strike, request: int | None, proxy: Proxy, verdict: Verdict
    ) -> None:
        name = proxy.worker
        if request is not None and strike.target != "here":
            where = self._prefill if strike.target == "prefill" else self._output
            name = where.get(request, name)

        def act() -> None:
            self._act(strike, name, request, proxy)

        if strike.point.early and strike.action != "leave":
            ends = strike.action in {"kill", "restart", "cut", "kill frontend"}
            if ends and name == proxy.worker:
                verdict.bodies = []  # what is cut here does not arrive
            act()
        else:
            verdict.after.append(act)

    def _act(
        self, strike: Strike, name: str, request: int | None, proxy: Proxy
    ) -> None:
        stage = self.stage
        match strike.action:
            case "cut":
                proxy.cut()
            case "still":
                stage.still(proxy, strike.value)
            case "kill":
                stage.kill(name)
            case "restart":
                stage.restart(name, strike.value)
            case "freeze":
                stage.freeze(name, strike.value)
            case "drain":
                stage.drain(name, strike.value)
            case "kill frontend":
                for index, client in self.clients.items():
                    if index % len(stage.frontends) == proxy.frontend:
                        self.left.add(index)
                        client.cancel()
                stage.kill_frontend(proxy.frontend)
            case "date":
                turn_date(strike.value)
            case "leap":
                loop = asyncio.get_running_loop()
                assert isinstance(loop, LeapingLoop)
                loop.leapt_s += strike.value
            case "leave":
                if request is not None and request in self.clients:
                    self.left.add(request)
                    self.clients[request].cancel()
            case _:
                raise AssertionError(strike.action)


def _stripped(message: FromFrontend | FromWorker) -> FromFrontend | FromWorker:
    """Return a batch whose ends carry nothing to hand over."""
    assert isinstance(message, Batch)
    ends = [msgspec.structs.replace(end, handover=None) for end in message.finished]
    return msgspec.structs.replace(message, finished=ends)
