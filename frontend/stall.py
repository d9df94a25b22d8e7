"""When a worker that beats but brings no tokens counts as stalled; no I/O, no clock."""

from __future__ import annotations

__all__ = ["STALL_TIMEOUT_S", "SUSPECT_S", "Stall"]

STALL_TIMEOUT_S = 8.0
"""The least silence that counts. Steps take 10 to 100 ms; a long prompt that is not
prefilled in chunks may hold an engine for seconds."""

STALL_GAPS = 50
"""So many usual gaps between batches also have to pass: a CPU's steps may take a second
each."""

SUSPECT_S = 30.0
"""How long a worker that stalled gets nothing new: it answers, but does not work."""

_WEIGHT = 0.05  # of the newest gap in the mean: the last twenty count most


class Stall:
    """The usual time between a worker's batches, and how long none has come."""

    __slots__ = ("_batch_at", "_gap_s", "_timeout_s")

    def __init__(self, timeout_s: float = STALL_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._gap_s = 0.0
        self._batch_at: float | None = None

    def batch(self, now: float) -> None:
        """Take note of a batch; called per engine step."""
        if self._batch_at is not None:
            # Idle times count as well: they make the bound longer, never shorter, and
            # not by more than the bound itself.
            gap = min(now - self._batch_at, self._timeout_s)
            self._gap_s += (gap - self._gap_s) * _WEIGHT
        self._batch_at = now

    def silence_s(self, now: float) -> float | None:
        """Return the time since the last batch, if it is too long."""
        if self._batch_at is None:
            return None
        silence = now - self._batch_at
        bound = max(self._timeout_s, STALL_GAPS * self._gap_s)
        return silence if silence > bound else None

    def reset(self) -> None:
        """Forget the last batch: another connection begins."""
        self._batch_at = None
