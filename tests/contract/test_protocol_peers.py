"""Peers of other releases: what they add, lack, or say that is not known here."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import example, given, strategies as st

from support.protocol_strategies import (
    DECODERS,
    FEW,
    PROPERTY,
    Decode,
    anything,
    raw,
    texts,
)
from tokenwire.protocol.codec import decode_from_frontend, decode_from_worker, encode
from tokenwire.protocol.errors import MalformedMessage
from tokenwire.protocol.messages import (
    Batch,
    Bye,
    Cancel,
    Finished,
    FinishReason,
    FromFrontend,
    FromWorker,
    Hello,
    Load,
    Logprobs,
    Ping,
    Sampling,
    Submit,
    Tokens,
)

END = {"request_id": "r", "reason": "stop", "num_output_tokens": 1}

# --- peers of other releases -------------------------------------------------------------


@pytest.mark.parametrize(
    ("decode", "message"),
    [
        (decode_from_frontend, Hello(1, "f", "i")),
        (decode_from_frontend, Cancel("r")),
        (decode_from_frontend, Submit("r", b"abcd", Sampling(1))),
        (decode_from_worker, Load("i")),
        (decode_from_worker, Batch([], [Finished("r", FinishReason.STOP, 0)])),
    ],
)
@FEW
@given(extra=st.dictionaries(texts.map(lambda t: "new_" + t), anything, min_size=1))
@example(extra={"new_a": {"deep": [1, {"er": None}]}})
def test_a_newer_peer_may_add_fields(
    decode: Decode, message: FromFrontend | FromWorker, extra: dict[str, Any]
) -> None:
    """Unknown fields are passed over, at every level."""
    tree: Any = msgspec.msgpack.decode(raw(message))
    tree.update(extra)
    inner: list[dict[str, Any]] = list(tree.get("finished", []))
    if "sampling" in tree:
        inner.append(tree["sampling"])
    for fields in inner:
        fields.update(extra)
    assert decode(raw(tree)) == message


@PROPERTY
@given(st.lists(anything, min_size=1, max_size=3))
def test_a_newer_peer_may_add_items_to_tokens_and_logprobs(extra: list[Any]) -> None:
    """What follows the known items of an array is passed over."""
    logprobs = [1, b"aaaa", b"bbbb", b"cccc", *extra]
    data = raw({"type": "batch", "tokens": [["r", 0, b"abcd", logprobs, 7, *extra]]})
    known = Logprobs(1, b"aaaa", b"bbbb", b"cccc")
    assert decode_from_worker(data) == Batch([Tokens("r", 0, b"abcd", known, 7)])


@pytest.mark.parametrize(
    ("decode", "tree", "message"),
    [
        (
            decode_from_frontend,
            {"type": "hello", "protocol_version": 1, "frontend_id": "f"}
            | {"incarnation": "i"},
            Hello(1, "f", "i"),
        ),
        (
            decode_from_frontend,
            {"type": "submit", "request_id": "r", "token_ids": b""}
            | {"sampling": {"max_tokens": 1}},
            Submit("r", b"", Sampling(1)),
        ),
        (decode_from_frontend, {"type": "bye"}, Bye()),
        (decode_from_worker, {"type": "batch"}, Batch()),
        (decode_from_worker, {"type": "load", "incarnation": "i"}, Load("i")),
        (
            decode_from_worker,
            {"type": "batch", "tokens": [["r", 0, b"abcd"]], "finished": [END]},
            Batch([Tokens("r", 0, b"abcd")], [Finished("r", FinishReason.STOP, 1)]),
        ),
    ],
)
def test_an_older_peer_may_lack_optional_fields(
    decode: Decode, tree: dict[str, Any], message: FromFrontend | FromWorker
) -> None:
    """Only the fields of version 1 without a default are required."""
    assert decode(raw(tree)) == message


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize(
    "tree",
    [{"type": "dance"}, {"type": 1}, {"type": None}, {}, {"request_id": "r"}, [], None],
)
def test_an_unknown_message_is_malformed(decode: Decode, tree: object) -> None:
    """A message that this release does not know is never guessed at."""
    with pytest.raises(MalformedMessage):
        decode(raw(tree))


def test_the_directions_do_not_mix() -> None:
    """A worker does not take a worker's message, nor a frontend a frontend's."""
    with pytest.raises(MalformedMessage):
        decode_from_frontend(encode(Load("i")))
    with pytest.raises(MalformedMessage):
        decode_from_worker(encode(Ping("i")))
