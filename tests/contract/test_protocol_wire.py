"""Round trips and garbage.

The fuzz law: whatever the bytes, a decoder returns a message or raises
``MalformedMessage`` or ``MessageTooLarge``; anything else would kill a link's task.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from support.protocol_strategies import (
    DECODERS,
    FUZZ,
    PROPERTY,
    Decode,
    anything,
    from_frontend,
    from_worker,
    raw,
)
from tokenwire.protocol.codec import decode_from_frontend, decode_from_worker, encode
from tokenwire.protocol.errors import MalformedMessage, MessageTooLarge
from tokenwire.protocol.messages import (
    FromFrontend,
    FromWorker,
    Ping,
    ReleaseKV,
    Sampling,
    Submit,
)

Node = dict[Any, Any] | list[Any] | str | bytes | float | None

# --- round trips -----------------------------------------------------------------------


@PROPERTY
@given(from_frontend)
def test_round_trip_from_a_frontend(message: FromFrontend) -> None:
    """What a frontend says is what a worker hears."""
    assert decode_from_frontend(encode(message)) == message


@PROPERTY
@given(from_worker)
def test_round_trip_from_a_worker(message: FromWorker) -> None:
    """What a worker says is what a frontend hears."""
    assert decode_from_worker(encode(message)) == message


def test_a_memoryview_is_as_good_as_bytes() -> None:
    """A frame need not be copied to be decoded."""
    assert decode_from_frontend(memoryview(encode(Ping("i")))) == Ping("i")


def test_zeros_are_not_lost() -> None:
    """``temperature=0`` and ``seed=0`` arrive as zeros, given as int or as float."""
    sent = Submit("r", b"", Sampling(1, temperature=0, seed=0, logprobs=0))
    got = decode_from_frontend(encode(sent))
    assert isinstance(got, Submit)
    assert (got.sampling.temperature, got.sampling.seed, got.sampling.logprobs) == (
        0.0,
        0,
        0,
    )
    assert isinstance(got.sampling.temperature, float)


# --- garbage -----------------------------------------------------------------------------


def tolerate(decode: Decode, data: bytes) -> FromFrontend | FromWorker | None:
    """Decode *data*; None if it is refused as the fuzz law allows."""
    try:
        return decode(data)
    except (MalformedMessage, MessageTooLarge):
        return None


@pytest.mark.parametrize("decode", DECODERS)
@PROPERTY
@given(data=st.binary(max_size=300))
def test_random_bytes(decode: Decode, data: bytes) -> None:
    """Bytes of no meaning are refused as malformed."""
    tolerate(decode, data)


def mutated(data: st.DataObject, valid: bytes) -> bytes:
    """Draw *valid* with some bytes changed, cut out, repeated or inserted."""
    changed = bytearray(valid)
    for _ in range(data.draw(st.integers(1, 4), label="mutations")):
        at = data.draw(st.integers(0, max(0, len(changed) - 1)), label="at")
        kind = data.draw(st.sampled_from(["set", "cut", "insert", "repeat"]))
        if kind == "set" and changed:
            changed[at] = data.draw(st.integers(0, 255), label="byte")
        elif kind == "cut":
            del changed[at : at + data.draw(st.integers(1, 20), label="length")]
        elif kind == "insert":
            changed[at:at] = data.draw(st.binary(min_size=1, max_size=8), label="new")
        else:
            changed[at:at] = changed[at : at + 16]
    return bytes(changed)


@FUZZ
@given(st.data())
def test_mutated_messages_from_a_frontend(data: st.DataObject) -> None:
    """A damaged message is refused, or is another message that can be sent on."""
    valid = encode(data.draw(from_frontend))
    message = tolerate(decode_from_frontend, mutated(data, valid))
    if message is not None:
        encode(message)


@FUZZ
@given(st.data())
def test_mutated_messages_from_a_worker(data: st.DataObject) -> None:
    """A damaged message is refused, or is another message that can be sent on."""
    valid = encode(data.draw(from_worker))
    message = tolerate(decode_from_worker, mutated(data, valid))
    if message is not None:
        encode(message)


@PROPERTY
@given(from_frontend, from_worker)
def test_every_truncation_is_malformed(ours: FromFrontend, theirs: FromWorker) -> None:
    """No beginning of a message is taken for a whole one."""
    for decode, message in zip(DECODERS, (ours, theirs), strict=True):
        data = encode(message)
        for end in range(len(data)):
            with pytest.raises(MalformedMessage):
                decode(data[:end])


def places(node: Node) -> Iterator[tuple[Any, Any]]:
    """Return every container below *node* with each of its keys."""
    keys: list[Any] = []
    children: list[Any] = []
    if isinstance(node, dict):
        keys, children = list(node), list(node.values())
    elif isinstance(node, list):
        keys, children = list(range(len(node))), node
    for key in keys:
        yield node, key
    for child in children:
        yield from places(child)


@FUZZ
@given(st.data())
@pytest.mark.parametrize("sender", ["frontend", "worker"])
def test_wrong_types_in_any_field(sender: str, data: st.DataObject) -> None:
    """Any value in place of any other, at any depth, is refused or harmless."""
    message = data.draw(from_frontend if sender == "frontend" else from_worker)
    decode = decode_from_frontend if sender == "frontend" else decode_from_worker
    tree: Any = msgspec.msgpack.decode(encode(message))
    paths = list(places(tree))
    node, key = data.draw(st.sampled_from(paths))
    node[key] = data.draw(anything)
    tolerate(decode, raw(tree))


def release_kv(value: bytes) -> bytes:
    """Return a ReleaseKV whose hand-over holds *value*, given as msgpack."""
    head = raw({"type": "release_kv", "request_id": "r", "handover": {"a": 0}})
    return head[:-1] + value


@pytest.mark.parametrize(
    "value",
    [
        b"\x91" * 200_000 + b"\x01",  # deep arrays
        b"\x81\xa1a" * 200_000 + b"\x01",  # deep maps
        b"\xdd\xff\xff\xff\xff",  # arrays, maps, text and bytes of 4 Gi items: no
        b"\xdf\xff\xff\xff\xff",  # memory may be reserved on their word
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        b"\x81\x80\x01",  # a map as a key
        b"\x81\x91\x80\x01",
        b"\xa2\xff\xff",  # no UTF-8
        b"\xa3\xed\xa0\x80",  # a surrogate
        b"\xd4\x05a",  # an extension
        b"\xc7\x0c\xff" + b"\xff" * 12,  # a timestamp out of range
        b"\xc1",  # the opcode that does not exist
        b"\x01\x02",  # more behind the end
        b"",
    ],
)
def test_hostile_values_in_a_handover(value: bytes) -> None:
    """The one field that takes any object takes nothing that harms."""
    with pytest.raises(MalformedMessage):
        decode_from_frontend(release_kv(value))


@pytest.mark.parametrize("number", [2**64 - 1, -(2**63)])
def test_the_largest_numbers_pass(number: int) -> None:
    """A number that msgpack can hold comes through, whatever a field makes of it."""
    got = decode_from_frontend(release_kv(raw(number)))
    assert got == ReleaseKV("r", {"a": number})


def test_a_number_above_64_bits_is_our_own_fault() -> None:
    """It cannot be sent, so it never arrives."""
    with pytest.raises(Exception, match="ReleaseKV cannot be encoded"):
        encode(ReleaseKV("r", {"a": 2**64}))


BATCH = {"type": "batch"}
END = {"request_id": "r", "reason": "stop", "num_output_tokens": 1}
LP = [1, b"aaaa", b"bbbb", b"cccc"]


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"tokens": [["r", 0, b"abcd"], ["r", -1, b"abcd"]]}, "$.tokens[1]"),
        ({"tokens": [["r", 0, b"abc"]]}, "$.tokens[0]"),
        ({"tokens": [["r", 0, b""]]}, "$.tokens[0]"),
        ({"tokens": [["r", 0, b"abcd", [0, b"", b"", b""]]]}, "$.tokens[0].logprobs"),
        ({"tokens": [["r", 0, b"abcd", [2, *LP[1:]]]]}, "$.tokens[0].logprobs"),
        ({"tokens": [["r", 0, b"abcd", [1, *LP[1:3], b""]]]}, "$.tokens[0].logprobs"),
        ({"tokens": [["r", "0", b"abcd"]]}, "$.tokens[0][1]"),
        ({"tokens": [["r", 0, b"abcd", None, -1]]}, "$.tokens[0][4]"),
        (
            {"finished": [END, {**END, "num_output_tokens": -1}]},
            "$.finished[1].num_out",
        ),
        ({"finished": [{**END, "num_prompt_tokens": -1}]}, "$.finished[0].num_prompt"),
        ({"finished": [{**END, "num_cached_tokens": -1}]}, "$.finished[0].num_cached"),
        ({"finished": [{**END, "prompt_token_ids": b"abc"}]}, "$.finished[0].prompt_t"),
        (
            {"finished": [{**END, "prompt_logprobs": [2, *LP[1:]]}]},
            "$.finished[0].prompt_logprobs",
        ),
        (
            {"finished": [{**END, "prompt_logprobs": [0, b"", b"", b""]}]},
            "$.finished[0].prompt_logprobs",
        ),
        ({"finished": [{**END, "reason": "boredom"}]}, "$.finished[0].reason"),
    ],
)
def test_what_contradicts_itself_names_the_field(
    fields: dict[str, Any], path: str
) -> None:
    """Counts, sizes and kinds that cannot be are refused, and the text says where."""
    with pytest.raises(MalformedMessage) as refused:
        decode_from_worker(raw({**BATCH, **fields}))
    assert path in str(refused.value)


@pytest.mark.parametrize(
    "field", ["max_model_len", "vocab_size", "block_size", "max_num_seqs"]
)
def test_a_card_with_less_than_nothing_names_the_field(field: str) -> None:
    """A negative block size hung every request behind it."""
    card = {
        "type": "card",
        "protocol_version": 1,
        "worker_id": "w",
        "incarnation": "i",
        "role": "decode",
        "model": "m",
        "max_model_len": 1,
        "vocab_size": 1,
        "block_size": 1,
        "engine": "sim",
        "engine_version": "1",
    }
    decode_from_worker(msgspec.msgpack.encode(card))
    with pytest.raises(MalformedMessage, match=rf"\$\.{field}: -1"):
        decode_from_worker(msgspec.msgpack.encode({**card, field: -1}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_running", -1),
        ("num_requests", -1),
        ("num_frontends", -1),
        ("kv_usage", -0.5),
        ("kv_usage", float("nan")),
    ],
)
def test_a_load_with_less_than_nothing_names_the_field(
    field: str, value: float
) -> None:
    """It would be in the metrics, and in every choice of a worker."""
    load = {"type": "load", "incarnation": "i", field: value}
    with pytest.raises(MalformedMessage, match=rf"\$\.{field}: "):
        decode_from_worker(msgspec.msgpack.encode(load))


def test_half_a_token_in_a_prompt_names_the_field() -> None:
    """A prompt is a whole number of ids."""
    with pytest.raises(MalformedMessage, match=r"\$\.token_ids: 5 bytes"):
        decode_from_frontend(raw(Submit("r", b"abcde", Sampling(1))))
