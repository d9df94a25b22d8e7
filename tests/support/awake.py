"""A clock that stands still with the machine.

Machines that tests run on are shared; one that was watched stood still for 5 s and for
59 s. What is awaited stood still with it, so that time proves nothing. A thread of its
own keeps the time: a blocked event loop, or a slow condition, does not stop it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator

__all__ = ["STANDSTILL_S", "Awake", "within"]

STANDSTILL_S = 60.0
"""The longest standstill that was watched, for limits that only a wall clock can keep:
those of sockets, of blocking calls and of other programs."""

TICK_S = 0.1
MAX_TICK_S = 0.5
"""What a tick counts at most: after more, this process did not run."""


class _Ticks:
    """How long this process has run since the first question; one thread."""

    def __init__(self) -> None:
        self.seconds = 0.0
        threading.Thread(target=self._run, name="awake", daemon=True).start()

    def _run(self) -> None:
        before = time.monotonic()
        while True:
            time.sleep(TICK_S)
            now = time.monotonic()
            self.seconds += min(now - before, MAX_TICK_S)
            before = now


class Awake:
    """The time since it was made, without that in which the machine stood still."""

    _ticks: _Ticks | None = None

    def __init__(self) -> None:
        if Awake._ticks is None:
            Awake._ticks = _Ticks()
        self._clock = Awake._ticks
        self._since = self._clock.seconds

    @property
    def seconds(self) -> float:
        """How long, to a tick."""
        return self._clock.seconds - self._since


@contextlib.asynccontextmanager
async def within(seconds: float) -> AsyncGenerator[None]:
    """Raise ``TimeoutError`` if the block takes more than *seconds* awake."""
    awake, loop = Awake(), asyncio.get_running_loop()
    later: list[asyncio.TimerHandle] = []

    def look(left: float) -> None:
        if left > 0:
            delay = max(left, TICK_S)
            later[:] = [loop.call_later(delay, lambda: look(seconds - awake.seconds))]
        else:
            limit.reschedule(loop.time())

    async with asyncio.timeout(None) as limit:
        look(seconds)
        try:
            yield
        finally:
            later[0].cancel()
