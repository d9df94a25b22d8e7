"""Round trips, garbage, and peers of other releases.

The fuzz law: whatever the bytes, a decoder returns a message or raises
``MalformedMessage`` or ``MessageTooLarge``; anything else would kill a link's task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

from tokenwire.protocol.codec import decode_from_frontend, decode_from_worker, encode
from tokenwire.protocol.errors import MalformedMessage, MessageTooLarge
from tokenwire.protocol.limits import MAX_REQUEST_ID_CHARS
from tokenwire.protocol.messages import (
    Batch,
    Bye,
    Cancel,
    Card,
    EngineDead,
    ErrorKind,
    Finished,
    FinishReason,
    FromFrontend,
    FromWorker,
    Hello,
    Leg,
    Load,
    Logprobs,
    Ping,
    Refused,
    ReleaseKV,
    Role,
    Sampling,
    StructuredOutput,
    Submit,
    Tokens,
)

Node = dict[Any, Any] | list[Any] | str | bytes | float | None
Decode = Callable[[bytes], FromFrontend | FromWorker]

raw = msgspec.msgpack.encode
DECODERS: list[Decode] = [decode_from_frontend, decode_from_worker]

# The same examples each time; a loaded machine is no failure.
PROPERTY = settings(
    derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
FUZZ = settings(PROPERTY, max_examples=300)
FEW = settings(PROPERTY, max_examples=25)

# --- strategies: every field of every message ----------------------------------------

# What UTF-8 can hold: no lone surrogates.
texts = st.text(st.characters(codec="utf-8"), max_size=20)
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=MAX_REQUEST_ID_CHARS)
ints = st.integers(-(2**63), 2**64 - 1)
counts = st.integers(0, 2**63)
floats = st.floats(allow_nan=False)
packed = st.lists(st.binary(min_size=4, max_size=4), max_size=8).map(b"".join)
objects = st.dictionaries(
    texts,
    st.recursive(
        st.none() | st.booleans() | ints | floats | texts | st.binary(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3)
        ),
        max_leaves=8,
    ),
    max_size=4,
)


@st.composite
def logprobs_of(draw: st.DrawFn, num_rows: int) -> Logprobs:
    """Draw logprobs for *num_rows* tokens."""
    width = draw(st.integers(1, 4))
    size = num_rows * width * 4
    part = st.binary(min_size=size, max_size=size)
    return Logprobs(width, draw(part), draw(part), draw(part))


@st.composite
def tokens(draw: st.DrawFn) -> Tokens:
    """Draw new tokens of one request."""
    ids = draw(packed.filter(bool))
    logprobs = draw(st.none() | logprobs_of(len(ids) // 4))
    return Tokens(draw(texts), draw(counts), ids, logprobs)


samplings = st.builds(
    Sampling,
    max_tokens=ints,
    min_tokens=ints,
    temperature=floats,
    top_p=floats,
    top_k=ints,
    min_p=floats,
    seed=st.none() | ints,
    presence_penalty=floats,
    frequency_penalty=floats,
    repetition_penalty=floats,
    stop_token_ids=st.lists(ints, max_size=3),
    ignore_eos=st.booleans(),
    logprobs=st.none() | ints,
    prompt_logprobs=st.none() | ints,
    logit_bias=st.none() | st.dictionaries(ints, floats, max_size=3),
    allowed_token_ids=st.none() | st.lists(ints, max_size=3),
    bad_words=st.lists(texts, max_size=3),
    structured_output=st.none()
    | st.builds(
        StructuredOutput, kind=texts, spec=texts, whitespace_pattern=st.none() | texts
    ),
)
from_frontend = st.one_of(
    st.builds(Hello, ints, texts, texts, st.lists(texts, max_size=3)),
    st.builds(
        Submit,
        request_id=names,
        token_ids=packed,
        sampling=samplings,
        leg=st.sampled_from(Leg),
        handover=st.none() | objects,
        kv_transfer_params=st.none() | objects,
        priority=ints,
        cache_salt=st.none() | texts,
        echo_prompt=st.booleans(),
    ),
    st.builds(Cancel, names),
    st.builds(ReleaseKV, names, objects),
    st.builds(Ping, texts),
    st.builds(Bye, texts),
)
finished = st.builds(
    Finished,
    request_id=texts,
    reason=st.sampled_from(FinishReason),
    num_output_tokens=counts,
    num_prompt_tokens=counts,
    num_cached_tokens=counts,
    stop_reason=st.none() | ints | texts,
    error_kind=st.none() | st.sampled_from(ErrorKind),
    error=texts,
    prompt_token_ids=st.none() | packed,
    handover=st.none() | objects,
    kv_transfer_params=st.none() | objects,
    prompt_logprobs=st.none() | st.integers(0, 3).flatmap(logprobs_of),
    queue_s=floats,
    prefill_s=floats,
)
from_worker = st.one_of(
    st.builds(
        Card,
        protocol_version=ints,
        worker_id=texts,
        incarnation=texts,
        role=st.sampled_from(Role),
        model=texts,
        max_model_len=ints,
        vocab_size=ints,
        block_size=ints,
        engine=texts,
        engine_version=texts,
        tokenizer_sha256=texts,
        revision=texts,
        dtype=texts,
        connector=texts,
        connector_compatibility=texts,
        max_num_seqs=ints,
        num_kv_blocks=ints,
        capabilities=st.lists(texts, max_size=3),
    ),
    st.builds(Refused, texts),
    st.builds(Batch, st.lists(tokens(), max_size=3), st.lists(finished, max_size=3)),
    st.builds(
        Load,
        incarnation=texts,
        num_running=ints,
        num_waiting=ints,
        kv_usage=floats,
        num_waiting_tokens=ints,
        draining=st.booleans(),
        num_requests=ints,
    ),
    st.builds(EngineDead, texts),
)


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


anything: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | ints | st.floats() | texts | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(texts | ints, inner, max_size=4)
    ),
    max_leaves=12,
)


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


def test_half_a_token_in_a_prompt_names_the_field() -> None:
    """A prompt is a whole number of ids."""
    with pytest.raises(MalformedMessage, match=r"\$\.token_ids: 5 bytes"):
        decode_from_frontend(raw(Submit("r", b"abcde", Sampling(1))))


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
    data = raw({"type": "batch", "tokens": [["r", 0, b"abcd", logprobs, *extra]]})
    known = Logprobs(1, b"aaaa", b"bbbb", b"cccc")
    assert decode_from_worker(data) == Batch([Tokens("r", 0, b"abcd", known)])


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
