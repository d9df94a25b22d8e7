"""How often a line is said: what a loop, or every request, would repeat is left out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

__all__ = ["MAX_LINES", "PERIOD_S", "UNLIMITED", "RateLimit"]

MAX_LINES = 100
"""Of one kind in a period: each of some requests that fail together can be read, and a
loop, or thousands of requests, write no more than 10 lines a second."""

PERIOD_S = 10.0

MAX_KINDS = 1_024
"""Formats that are remembered: the program has some hundreds."""

MAX_FORMAT_CHARS = 200
"""Of a format that tell it from others: some have their arguments in them already."""

UNLIMITED = ("tokenwire.access", "tokenwire.prompts")
"""Loggers whose every line was asked for."""


class RateLimit(logging.Filter):
    """Lets ``MAX_LINES`` records of one kind pass in each period; for a handler.

    A kind is a logger and a format, whatever the arguments. The first one of a later
    period says how many were left out. The event loop and threads call it, one at a time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: dict[
            tuple[str, str], tuple[float, int]
        ] = {}  # since when, how many

    @property
    def num_kinds(self) -> int:
        """Kinds that are remembered."""
        return len(self._kinds)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether *record* is written."""
        if record.name in UNLIMITED:
            return True
        now = self._clock()
        kind = (record.name, str(record.msg)[:MAX_FORMAT_CHARS])
        since, number = self._kinds.get(kind, (now, 0))
        if now - since >= PERIOD_S:
            if number > MAX_LINES:
                record.left_out = number - MAX_LINES
            since, number = now, 0
        if len(self._kinds) >= MAX_KINDS and kind not in self._kinds:
            self._kinds.clear()
        self._kinds[kind] = (since, number + 1)
        return number < MAX_LINES
