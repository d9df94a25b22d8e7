"""Which weights count, where workers differ."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenwire.frontend.weights import Weights
from tokenwire.protocol.admin import update_of
from tokenwire.protocol.messages import Adapter, Status


@dataclass
class Holder:
    """A worker's weights."""

    status: Status = field(default_factory=Status)
    is_outdated: bool = False
    is_ready: bool = True


def test_the_newest_update_counts() -> None:
    """Whoever has an older one is kept out; what it is called does not matter."""
    old, new = Holder(Status("b", 1)), Holder(Status("a", 2))
    Weights().look([old, new])
    assert (old.is_outdated, new.is_outdated) == (True, False)


def test_who_is_just_being_updated_is_not_kept_out() -> None:
    """It stands anyway, and will have them in a moment."""
    old, new = Holder(Status("a", 1, busy="update_weights")), Holder(Status("b", 2))
    weights = Weights()
    weights.look([old, new])
    assert not old.is_outdated
    old.status = Status("a", 1)  # it has failed
    weights.look([old, new])
    assert old.is_outdated


def test_the_newest_is_remembered() -> None:
    """Weights do not go back because a worker is gone."""
    weights = Weights()
    holder = Holder(Status("b", 2))
    weights.look([holder])
    holder.is_ready = False
    restarted = Holder()
    weights.look([holder, restarted])
    assert restarted.is_outdated


def test_a_worker_that_is_gone_is_not_judged() -> None:
    """What it had does not count before it is back."""
    gone = Holder(Status("b", 2), is_ready=False)
    old = Holder(Status("a", 1))
    Weights().look([gone, old])
    assert not old.is_outdated


def test_adapters_are_served_by_who_has_the_newest_version() -> None:
    """And are no more when the last worker that has any has unloaded it."""
    first = Holder(Status(adapters=[Adapter("a", 1)]))
    second = Holder(Status(adapters=[Adapter("a", 2), Adapter("b", 1)]))
    weights = Weights()
    weights.look([first, second])
    assert weights.adapters == {"a": 2, "b": 1}
    assert [weights.has(one, "a") for one in (first, second)] == [False, True]
    assert weights.has(first, "")
    second.is_ready = False
    weights.look([first, second])
    assert not weights.has(first, "a")  # it has the older one still
    first.status = Status()
    weights.look([first, second])
    assert weights.adapters == {}


def test_an_adapter_is_of_its_own_update_and_of_its_base() -> None:
    """KV of it is of neither older one."""
    status = Status("x", 5, [Adapter("old", 3), Adapter("new", 9)])
    assert [update_of(status, name) for name in ("", "old", "new", "no")] == [
        5,
        5,
        9,
        None,
    ]
