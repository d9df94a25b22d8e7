"""The choice among workers that can all take a sequence, by the operator's policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import nlargest
from operator import itemgetter

from tokenwire.protocol.messages import Role

from .affinity import hints
from .cached import Holdings
from .link import Link
from .routing import CostWeights, Policy, cheapest, cost, load_cost

__all__ = ["HANDOVER_SHARE", "MANY", "Chooser"]

HANDOVER_SHARE = 0.25
"""Of what computing a token costs, reading its KV from a prefill worker does: most of what
a decode worker has not cached it reads, and what waits there waits for that."""


MANY = 128
"""Workers from which on not all are looked at: what a choice takes stays below a
millisecond with a thousand (docs/scale.md)."""


class Chooser:
    """Chooses by cost, or in turns.

    Args:
        policy: How.
        weights: Of the parts of the cost.
    """

    def __init__(
        self, policy: Policy = Policy.KV, weights: CostWeights | None = None
    ) -> None:
        self._policy = policy
        self._weights = weights or CostWeights()
        self._turns = 0

    def output(
        self, candidates: Sequence[Link], held: Holdings, session_id: str | None
    ) -> Link | None:
        """Return who brings the output; None if there is nobody.

        Args:
            candidates: Workers that decode, of one role or both.
            held: Who has the sequence.
            session_id: Of the request.
        """

        def price(link: Link, num_uncached: int) -> float:
            is_decode = link.card is not None and link.card.role is Role.DECODE
            if not is_decode:
                return num_uncached + load_cost(self._weights, link)
            queued = self._weights.queue * link.num_queued_tokens
            read = HANDOVER_SHARE * num_uncached - (1 - HANDOVER_SHARE) * queued
            return read + load_cost(self._weights, link)

        return self._choose(candidates, held, session_id, price)

    def prefill(
        self,
        candidates: Sequence[Link],
        held: Holdings,
        session_id: str | None,
        max_queued_tokens: int,
    ) -> Link | None:
        """Return who computes a prompt; None if there is nobody.

        Args:
            candidates: Prefill workers.
            held: Who has the prompt.
            session_id: Of the request.
            max_queued_tokens: Who has more waiting is used if all have.
        """
        free = [one for one in candidates if one.num_queued_tokens <= max_queued_tokens]

        def price(link: Link, num_uncached: int) -> float:
            # What has been computed there is gone: no sequence runs for long.
            return cost(self._weights, num_uncached, link.num_queued_tokens)

        return self._choose(free or candidates, held, session_id, price)

    def _choose(
        self,
        candidates: Sequence[Link],
        held: Holdings,
        session_id: str | None,
        price: Callable[[Link, int], float],
    ) -> Link | None:
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        if self._policy is Policy.ROUND_ROBIN:
            self._turns += 1
            return candidates[self._turns % len(candidates)]
        if len(candidates) > MANY:
            candidates = self._shortlist(candidates, held, session_id)
        num_tokens = held.num_tokens
        looks = self._policy is Policy.KV
        uncached = [
            num_tokens - held.num_cached(one)
            if looks or held.is_named(one)
            else num_tokens
            for one in candidates
        ]
        costs = [price(one, num) for one, num in zip(candidates, uncached, strict=True)]
        hint = self._weights.session_tokens
        preferred = hints(session_id, candidates, hint)
        least = uncached[costs.index(min(costs))]
        for index, one in enumerate(candidates):
            if held.is_named(one):
                costs[index] -= hint
            elif preferred and uncached[index] <= least:
                # Where the best one is known to have more of it, its session is there.
                costs[index] -= preferred.get(one, 0)
        return cheapest(candidates, costs, held.seed, self._slack(candidates))

    def _shortlist(
        self, candidates: Sequence[Link], held: Holdings, session_id: str | None
    ) -> list[Link]:
        """Return those that are looked at: who has most of it, and some others.

        The others are drawn by the sequence itself: among so many, one is about as free
        as the freest of all.
        """
        begin = held.seed() % len(candidates)
        turned = [*candidates[begin:], *candidates[:begin]]
        some = dict.fromkeys(turned[: MANY // 2])
        if self._policy is Policy.KV:
            # Of equals the first of this sequence's order: not always the same ones.
            has = [(num, one) for one in turned if (num := held.num_told(one))]
            most = nlargest(MANY // 2, has, key=itemgetter(0))
            some.update(dict.fromkeys(one for _, one in most))
        some.update(dict.fromkeys(one for one in turned if held.is_named(one)))
        if session_id is not None:
            some.update(hints(session_id, candidates, 1))
        return list(some)

    def _slack(self, candidates: Iterable[Link]) -> float:
        """Return by how much costs may differ and be the same, as far as is known.

        With other frontends, a request more or less is not known before the next Load.
        """
        shared = any(one.load.num_frontends > 1 for one in candidates)
        return float(self._weights.sequence_tokens) if shared else 0.0
