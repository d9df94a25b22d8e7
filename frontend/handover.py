"""The watch over a decode worker's read of KV: its source may be lost under it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .link import Link

__all__ = ["READ_GRACE_S", "Handover"]

READ_GRACE_S = 2.0
"""How long a decode worker may go on reading from a prefill worker that was lost: what
had been read is used within a step; from a frozen peer it would wait for ever."""


class Handover:
    """Calls *overdue* with the reason when the source is lost and the read goes on.

    Args:
        source: The worker that a decode worker reads from now.
        overdue: Who hears of it.
    """

    __slots__ = ("_bound", "_overdue", "_source")

    def __init__(self, source: Link, overdue: Callable[[str], None]) -> None:
        self._source = source
        self._overdue = overdue
        self._bound: asyncio.TimerHandle | None = None
        source.watch(self._source_lost)

    def end(self) -> None:
        """The read has ended, one way or another."""
        self._source.unwatch(self._source_lost)
        if self._bound is not None:
            self._bound.cancel()

    def _source_lost(self, reason: str) -> None:
        loop = asyncio.get_running_loop()
        self._bound = loop.call_later(READ_GRACE_S, self._overdue, reason)
