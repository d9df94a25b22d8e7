"""The ways in which alert rules are broken, so that a test that does not notice is seen."""

from __future__ import annotations

import pytest
from alert_tests import mutants


def expressions(expression: str) -> list[str]:
    """Return what becomes of a rule's *expression*."""
    rule = {"alert": "A", "expr": expression}
    return [mutant.rule["expr"] for mutant in mutants(rule)]


@pytest.mark.parametrize(
    ("expression", "looser", "tighter"),
    [
        ("a > 10", "a > 8", "a > 14"),
        ("a > 0", "a >= 0", "a > 1"),
        ("a >= 2", "a >= 1", "a >= 3"),
        ("a < 0.5", "a < 0.6", "a < 0.3"),
        ("a == 0", "a >= 0", "a == -1"),
        ("a > 1.5 * b", "a > 1.2 * b", "a > 2.1 * b"),
    ],
)
def test_thresholds_are_moved_both_ways(
    expression: str, looser: str, tighter: str
) -> None:
    """By a bit: what lies between is what a test has to have."""
    assert expressions(expression) == [looser, tighter]


def test_matchers_and_conditions_are_taken_away() -> None:
    """One at a time; a comparison of two series lets equal ones pass."""
    assert expressions('sum(a{b="c",d=~"e|f"}) < g{h!="i"} and on (j) (k or l)') == [
        'sum(a{b="c",d=~"e|f"}) <= g{h!="i"} and on (j) (k or l)',
        'sum(a{b=~".*",d=~"e|f"}) < g{h!="i"} and on (j) (k or l)',
        'sum(a{b="c",d=~".*"}) < g{h!="i"} and on (j) (k or l)',
        'sum(a{b="c",d=~"e|f"}) < g{h=~".*"} and on (j) (k or l)',
        'sum(a{b="c",d=~"e|f"}) < g{h!="i"}',
    ]


def test_exceptions_and_alternatives_are_taken_away() -> None:
    """What is left out is not, or is all there is; and each side of an ``or`` stands alone."""
    assert expressions("absent(a) unless on () b or (c or d)") == [
        "absent(a) and on () b or (c or d)",
        "absent(a) or on () b or (c or d)",
        "(c or d)",
        "absent(a) unless on () b",
    ]


def test_a_rule_does_not_wait() -> None:
    """And nothing else of it is changed."""
    rule = {"alert": "A", "expr": "absent(a)", "for": "2m", "labels": {"b": "c"}}

    (mutant,) = mutants(rule)
    assert mutant.rule == {"alert": "A", "expr": "absent(a)", "labels": {"b": "c"}}
