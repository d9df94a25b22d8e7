"""The short way of an id: the same bytes as the long one, or nothing."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from support.tiny_model import tiny_tokenizer
from tokenwire.frontend.detokenize import (
    ByteDetokenizer,
    ByteTable,
    Detokenizer,
    StreamDetokenizer,
)
from tokenwire.frontend.frame import Frame
from tokenwire.frontend.nvext import Placement, Selection
from tokenwire.frontend.plain import Around, plain_way
from tokenwire.frontend.shapes import ChatShape, CompletionShape
from tokenwire.frontend.sse import EventStream
from tokenwire.frontend.tokenizer import SamplingDefaults, TextModel

MODEL = TextModel(
    tiny_tokenizer(),
    vocab_size=264,
    chat_template=None,
    special_tokens={},
    sampling_defaults=SamplingDefaults(),
)
IDS = Selection(completion_token_ids=True, prompt_token_ids=True)
SELECTIONS = [Selection(), IDS, replace(IDS, native=Placement.VLLM)]


class Sent:
    """A stream that keeps what it is to send."""

    def __init__(self) -> None:
        self.events: list[bytes] = []

    def send_parts(self, parts: tuple[bytes, ...], num_bytes: int) -> None:
        """Keep an event, whose size must be right: it stands before an HTTP chunk."""
        event = b"".join(parts)
        assert len(event) == num_bytes
        self.events.append(event)


@pytest.mark.parametrize("kind", [ChatShape, CompletionShape])
@pytest.mark.parametrize("selection", SELECTIONS)
@given(token_ids=st.lists(st.integers(0, 300), max_size=40), index=st.integers(0, 3))
def test_it_sends_what_the_long_way_makes(
    kind: type[ChatShape | CompletionShape],
    selection: Selection,
    token_ids: list[int],
    index: int,
) -> None:
    """Byte for byte, also inside characters, and above the vocabulary."""
    shape = kind(Frame("id-1", 7, 'mo"del', MODEL, selection, [[1, 2]] * 4))
    stream = Sent()
    detokenizer = MODEL.detokenizer([1], skip_special_tokens=True)
    way = plain_way(shape.around(index), detokenizer, cast("EventStream", stream))
    assert way is not None
    plain = MODEL.detokenizer([1], skip_special_tokens=True)
    for token_id in token_ids:
        expected = shape.plain_chunk(index, plain.feed(token_id), [token_id])
        if not way.send(token_id):
            detokenizer.feed(token_id)
            continue
        assert stream.events.pop() == expected
    assert stream.events == []


def test_a_text_of_its_own_is_sent() -> None:
    """But not inside a character, no part of one, and nothing that is not shown."""
    stream = Sent()
    table = ByteTable([b"a", b"\xc3", b"\xa9", b"</s>"]).without({3})
    detokenizer = ByteDetokenizer(table)
    way = plain_way(Around(b"<", (b">",)), detokenizer, cast("EventStream", stream))
    assert way is not None

    assert way.send(0)
    assert not any(map(way.send, (1, 2, 3, 4)))
    detokenizer.feed(1)
    assert not way.send(0)
    detokenizer.feed(2)
    assert way.send(0)
    assert stream.events == [b'<"a">'] * 2


def test_it_waits_for_what_stands_before_its_first_event() -> None:
    """A completion's prompt ids are in its first chunk, which is a longer one."""
    shape = CompletionShape(Frame("id-1", 7, "model", MODEL, SELECTIONS[2], [[1, 2]]))
    shape.opening(0)
    assert shape.around(0) is None
    assert b'"prompt_token_ids":[1,2]' in shape.plain_chunk(0, "a", [5])

    assert shape.around(0) is not None


def test_it_is_for_tokenizers_whose_ids_are_texts_of_their_own() -> None:
    """Others have a text only behind the ids before them."""
    stream = cast("EventStream", Sent())
    around = Around(b"<", (b">",))
    other: Detokenizer = StreamDetokenizer(str, (), [])

    assert plain_way(around, other, stream) is None
    assert plain_way(None, ByteDetokenizer(ByteTable([b"a"])), stream) is None
    assert plain_way(around, ByteDetokenizer(ByteTable([b"a"])), stream) is not None
