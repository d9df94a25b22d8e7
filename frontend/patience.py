"""A wait for some worker to become ready, within a bound."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .pool import Pool

__all__ = ["Patience"]


class Patience:
    """The waits of one sequence; the bound runs from the first until ``end``."""

    __slots__ = ("_bound", "_give_up", "_pool", "_resume")

    def __init__(
        self, pool: Pool, resume: Callable[[], None], give_up: Callable[[], None]
    ) -> None:
        self._pool = pool
        self._resume = resume
        self._give_up = give_up
        self._bound: asyncio.TimerHandle | None = None

    def wait(self) -> None:
        """Have ``resume`` called when a worker is ready, or ``give_up`` too late."""
        if self._bound is None:
            loop = asyncio.get_running_loop()
            self._bound = loop.call_later(self._pool.wait_s, self._give_up)
        self._pool.wait(self._resume)

    def end(self) -> None:
        """Wait no more."""
        if self._bound is not None:
            self._bound.cancel()
            self._bound = None
            self._pool.forget(self._resume)
