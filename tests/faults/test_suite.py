"""A short `make faults`: the same cases each time, each a test of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults import Table, rerun
from faults_case import run_case
from faults_plan import KINDS, plan, plan_digest

SEED = 1
CASES = 2 * len(KINDS)
TWICE = (0, 2, 3, 5, 11)


@pytest.mark.parametrize("number", range(CASES))
def test_a_case_loses_nothing(tiny_model: Path, number: int) -> None:
    """Every token once, every request ended, every block free again."""
    result = run_case(SEED, number, tiny_model)
    assert result.passed, f"{result.faults}; alone: {rerun(SEED, number)}"
    assert result.num_struck <= result.num_strikes


def test_the_same_seed_is_the_same_run(tiny_model: Path) -> None:
    """Plans and outcomes are equal, times aside; another seed is another plan."""
    first, second = (
        Table(SEED, [run_case(SEED, number, tiny_model) for number in TWICE])
        for _ in range(2)
    )
    assert first.digests == second.digests
    assert plan_digest(plan(SEED, 0)) != plan_digest(plan(SEED + 1, 0))


def test_a_plan_depends_on_nothing_but_seed_and_number() -> None:
    """Not on the plans made before it."""
    backwards = [plan(SEED, number) for number in (19, 18, 17)]
    assert [plan(SEED, number) for number in (17, 18, 19)] == backwards[::-1]
