"""How many connections there may be, and how long each may take."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tokenwire.frontend.connections import (
    SLOW_LOOKS,
    ConnectionLimits,
    Connections,
    client_of,
)


class Fake:
    """A connection that notes what becomes of it."""

    end: str

    def __init__(self, name: str = "", address: str = "10.0.0.1") -> None:
        self.name = name
        self.address = address
        self.is_idle = True
        self.num_unsent_bytes = 0
        self.end = ""

    def expire(self) -> None:
        """Note it."""
        self.end = "expired"

    def drop(self) -> None:
        """Note it."""
        self.end = "dropped"


def ends(*fakes: Fake) -> list[str]:
    """Return what has become of these."""
    return [fake.end for fake in fakes]


class Desk(Connections):
    """Connections whose timer is the test's."""

    def __init__(self, **limits: float) -> None:
        self.reasons: list[str] = []
        super().__init__(
            ConnectionLimits(header_timeout_s=3, write_timeout_s=2, **limits),  # type: ignore[arg-type]
            self.reasons.append,
        )

    def entered(self, *names: str, address: str = "10.0.0.1") -> list[Fake]:
        """Return new connections, all of which are taken."""
        fakes = [Fake(name, address) for name in names]
        assert all(self.enter(fake) for fake in fakes)
        return fakes

    def looks(self, number: int) -> None:
        """Look so many times."""
        for _ in range(number):
            self.look()


@pytest.fixture(autouse=True)
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """A loop for timers that never fire."""
    made = asyncio.new_event_loop()
    asyncio.events._set_running_loop(made)
    yield made
    asyncio.events._set_running_loop(None)
    made.close()


def test_who_sends_no_request_expires() -> None:
    """By looks: who came later has as long, and who has sent one is left alone."""
    desk = Desk()
    silent, speaks = desk.entered("silent", "speaks")
    desk.looks(2)
    [later] = desk.entered("later")
    desk.arrived(speaks)
    desk.looks(1)
    assert ends(silent) == [""]
    desk.looks(1)
    assert ends(silent, speaks, later) == ["expired", "", ""]
    desk.looks(1)
    assert ends(later) == [""]
    desk.looks(1)
    assert ends(later) == ["expired"]
    assert desk.reasons == ["slow_request"] * 2


def test_bytes_that_trickle_in_buy_no_time() -> None:
    """The first of a request begins its time; the others change nothing."""
    desk = Desk()
    [slow] = desk.entered("slow")
    for _ in range(4):
        desk.awaits(slow)
        desk.looks(1)
    assert slow.end == "expired"


def test_who_reads_nothing_is_dropped() -> None:
    """Beyond the time that its stream gives it itself; reading a little buys it again."""
    desk = Desk()
    stuck, reads = desk.entered("stuck", "reads")
    for peer in (stuck, reads):
        desk.arrived(peer)
        peer.num_unsent_bytes = 1_000
        desk.stalls(peer)
    bound = 2 + SLOW_LOOKS
    desk.looks(bound)
    reads.num_unsent_bytes = 999
    desk.looks(1)
    assert (stuck.end, reads.end) == ("dropped", "")
    desk.looks(bound)
    assert not reads.end
    desk.flows(reads)
    desk.looks(bound)
    assert not reads.end
    assert desk.reasons == ["slow_reader"]


def test_who_waits_makes_room() -> None:
    """First who has never sent a request, the oldest; then who is idle."""
    desk = Desk(max_connections=3)
    idle, busy, fresh = desk.entered("idle", "busy", "fresh")
    desk.arrived(idle)
    desk.arrived(busy)
    busy.is_idle = False
    assert desk.enter(Fake("one"))
    assert (idle.end, fresh.end) == ("", "dropped")
    [*_, one] = [*desk._peers]  # pyright: ignore[reportPrivateUsage]
    desk.arrived(one)
    assert desk.enter(Fake("two"))
    assert idle.end == "dropped"
    assert len(desk) == 3


def test_where_all_have_a_request_new_ones_are_turned_away() -> None:
    """And those that are there go on."""
    desk = Desk(max_connections=2)
    busy = desk.entered("a", "b")
    for peer in busy:
        desk.arrived(peer)
        peer.is_idle = False
    late = Fake()
    assert not desk.enter(late)
    desk.leave(late)
    assert [peer.end for peer in busy] == ["", ""]
    assert desk.reasons == ["limit"]
    desk.leave(busy[0])
    assert desk.enter(Fake())


def test_an_address_has_a_bound_of_its_own() -> None:
    """Whoever leaves makes room; nothing is kept of addresses that are gone."""
    desk = Desk(max_per_client=2)
    near = desk.entered("a", "b")
    assert not desk.enter(Fake())
    far = desk.entered("c", address="10.0.0.2")
    desk.leave(near[0])
    [last] = desk.entered("d")
    assert desk.reasons == ["client_limit"]
    for peer in [near[1], *far, last]:
        desk.leave(peer)
    assert not desk._by_address  # pyright: ignore[reportPrivateUsage]


def test_a_network_of_ipv6_is_one_client() -> None:
    """Its addresses are for it to choose: they share its places, and all are given back."""
    desk = Desk(max_per_client=2)
    first = desk.entered("a", address="2001:db8:0:1::1")
    second = desk.entered("b", address="2001:db8:0:1:ffff::2")
    assert not desk.enter(Fake("c", "2001:db8:0:1::3"))
    desk.entered("d", address="2001:db8:0:2::1")
    for one in (*first, *second):
        desk.leave(one)
    desk.entered("e", "f", address="2001:db8:0:1::4")


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("", ""),
        ("::1", "::/64"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::%eth0/64"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("no:address", "no:address"),
    ],
)
def test_whose_an_address_is(address: str, client: str) -> None:
    """IPv4 in IPv6's form is IPv4: else all of it would be one client."""
    assert client_of(address) == client


def test_nobody_is_looked_at_when_nobody_waits() -> None:
    """No timer stands while all connections have a request, or are idle."""
    desk = Desk()
    [peer] = desk.entered("a")

    def has_timer() -> bool:
        return desk._timer is not None  # pyright: ignore[reportPrivateUsage]

    assert has_timer()
    desk.arrived(peer)
    desk._on_timer()  # pyright: ignore[reportPrivateUsage]
    stands = has_timer()
    desk.awaits(peer)
    assert (stands, has_timer()) == (False, True)
    desk.close()
