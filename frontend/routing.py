"""Which of several workers takes a request: the one where it costs least.

The unit is the prompt token, since that is what a cached prefix saves and what a queue
is long by::

    cost =                     prompt tokens that it would have to compute
         + queue_weight      * prompt tokens that wait there for their prefill
         + sequence_tokens   * requests there, running or waiting
         + waiting_tokens    * (requests there beyond its slots + how far its KV is beyond
                                KV_NEARLY_FULL, 0..1)
         - a hint            , for the session's worker: ``session_tokens`` at most

Laws:
- What is cached is never worth more than what it saves: a worker that is busier by as
  much is passed by, and no request fails or waits for the sake of what is cached.
- Frontends do not herd. Of workers that cost the same, as far as is known, two are drawn
  by the sequence itself, and the cheaper one takes it: other sequences go elsewhere, and
  the same sequence goes to the same worker from every frontend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Protocol, TypeVar

import msgspec

from tokenwire.protocol.messages import Card, Load

__all__ = [
    "KV_NEARLY_FULL",
    "QUEUE_WEIGHT",
    "SEQUENCE_TOKENS",
    "SESSION_TOKENS",
    "WAITING_TOKENS",
    "Candidate",
    "CostWeights",
    "Policy",
    "cheapest",
    "cost",
    "load_cost",
    "num_requests",
]

QUEUE_WEIGHT = 1.0
"""A token that waits is computed before this request's own: it delays as much."""

SEQUENCE_TOKENS = 128
"""A request that runs makes each step of the others longer, for as long as both run, and
it may be gone soon. Found by ``make bench-routing``: with less, workers with popular
prefixes get more than their share; with more, prefixes are computed at several."""

WAITING_TOKENS = 2_048
"""A request without a slot waits for the end of another: a good part of an answer, in
which a GPU computes some thousand prompt tokens. The same where KV is nearly full: a
sequence that is preempted is computed again."""

SESSION_TOKENS = 4 * SEQUENCE_TOKENS
"""A session's worker may have almost four requests more than others: its parallel ones
(samples, judges, tools) stay together on an idle deployment."""

KV_NEARLY_FULL = 0.9
"""Used share of the KV blocks from which on sequences may be preempted: a tenth is what
running ones grow by in a while. Blocks that are only cached do not count as used."""


class Policy(StrEnum):
    """By what a worker is chosen: the option ``--routing``."""

    KV = "kv"
    """By the cost."""
    LOAD = "load"
    """By the cost as if nobody had anything cached."""
    ROUND_ROBIN = "round-robin"
    """One after the other."""


class CostWeights(msgspec.Struct, frozen=True):
    """How much each part of the cost counts."""

    queue: float = QUEUE_WEIGHT
    sequence_tokens: int = SEQUENCE_TOKENS
    waiting_tokens: int = WAITING_TOKENS
    session_tokens: int = SESSION_TOKENS


class Candidate(Protocol):
    """What the choice looks at."""

    @property
    def num_open(self) -> int:
        """Requests of this frontend that have not ended there."""
        ...

    @property
    def num_open_at_load(self) -> int:
        """The same when ``load`` came."""
        ...

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that wait there for their prefill."""
        ...

    @property
    def load(self) -> Load:
        """What the worker last said, up to a heartbeat old."""
        ...

    @property
    def card(self) -> Card | None:
        """Who it is."""
        ...


C = TypeVar("C")


def num_requests(candidate: Candidate) -> int:
    """Return how many requests a worker has.

    This frontend's own count is exact. What other frontends have is what the worker had
    beyond that when it last said so, up to a second ago. (The larger of its count and
    ours would hide what has ended here since: a free worker would look full until it
    speaks again.)
    """
    num_others = candidate.load.num_requests - candidate.num_open_at_load
    return candidate.num_open + num_others if num_others > 0 else candidate.num_open


def cost(
    weights: CostWeights,
    num_uncached: float,
    num_queued: float = 0,
    num_requests: int = 0,
    num_slots: int = 0,
    kv_usage: float = 0.0,
) -> float:
    """Return what a request costs at a worker, in prompt tokens.

    Args:
        weights: How much each part counts.
        num_uncached: Of its prompt tokens, those that the worker has not cached.
        num_queued: Prompt tokens that wait there.
        num_requests: Requests there.
        num_slots: How many it runs at once; 0: unknown.
        kv_usage: Used share of its KV blocks.
    """
    result = (
        num_uncached
        + weights.queue * num_queued
        + weights.sequence_tokens * num_requests
    )
    if 0 < num_slots <= num_requests:
        result += weights.waiting_tokens * (num_requests - num_slots + 1)
    if kv_usage > KV_NEARLY_FULL:
        fullness = (kv_usage - KV_NEARLY_FULL) / (1 - KV_NEARLY_FULL)
        result += weights.waiting_tokens * fullness
    return result


def load_cost(weights: CostWeights, candidate: Candidate) -> float:
    """Return what a request without a prompt would cost at a worker."""
    card, load = candidate.card, candidate.load
    return cost(
        weights,
        0,
        candidate.num_queued_tokens,
        num_requests(candidate),
        0 if card is None else card.max_num_seqs,
        load.kv_usage,
    )


def cheapest(
    candidates: Sequence[C],
    costs: Sequence[float],
    seed: Callable[[], int],
    slack: float = 0.0,
) -> C:
    """Return who takes a request.

    Args:
        candidates: At least one.
        costs: Theirs, (num_candidates,).
        seed: Returns a number of the sequence's own: it draws two of those that cost the
            same.
        slack: Costs differ by less only as far as is known.
    """
    most = min(costs) + slack
    ties = [index for index, one in enumerate(costs) if one <= most]
    if len(ties) == 1:
        return candidates[ties[0]]
    draw, place = divmod(seed(), len(ties))
    first = ties[place]
    second = ties[(place + 1 + draw % (len(ties) - 1)) % len(ties)]
    return candidates[second if costs[second] < costs[first] else first]
