"""The part of the fault suite that needs processes: signals, and the real engine.

A few scenarios under ``tokenwire-up``: streams are under way when a worker or a frontend
gets a signal, which strikes when a client has heard so many events. With ``--engine
vllm`` the same on real engines, in fp32 and greedy, where ids can be exact.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
from faults_case import Result
from faults_client import Answer, ask, body_of, compare
from faults_parts import Ask, digest

from support.up import Up, alive, until, up

__all__ = ["SCENARIOS", "TITLE", "left_behind", "run_scenario"]

TITLE = "processes"
WORKERS = {"prefill": 1, "decode": 2}
NUM_STREAMS = 8
READY_S = {"sim": 40.0, "vllm": 900.0}
REQUEST_S = {"sim": 60.0, "vllm": 900.0}
IDLE_S = {"sim": 6.0, "vllm": 10.0}
ARGUMENTS = {
    "sim": ("--step-ms", "10", "--kv-lease-s", "4"),
    "vllm": ("--dtype", "float32", "--max-model-len", "2048"),
}
SETTINGS = {
    "sim": {"TOKENWIRE_HEARTBEAT_TIMEOUT_S": "2", "TOKENWIRE_WORKER_WAIT_S": "30"},
    "vllm": {"TOKENWIRE_WORKER_WAIT_S": "600"},
}
STRIKE_AT = 12  # events that the first client has heard: in the middle of its output


@dataclass
class Field:
    """A running stack with streams under way."""

    running: Up
    engine: str
    session: aiohttp.ClientSession
    clients: dict[int, asyncio.Task[Answer]] = field(
        default_factory=dict[int, asyncio.Task[Answer]]
    )
    left: set[int] = field(default_factory=set[int])
    undo: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])

    async def back(self) -> None:
        """Wait until every worker serves again."""
        what = "all workers are back"
        await until(lambda: self.running.ready(**WORKERS), READY_S[self.engine], what)


async def kill_decode(at: Field) -> None:
    """SIGKILL one of two decode workers."""
    at.running.kill("decode-0")


async def stop_decode(at: Field) -> None:
    """SIGSTOP one of two decode workers, and SIGCONT after it was given up."""
    pid = at.running.kill("decode-0", signal.SIGSTOP)
    at.undo.append(lambda: _signal(pid, signal.SIGCONT))
    await until(lambda: at.running.ready(prefill=1, decode=1), 60, "it is missed")
    _signal(pid, signal.SIGCONT)


async def blink_decode(at: Field) -> None:
    """SIGSTOP and SIGCONT before anybody gives it up."""
    pid = at.running.kill("decode-0", signal.SIGSTOP)
    await asyncio.sleep(0.5)
    _signal(pid, signal.SIGCONT)


async def kill_prefill(at: Field) -> None:
    """SIGKILL the only prefill worker."""
    at.running.kill("prefill-0")


async def stop_prefill(at: Field) -> None:
    """SIGSTOP the only prefill worker, and SIGCONT after it was given up."""
    pid = at.running.kill("prefill-0", signal.SIGSTOP)
    at.undo.append(lambda: _signal(pid, signal.SIGCONT))
    await until(lambda: at.running.ready(decode=2), 60, "it is missed")
    _signal(pid, signal.SIGCONT)


async def rolling_restart(at: Field) -> None:
    """SIGTERM each worker in turn, the next when the last one is back."""
    for name in ("decode-0", "decode-1", "prefill-0"):
        pid = at.running.kill(name, signal.SIGTERM)
        await until(lambda pid=pid: not alive(pid), READY_S[at.engine], f"{name} left")
        await at.back()


async def kill_two(at: Field) -> None:
    """SIGKILL a decode worker and the prefill worker at once."""
    at.running.kill("decode-1")
    at.running.kill("prefill-0")


async def kill_frontend(at: Field) -> None:
    """SIGKILL the frontend: its clients are cut off, the workers free what was theirs."""
    at.left |= set(at.clients)
    at.running.kill("frontend")
    await at.back()


async def stop_frontend(at: Field) -> None:
    """SIGSTOP the frontend until the workers have given it up, and SIGCONT."""
    pid = at.running.kill("frontend", signal.SIGSTOP)
    at.undo.append(lambda: _signal(pid, signal.SIGCONT))
    await asyncio.sleep(6.0)
    _signal(pid, signal.SIGCONT)


async def leave_between(at: Field) -> None:
    """Have every other client leave as soon as its prefill leg is under way."""
    for index, client in at.clients.items():
        if index % 2 and not client.done():
            at.left.add(index)
            client.cancel()
            await asyncio.sleep(0.02)


SCENARIOS: dict[str, Callable[[Field], Awaitable[None]]] = {
    action.__name__: action
    for action in (
        kill_decode, stop_decode, blink_decode, kill_prefill, stop_prefill,
        rolling_restart, kill_two, kill_frontend, stop_frontend, leave_between,
    )
}  # fmt: skip


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _asks(rng: random.Random, engine: str) -> list[Ask]:
    asks = [
        Ask(
            chat=rng.random() < 0.5,
            stream=True,
            num_prompt=rng.choice((20, 60)),
            max_tokens=rng.randint(100, 250)
            if engine == "sim"
            else rng.randint(60, 120),
            sampling="greedy",
            seed=0,
            logprobs=engine == "sim" and rng.random() < 0.5,
        )
        for _ in range(NUM_STREAMS)
    ]
    if engine == "vllm":
        return asks
    return [
        replace(one, sampling=rng.choice(("greedy", "seeded")), seed=rng.randrange(99))
        for one in asks
    ]


async def left_behind(running: Up, timeout_s: float) -> list[str]:
    """Return the workers that still run or hold something after so long."""
    left: list[str] = []

    def is_idle() -> bool:
        health: dict[str, Any] = running.get("/health")[1] or {}
        instances: list[dict[str, Any]] = health.get("instances") or []
        keys = ("num_running", "num_waiting", "num_open", "kv_usage")
        left[:] = [str(one) for one in instances if any(one.get(key) for key in keys)]
        return not left

    with contextlib.suppress(AssertionError):
        await until(is_idle, timeout_s, "idle")
    return left


@contextlib.asynccontextmanager
async def _stack(engine: str, model: Path) -> AsyncGenerator[Up]:
    with tempfile.TemporaryDirectory() as folder:
        async with up(
            model,
            Path(folder),
            engine=engine,
            workers=WORKERS,
            timeout_s=READY_S[engine],
            engine_arguments=ARGUMENTS[engine],
            settings=SETTINGS[engine],
        ) as running:
            yield running


async def _run(seed: int, number: int, name: str, engine: str, model: Path) -> Result:
    rng = random.Random(f"{seed}/{name}")
    asks = _asks(rng, engine)
    prompts = [[rng.randint(5, 250) for _ in range(one.num_prompt)] for one in asks]
    planned = digest([name, engine, [str(one) for one in asks], prompts])
    result = Result(number, TITLE, planned, num_requests=len(asks), num_strikes=1)
    async with _stack(engine, model) as running, aiohttp.ClientSession() as session:
        at = Field(running, engine, session)
        bodies = [
            body_of(one, prompt, "calm")
            for one, prompt in zip(asks, prompts, strict=True)
        ]
        calm = await asyncio.gather(
            *(
                ask(session, running.url, one, body)
                for one, body in zip(asks, bodies, strict=True)
            )
        )
        strike_now = asyncio.Event()
        num_heard = 0

        def heard() -> None:
            nonlocal num_heard
            num_heard += 1
            if num_heard >= STRIKE_AT:
                strike_now.set()

        for index, one in enumerate(asks):
            body = bodies[index] | {"cache_salt": f"case-{index}"}
            call = ask(session, running.url, one, body, None if index else heard)
            at.clients[index] = asyncio.create_task(call)
        if name == "leave_between":
            strike_now.set()
        await strike_now.wait()
        try:
            await SCENARIOS[name](at)
            result.num_struck = 1
            done, _ = await asyncio.wait(at.clients.values(), timeout=REQUEST_S[engine])
        finally:
            for undo in at.undo:
                undo()
        _judge(result, at, done, calm)
        await at.back()
        left = await left_behind(running, IDLE_S[engine])
        if left:
            result.num_leaked += 1
            result.faults.append(f"left behind: {left}")
    return result


def _judge(
    result: Result, at: Field, done: set[asyncio.Task[Answer]], calm: list[Answer]
) -> None:
    outcome: list[object] = []
    for index, client in at.clients.items():
        if index in at.left:
            client.cancel()
            outcome.append("left")
        elif client not in done:
            client.cancel()
            result.num_lost += 1
            result.faults.append(f"request {index}: no end")
        elif not (got := client.result()).done:
            result.num_lost += 1
            result.faults.append(f"request {index}: {got.status} {got.error}")
        else:
            found = compare(got, calm[index])
            result.num_lost_tokens += found.num_lost
            result.num_repeated_tokens += found.num_repeated
            result.worst_pause_s = max(result.worst_pause_s, got.longest_pause_s)
            outcome.append(digest([one.ids for one in got.choices.values()]))
            if found:
                result.faults.append(f"request {index}: {found}")
    result.outcome_digest = digest(outcome)


def run_scenario(seed: int, name: str, engine: str, model: Path) -> Result:
    """Run one scenario; a crash of it is a failure of it."""
    number = -1 - list(SCENARIOS).index(name)
    try:
        return asyncio.run(_run(seed, number, name, engine, model))
    except Exception as error:
        crash = Result(number, TITLE, "")
        crash.faults.append(f"{name} crashed: {type(error).__name__}: {error}")
        return crash
