"""The numbers of updates, which frontends choose alike without a word to each other.

A number says when and what: its upper half is one above that of the newest update that
the workers have shown, its lower half a checksum of what is loaded. So one update that
is sent to worker after worker, at once or in turn, through one frontend or several, has
one number; and of two different ones at the same time, one is the newer for everybody.

Laws:
- What a worker gets has a larger number than what it has.
- One frontend gives different updates different numbers, the later the larger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from time import time
from zlib import crc32

from .weights import Weights

__all__ = ["Updates"]

_MARK_BITS = 32
"""Of a number: which update it is. The rest counts; it begins at the clock's seconds and
then goes up by one with each update, so that all is below 2^64 until 2106."""

_MARK = (1 << _MARK_BITS) - 1


class Updates:
    """Numbers for what is loaded; *weights* are those that the workers have shown."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._last = 0  # the largest that was given
        self._under_way: Counter[tuple[str, int]] = Counter()  # adapter, number

    @contextmanager
    def numbered(
        self, lora: str, what: str, have: Iterable[int | None]
    ) -> Generator[int]:
        """Give the number of an update; it is under way within the block.

        Args:
            lora: The adapter that is loaded; empty: the model's own weights.
            what: Tells it from others: how its user calls it, or where it is.
            have: What the workers that it is for have of it now; None: nothing.
        """
        mark = crc32(what.encode())
        held = max((number for number in have if number is not None), default=0)
        number = self._newest(lora)
        if number & _MARK != mark or number <= held:
            number = self._next(mark)
        self._last = max(self._last, number)
        entry = lora, number
        self._under_way[entry] += 1
        try:
            yield number
        finally:
            self._under_way[entry] -= 1
            self._under_way += Counter()  # without those that are at 0

    def _newest(self, lora: str) -> int:
        """Return the newest update of *lora*, shown by a worker or under way to one."""
        weights = self._weights
        shown = weights.adapters.get(lora, 0) if lora else weights.newest
        return max([shown, *(n for name, n in self._under_way if name == lora)])

    def _next(self, mark: int) -> int:
        """Return a number above all that are known.

        Not of the clock, where any is known: others would read another time. Where none
        is, frontends that have run for longer may remember some, which the clock is past.
        """
        known = max(self._last, self._weights.highest)
        count = (known >> _MARK_BITS) + 1 if known else int(time())
        return count << _MARK_BITS | mark
