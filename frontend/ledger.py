"""What each API key has used, in memory that all processes of a frontend share.

A rate is one number: the time at which all that was taken will have been earned back (the
generic cell rate algorithm). It may lie a minute ahead, so a minute's worth can be taken
at once. A number is one aligned word. Two processes that add to it in the same
microsecond may lose one of both additions, which a limit can bear.

Laws:
- Slots are never given back: what a name has used counts while the parent lives, also
  where its line leaves the file and returns.
- What runs is counted by process, so that the parent can clear what died with one.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os

__all__ = ["MINUTE_NS", "Ledger"]

_log = logging.getLogger(__name__)

MINUTE_NS = 60 * 10**9

MAX_OWED_NS = 24 * 60 * MINUTE_NS
"""A day: an output is paid for at its end, and may be worth more than its key's minute.
What takes longer is no limit any more; and a word has room for it."""

SLOTS = 2_048
"""Twice the keys that a file may hold: names that come and go have room, and a search
meets few others."""

_WORD_BYTES = 8
_NAME, _REQUESTS, _TOKENS, _RUNNING = range(4)  # behind it, one word for each process


class Ledger:
    """The memory, for one process. Times are the machine's monotonic clock, in ns.

    Args:
        fd: The memory, from ``create``.
        num_processes: Of the frontend.
        process: This one's number.
    """

    REQUESTS = _REQUESTS
    TOKENS = _TOKENS

    def __init__(self, fd: int, num_processes: int, process: int = 0) -> None:
        self.fd = fd
        self._num = num_processes
        self._process = process
        self._size = _RUNNING + num_processes
        self._map = mmap.mmap(fd, SLOTS * self._size * _WORD_BYTES)
        self._words = memoryview(self._map).cast("q")
        self._slots: dict[str, tuple[int, int]] = {}  # where, and its mark

    @classmethod
    def create(cls, num_processes: int = 1) -> Ledger:
        """Return one in which nothing is used."""
        fd = os.memfd_create("tokenwire-ledger")
        os.ftruncate(fd, SLOTS * (_RUNNING + num_processes) * _WORD_BYTES)
        return cls(fd, num_processes)

    def close(self) -> None:
        """Let the memory go."""
        self._words.release()
        self._map.close()
        os.close(self.fd)

    def wait_ns(
        self, name: str, rate: int, each_ns: float, amount: int, now: int
    ) -> int:
        """Return how long it takes until *amount* may be taken; 0: now.

        Args:
            name: Whose.
            rate: ``REQUESTS`` or ``TOKENS``.
            each_ns: What earning one takes.
            amount: How many. More than a minute's worth is waited for as long as that.
            now: The time.
        """
        taken_until = max(self._words[self._at(name) + rate], now)
        cost = min(int(amount * each_ns), MINUTE_NS)
        return max(0, taken_until + cost - now - MINUTE_NS)

    def take(self, name: str, rate: int, each_ns: float, amount: int, now: int) -> None:
        """Take *amount*, also where that is more than there is."""
        at = self._at(name) + rate
        until = max(self._words[at], now) + int(amount * each_ns)
        self._words[at] = min(until, now + MAX_OWED_NS)

    def owed_ns(self, name: str, rate: int, now: int) -> int:
        """Return how long it takes until nothing is taken any more."""
        return max(0, self._words[self._at(name) + rate] - now)

    def running(self, name: str) -> int:
        """Return how many requests run, in all processes."""
        at = self._at(name) + _RUNNING
        return sum(self._words[at : at + self._num])

    def run(self, name: str, change: int) -> None:
        """Count requests of this process: begun, or ended."""
        self._words[self._at(name) + _RUNNING + self._process] += change

    def leave(self, process: int) -> None:
        """Clear what a process that has ended was running."""
        for at in range(_RUNNING + process, SLOTS * self._size, self._size):
            self._words[at] = 0

    def _at(self, name: str) -> int:
        """Return where a name's words begin."""
        at, mark = self._slots.get(name, (0, 0))
        if mark and self._words[at] == mark:
            return at
        return self._find(name)

    def _find(self, name: str) -> int:
        digest = hashlib.blake2b(name.encode(), digest_size=_WORD_BYTES).digest()
        mark = int.from_bytes(digest, "little", signed=True) or 1
        for step in range(SLOTS):
            at = (mark + step) % SLOTS * self._size
            if not self._words[at]:
                self._words[at] = mark
            if (
                self._words[at] == mark
            ):  # read back: another process may have been first
                self._slots[name] = at, mark
                return at
        if name not in self._slots:
            _log.error("above %d names of API keys: %s shares its limits", SLOTS, name)
        at = mark % SLOTS * self._size
        self._slots[name] = at, self._words[at]
        return at
