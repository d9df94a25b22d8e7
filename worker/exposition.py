"""What the engine measures, for frontends: made in a thread, once for all who ask.

Laws:
- The event loop waits for nothing: some hundred histogram lines take milliseconds.
- It is made at most once in ``FRESH_S``, however many frontends ask, and however often.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from tokenwire.protocol.limits import MAX_METRICS_BYTES

__all__ = ["FRESH_S", "Exposition"]

_log = logging.getLogger(__name__)

FRESH_S = 1.0
"""So old a text is given again: frontends are scraped every few seconds, each by its
own clock, and vLLM's counts change once a step."""

MAX_TEXT_BYTES = MAX_METRICS_BYTES - 1_024
"""What a MetricsText adds to its text is less than 100 bytes."""


class Exposition:
    """A text that is made when asked for; for one event loop.

    Args:
        make: Returns the text; called in a thread.
    """

    def __init__(self, make: Callable[[], str]) -> None:
        self._make = make
        self._text = ""
        self._made_at = float("-inf")
        self._making: asyncio.Task[None] | None = None
        self._asking: dict[bytes, Callable[[str], None]] = {}

    def ask(self, who: bytes, take: Callable[[str], None]) -> None:
        """Have *take* called with the text, now or soon.

        Args:
            who: The peer that asks; of two questions at once the later counts.
            take: Called on the event loop.
        """
        loop = asyncio.get_running_loop()
        if self._making is None and loop.time() - self._made_at < FRESH_S:
            take(self._text)
            return
        self._asking[who] = take
        if self._making is None:
            self._making = loop.create_task(self._refresh())

    def close(self) -> None:
        """Answer nobody any more: the link closes."""
        self._asking.clear()

    async def _refresh(self) -> None:
        try:
            text = await asyncio.to_thread(self._make)
            size = len(text.encode())
            if size > MAX_TEXT_BYTES:
                _log.error("the engine's metrics have %d bytes: not passed on", size)
                text = ""
        except Exception:  # noqa: BLE001 - a collector's bug must not end the worker
            _log.exception("the engine's metrics cannot be read")
            text = ""
        self._text, self._made_at = text, asyncio.get_running_loop().time()
        self._making = None
        asking, self._asking = self._asking, {}
        for take in asking.values():
            take(text)
