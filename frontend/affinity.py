"""Which worker a request prefers: one that has its KV, or its session's, cached.

Laws:
- It is a hint: a worker that is notably busier than others, or that takes nothing, is
  passed by, and no request fails or waits for the sake of what is cached.
- Frontends remember no session. Each ranks the workers for it by a hash of both names
  (rendezvous hashing), so all frontends agree, also after a restart; a worker that comes
  or goes moves only the sessions whose first choice it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol, TypeVar

from tokenwire.protocol.messages import Card

from . import routing

__all__ = ["choose", "choose_prefill", "ranked"]

MAX_SHARE = 1.25
"""Requests at a worker, in equal shares of all, up to which it is no busier than others.
A step with a quarter more sequences is a few per cent longer; elsewhere the whole
conversation would have to be computed again."""

MIN_EXCESS = 4
"""So few requests more than the least busy worker has are never too many: a session's
own parallel ones (samples, judges, tools) stay together on an idle deployment."""


class Candidate(routing.Candidate, Protocol):
    """What the choice looks at."""

    @property
    def worker_id(self) -> str:
        """Its name, which all frontends know it by and which it keeps over restarts."""
        ...

    @property
    def card(self) -> Card | None:
        """Who it is."""
        ...


C = TypeVar("C", bound=Candidate)


def ranked(session_id: str, candidates: Sequence[C]) -> list[C]:
    """Return *candidates*, the one that the session prefers first."""
    head = session_id.encode(errors="surrogateescape") + b"\0"
    return sorted(
        candidates,
        key=lambda one: blake2b(head + one.worker_id.encode(), digest_size=8).digest(),
    )


def choose(
    candidates: Sequence[C], session_id: str | None, holder: C | None = None
) -> C | None:
    """Return who takes a request that brings output; None if there is nobody.

    Args:
        candidates: Who can.
        session_id: Of the request.
        holder: The candidate that has the sequence cached: it goes before the session's.
    """
    preferred = _preferred(candidates, session_id, holder)
    if not preferred:
        return routing.choose(candidates)
    counts = [routing.cost(one)[0] for one in candidates]
    least = min(counts)
    share = MAX_SHARE * (sum(counts) + 1) / len(counts)
    for one in preferred:
        count = routing.cost(one)[0]
        is_busy = count + 1 > share and count >= least + MIN_EXCESS
        is_full = one.card is not None and 0 < one.card.max_num_seqs <= count
        if count == least or not (is_busy or is_full):
            return one
    return routing.choose(candidates)


def choose_prefill(
    candidates: Sequence[C],
    session_id: str | None,
    num_tokens: int,
    most: int,
    holder: C | None = None,
    num_held: int = 0,
) -> C | None:
    """Return who computes a prompt; None if there is nobody.

    Args:
        candidates: Prefill workers.
        session_id: Of the request.
        num_tokens: Of the prompt. The preferred worker may have so many more to compute
            before it than another: elsewhere these would have to be computed at worst.
        most: No worker with more waiting tokens is preferred.
        holder: As for ``choose``.
        num_held: Tokens of the prompt that it has cached: so many would have to be
            computed elsewhere.
    """
    preferred = _preferred(candidates, session_id, holder)
    if not preferred:
        return routing.choose_prefill(candidates)
    least = min(one.num_queued_tokens for one in candidates)
    for one in preferred:
        worth = num_held if one is holder else num_tokens
        if one.num_queued_tokens <= min(most, least + worth):
            return one
    return routing.choose_prefill(candidates)


def _preferred(
    candidates: Sequence[C], session_id: str | None, holder: C | None
) -> list[C]:
    """Return who is preferred to the least busy one, the most preferred first."""
    if len(candidates) < 2:
        return []
    first = [] if holder is None else [holder]
    return first if session_id is None else first + ranked(session_id, candidates)
