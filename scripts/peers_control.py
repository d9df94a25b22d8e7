"""What the client and a simulated engine share: the engine's step, and what has arrived.

A file of three numbers, mapped by both. With a step of 0 an engine of ours goes as fast
as the server before it: it runs at most ``STEPS_AHEAD`` steps ahead of what the client
has seen. Without that bound tokens would pile up before the server, which would
merge them into fewer events (vLLM) or carry many in one read (the routers): then a token would
cost less than it does in service.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["STEPS_AHEAD", "Control", "Pace"]

FIELDS = struct.Struct("=QQQ")  # the step in us, the epoch, tokens that have arrived
STEPS_AHEAD = 2
"""One step on its way through the server, and one for it to go on with."""

MAX_BUNDLE = 8
STALL_S = 0.05
"""After so long without an arrival the engine steps regardless: what it counts as on
its way was merged, or its request was left."""


LOOK_S = 0.00005
"""Between two looks whether tokens have arrived: a tenth of what a step of 48 tokens takes."""


class Control:
    """The shared file.

    Args:
        path: Made if it is absent.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            path.write_bytes(bytes(FIELDS.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), FIELDS.size)

    @property
    def step_s(self) -> float:
        """The engine's step; 0: as fast as it goes."""
        return float(self._read()[0]) / 1e6

    def begin(self, step_s: float) -> None:
        """Set the engine's step and count arrivals anew."""
        FIELDS.pack_into(self._map, 0, round(step_s * 1e6), self._read()[1] + 1, 0)

    def arrived(self, num_tokens: int) -> None:
        """Say how many tokens have arrived since ``begin``."""
        struct.pack_into("=Q", self._map, 16, max(num_tokens, 0))

    def progress(self) -> tuple[int, int]:
        """Return the epoch, and how many tokens have arrived in it."""
        _, epoch, num_tokens = self._read()
        return epoch, num_tokens

    def _read(self) -> tuple[int, int, int]:
        step_us, epoch, num_tokens = FIELDS.unpack_from(self._map)
        return step_us, epoch, num_tokens


class Pace:
    """When an engine may step.

    Args:
        control: What the client says.
        clock: Any that counts seconds.
    """

    def __init__(
        self, control: Control, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._control = control
        self._clock = clock
        self._epoch = 0
        self._sent = 0
        self._seen = 0
        self._moved_at = 0.0
        self._next = 0.0

    def wait_s(self, num_running: int) -> float:
        """Return how long to wait until the next look; 0: step now."""
        now = self._clock()
        step_s = self._control.step_s
        if step_s:
            if now - self._next > 1:  # it was idle
                self._next = now
            return max(0.0, self._next - now)
        epoch, seen = self._control.progress()
        if epoch != self._epoch:
            self._epoch, self._sent, self._seen = epoch, 0, 0
            self._moved_at = now
        if seen != self._seen:
            self._seen, self._moved_at = seen, now
        if self._sent - seen <= (STEPS_AHEAD - 1) * num_running:
            return 0.0
        if now - self._moved_at > STALL_S:
            self._sent, self._moved_at = seen, now
            return 0.0
        return LOOK_S

    def bundle(self, num_running: int) -> int:
        """Return how many tokens of a stream may go at once.

        More than one where the client says that it is many steps ahead of what was sent, as the
        direct arm does, in which events are carried and not made one by one.
        """
        if self._control.step_s:
            return 1
        return max(1, min(MAX_BUNDLE, (self._seen - self._sent) // num_running))

    def stepped(self, num_tokens: int) -> None:
        """Count a step."""
        self._sent += num_tokens
        self._next += self._control.step_s
