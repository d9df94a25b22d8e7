"""When a worker that beats but brings no tokens counts as stalled; no I/O, no clock."""

from __future__ import annotations

__all__ = ["FIRST_TOKEN_TIMEOUT_S", "STALL_TIMEOUT_S", "SUSPECT_S", "Stall"]

STALL_TIMEOUT_S = 8.0
"""The least silence that counts while outputs are under way. Steps take 10 to 100 ms; a
long prompt that is not prefilled in chunks may hold an engine for seconds."""

FIRST_TOKEN_TIMEOUT_S = 120.0
"""The silence that counts while no request has a token: they may wait in a queue, or for
the prefill of a prompt of 100,000 tokens."""

STALL_GAPS = 50
"""So many usual gaps between batches also have to pass: a CPU's steps may take a second
each."""

SUSPECT_S = 30.0
"""How long a worker that stalled gets nothing new: it answers, but does not work."""

_WEIGHT = 0.05  # of the newest gap in the mean: the last twenty count most


class Stall:
    """The usual time between a worker's batches, and how long none has come.

    It looks at times alone in which requests were open: ``begin`` with the first of
    them, ``idle`` when none is left.
    """

    __slots__ = ("_batch_at", "_began_at", "_first_s", "_gap_s", "_timeout_s")

    def __init__(
        self,
        timeout_s: float = STALL_TIMEOUT_S,
        first_token_timeout_s: float = FIRST_TOKEN_TIMEOUT_S,
    ) -> None:
        self._timeout_s = timeout_s
        self._first_s = max(first_token_timeout_s, timeout_s)
        self._gap_s = 0.0
        self._began_at: float | None = None
        self._batch_at: float | None = None

    def begin(self, now: float) -> None:
        """Take note that a request is open where none was."""
        self._began_at, self._batch_at = now, None

    def idle(self) -> None:
        """Take note that no request is open."""
        self._began_at = self._batch_at = None

    def batch(self, now: float) -> None:
        """Take note of a batch; called per engine step."""
        if self._batch_at is not None:
            gap = min(now - self._batch_at, self._timeout_s)
            self._gap_s += (gap - self._gap_s) * _WEIGHT
        self._batch_at = now

    def silence_s(self, now: float, *, under_way: bool) -> float | None:
        """Return the time without a batch, if it is too long.

        Args:
            now: The caller's clock.
            under_way: Whether an open request has a token already.
        """
        last = self._began_at if self._batch_at is None else self._batch_at
        if last is None:
            return None
        silence = now - last
        bound = max(self._timeout_s, STALL_GAPS * self._gap_s)
        if not under_way:
            bound = max(bound, self._first_s)
        return silence if silence > bound else None
