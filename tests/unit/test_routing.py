"""What a request costs at a worker, and who takes it where costs are equal."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial

import msgspec
import pytest

from tokenwire.frontend.routing import (
    KV_NEARLY_FULL,
    CostWeights,
    cheapest,
    cost,
    load_cost,
    num_requests,
)
from tokenwire.protocol.messages import Card, Load, Role

WEIGHTS = CostWeights(
    queue=2.0, sequence_tokens=10, waiting_tokens=1_000, session_tokens=0
)
CARD = Card(1, "w", "1", Role.AGGREGATED, "m", 2048, 100, 16, "sim", "1")


@dataclass
class Worker:
    """A candidate."""

    num_open: int = 0
    load: Load = field(default_factory=lambda: Load("1"))
    num_queued_tokens: int = 0
    num_open_at_load: int = 0
    card: Card | None = None


@pytest.mark.parametrize(
    ("uncached", "queued", "requests", "slots", "kv_usage", "expected"),
    [
        (0, 0, 0, 0, 0.0, 0.0),
        (7, 0, 0, 0, 0.0, 7.0),  # what it would have to compute
        (7, 100, 0, 0, 0.0, 207.0),  # and what waits there
        (7, 0, 3, 0, 0.0, 37.0),  # and what runs
        (7, 0, 3, 4, 0.0, 37.0),  # a slot is free
        (7, 0, 4, 4, 0.0, 1_047.0),  # none: one has to end first
        (7, 0, 6, 4, 0.0, 3_067.0),  # three
        (7, 0, 6, 0, 0.0, 67.0),  # nobody knows how many it has
        (0, 0, 0, 0, KV_NEARLY_FULL, 0.0),
        (0, 0, 0, 0, 0.95, 500.0),  # half of what is left of its KV
        (0, 0, 0, 0, 1.0, 1_000.0),
        (0, 1, 1, 1, 1.0, 2_012.0),  # all of it
    ],
)
def test_a_cost(
    uncached: int,
    queued: int,
    requests: int,
    slots: int,
    kv_usage: float,
    expected: float,
) -> None:
    """Each part counts by its weight, in prompt tokens."""
    given = cost(WEIGHTS, uncached, queued, requests, slots, kv_usage)
    assert given == pytest.approx(expected)


def test_the_load_of_a_worker_is_a_cost() -> None:
    """What the worker said, and what this frontend knows better."""
    load = Load("1", num_requests=5, kv_usage=0.95)
    card = msgspec.structs.replace(CARD, max_num_seqs=4)
    worker = Worker(3, load, num_queued_tokens=100, num_open_at_load=4, card=card)

    assert num_requests(worker) == 4
    assert load_cost(WEIGHTS, worker) == pytest.approx(200 + 40 + 1_000 + 500)
    worker.card = None
    assert load_cost(WEIGHTS, worker) == pytest.approx(200 + 40 + 500)


def test_a_worker_that_has_ended_ours_is_free_before_it_says_so() -> None:
    """Its Load is old; how many of its requests are another frontend's is not."""
    load = Load("1", num_requests=10)
    freed, full = Worker(8, load, num_open_at_load=10), Worker(10, load, 0, 10)
    shared = Worker(3, load, num_open_at_load=4)

    assert [num_requests(one) for one in (freed, full, shared)] == [8, 10, 9]
    assert num_requests(Worker(2, load, num_open_at_load=12)) == 2


def test_the_cheapest_takes_it() -> None:
    """Whatever the seed."""
    assert {cheapest("abc", [3, 1, 2], partial(int, n)) for n in range(50)} == {"b"}
    assert cheapest("a", [9], int) == "a"


def test_equals_share_by_the_seed_and_two_are_compared() -> None:
    """Evenly among those within the slack; the dearest of them only if nobody is left."""
    taken = drawn([0, 0, 0, 9], 0.0)
    assert set(taken) == set("abc")
    assert min(taken.values()) > 900
    taken = drawn([2, 0, 1, 9], 2.0)
    assert set(taken) == set("bc")  # of any two of these, one is cheaper than a
    assert taken["b"] > 1.5 * taken["c"]


def drawn(costs: list[float], slack: float) -> Counter[str]:
    """Return who has taken how many of 3,000 requests."""
    seeds = [partial(int, number) for number in range(3_000)]
    return Counter(cheapest("abcd", costs, seed, slack) for seed in seeds)
