"""The order of one engine core's KV events: gaps are asked for again, or all is forgotten.

Laws:
- What is passed on is in order and without a gap, or ``forget`` was called in between.
- What comes while a gap is being filled is held, within a bound.
No socket and no clock in here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from tokenwire.worker.kv_blocks import BlockUsage

from .kv_events import EventError, KVEvent, decode_events

__all__ = ["MAX_HELD", "Stream"]

logger = logging.getLogger(__name__)

MAX_HELD = 1_000
"""Messages, one a step: 10 s at a 10 ms step, twice what an answer may take."""


class Stream:
    """The events of one engine core, from its first on.

    Args:
        take: Called with the events of a step.
        replay: Asked for what was sent from a number on; returns whether it will come,
            by ``replayed`` and then ``replay_ended``.
        forget: Called where something between two steps is lost.
        usage: Where it counts.
    """

    def __init__(
        self,
        take: Callable[[Iterable[KVEvent]], None],
        replay: Callable[[int], bool],
        forget: Callable[[], None],
        usage: BlockUsage,
    ) -> None:
        self._take = take
        self._replay = replay
        self._forget = forget
        self._usage = usage
        self._next = 0  # the number that is due
        self._next_live = 0  # the least that the engine core can send next
        self._held: list[tuple[int, bytes]] | None = None  # while a replay runs

    def begin(self) -> None:
        """Ask for what was sent before anybody listened."""
        if self._replay(0):
            self._held = []

    def live(self, number: int, payload: bytes) -> None:
        """Take a message as the engine core sends it."""
        if number < self._next_live:
            self._lost("the engine core has begun anew", 0)
            self._held = None
        self._next_live = number + 1
        if self._held is None:
            self._in_order(number, payload)
        elif len(self._held) < MAX_HELD:
            self._held.append((number, payload))

    def replayed(self, number: int, payload: bytes) -> None:
        """Take a message of a replay."""
        if self._held is None or number < self._next:
            return
        if number > self._next:
            self._lost("the engine keeps no older ones", number)
        self._pass(number, payload)

    def replay_ended(self) -> None:
        """Go on behind a replay, which has brought all that it could."""
        held, self._held = self._held or [], None
        for number, payload in held:
            if number > self._next:
                self._lost("they did not come again", number)
            if number == self._next:
                self._pass(number, payload)

    def _in_order(self, number: int, payload: bytes) -> None:
        if number < self._next:
            return  # a replay has brought it
        if number > self._next:
            self._usage.num_gaps += 1
            if self._replay(self._next):
                self._held = [(number, payload)]
                return
            self._lost("the engine has no replay_endpoint", number)
        self._pass(number, payload)

    def _pass(self, number: int, payload: bytes) -> None:
        self._next = number + 1
        self._usage.num_events += 1
        try:
            events = decode_events(payload)
        except EventError as error:
            self._lost(f"not understood: {error}", number + 1)
            return
        self._take(events)

    def _lost(self, why: str, number: int) -> None:
        logger.warning(
            "KV events from %d on are lost (%s): cached blocks are known anew from %d on",
            self._next,
            why,
            number,
        )
        self._usage.num_resets += 1
        self._next = number
        self._forget()
