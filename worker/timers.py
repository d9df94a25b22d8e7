"""Time and deferred calls, as the service and the simulated engine need them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

__all__ = ["LoopTimers", "Timers"]


class Timers(Protocol):
    """An event loop's clock; tests give one that they turn themselves."""

    def time(self) -> float:
        """Return the time, in s; it never goes back."""
        ...

    def call_at(self, when: float, callback: Callable[[], None], /) -> object:
        """Call *callback* at the time *when*."""

    def call_soon(self, callback: Callable[[], None], /) -> object:
        """Call *callback* in the loop's next iteration."""


class LoopTimers:
    """The running event loop, with a finer clock.

    uvloop's ``time()`` has whole milliseconds and stands still within an iteration:
    too coarse for latencies, and wrong after a long callback.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.time = time.monotonic

    def call_at(self, when: float, callback: Callable[[], None]) -> None:
        """Call *callback* at the time *when*."""
        self._loop.call_later(max(0.0, when - time.monotonic()), callback)

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call *callback* in the loop's next iteration."""
        self._loop.call_soon(callback)
