"""The workers that a session prefers: stable, and the same for all frontends."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import dataclass

from tokenwire.frontend.affinity import hints, ranked

SESSIONS = [f"rollout-{n}" for n in range(400)]


@dataclass(frozen=True)
class Worker:
    """A candidate."""

    worker_id: str


def workers(number: int) -> list[Worker]:
    """Return workers."""
    return [Worker(f"decode-{n}") for n in range(number)]


def names(candidates: list[Worker]) -> dict[str, str]:
    """Return where each session goes."""
    return {session: ranked(session, candidates)[0].worker_id for session in SESSIONS}


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


def test_a_first_and_a_second_choice_may_cost_more() -> None:
    """Where one goes when the other is busy; without a session or a choice, nobody."""
    candidates = workers(4)
    first, second, *_ = ranked("s", candidates)

    assert hints("s", candidates, 100) == {first: 100, second: 12}
    assert hints(None, candidates, 100) == {}
    assert hints("s", candidates[:1], 100) == {}
    assert hints("s", candidates, 0) == {}
