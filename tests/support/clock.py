"""Clocks that a test moves because it does not want to wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

__all__ = ["MovedClock", "move_clock"]


@dataclass
class MovedClock:
    """A clock that is ahead of another one."""

    clock: Callable[[], float]
    by_s: float = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.clock() + self.by_s


def move_clock(monkeypatch: pytest.MonkeyPatch, by_s: float) -> None:
    """Move the loop's clock; it goes on from there, and what falls due is called."""
    loop = asyncio.get_running_loop()
    clock: Any = loop.time
    if not isinstance(clock, MovedClock):
        clock = MovedClock(clock)
        monkeypatch.setattr(loop, "time", clock)
    clock.by_s += by_s
