"""What `make lock` makes of what pip has resolved."""

from __future__ import annotations

import pytest
from lock import LEFT_OUT, Found, closure, kept

LOCK = "# A title\n# Written by\na==1.0\nb-c==2.0\n"


@pytest.mark.parametrize(
    ("upgraded", "left"),
    [(set[str](), ["a==1.0", "b-c==2.0"]), ({"a"}, ["b-c==2.0"]), ({"all"}, [])],
)
def test_what_is_pinned_stays_unless_it_is_named(
    upgraded: set[str], left: list[str]
) -> None:
    """A change of one package moves no other."""
    assert list(kept(LOCK, upgraded)) == left


def test_a_lock_has_what_is_needed_and_nothing_else() -> None:
    """By extras and markers, each once, round in circles too; without what is left out."""
    left_out = next(iter(LEFT_OUT))
    known = {
        "a": Found("1", ("B.c>=1", 'd; extra == "more"', 'e; sys_platform == "never"')),
        "b-c": Found("2", ("a", left_out)),
        "d": Found("3", ()),
        "f": Found("4", ()),
    }

    assert closure(["A"], known) == {"a": "a==1", "b-c": "b-c==2"}
    assert closure(["a[more]"], known).keys() == {"a", "b-c", "d"}
