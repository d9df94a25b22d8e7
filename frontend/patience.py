"""The waits of one sequence for a worker, within a bound."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from .pool import Pool

__all__ = ["LOOK_AGAIN_S", "Patience"]

LOOK_AGAIN_S = 0.5
"""About how long a sequence waits before it asks again a worker that is ready: in some
steps of a full one requests end, and one that failed may have come back. Spread, so that
not all ask at once."""


class Patience:
    """Calls *resume* when a worker may take the sequence, *give_up* too late.

    The bound runs from the first wait to ``end``, over all waits between them.
    """

    __slots__ = ("_bound", "_deadline", "_give_up", "_look", "_pool", "_resume")

    def __init__(
        self, pool: Pool, resume: Callable[[], None], give_up: Callable[[], None]
    ) -> None:
        self._pool = pool
        self._resume = resume
        self._give_up = give_up
        self._deadline: float | None = None
        self._bound: asyncio.TimerHandle | None = None
        self._look: asyncio.TimerHandle | None = None

    def wait(self) -> None:
        """Wait for a worker to become ready, or a little if one is."""
        self.pause()
        loop = asyncio.get_running_loop()
        if self._deadline is None:
            self._deadline = loop.time() + self._pool.wait_s
        self._bound = loop.call_at(self._deadline, self._give_up)
        self._pool.wait(self._resume)
        self._look_later()

    def pause(self) -> None:
        """A worker is being tried."""
        if self._bound is not None and self._look is not None:
            self._bound.cancel()
            self._look.cancel()
            self._bound = self._look = None
            self._pool.forget(self._resume)

    def end(self) -> None:
        """All is well again, or over."""
        self.pause()
        self._deadline = None

    def _look_later(self) -> None:
        delay_s = LOOK_AGAIN_S * random.uniform(0.5, 1.5)  # noqa: S311 - no secret
        self._look = asyncio.get_running_loop().call_later(delay_s, self._look_again)

    def _look_again(self) -> None:
        if self._pool.ready:
            self._resume()
        else:
            self._look_later()
