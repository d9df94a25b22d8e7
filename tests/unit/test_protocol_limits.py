"""The bounds of the wire are enforced where a message is made or read."""

from __future__ import annotations

import msgspec
import pytest

from tokenwire.protocol.codec import decode_from_frontend, decode_from_worker, encode
from tokenwire.protocol.errors import (
    LocalProtocolError,
    MalformedMessage,
    MessageTooLarge,
)
from tokenwire.protocol.limits import (
    MAX_BATCH_ITEMS,
    MAX_CONTROL_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_METRICS_BYTES,
    MAX_REQUEST_ID_CHARS,
)
from tokenwire.protocol.messages import (
    Batch,
    Bye,
    Cancel,
    EngineDead,
    MetricsText,
    Sampling,
    Submit,
    Tokens,
)

PAD = 200  # below what any message adds to its largest field


def submit(num_bytes: int) -> Submit:
    """Return a Submit with *num_bytes* of ids."""
    return Submit("r", bytes(num_bytes), Sampling(max_tokens=1))


def test_a_message_at_the_limit_passes() -> None:
    """The largest prompt that the limit allows goes both ways."""
    overhead = len(encode(submit(70_000))) - 70_000
    largest = submit((MAX_MESSAGE_BYTES - overhead) // 4 * 4)
    assert decode_from_frontend(encode(largest)) == largest


def test_a_message_above_the_limit_is_refused_on_both_sides() -> None:
    """It is neither sent nor decoded."""
    with pytest.raises(MessageTooLarge, match="Submit has 6710"):
        encode(submit(MAX_MESSAGE_BYTES))
    for decode in (decode_from_frontend, decode_from_worker):
        with pytest.raises(MessageTooLarge):
            decode(bytes(MAX_MESSAGE_BYTES + 1))


def test_control_messages_have_a_smaller_limit() -> None:
    """What carries no tokens cannot make its receiver hold megabytes."""
    with pytest.raises(MessageTooLarge, match="Bye has"):
        encode(Bye("x" * MAX_CONTROL_BYTES))
    raw = msgspec.msgpack.encode
    with pytest.raises(MessageTooLarge, match="Bye has"):
        decode_from_frontend(raw(Bye("x" * MAX_CONTROL_BYTES)))
    with pytest.raises(MessageTooLarge, match="EngineDead has"):
        decode_from_worker(raw(EngineDead("x" * MAX_CONTROL_BYTES)))
    encode(Bye("x" * (MAX_CONTROL_BYTES - PAD)))


def test_metrics_have_a_limit_of_their_own() -> None:
    """More than a control message, far less than a prompt."""
    largest = MetricsText("x" * (MAX_METRICS_BYTES - PAD))
    assert decode_from_worker(encode(largest)) == largest
    with pytest.raises(MessageTooLarge, match="MetricsText has"):
        decode_from_worker(msgspec.msgpack.encode(MetricsText("x" * MAX_METRICS_BYTES)))


@pytest.mark.parametrize("length", [0, MAX_REQUEST_ID_CHARS + 1])
def test_request_ids_are_bounded(length: int) -> None:
    """An empty or overlong request id is malformed."""
    with pytest.raises(MalformedMessage, match=r"\$\.request_id: "):
        decode_from_frontend(encode(Cancel("x" * length)))


def test_a_batch_is_bounded() -> None:
    """More items than the bound are neither sent nor accepted."""
    batch = Batch(tokens=[Tokens("r", 0, b"abcd")] * (MAX_BATCH_ITEMS + 1))
    with pytest.raises(LocalProtocolError, match="65537 items"):
        encode(batch)
    with pytest.raises(MalformedMessage, match="65537 items"):
        decode_from_worker(msgspec.msgpack.encode(batch))


def test_what_msgpack_cannot_hold_is_our_own_fault() -> None:
    """An object of no wire type is a local error that names the message."""
    wrong = Submit("r", b"", Sampling(max_tokens=1), handover={"a": object()})
    with pytest.raises(LocalProtocolError, match="Submit cannot be encoded"):
        encode(wrong)
