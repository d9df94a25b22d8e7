"""What vLLM is told, and when: pauses that end otherwise, sleep, and cache salts."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from support.awake import within
from tokenwire.protocol.admin import Action, Pause, Resume, Sleep
from tokenwire.protocol.messages import Sampling
from tokenwire.worker.engine import AdminOutcome, EngineRequest
from tokenwire.worker.vllm import operator as module
from tokenwire.worker.vllm.operator import Operator


class EngineDeadError(Exception):
    """As vLLM's."""


@dataclass
class Core:
    """vLLM's ``AsyncLLM``: takes calls in order, and answers those that it may."""

    calls: list[Any] = field(default_factory=list[Any])
    is_paused: bool = False
    hangs: set[str] = field(default_factory=set[str])  # get no answer

    engine_core = SimpleNamespace(outputs_queue=asyncio.Queue())

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        """Pause; vLLM answers a wait when nothing runs."""
        assert not clear_cache
        await self._take(f"pause {mode}", is_paused=True)

    async def resume_generation(self) -> None:
        """Go on."""
        await self._take("resume", is_paused=False)

    async def sleep(self, level: int, mode: str) -> None:
        """Sleep."""
        await self._take(f"sleep {level} {mode}", is_paused=True)

    async def reset_prefix_cache(self, running: bool = False) -> bool:
        """Fail where vLLM fails: requests wait for KV from elsewhere."""
        await self._take(f"reset {running}", is_paused=self.is_paused)
        if running:
            msg = "Failed to reset KV cache"
            raise RuntimeError(msg)
        return True

    async def _take(self, call: str, *, is_paused: bool) -> None:
        self.calls.append(call)
        self.is_paused = is_paused
        if call in self.hangs:
            await asyncio.Event().wait()
        await asyncio.sleep(0)


def operator(core: Core) -> Operator:
    """Return an operator of a CPU's engine."""
    vllm: Any = SimpleNamespace(EngineDeadError=EngineDeadError, is_cpu=True)
    return Operator(vllm, core, None)


async def do(one: Operator, action: Action, timeout_s: float = 0.0) -> AdminOutcome:
    """Do an action as the engine has it done."""
    one.expect(action)
    async with within(60):
        return await one.do(action, timeout_s)


@pytest.mark.parametrize("action", [Pause("wait"), Sleep(0, "wait")])
async def test_what_waits_too_long_is_undone(action: Action) -> None:
    """The engine goes on, as the Status says."""
    core = Core(hangs={"pause wait"})
    outcome = await do(operator(core), action, 0.01)
    assert (outcome.kind, outcome.is_stuck) == ("timeout", False)
    assert core.calls == ["pause wait", "resume"]


async def test_an_engine_that_was_paused_before_stays_so() -> None:
    """A second pause that fails does not end the first."""
    core = Core(hangs={"pause wait"})
    one = operator(core)
    await do(one, Pause("keep", clear_cache=False))
    await do(one, Pause("wait"), 0.01)
    assert core.calls == ["pause keep", "pause wait", "pause keep"]


async def test_an_engine_that_does_not_go_on_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Within a bound: else the worker would be busy for ever."""
    monkeypatch.setattr(module, "UNDO_WAIT_S", 0.01)
    core = Core(hangs={"pause wait", "resume"})
    outcome = await do(operator(core), Pause("wait"), 0.01)
    assert (outcome.kind, outcome.is_stuck) == ("timeout", True)


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_resume_wins_over_the_pause_that_it_crosses(is_late: bool) -> None:
    """Whichever of the two the core gets first: the last word is resume."""
    core = Core(hangs={"pause wait"})
    one = operator(core)
    one.expect(Pause("wait"))
    if is_late:
        pausing = asyncio.ensure_future(one.do(Pause("wait"), 0))
        while not core.calls:
            await asyncio.sleep(0)
        assert not (await do(one, Resume())).error
    else:  # while the worker waits for what was aborted
        assert not (await do(one, Resume())).error
        pausing = asyncio.ensure_future(one.do(Pause("wait"), 0))
    async with within(60):
        outcome = await pausing
    assert outcome.error == "it was resumed"
    assert not core.is_paused
    assert core.calls[-1] == "resume"


async def test_a_resume_that_the_core_gets_first_is_sent_again() -> None:
    """Its answer comes when the pause has been sent behind it."""
    core = Core(hangs={"pause wait"})
    one = operator(core)
    one.expect(Pause("wait"))
    both = [one.do(Resume(), 0), one.do(Pause("wait"), 0)]
    async with within(60):
        resumed, paused = await asyncio.gather(*both)
    assert (resumed.error, paused.error) == ("", "it was resumed")
    assert core.calls == ["resume", "pause wait", "resume"]
    assert not core.is_paused


async def test_the_engine_stands_before_it_sleeps() -> None:
    """So a sleep that waits may be given up."""
    core = Core()
    assert not (await do(operator(core), Sleep(0, "wait"))).error
    assert core.calls == ["pause wait", "sleep 0 keep"]


async def test_a_pause_that_clears_the_cache_clears_that_of_running_requests() -> None:
    """As vLLM's own; what it cannot clear is not found again all the same."""
    core = Core()
    one = operator(core)
    assert not (await do(one, Pause("keep"))).error
    assert core.calls == ["pause keep", "reset True"]
    assert one.salt_of(EngineRequest("r", [1], Sampling(max_tokens=1))) == "1:0:"


async def test_a_clients_salt_is_never_the_operators() -> None:
    """Whatever it looks like: it would find KV that was to be forgotten."""
    one = operator(Core())
    asked = EngineRequest("r", [1], Sampling(max_tokens=1), cache_salt="1:0:")
    plain = EngineRequest("r", [1], Sampling(max_tokens=1))
    assert one.salt_of(plain) is None
    before = one.salt_of(asked)
    await do(one, Pause("keep"))
    assert before
    assert before not in {"1:0:", one.salt_of(asked), one.salt_of(plain)}
