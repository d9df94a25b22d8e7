"""How many sequences the workers have room for; no I/O, no clock.

Each worker has a window: what it should have at most, running and waiting. The Card says
where it begins (``max_num_seqs`` and a little more), the Loads where it ends: an engine
whose KV cache is full, or whose prompts are long, runs fewer sequences than it has slots
for, one with data-parallel ranks runs more.

Several frontends share the workers and see of each other what a Load says, up to a
heartbeat old. So a frontend takes what the others leave, but at least an equal share:
none starves, at worst an engine's queue is longer until the others have ended some.

Prefill workers have no window: how much waits there is bounded where a request is routed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from tokenwire.protocol.messages import Card, Load, Role

__all__ = ["UNLIMITED", "Capacity", "Worker"]

HEADROOM_SHARE = 8
"""One sequence waits in an engine for so many that it can run: what ends in one step is
replaced in the next, without a frontend's answer in between. It adds an eighth of a
request's time to the wait at most."""

MIN_HEADROOM = 2
"""Also of a small engine two sequences may end in one step."""

GROWTH_SHARE = 4
"""A window that turns out too small grows by this part of it per Load: it doubles in
five heartbeats, and what it overshoots by waits in the engine for two."""

UNLIMITED = 1 << 30
"""The limit where a worker does not say how many sequences it runs: it refuses itself."""


class Worker(Protocol):
    """What is known of one worker; a ``Link``."""

    @property
    def usable(self) -> bool:
        """Whether a request may be sent there."""
        ...

    @property
    def stands(self) -> bool:
        """Whether its engine makes no steps, on purpose."""
        ...

    @property
    def card(self) -> Card | None:
        """Who it is."""
        ...

    @property
    def load(self) -> Load:
        """What it last said."""
        ...

    @property
    def num_open(self) -> int:
        """Requests of this frontend there."""
        ...

    @property
    def num_open_at_load(self) -> int:
        """The same when its last Load came."""
        ...


@dataclass(slots=True)
class _Window:
    """What one worker should have at most."""

    size: int
    headroom: int
    load: Load  # the last one looked at
    stood: bool = False  # more than the headroom waited in its engine then
    pressed: bool = False  # requests have waited here since
    starved: bool = False  # and next to none in its engine

    def heard(self, load: Load) -> None:
        """Fit the size to what a new Load says.

        What two Loads say is so: for a moment, every burst makes a queue, and every few
        ends leave none.
        """
        stands = load.num_waiting > self.headroom
        if stands and self.stood:
            self.size = min(self.size, max(1, load.num_running) + self.headroom)
        starves = self.pressed and load.num_waiting <= self.headroom // 2
        if starves and self.starved:
            self.size += max(1, self.size // GROWTH_SHARE)
        self.stood, self.starved = stands, starves
        self.pressed = False
        self.load = load


class Capacity:
    """The windows of all workers.

    Args:
        workers: Returns every worker known, usable or not.
    """

    def __init__(self, workers: Callable[[], Iterable[Worker]]) -> None:
        self._workers = workers
        self._windows: dict[str, _Window] = {}  # by the worker's incarnation

    def limit(self, num_own: int) -> int:
        """Return how many sequences this frontend may have at the workers.

        Args:
            num_own: How many it has. What it has at workers that take nothing more
                counts for nobody's window.
        """
        known, self._windows = self._windows, {}
        size = share = num_others = num_stranded = 0
        for worker in self._workers():
            card, load = worker.card, worker.load
            if card is None or not worker.usable or worker.stands:
                num_stranded += worker.num_open
                continue
            num_others += max(0, load.num_requests - worker.num_open_at_load)
            if card.role is Role.PREFILL:
                continue  # what it computes goes on at a decode worker
            if not card.max_num_seqs:
                return UNLIMITED
            window = known.get(card.incarnation) or _first_window(card, load)
            self._windows[card.incarnation] = window
            if window.load is not load:
                window.heard(load)
            size += window.size
            share += -(-window.size // max(1, load.num_frontends))
        limit = max(size - num_others, share) + num_stranded
        if num_own >= limit:
            for window in self._windows.values():
                window.pressed = True
        return limit


def _first_window(card: Card, load: Load) -> _Window:
    headroom = max(MIN_HEADROOM, card.max_num_seqs // HEADROOM_SHARE)
    return _Window(card.max_num_seqs + headroom, headroom, load)
