"""Runs one case of the fault suite, and judges it; its limits are of awake time.

Each request is asked twice: of an undisturbed worker, and where the faults strike. The
two answers must be equal to the token, and when all is over nothing may be held.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from faults_client import Answer, ask, body_of, compare
from faults_director import Director
from faults_parts import Case, digest
from faults_plan import plan, plan_digest
from faults_stage import LeapingLoop, Stage, turn_date

from support.awake import Awake
from support.stack import Stack, stack

__all__ = ["Result", "run_case"]

_log = logging.getLogger(__name__)

REQUEST_S = 30.0
"""A request that has not ended by then is lost: every bound of the case is shorter."""

HUNG_S = 180.0
"""A case that blocks its process for so long ends it, with a traceback: a bug as well. A
machine may stand still for a minute of it."""

LEAK_S = 4.0
"""What is held so long after the last answer has leaked; leases of the cases: 2 s."""

RECONNECT_S = 14.0
"""A Hello that got lost is said again after 10 s, and a connection tried every 2 s."""

FORBIDDEN = {"drop", "repeat", "swap", "truncate", "garble"}
"""What the protocol rules out on a link, so that it must be noticed."""

LOOK_S = 0.02


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
    awake = Awake()
    while pending and awake.seconds < REQUEST_S:
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
    awake = Awake()
    while (left := stage.leaks()) and awake.seconds < LEAK_S:
        await asyncio.sleep(LOOK_S)
    return left


async def _whole_again(stage: Stage) -> list[str]:
    """Wait until every frontend is connected to every worker; return what is not."""
    awake = Awake()
    while (missing := stage.missed()) and awake.seconds < RECONNECT_S:
        await asyncio.sleep(LOOK_S)
    return missing


async def _is_noticed(case: Case, stage: Stage, director: Director) -> bool:
    """Return whether what was done to a message is noticed by who did not get it.

    Not by a deadline, which other traffic may put off for ever. Where processes or
    connections are struck too, the message may be lost with them.
    """
    actions = {strike.action for strike in case.strikes}
    if not actions or not actions <= FORBIDDEN or not director.num_struck:
        return True
    awake = Awake()
    while not stage.num_violations and awake.seconds < LEAK_S:
        await asyncio.sleep(LOOK_S)
    return bool(stage.num_violations)


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
        if not await _is_noticed(case, stage, director):
            result.faults.append("nobody has noticed what was done to a message")
        if missing := await _whole_again(stage):
            result.faults.append(f"not connected again: {missing}")
    num_engine = sum("--fault" in options for options in case.engine.values())
    result.num_strikes = len(case.strikes) + num_engine
    result.num_struck = director.num_struck + num_engine
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
