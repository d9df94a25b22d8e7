"""Whether a worker lives and serves, as probes ask for it: ``/live`` and ``/ready``.

Laws:

- Being live depends on this process alone: whether frontends or other workers are there
  changes nothing.
- It is asked from another thread than the one it tells of, so that a loop that stands still
  cannot hide it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from http import HTTPStatus

__all__ = ["LIVE", "READY", "Health"]

LIVE = "/live"
READY = "/ready"

STANDSTILL_S = 60.0
"""A loop that has not turned for so long will not: frontends have given the worker up after
4 s, and machines stand still for up to a minute."""


class Health:
    """The state of one worker.

    Args:
        clock: Seconds, of any zero; read by both threads.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._state = "starting"
        self._beat_at: float | None = None  # None: nothing to expect

    def serving(self) -> None:
        """Take note that requests are taken from now on, and beats come."""
        self._state = "serving"
        self._beat_at = self._clock()

    def beat(self) -> None:
        """Take note that the event loop turns; it counts while requests are taken."""
        if self._beat_at is not None:
            self._beat_at = self._clock()

    def stopping(self) -> None:
        """Take note that nothing new is taken; the engine may take its time to stop."""
        self._state = "stopping"
        self._beat_at = None

    @property
    def is_live(self) -> bool:
        """Whether there is no reason to kill it. An engine may load as long as it likes."""
        beat_at = self._beat_at
        return beat_at is None or self._clock() - beat_at < STANDSTILL_S

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests."""
        return self._state == "serving" and self.is_live

    def answer(self, path: str) -> tuple[HTTPStatus, str] | None:
        """Return the answer to a probe at *path*, or None if it is no probe's."""
        if path == LIVE:
            well = self.is_live
        elif path == READY:
            well = self.is_ready
        else:
            return None
        status = HTTPStatus.OK if well else HTTPStatus.SERVICE_UNAVAILABLE
        return status, self._state if self.is_live else "standing still"
