"""Telling frontends which blocks are cached: all of them once, then what changes.

Laws:
- A frontend gets one slice and the changes per period, however many blocks there are:
  what is sent is bounded by its period and the engine's size, and what waits in ZeroMQ's
  queue for a frontend that does not read, by its heartbeat.
- A slice is what is there when it is sent, and every change behind it is told: so a
  frontend's set is right one period later, without a copy of it being kept here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from tokenwire.protocol.blocks import pack_hashes
from tokenwire.protocol.limits import MAX_KV_HASHES
from tokenwire.protocol.messages import KVBlocks
from tokenwire.worker.kv_blocks import CachedBlocks

from .delivery import Delivery
from .frontends import Frontend
from .timers import Timers

__all__ = ["MAX_CHANGES", "PERIOD_S", "KVWatch"]

PERIOD_S = 0.05
"""Between two messages to a frontend: some engine steps are told at once, and a router
knows by itself what it has sent within it. A million blocks take 12 s, at 0.6 MB/s."""

MAX_CHANGES = 4 * MAX_KV_HASHES
"""Of one period: half a million ids. More are told slice by slice, as to a frontend that
has just come; an emptied cache so needs one message."""

_DONE = -1


class KVWatch:
    """The frontends that have asked.

    Args:
        blocks: What is cached.
        delivery: The way to them.
        timers: The event loop.
    """

    def __init__(
        self, blocks: CachedBlocks, delivery: Delivery, timers: Timers
    ) -> None:
        self._blocks = blocks
        self._delivery = delivery
        self._timers = timers
        # Which slice each gets next; 0: all is still to be told.
        self._next: dict[Frontend, int] = {}
        self._is_due = False

    def watch(self, frontend: Frontend) -> None:
        """Tell *frontend* all there is, and then what changes, until it is lost."""
        if not self._next:
            self._blocks.take_changes()
            self._blocks.on_change = self._look_soon
        self._next[frontend] = 0
        self._look_soon()

    def lost(self, frontend: Frontend) -> None:
        """Tell *frontend* nothing more."""
        if self._next.pop(frontend, None) is not None and not self._next:
            self._blocks.on_change = None
            self._blocks.take_changes()

    def _look_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._timers.call_at(self._timers.time() + PERIOD_S, self._look)

    def _look(self) -> None:
        self._is_due = False
        changes = self._blocks.take_changes()
        if len(changes) > MAX_CHANGES or (len(changes) and not len(self._blocks)):
            self._next = dict.fromkeys(self._next, 0)
        elif len(changes):
            messages = list(_messages(changes.stored, changes.removed))
            for frontend in [one for one, next_ in self._next.items() if next_]:
                for message in messages:  # one, almost always
                    self._delivery.send(frontend, message)
        waiting = [one for one, next_ in self._next.items() if next_ != _DONE]
        for frontend in waiting:
            self._send_slice(frontend)
        if any(next_ != _DONE for next_ in self._next.values()):
            self._look_soon()

    def _send_slice(self, frontend: Frontend) -> None:
        index = self._next[frontend]
        self._next[frontend] = (
            index + 1 if index + 1 < self._blocks.num_slices else _DONE
        )
        stored = self._blocks.slice_of(index)
        for message in _messages(stored, (), reset=index == 0):
            self._delivery.send(frontend, message)


def _messages(
    stored: Iterable[int], removed: Iterable[int], *, reset: bool = False
) -> Iterator[KVBlocks]:
    """Return what tells this, in as few messages as can carry it."""
    new, old = iter(stored), iter(removed)
    while True:
        out = list(islice(old, MAX_KV_HASHES))
        in_ = list(islice(new, MAX_KV_HASHES - len(out)))
        if not out and not in_ and not reset:
            return
        yield KVBlocks(reset, pack_hashes(in_), pack_hashes(out))
        reset = False
