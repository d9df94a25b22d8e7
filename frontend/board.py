"""What the processes of one frontend see of each other at any time: shared memory.

Each process writes its own seat, all read all. A number is one aligned word, so none is
ever seen half written; two numbers may be of different moments, which hints can bear.

Laws:
- A process that has not written for ``STALE_S`` counts as absent.
- Connections go to whoever has the fewest, and to nobody who cannot serve while another
  can; but a connection waits for that no longer than ``YIELD_S`` or ``STALE_S``.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from enum import Enum

__all__ = ["STALE_S", "STAND_BY_S", "TICK_S", "YIELD_S", "Board", "Seat", "Turn"]

TICK_S = 0.25
"""How often a process writes its seat: a lost worker is known to the others so soon."""

STALE_S = 2.0
"""Eight ticks: on a busy machine an event loop may stand for a second."""

YIELD_S = 0.002
"""The head start of whoever has fewer connections: ten turns of an idle event loop. It is
also what a connection may lose where that one is busy."""

STAND_BY_S = 0.1
"""Until one that cannot serve looks again whether anybody else can."""

SLACK_SHARE = 16
"""One connection more among so many is no imbalance that is worth a wait."""

_FIELDS = 4  # pid, ready, connections, last written
_WORD_BYTES = 8
_PID, _READY, _CONNECTIONS, _WRITTEN_MS = range(_FIELDS)


class Turn(Enum):
    """Whether a process takes a connection that waits."""

    NOW = "now"
    YIELD = "yield"  # another one has fewer
    STAND_BY = "stand by"  # another one can serve, this one cannot


@dataclass(slots=True, frozen=True)
class Seat:
    """What one process says of itself."""

    process: int  # its number
    pid: int
    ready: bool
    connections: int


class Board:
    """The seats of all processes. *now* is the machine's monotonic clock, in s.

    Args:
        fd: The memory, from ``create``.
        num: How many seats there are.
    """

    def __init__(self, fd: int, num: int) -> None:
        self.fd = fd
        self.num = num
        self._map = mmap.mmap(fd, num * _FIELDS * _WORD_BYTES)
        self._words = memoryview(self._map).cast("q")

    @classmethod
    def create(cls, num: int) -> Board:
        """Return a board that nobody sits at."""
        fd = os.memfd_create("tokenwire-board")
        os.ftruncate(fd, num * _FIELDS * _WORD_BYTES)
        return cls(fd, num)

    def close(self) -> None:
        """Let the memory go."""
        self._words.release()
        self._map.close()
        os.close(self.fd)

    def sit(self, process: int, now: float, *, ready: bool) -> None:
        """Write what the calling process is; again and again."""
        at = process * _FIELDS
        self._words[at + _PID] = os.getpid()
        self._words[at + _READY] = ready
        self._words[at + _WRITTEN_MS] = int(1e3 * now)

    def count(self, process: int, num_connections: int) -> None:
        """Write how many clients the calling process has."""
        self._words[process * _FIELDS + _CONNECTIONS] = num_connections

    def leave(self, process: int) -> None:
        """Clear the seat of a process that has ended."""
        for field in range(_FIELDS):
            self._words[process * _FIELDS + field] = 0

    def seats(self, now: float) -> list[Seat]:
        """Return the seats of those that are there."""
        oldest = int(1e3 * (now - STALE_S))
        words = self._words
        return [
            Seat(
                at // _FIELDS,
                words[at + _PID],
                bool(words[at + _READY]),
                words[at + _CONNECTIONS],
            )
            for at in range(0, self.num * _FIELDS, _FIELDS)
            if words[at + _PID] and words[at + _WRITTEN_MS] >= oldest
        ]

    def is_ready(self, now: float) -> bool:
        """Return whether any process can serve."""
        return any(seat.ready for seat in self.seats(now))

    def turn(self, process: int, now: float) -> Turn:
        """Return whether *process* takes a connection that waits for all."""
        seats = self.seats(now)
        own = next((seat for seat in seats if seat.process == process), None)
        able = [seat for seat in seats if seat.ready and seat.process != process]
        if own is None or not able:
            return Turn.NOW
        if not own.ready:
            return Turn.STAND_BY
        fewest = min(seat.connections for seat in able)
        is_behind = own.connections > fewest + fewest // SLACK_SHARE
        return Turn.YIELD if is_behind else Turn.NOW
