"""The waits of one sequence for a worker, within a bound."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from .pool import Pool

__all__ = ["BUSY_RETRY_S", "Patience"]

BUSY_RETRY_S = 0.5
"""About how long a sequence under way waits when all workers are at their bounds: some
steps of theirs, in which requests end. Spread, so that not all ask at once."""


class Patience:
    """Calls *resume* when a worker may take the sequence, *give_up* too late.

    The bound runs from the first wait to ``end``, over all waits between them.
    """

    __slots__ = ("_deadline", "_give_up", "_pool", "_resume", "_timers")

    def __init__(
        self, pool: Pool, resume: Callable[[], None], give_up: Callable[[], None]
    ) -> None:
        self._pool = pool
        self._resume = resume
        self._give_up = give_up
        self._deadline: float | None = None
        self._timers: list[asyncio.TimerHandle] = []

    def wait(self) -> None:
        """Wait for a worker to become ready."""
        self.pause()
        loop = asyncio.get_running_loop()
        if self._deadline is None:
            self._deadline = loop.time() + self._pool.wait_s
        self._timers.append(loop.call_at(self._deadline, self._give_up))
        self._pool.wait(self._resume)

    def wait_for_room(self) -> None:
        """Wait a little: a worker that is ready and busy may have room then."""
        self.wait()
        delay_s = BUSY_RETRY_S * random.uniform(0.5, 1.5)  # noqa: S311 - no secret
        loop = asyncio.get_running_loop()
        self._timers.append(loop.call_later(delay_s, self._resume))

    def pause(self) -> None:
        """A worker is being tried."""
        if self._timers:
            for timer in self._timers:
                timer.cancel()
            self._timers.clear()
            self._pool.forget(self._resume)

    def end(self) -> None:
        """All is well again, or over."""
        self.pause()
        self._deadline = None
