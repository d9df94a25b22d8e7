"""A short `make resume-report`: it passes, and fails where generations do not go on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from report_kinds import KINDS, SAMPLINGS
from report_sim import PATHS, run_simulated
from report_table import failures

pytestmark = [pytest.mark.timeout(180), pytest.mark.untraced]

PLAIN = tuple(kind for kind in KINDS if kind.name == "plain")


def test_what_is_broken_in_each_way_goes_on(tiny_model: Path) -> None:
    """At the ends of an output, inside a character, and behind a block."""
    cuts = ("0", "block", "inside a character", "before EOS", "after EOS")
    outcomes = asyncio.run(
        run_simulated(tiny_model, print, kinds=PLAIN, cuts=cuts, parsed=False)
    )

    assert failures(outcomes) == []
    raw = [one for one in outcomes if one.method == "raw ids"]
    assert {one.path for one in raw} == set(PATHS)
    assert {one.cut.name for one in raw} == set(cuts)
    assert len(raw) == len(PATHS) * len(cuts) * len(SAMPLINGS) * 2
    others = [one for one in outcomes if one.method != "raw ids" and one.cut.k]
    assert not all(one.metrics.post_resume_exact for one in others)


def test_a_worker_that_does_not_go_on_exactly_is_found_out(tiny_model: Path) -> None:
    """Where seeds or penalties count; and it has not claimed to."""
    outcomes = asyncio.run(
        run_simulated(
            tiny_model,
            print,
            kinds=PLAIN,
            paths=("client resume",),
            cuts=("block",),
            options=("--no-exact-resume",),
            parsed=False,
        )
    )

    raw = [one for one in outcomes if one.method == "raw ids"]
    assert len(failures(raw)) > len(raw) / 2
    for one in raw:
        is_greedy = one.case.sampling.name == "T=0" and not one.case.penalized
        if is_greedy or one.case.sampling.is_seeded:
            assert one.metrics.post_resume_exact is is_greedy
            assert one.metrics.claim_ok
