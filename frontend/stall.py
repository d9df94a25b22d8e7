"""When a worker that beats but brings no tokens counts as stalled; no I/O, no clock."""

from __future__ import annotations

__all__ = ["FIRST_TOKEN_TIMEOUT_S", "STALL_TIMEOUT_S", "SUSPECT_S", "Stall"]

STALL_TIMEOUT_S = 6.0
"""The least silence that counts while outputs are under way: with what it takes to go on
elsewhere, a client waits for less than 10 s. Steps take 10 to 100 ms; a chunk of a long
prompt holds an engine for a second or, on a CPU, for a few."""

FIRST_TOKEN_TIMEOUT_S = 120.0
"""The silence that counts in any case, also where none of the requests has a token yet:
they may wait in a queue, or for the prefill of a prompt of 100,000 tokens."""

STALL_GAPS = 30
"""So many usual gaps between batches also have to pass: a CPU's steps may take a second
each. At the 200 ms of a full batch on two cores they are the least bound again."""

STILL_STEPS = 4
"""So many stall timeouts may pass before a first token while the worker, which counts its
steps, makes none: one step with a long prompt takes seconds."""

SUSPECT_S = 30.0
"""How long a worker that stalled gets nothing new: it answers, but does not work."""

_WEIGHT = 0.05  # of the newest gap in the mean: the last twenty count most


class Stall:
    """The usual time between a worker's batches, and how long none has come.

    It looks at times alone in which requests were open: ``begin`` with the first of
    them, ``idle`` when none is left. An engine that makes steps works, if on what others
    asked for: only its own count of steps can tell that it stands still.
    """

    __slots__ = (
        "_batch_at",
        "_began_at",
        "_first_s",
        "_gap_s",
        "_num_steps",
        "_step_at",
        "_timeout_s",
    )

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
        self._num_steps: int | None = None
        self._step_at = 0.0

    def begin(self, now: float) -> None:
        """Take note that a request is open where none was."""
        self._began_at, self._batch_at = now, None

    def idle(self) -> None:
        """Take note that no request is open."""
        self._began_at = self._batch_at = None

    def batch(self, now: float) -> None:
        """Take note of a batch; called per engine step."""
        if self._batch_at is not None:
            gap = now - self._batch_at
            if gap > self._timeout_s:
                gap = self._timeout_s
            self._gap_s += (gap - self._gap_s) * _WEIGHT
        self._batch_at = now

    def steps(self, num_steps: int | None, now: float) -> None:
        """Take note of the worker's own count; None: it does not count."""
        if num_steps != self._num_steps:
            self._num_steps, self._step_at = num_steps, now

    def silence_s(self, now: float, *, under_way: bool) -> float | None:
        """Return the time without a batch, or a step, if it is too long.

        Args:
            now: The caller's clock.
            under_way: Whether an open request has a token already.
        """
        last = self._began_at if self._batch_at is None else self._batch_at
        if last is None:
            return None
        silence = now - last
        usual = STALL_GAPS * self._gap_s
        in_any_case = max(self._first_s, usual)
        if self._num_steps is None:
            bound = max(self._timeout_s, usual) if under_way else in_any_case
            return silence if silence > bound else None
        still = now - max(last, self._step_at)
        timeout_s = self._timeout_s if under_way else STILL_STEPS * self._timeout_s
        if still > max(timeout_s, usual):
            return still
        return silence if silence > in_any_case else None
