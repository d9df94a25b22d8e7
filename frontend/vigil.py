"""Whether one worker still serves this frontend: beats, steps and tokens; no I/O."""

from __future__ import annotations

from tokenwire.protocol.liveness import Liveness
from tokenwire.protocol.messages import Load

from .opened import OpenRequests
from .reply import Reply
from .stall import SUSPECT_S, Stall

__all__ = ["Vigil"]

LOOKS = 8
"""At each open request within its timeout: the last one is late by an eighth of it."""


class Vigil:
    """What is known of a worker's life; *now* is any monotonic clock, in s.

    Args:
        opened: The requests that are open there.
        now: The clock.
        heartbeat_timeout_s: Silence after which the worker is lost.
        stall_timeout_s: The least time without a token, while an output is under way,
            after which its engine counts as stalled; longer where steps are long.
        first_token_timeout_s: The same while no request has a token yet.
    """

    __slots__ = (
        "_heartbeat_timeout_s",
        "_liveness",
        "_next_look",
        "_open",
        "_stall",
        "_stuck_s",
        "_suspect_until",
        "stands",
    )

    def __init__(
        self,
        opened: OpenRequests,
        now: float,
        *,
        heartbeat_timeout_s: float,
        stall_timeout_s: float,
        first_token_timeout_s: float,
    ) -> None:
        self._open = opened
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._liveness = Liveness(now, timeout_s=heartbeat_timeout_s)
        self._stall = Stall(stall_timeout_s, first_token_timeout_s)
        self._stuck_s, self._next_look = first_token_timeout_s, 0.0
        self._suspect_until = 0.0
        self.stands = False
        """Whether the engine makes no steps on purpose: then none are missed."""

    def begin(self, now: float) -> None:
        """A handshake begins: what was heard before does not count."""
        self._liveness = Liveness(now, timeout_s=self._heartbeat_timeout_s)

    def heard(self, now: float) -> None:
        """Take note that something, anything, came from the worker."""
        self._liveness.heard(now)

    def load(self, load: Load, now: float) -> None:
        """Take note of what the worker says of itself."""
        self._stall.steps(load.num_steps, now)

    def batch(self, now: float) -> None:
        """Take note of a batch; called per engine step."""
        self._stall.batch(now)

    def opened(self, now: float) -> None:
        """A request is about to be sent."""
        if not self._open:
            self._stall.begin(now)

    def ended(self) -> None:
        """Some requests have ended."""
        if not self._open:
            self._stall.idle()

    def look(self, now: float) -> None:
        """Look at the clock, several times within every timeout."""
        if (self._liveness.slept(now) or self.stands) and self._open:
            self._stall.begin(now)
            self._open.look_anew(now)

    def beat_due(self, now: float) -> bool:
        """Return whether to send a heartbeat now; a true answer starts a new period."""
        return self._liveness.beat_due(now)

    def is_suspect(self, now: float) -> bool:
        """Whether the worker should get nothing new: it has stalled lately."""
        return now < self._suspect_until

    def silence(self, now: float) -> str | None:
        """Return why the worker counts as lost, if it has been silent for too long."""
        if not self._liveness.lost(now):
            return None
        return f"silent for {self._liveness.silence_s(now):.1f} s"

    def stall(self, now: float) -> str | None:
        """Return why the worker counts as stalled, if it does; it is suspect from then.

        It may be the one request that its engine cannot get over; whatever else it has
        can go on elsewhere.
        """
        if not self._open or self._stall.silence_s(now, under_way=True) is None:
            return None  # so most of the time, and no request need be looked at
        stalled_s = self._stall.silence_s(now, under_way=self._open.under_way)
        if stalled_s is None:
            return None
        self._suspect_until = now + SUSPECT_S
        return f"no token for {stalled_s:.1f} s"

    def take_stuck(self, now: float) -> tuple[str, dict[str, Reply]]:
        """Return requests that the engine alone has forgotten, and why they are lost.

        They are open no more.
        """
        text = f"no token for {self._stuck_s:.0f} s, only for others"
        if now < self._next_look:
            return text, {}
        self._next_look = now + self._stuck_s / LOOKS
        return text, self._open.take_stuck(now, self._stuck_s)
