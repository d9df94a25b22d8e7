"""Which of several workers takes a request: the one with the least to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from tokenwire.protocol.messages import Load

__all__ = ["Candidate", "choose", "choose_prefill", "cost"]


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


C = TypeVar("C", bound=Candidate)


def cost(candidate: Candidate) -> tuple[int, float]:
    """Return how busy a worker is: requests first, used KV to break a tie.

    This frontend's own count is exact. What other frontends have is what the worker had
    beyond that when it last said so, up to a second ago. (The larger of its count and
    ours would hide what has ended here since: a free worker would look full until it
    speaks again.)
    """
    load = candidate.load
    num_others = max(0, load.num_requests - candidate.num_open_at_load)
    return candidate.num_open + num_others, load.kv_usage


def choose(candidates: Sequence[C]) -> C | None:
    """Return the cheapest candidate, the first of equals; None if there is none."""
    return min(candidates, key=cost, default=None)


def choose_prefill(candidates: Sequence[C]) -> C | None:
    """Return who would begin a prompt first: what waits there is counted in tokens."""
    return min(
        candidates,
        key=lambda one: (one.num_queued_tokens, one.load.kv_usage),
        default=None,
    )
