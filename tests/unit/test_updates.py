"""The numbers of updates: equal for one update, larger for the next."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tokenwire.frontend import updates as module
from tokenwire.frontend.updates import Updates
from tokenwire.frontend.weights import Weights
from tokenwire.protocol.messages import Adapter, Status


@dataclass
class Holder:
    """A worker's weights."""

    status: Status = field(default_factory=Status)
    is_outdated: bool = False
    is_ready: bool = True


class Frontend:
    """One of several: what it has seen of the workers, and its numbers."""

    def __init__(self, *holders: Holder) -> None:
        self.weights = Weights()
        self.weights.look(holders)
        self.updates = Updates(self.weights)

    def number(self, what: str, lora: str = "", have: int = 0) -> int:
        """Return the number of an update that is over at once."""
        with self.updates.numbered(lora, what, [have, None]) as number:
            return number


def test_frontends_that_know_the_same_choose_the_same() -> None:
    """And different updates are two to both of them."""
    known = Holder(Status("x", 5 << 32, [Adapter("a", (7 << 32) + 3)]))
    first, second = Frontend(known), Frontend(known)
    one = first.number("y")
    assert one == second.number("y")
    assert one >> 32 == 8
    other = Frontend(known).number("z")
    assert other >> 32 == 8
    assert other != one


def test_the_first_number_is_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frontend that has run for longer may remember some that nobody shows."""
    monkeypatch.setattr(module, "time", lambda: 1_790_000_000.9)
    assert Frontend().number("x") >> 32 == 1_790_000_000


def test_numbers_go_up() -> None:
    """Also behind one that failed, and behind what a lost worker has shown."""
    holder = Holder(Status("x", 5 << 32))
    at = Frontend(holder)
    numbers = [at.number(what) for what in ("x", "y", "x", "y")]
    assert numbers == sorted(set(numbers))
    lost = Holder(Status(adapters=[Adapter("a", 90 << 32)]))
    at.weights.look([holder, lost])
    lost.is_ready = False
    at.weights.look([holder, lost])
    assert at.number("z") >> 32 == 91


def test_what_is_under_way_has_its_number() -> None:
    """Sent to another worker meanwhile it is the same update; then no longer."""
    at = Frontend(Holder(Status("x", 5 << 32)))
    with at.updates.numbered("", "y", [0]) as first:
        assert at.number("y") == first
        assert at.number("y", lora="a") != first
        with at.updates.numbered("", "z", [0]) as later:
            assert later > first
            assert at.number("y") > later  # it would be the older one
    assert at.number("y") not in {first, later}


def test_what_a_worker_shows_is_joined_by_those_that_lack_it() -> None:
    """Who has it gets it anew, under another number, and so do the others then."""
    at = Frontend()
    one = at.number("y")
    at.weights.look([Holder(Status("y", one))])
    assert at.number("y", have=one - 1) == one
    assert at.number("z", have=one - 1) > one
    again = at.number("y", have=one)
    assert again > one
    at.weights.look([Holder(Status("y", again)), Holder(Status("y", one))])
    assert at.number("y", have=one) == again


def test_adapters_are_joined_by_their_name() -> None:
    """One that was unloaded everywhere is another when it is loaded again."""
    at = Frontend()
    one = at.number("/a", "a")
    at.weights.look([Holder(Status(adapters=[Adapter("a", one)]))])
    assert at.number("/a", "a") == one
    assert at.number("/a", "b") != one
    assert at.number("/other", "a") != one
    at.weights.look([Holder()])
    assert at.number("/a", "a") > one
