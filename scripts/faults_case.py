"""Runs one case of the fault suite, and judges it.

Each request is asked twice: of an undisturbed worker, and where the faults strike. The
two answers must be equal to the token, and when all is over nothing may be held.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import random
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
from faults_client import Answer, ask, body_of, compare
from faults_plan import Case, Point, Strike, digest, plan, plan_digest
from faults_proxy import Proxy, Verdict
from faults_stage import LeapingLoop, Stage, turn_date

from support.stack import Stack, stack
from tokenwire.protocol.codec import encode
from tokenwire.protocol.messages import (
    Batch,
    Bye,
    Cancel,
    Card,
    EngineDead,
    FromFrontend,
    FromWorker,
    Hello,
    Leg,
    Load,
    Ping,
    Refused,
    ReleaseKV,
    Submit,
)
from tokenwire.protocol.tokens import TOKEN_BYTES

__all__ = ["Result", "run_case"]

_log = logging.getLogger(__name__)

REQUEST_S = 30.0
"""A request that has not ended by then is lost: every bound of the case is shorter."""

HUNG_S = 120.0
"""A case that blocks its process for so long ends it, with a traceback: a bug as well."""

LEAK_S = 4.0
"""What is held so long after the last answer has leaked; leases of the cases: 2 s."""

LOOK_S = 0.02

_TAGS: dict[type, str] = {
    Hello: "hello", Submit: "submit", Cancel: "cancel", ReleaseKV: "release",
    Ping: "ping", Bye: "bye", Card: "card", Refused: "refused", Batch: "batch",
    Load: "load", EngineDead: "dead",
}  # fmt: skip


@dataclass
class Result:
    """What one case came to."""

    number: int
    kind: str
    plan_digest: str
    outcome_digest: str = ""
    num_requests: int = 0
    num_lost: int = 0
    num_lost_tokens: int = 0
    num_repeated_tokens: int = 0
    num_leaked: int = 0
    num_struck: int = 0
    num_strikes: int = 0
    worst_pause_s: float = 0.0
    faults: list[str] = field(default_factory=list[str])  # why the case failed

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults


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

    def _events(
        self, proxy: Proxy, message: FromFrontend | FromWorker
    ) -> list[tuple[str, int | None, str | None, int]]:
        """Return what *message* means: name, request, leg, and the how manieth."""
        tag = _TAGS[type(message)]
        if isinstance(message, Submit):
            return [self._count(tag, None, None), *self._submitted(proxy, message)]
        if isinstance(message, Batch):
            return [self._count(tag, None, None), *self._brought(message)]
        return [self._count(tag, None, None)]

    def _submitted(
        self, proxy: Proxy, message: Submit
    ) -> list[tuple[str, int | None, str | None, int]]:
        request = int((message.cache_salt or "0").rpartition("/")[2])
        self._legs[message.request_id] = request, message.leg
        where = self._prefill if message.leg is Leg.PREFILL else self._output
        where[request] = proxy.worker
        return [self._count("submit", request, message.leg.value)]

    def _brought(self, batch: Batch) -> list[tuple[str, int | None, str | None, int]]:
        events: list[tuple[str, int | None, str | None, int]] = []
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

    def _count(
        self, name: str, request: int | None, leg: str | None
    ) -> tuple[str, int | None, str | None, int]:
        self._seen[name, request, leg] += 1
        return name, request, leg, self._seen[name, request, leg]

    def _hits(
        self, point: Point, event: tuple[str, int | None, str | None, int]
    ) -> bool:
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


async def _prepared(calm: Stack, case: Case) -> list[tuple[dict[str, Any], Answer]]:
    """Return each request's body, its stops filled in, and its undisturbed answer."""
    prepared: list[tuple[dict[str, Any], Answer]] = []
    for index, one in enumerate(case.asks):
        rng = random.Random(f"{case.seed}/{case.number}/{index}")
        prompt = [rng.randint(5, 250) for _ in range(one.num_prompt)]
        body = body_of(one, prompt, f"calm/{case.number}/{index}")
        stays = replace(one, leaves_after=None, reads_slowly=False)
        if one.stop_after is not None or one.stop_token_after is not None:
            probe = {**body, "stream": False, "n": 1}
            probe.pop("stream_options", None)
            probe["nvext"] = {"extra_fields": ["completion_token_ids"]}
            whole = replace(stays, stream=False)
            found = (await ask(calm.client, calm.url, whole, probe)).choice(0)
            if one.stop_token_after is not None:
                body["stop_token_ids"] = [found.ids[one.stop_token_after - 1]]
            if one.stop_after is not None:
                text = found.text
                body["stop"] = [text[len(text) // 3 :][:4]]
        answer = await ask(calm.client, calm.url, stays, body)
        body["cache_salt"] = f"case/{case.number}/{index}"
        prepared.append((body, answer))
    return prepared


async def _ask_all(
    case: Case, stage: Stage, director: Director, bodies: list[dict[str, Any]]
) -> list[Answer | None]:
    """Send every request at once; None for one that has not ended in time."""
    director.begin()
    for index, (one, body) in enumerate(zip(case.asks, bodies, strict=True)):
        at = stage.frontends[index % len(stage.frontends)]
        call = ask(at.client, at.url, one, body)
        director.clients[index] = asyncio.create_task(call)
    pending = set(director.clients.values())
    give_up_at = time.monotonic() + REQUEST_S  # the loop's clock may leap
    while pending and time.monotonic() < give_up_at:
        _, pending = await asyncio.wait(pending, timeout=0.5)
    answers: list[Answer | None] = []
    for client in director.clients.values():
        is_over = client.done()
        client.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await client
        if client.cancelled():
            answers.append(Answer(left=True) if is_over else None)
        else:
            answers.append(client.result())
    return answers


def _judge(
    case: Case, result: Result, director: Director, got: list[Answer | None],
    calm: list[Answer],
) -> None:  # fmt: skip
    outcome: list[object] = []
    for index, (answer, right) in enumerate(zip(got, calm, strict=True)):
        if not right.done:
            result.faults.append(f"request {index}: no calm answer: {right.error}")
        elif answer is None:
            result.num_lost += 1
            result.faults.append(f"request {index}: no end within {REQUEST_S:.0f} s")
        elif answer.left or index in director.left:
            outcome.append("left")
            continue
        elif not answer.done:
            busy = answer.status in {429, 503} and answer.retry_after
            if case.refusals and busy:
                outcome.append("answered")
                continue
            result.num_lost += 1
            result.faults.append(f"request {index}: {answer.status} {answer.error}")
        else:
            result.worst_pause_s = max(result.worst_pause_s, answer.longest_pause_s)
            found = compare(answer, right)
            result.num_lost_tokens += found.num_lost
            result.num_repeated_tokens += found.num_repeated
            if found:
                result.faults.append(f"request {index}: {found}")
            elif case.refusals:
                outcome.append("answered")
                continue
            outcome.append([index, digest(_content(answer))])
            continue
        outcome.append([index, "failed"])
    result.outcome_digest = digest(outcome)


def _content(answer: Answer) -> object:
    return [
        [index, one.ids, one.text, one.finish_reason]
        for index, one in sorted(answer.choices.items())
    ]


async def _nothing_left(stage: Stage) -> dict[str, int]:
    deadline = time.monotonic() + LEAK_S
    while (left := stage.leaks()) and time.monotonic() < deadline:
        await asyncio.sleep(LOOK_S)
    return left


async def _run(case: Case, model: Path) -> Result:
    result = Result(
        case.number, case.kind, plan_digest(case), num_requests=len(case.asks)
    )
    director = Director(case)
    async with stack(model) as quiet:
        prepared = await _prepared(quiet, case)
    async with Stage(case, model, director) as stage:
        director.stage = stage
        got = await _ask_all(case, stage, director, [body for body, _ in prepared])
        left = await _nothing_left(stage)
        result.num_leaked = sum(left.values())
        if left:
            result.faults.append(f"left behind: {left}")
    result.num_strikes, result.num_struck = len(case.strikes), director.num_struck
    _judge(case, result, director, got, [answer for _, answer in prepared])
    return result


def run_case(seed: int, number: int, model: Path, log: Path | None = None) -> Result:
    """Run one case in an event loop of its own; a crash of it is a failure of it."""
    if log is not None:
        logging.basicConfig(
            filename=log, filemode="w", level=logging.INFO, force=True,
            format="%(asctime)s %(levelname)s %(name)s %(message)s",
        )  # fmt: skip
    case = plan(seed, number)
    faulthandler.dump_traceback_later(HUNG_S, exit=True)
    try:
        with asyncio.Runner(loop_factory=LeapingLoop) as runner:
            return runner.run(_run(case, model))
    except Exception as error:
        _log.exception("case %d", number)
        crash = Result(number, case.kind, plan_digest(case))
        crash.faults.append(f"the case crashed: {type(error).__name__}: {error}")
        return crash
    finally:
        faulthandler.cancel_dump_traceback_later()
        turn_date(0)
