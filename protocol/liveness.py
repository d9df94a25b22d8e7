"""Whether a peer is alive, from when it was last heard; the clock is the caller's."""

from __future__ import annotations

from .limits import HEARTBEAT_INTERVAL_S, HEARTBEAT_TIMEOUT_S, SLEPT_S

__all__ = ["Liveness"]


class Liveness:
    """When to beat, and when to give a peer up. *now* is any monotonic clock, in s."""

    __slots__ = ("_heard_at", "_looked_at", "_next_beat", "interval_s", "timeout_s")

    def __init__(
        self,
        now: float,
        interval_s: float = HEARTBEAT_INTERVAL_S,
        timeout_s: float = HEARTBEAT_TIMEOUT_S,
    ) -> None:
        self.interval_s = interval_s
        self.timeout_s = timeout_s
        self._heard_at = now
        self._looked_at = now
        self._next_beat = now

    def heard(self, now: float) -> None:
        """Note that something, anything, came from the peer."""
        self._heard_at = now

    def slept(self, now: float) -> bool:
        """Look at the clock, and return whether the last look was too long ago.

        Then this process was stopped, or its machine, and not the peer: its silence
        begins now. Else all peers would look lost at once.
        """
        was_away = now - self._looked_at > SLEPT_S
        self._looked_at = now
        if was_away:
            self._heard_at = now
        return was_away

    def silence_s(self, now: float) -> float:
        """Return for how long the peer has said nothing."""
        return now - self._heard_at

    def lost(self, now: float) -> bool:
        """Return whether the peer has been silent for longer than the timeout."""
        return now - self._heard_at > self.timeout_s

    def beat_due(self, now: float) -> bool:
        """Return whether to send a heartbeat now; a true answer starts a new period."""
        if now < self._next_beat:
            return False
        self._next_beat = now + self.interval_s
        return True
