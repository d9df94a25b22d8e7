"""The workers that a session prefers: stable, shared by all frontends, never a pin."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field

import msgspec
import pytest

from tokenwire.frontend.affinity import MIN_EXCESS, choose, choose_prefill, ranked
from tokenwire.protocol.messages import Card, Load, Role

CARD = Card(1, "w", "1", Role.DECODE, "m", 2048, 100, 16, "sim", "1")
SESSIONS = [f"rollout-{n}" for n in range(400)]
NO_BOUND = 1 << 30


@dataclass
class Worker:
    """A candidate."""

    worker_id: str
    num_open: int = 0
    load: Load = field(default_factory=lambda: Load("1"))
    num_queued_tokens: int = 0
    num_open_at_load: int = 0
    card: Card | None = None


def workers(number: int) -> list[Worker]:
    """Return idle workers."""
    return [Worker(f"decode-{n}") for n in range(number)]


def names(candidates: list[Worker]) -> dict[str, str]:
    """Return where each session goes."""
    chosen = {session: choose(candidates, session) for session in SESSIONS}
    return {session: one.worker_id for session, one in chosen.items() if one}


def test_a_session_keeps_its_worker_and_sessions_are_spread() -> None:
    """In whatever order the workers are known, and about evenly."""
    candidates = workers(4)
    first = names(candidates)

    assert names(candidates[::-1]) == first
    counts = Counter(first.values())
    assert len(counts) == 4
    assert all(70 <= count <= 130 for count in counts.values()), counts


def test_another_process_chooses_alike() -> None:
    """Frontends share no state, and Python's own hash differs between processes."""
    program = (
        "import sys; from tokenwire.frontend.affinity import ranked\n"
        "from types import SimpleNamespace as W\n"
        "ws = [W(worker_id=f'decode-{n}') for n in range(4)]\n"
        "for s in sys.argv[1:]: print([w.worker_id for w in ranked(s, ws)])"
    )
    some = SESSIONS[:5]
    said = subprocess.run(
        [sys.executable, "-c", program, *some],
        capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"},
    ).stdout  # fmt: skip
    expected = [[one.worker_id for one in ranked(s, workers(4))] for s in some]
    assert said.splitlines() == [str(one) for one in expected]


def test_a_lost_worker_moves_its_own_sessions_alone() -> None:
    """To several others; and when it is back, so are they."""
    candidates = workers(4)
    before = names(candidates)
    after = names(candidates[1:])

    lost = candidates[0].worker_id
    moved = {session for session in SESSIONS if before[session] != after[session]}
    assert moved == {session for session in SESSIONS if before[session] == lost}
    assert len({after[session] for session in moved}) == 3
    assert names(candidates) == before


def test_a_busy_worker_is_left_for_the_next_in_the_sessions_order() -> None:
    """Only if it has a few more than others *and* more than a quarter above its share."""
    candidates = workers(4)
    first, second, *others = ranked("s", candidates)
    first.num_open = MIN_EXCESS - 1
    assert choose(candidates, "s") is first
    first.num_open = MIN_EXCESS
    assert choose(candidates, "s") is second
    for one in (second, *others):
        one.num_open = 100
    first.num_open = 124
    assert choose(candidates, "s") is first  # a few more, but no quarter more
    first.num_open = 140
    assert choose(candidates, "s") is second
    first.num_open = second.num_open = 200
    assert choose(candidates, "s") is others[0]


def test_what_other_frontends_have_counts_too() -> None:
    """The load that the worker tells is theirs as well."""
    candidates = workers(2)
    first, second = ranked("s", candidates)
    first.load = Load("1", num_requests=MIN_EXCESS)
    assert choose(candidates, "s") is second


def test_a_worker_without_a_slot_is_left() -> None:
    """What is sent there would wait in its engine, whatever its share."""
    candidates = workers(2)
    first, second = ranked("s", candidates)
    first.card = msgspec.structs.replace(CARD, max_num_seqs=2)
    first.num_open, second.num_open = 2, 1
    assert choose(candidates, "s") is second
    second.num_open = 2
    assert choose(candidates, "s") is first


@pytest.mark.parametrize("counts", [[0, 0], [9, 9, 9], [5, 0, 0, 100]])
def test_somebody_is_always_chosen(counts: list[int]) -> None:
    """However the requests are spread, and whatever the slots."""
    card = msgspec.structs.replace(CARD, max_num_seqs=1)
    candidates = [
        Worker(f"w{n}", num_open=count, card=card) for n, count in enumerate(counts)
    ]
    for session in SESSIONS:
        assert choose(candidates, session) in candidates
    assert choose([], "s") is None


def test_no_session_is_the_least_busy_worker() -> None:
    """As ever."""
    candidates = [Worker("a", num_open=1), Worker("b")]
    assert choose(candidates, None) is candidates[1]
    candidates[1].num_queued_tokens = 9
    assert choose_prefill(candidates, None, 100, NO_BOUND) is candidates[0]
    assert choose_prefill([], "s", 100, NO_BOUND) is None


def test_a_prefill_worker_is_left_if_waiting_costs_more_than_computing() -> None:
    """The prompt's own length decides: so much is computed elsewhere at worst."""
    candidates = workers(3)
    first, second, third = ranked("s", candidates)
    second.num_queued_tokens = third.num_queued_tokens = 500
    first.num_queued_tokens = 1_500
    assert choose_prefill(candidates, "s", 1_000, NO_BOUND) is first
    first.num_queued_tokens = 1_501
    assert choose_prefill(candidates, "s", 1_000, NO_BOUND) is second


def test_no_prefill_worker_above_the_operators_bound_is_preferred() -> None:
    """Else the prompt would be computed by a decode worker, with a prefill worker free."""
    candidates = workers(2)
    first, second = ranked("s", candidates)
    first.num_queued_tokens = 151
    assert choose_prefill(candidates, "s", 10_000, 150) is second
    first.num_queued_tokens = 150
    assert choose_prefill(candidates, "s", 10_000, 150) is first
    first.num_queued_tokens, second.num_queued_tokens = 300, 200
    assert choose_prefill(candidates, "s", 10_000, 150) is second
