"""How far one choice is, and when its tokens came."""

from __future__ import annotations

from collections.abc import Callable

from .metrics import Metrics

__all__ = ["Pace"]


class Pace:
    """What every token of a choice changes.

    Args:
        metrics: Where the times between tokens are counted.
        clock: Any monotonic clock, in s.
    """

    __slots__ = (
        "_clock",
        "_metrics",
        "_observe_gap",
        "first_at",
        "last_at",
        "num_tokens",
        "started_at",
    )

    def __init__(self, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._observe_gap = metrics.inter_token_latency.observe
        self.started_at: float = clock()
        self.first_at: float = 0.0
        self.last_at: float = 0.0  # 0: there was none yet
        self.num_tokens: int = 0
        """Ids delivered; equals ``usage.completion_tokens`` at the end."""

    def continue_from(self, other: Pace) -> None:
        """Be as *other* is, in its place."""
        for name in Pace.__slots__:
            setattr(self, name, getattr(other, name))

    def tick(self) -> None:
        """Take note that tokens have come now."""
        now = self._clock()
        if self.last_at:
            self._observe_gap(now - self.last_at)
        else:
            self.first_at = now
            self._metrics.time_to_first_token.observe(now - self.started_at)
        self.last_at = now
