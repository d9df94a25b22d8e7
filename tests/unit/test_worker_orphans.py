"""KV whose frontend is gone: who is told of it, when, and for how long."""

from __future__ import annotations

import pytest

from support.worker_fakes import FakeTimers
from tokenwire.protocol.liveness import Liveness
from tokenwire.protocol.messages import (
    ORPHANED_KV,
    PROTOCOL_VERSION,
    Hello,
    Sampling,
    Submit,
)
from tokenwire.worker import orphans as module
from tokenwire.worker.frontends import Frontend, Request
from tokenwire.worker.orphans import AGAIN_S, GRACE_S, LEASE_S, Orphans

HANDOVER = {"remote_request_id": "x"}


def peer(name: str, incarnation: str = "", *, knows: bool = True) -> Frontend:
    """Return a frontend; its incarnation is its name unless given."""
    capabilities = [ORPHANED_KV] if knows else []
    hello = Hello(PROTOCOL_VERSION, name, incarnation or name, capabilities)
    return Frontend(name.encode(), hello, Liveness(0.0))


class Table:
    """Orphans under a clock turned by hand."""

    def __init__(self) -> None:
        self.orphans = Orphans()
        self.timers = FakeTimers()

    def give(self, to: Frontend, number: int = 1) -> None:
        """Hand over request ``r<number>``, which the engine calls ``e<number>``."""
        submit = Submit(f"r{number}", b"", Sampling(1))
        request = Request(to, submit, f"e{number}", self.timers.now)
        self.orphans.given(request, HANDOVER, self.timers.now)

    def lose(self, frontend: Frontend) -> int:
        """Lose a frontend."""
        return self.orphans.lost(frontend, self.timers.now)

    def offers(self, *frontends: Frontend) -> list[tuple[str, str]]:
        """Return who is told of which orphan now."""
        made = list(self.orphans.offers(frontends, self.timers.now))
        assert all(message.handover == HANDOVER for _, message in made)
        return [(one.identity.decode(), message.request_id) for one, message in made]


def test_what_is_passed_on_is_forgotten() -> None:
    """Then the loss of its frontend leaves nothing behind."""
    table, a, b = Table(), peer("a"), peer("b")
    table.give(a)
    table.orphans.settled(a, "r1")
    assert len(table.orphans) == 0
    assert table.lose(a) == 0
    table.timers.advance(GRACE_S)
    assert table.offers(b) == []


def test_an_orphan_goes_to_another_after_the_grace() -> None:
    """Not before: its frontend may only have lost its connection."""
    table, a, b = Table(), peer("a"), peer("b")
    table.give(a, 1)
    table.give(b, 2)
    assert table.offers(a, b) == []
    assert table.lose(a) == 1
    assert table.offers(b) == []
    table.timers.advance(GRACE_S)
    assert table.offers(b) == [("b", "e1")]
    table.orphans.settled(b, "e1")
    table.timers.advance(AGAIN_S)
    assert table.offers(b) == []
    assert len(table.orphans) == 1  # b's own


def test_a_frontend_that_is_back_gets_its_own_at_once_and_alone() -> None:
    """It alone knows what it has passed on."""
    table, a, b = Table(), peer("a"), peer("b")
    table.give(a)
    table.lose(a)
    back = peer("a-again", "a")
    assert table.offers(b, back) == [("a-again", "e1")]
    table.timers.advance(GRACE_S + AGAIN_S)
    assert table.offers(b, back) == [("a-again", "e1")]


def test_an_offer_is_made_again_to_another_until_the_lease_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its taker may be lost too, or know no decode worker; then it is said."""
    table, a = Table(), peer("a")
    takers = [peer("b"), peer("c")]
    table.give(a)
    table.lose(a)
    table.timers.advance(GRACE_S)
    told: list[str] = []
    while len(table.orphans):
        told += [name for name, _ in table.offers(*takers)]
        assert table.offers(*takers) == []
        table.timers.advance(AGAIN_S)
    assert told == ["c", "b"] * 7 + ["c"]
    assert table.timers.now - 1000.0 <= LEASE_S + GRACE_S + AGAIN_S
    assert "KV of 1 hand-overs was held until its lease was over" in caplog.text


def test_without_another_frontend_it_waits_for_one() -> None:
    """One that starts within the lease."""
    table, a = Table(), peer("a")
    table.give(a)
    table.lose(a)
    table.timers.advance(LEASE_S - 1)
    assert table.offers() == []
    assert table.offers(peer("late")) == [("late", "e1")]


def test_an_end_that_nobody_has_heard_is_anyone_s() -> None:
    """Its frontend was lost while the engine worked: no decode leg can have it."""
    table, b = Table(), peer("b")
    table.orphans.undelivered("e9", HANDOVER, table.timers.now)
    assert table.offers(b) == [("b", "e9")]


def test_an_older_frontend_is_neither_counted_on_nor_told() -> None:
    """It does not say when it has passed something on, so that it may be being read."""
    table, old, b = Table(), peer("old", knows=False), peer("b")
    table.give(old)
    assert table.lose(old) == 0
    table.give(b)
    table.lose(b)
    table.timers.advance(GRACE_S)
    assert table.offers(peer("old-too", knows=False)) == []


def test_what_is_never_settled_does_not_pile_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither the hand-overs of a frontend that is there, nor orphans; by time and number."""
    table, a = Table(), peer("a")
    table.give(a)
    table.timers.advance(LEASE_S)
    assert table.offers(a) == []
    assert len(table.orphans) == 0

    monkeypatch.setattr(module, "MAX_REMEMBERED", 10)
    for number in range(30):
        table.give(a, number)
    assert len(table.orphans) == 10
    table.lose(a)
    assert len(table.orphans) == 10
    monkeypatch.setattr(module, "MAX_OFFERS", 4)
    table.timers.advance(GRACE_S)
    assert [len(table.offers(peer("b"))) for _ in range(4)] == [4, 4, 2, 0]
