"""The clock of tests: what stands still with the machine does not use a limit up."""

from __future__ import annotations

import asyncio

import pytest

from support.awake import Awake, within


class Ticks:
    """The time that this process has run, as the test says."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_looks = 0

    @property
    def seconds(self) -> float:
        """Return it."""
        self.num_looks += 1
        return self.now


async def test_a_limit_waits_for_a_machine_that_stood_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However late it is by the loop's clock; awake for long enough, it is over."""
    ticks = Ticks()
    monkeypatch.setattr(Awake, "_ticks", ticks)

    async def wait() -> None:
        async with within(0.1):
            await asyncio.Event().wait()

    waiting = asyncio.create_task(wait())
    while ticks.num_looks < 4:  # its beginning, and three at which no time had passed
        await asyncio.sleep(0)
    assert not waiting.done()
    ticks.now = 1.0
    with pytest.raises(TimeoutError):
        await waiting


async def test_what_ends_in_time_is_left_alone() -> None:
    """Also by a limit that falls due later."""
    async with within(0.1):
        pass
    loop = asyncio.get_running_loop()
    began = loop.time()
    while loop.time() < began + 0.2:
        await asyncio.sleep(0)
