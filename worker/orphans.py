"""KV that is held for a decode leg which may never come, since its frontend is gone.

A prefill engine cannot free what it has handed over: a decode engine reads it, or makes
the empty read that frees it; else it stays until the engine's lease is over. So each
hand-over is remembered until its frontend has passed it on, and if the frontend is lost
before that, another one has it released.

Laws:
- What has been passed on is forgotten: the decode worker reads it, or frees it when its
  own leg is aborted.
- An orphan goes back to the frontend that lost it if that is there again: it alone knows
  what it has passed on when its word was lost, and KV that is being read must not be
  freed. After ``GRACE_S`` it goes to anyone.
- It is offered until somebody has settled it, or the lease is over. Nothing is wrong with
  a second release.
No socket and no clock in here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tokenwire.protocol.messages import ORPHANED_KV, JsonObject, OrphanedKV

from .frontends import Frontend, Request

__all__ = ["Orphans"]

logger = logging.getLogger(__name__)

LEASE_S = 30.0
"""NIXL's, after which the engine frees what nobody has read."""

GRACE_S = 1.0
"""How long a lost frontend may take to come back: it connects again within 0.1 s where
only the connection was lost. Short, since KV has to be free 2 s after the loss."""

AGAIN_S = 2.0
"""An offer that is not settled by then is made again: its taker may be lost too, or know
no decode worker."""

MAX_REMEMBERED = 8_192
"""As many as a worker takes requests; in use there are a few, for milliseconds each. The
oldest is forgotten first, and left to the lease."""

MAX_OFFERS = 256
"""At once; the rest follows a quarter of a second later."""


@dataclass(slots=True)
class _Held:
    """A hand-over that nobody is known to see to."""

    handover: JsonObject
    incarnation: str  # of its frontend; empty: no frontend has heard of it
    expires_at: float
    anyone_at: float = 0.0  # an orphan's: when anyone may have it
    offer_at: float = 0.0


class Orphans:
    """Hand-overs on their way. *now* is the worker's clock, in s."""

    def __init__(self) -> None:
        self._given: dict[tuple[bytes, str], tuple[str, _Held]] = {}
        self._orphans: dict[str, _Held] = {}  # by the engine's request id
        self._turn = 0

    def __len__(self) -> int:
        return len(self._given) + len(self._orphans)

    def given(self, request: Request, handover: JsonObject, now: float) -> None:
        """Remember what the frontend of a prefill leg is told in its end."""
        frontend = request.frontend
        if not _knows(frontend):
            return  # it will not say when it has passed it on
        held = _Held(handover, frontend.hello.incarnation, now + LEASE_S)
        key = frontend.identity, request.submit.request_id
        self._given[key] = request.engine_id, held
        if len(self._given) > MAX_REMEMBERED:
            del self._given[next(iter(self._given))]

    def undelivered(self, engine_id: str, handover: JsonObject, now: float) -> None:
        """Take an end whose frontend was lost before it came."""
        self._add(engine_id, _Held(handover, "", now + LEASE_S), now)

    def settled(self, frontend: Frontend, request_id: str) -> None:
        """Forget a hand-over: its own, or an orphan that it was offered."""
        if self._given.pop((frontend.identity, request_id), None) is None:
            self._orphans.pop(request_id, None)

    def lost(self, frontend: Frontend, now: float) -> int:
        """Take note that *frontend* is gone; return how many orphans it leaves."""
        lost = [key for key in self._given if key[0] == frontend.identity]
        for key in lost:
            engine_id, held = self._given.pop(key)
            self._add(engine_id, held, now)
        return len(lost)

    def offers(
        self, frontends: Iterable[Frontend], now: float
    ) -> Iterator[tuple[Frontend, OrphanedKV]]:
        """Return who is to be told of which orphan now."""
        self._expire(now)
        takers = [one for one in frontends if _knows(one)] if self._orphans else []
        num_offers = 0
        for engine_id, held in self._orphans.items():
            if held.offer_at > now:
                continue
            taker = self._taker(held, takers, now)
            if taker is None:
                continue
            held.offer_at = now + AGAIN_S
            yield taker, OrphanedKV(engine_id, held.handover)
            num_offers += 1
            if num_offers == MAX_OFFERS:
                break

    def _taker(
        self, held: _Held, takers: list[Frontend], now: float
    ) -> Frontend | None:
        for one in takers:
            if one.hello.incarnation == held.incarnation:
                return one
        if not takers or (held.incarnation and now < held.anyone_at):
            return None
        self._turn += 1  # a taker that cannot help must not be the only one asked
        return takers[self._turn % len(takers)]

    def _add(self, engine_id: str, held: _Held, now: float) -> None:
        held.anyone_at = now + GRACE_S
        self._orphans[engine_id] = held
        if len(self._orphans) > MAX_REMEMBERED:
            del self._orphans[next(iter(self._orphans))]

    def _expire(self, now: float) -> None:
        while self._given:
            key, (_, held) = next(iter(self._given.items()))
            if held.expires_at > now:
                break
            del self._given[key]
        over = [name for name, held in self._orphans.items() if held.expires_at <= now]
        for engine_id in over:
            del self._orphans[engine_id]
        if over:
            logger.warning(
                "KV of %d hand-overs was held until its lease was over: their frontend "
                "is gone, and no other could release them",
                len(over),
            )


def _knows(frontend: Frontend) -> bool:
    return ORPHANED_KV in frontend.hello.capabilities
