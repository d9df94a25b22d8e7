"""Injected faults: their notation and when they strike."""

from __future__ import annotations

import pytest

from tokenwire.worker.sim.faults import Fault, FaultKind, Faults, parse_fault


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        ("die@3", Fault(FaultKind.DIE, 3)),
        ("freeze@1", Fault(FaultKind.FREEZE, 1)),
        ("slow=2.5", Fault(FaultKind.SLOW, None, 2.5)),
        ("slow=200@7", Fault(FaultKind.SLOW, 7, 200.0)),
        ("fail-handover", Fault(FaultKind.FAIL_HANDOVER)),
        ("drop-finish@2", Fault(FaultKind.DROP_FINISH, 2)),
    ],
)
def test_a_spec_is_kind_value_and_count(spec: str, fault: Fault) -> None:
    """``KIND[=VALUE][@N]``."""
    assert parse_fault(spec) == fault


@pytest.mark.parametrize(
    "spec",
    ["", "die", "freeze", "die@0", "slow", "slow@3", "die=1@2", "burn@1", "die@x"],
)
def test_any_other_spec_is_refused(spec: str) -> None:
    """With the spec in the text."""
    with pytest.raises(ValueError, match="fault"):
        parse_fault(spec)


def test_steps_are_hit_as_counted() -> None:
    """Death and slowness at their step, a freeze from its step on."""
    faults = Faults([parse_fault(spec) for spec in ("die@3", "freeze@5", "slow=100@2")])
    assert [faults.dies(step) for step in (2, 3, 4)] == [False, True, False]
    assert [faults.freezes(step) for step in (4, 5, 6)] == [False, True, True]
    assert [faults.extra_s(step) for step in (1, 2)] == [0.0, 0.1]


def test_reads_and_ends_are_counted() -> None:
    """The Nth of each, or all without an N."""
    faults = Faults([parse_fault("fail-handover@2"), parse_fault("drop-finish")])
    assert [faults.fails_read() for _ in range(3)] == [False, True, False]
    assert [faults.drops_end() for _ in range(2)] == [True, True]
    assert not Faults().drops_end()
