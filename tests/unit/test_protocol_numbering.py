"""A link's messages are numbered: what is missing, repeated or late is noticed."""

from __future__ import annotations

import msgspec
import pytest

from tokenwire.protocol.errors import SequenceError
from tokenwire.protocol.messages import Batch, Bye, Cancel, Hello, Load, Ping
from tokenwire.protocol.numbering import Incoming, Outgoing


def numbered(*numbers: int) -> list[Ping]:
    """Return pings with these numbers."""
    return [Ping("i", seq=number) for number in numbers]


def test_what_is_sent_is_numbered_from_one() -> None:
    """A number is used up by sending, not by asking for it."""
    outgoing = Outgoing()
    first = outgoing.numbered(Ping("i"))
    assert first.seq == outgoing.numbered(Bye("why")).seq == 1
    outgoing.sent(first)
    assert outgoing.numbered(Cancel("r")) == Cancel("r", seq=2)


def test_a_hello_has_no_number_and_uses_none() -> None:
    """It is what the numbers begin behind."""
    outgoing = Outgoing()
    hello = Hello(1, "f", "i")
    assert outgoing.numbered(hello) is hello
    outgoing.sent(hello)
    assert outgoing.numbered(Load("i")).seq == 1


@pytest.mark.parametrize(
    ("numbers", "fault"),
    [
        ((2,), "1 messages are missing before Ping 2"),
        ((1, 4), "2 messages are missing before Ping 4"),
        ((1, 1), "Ping 1 came where number 2 was due"),
        ((1, 2, 1), "Ping 1 came where number 3 was due"),
        ((0,), "Ping 0 came where number 1 was due"),
    ],
)
def test_what_is_missing_or_repeated_is_an_error(
    numbers: tuple[int, ...], fault: str
) -> None:
    """The error names the message and the number that was due."""
    incoming = Incoming()
    *good, bad = numbered(*numbers)
    for message in good:
        incoming.check(message)
    with pytest.raises(SequenceError, match=fault):
        incoming.check(bad)


def test_a_peer_that_numbers_nothing_is_believed() -> None:
    """It is of an older release; one that stops numbering is no such peer."""
    incoming = Incoming()
    incoming.check(Batch())
    incoming.check(Load("i"))
    incoming.check(Batch(seq=1))
    with pytest.raises(SequenceError, match="Load has no number"):
        incoming.check(Load("i", seq=msgspec.UNSET))
