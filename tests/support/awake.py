"""Waits that count only the time in which this process ran.

Machines that tests run on are shared; one that was watched stood still for 5 s and for
59 s. What is awaited stood still with it, so that time proves nothing.
"""

from __future__ import annotations

import time

__all__ = ["Awake"]

MAX_STEP_S = 0.5
"""Of the time between two looks: more than that, and this process did not run."""


class Awake:
    """A clock of the time in which somebody looked at it often."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._looked_at = time.monotonic()

    def look(self) -> float:
        """Return the time awake so far, in seconds."""
        now = time.monotonic()
        self.seconds += min(now - self._looked_at, MAX_STEP_S)
        self._looked_at = now
        return self.seconds
