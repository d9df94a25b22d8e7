"""The straight way of an id: the same bytes as the long one, or left to it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from support.tiny_model import tiny_tokenizer
from tokenwire.frontend.detokenize import ByteDetokenizer, ByteTable
from tokenwire.frontend.frame import Frame
from tokenwire.frontend.legs import OutputLeg
from tokenwire.frontend.metrics import Metrics
from tokenwire.frontend.nvext import Placement, Selection
from tokenwire.frontend.pace import Pace
from tokenwire.frontend.plain import Around, PlainWay
from tokenwire.frontend.shapes import ChatShape, CompletionShape
from tokenwire.frontend.sse import EventStream
from tokenwire.frontend.tokenizer import SamplingDefaults, TextModel
from tokenwire.protocol.messages import Finished, FinishReason, Logprobs, Tokens
from tokenwire.protocol.tokens import pack_ids

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
        self.error: Exception | None = None

    def send(self, data: bytes) -> None:
        """Keep an event."""
        if self.error is not None:
            raise self.error
        self.events.append(data)


@dataclass
class Left:
    """A leg that keeps what is left to it."""

    link: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(weight_version="1")
    )
    items: list[tuple[Tokens, Finished | None]] = field(
        default_factory=list[tuple[Tokens, "Finished | None"]]
    )
    others: list[object] = field(default_factory=list[object])

    def tokens(self, item: Tokens, end: Finished | None) -> None:
        """Keep tokens, and the end that came with them."""
        self.items.append((item, end))

    def finished(self, end: Finished) -> None:
        """Keep an end that came alone."""
        self.others.append(end)

    def lost(self, reason: str) -> None:
        """Keep a loss."""
        self.others.append(reason)


class Way:
    """A straight way, and all around it."""

    def __init__(self, around: Around, detokenizer: ByteDetokenizer) -> None:
        self.stream, self.leg, self.output = Sent(), Left(), bytearray()
        self.metrics = Metrics()
        clock = map(float, itertools.count(1))  # a second more at each look
        pace = Pace(self.metrics, lambda: next(clock))
        pace.tick()
        pace.num_tokens = 3
        self.bugs: list[Exception] = []
        self.way = PlainWay(
            *(pace, around, detokenizer, cast("EventStream", self.stream)),
            self.bugs.append,
        )
        self.begin()

    def begin(self) -> None:
        """Begin it, as its choice does behind an id that went the long way."""
        self.way.begin(self.output, cast("OutputLeg", self.leg))

    def takes(self, *token_ids: int, logprobs: Logprobs | None = None) -> bool:
        """Give it ids; return whether it took them, and left nothing or all."""
        item = Tokens("r", 0, pack_ids(token_ids), logprobs)
        before = self.state
        self.way.tokens(item, None)
        if self.leg.items:
            assert self.leg.items == [(item, None)]
            assert self.state == before
            self.leg.items.clear()
            return False
        return True

    @property
    def state(self) -> tuple[object, ...]:
        """All that an id changes."""
        way, gaps = self.way, self.metrics.inter_token_latency
        sent = len(self.stream.events)
        return bytes(self.output), way.num_tokens, way.last_at, gaps.total, sent


def plain(*pieces: bytes) -> Way:
    """Return a way for ids of these bytes; the last one is not to be shown."""
    table = ByteTable(pieces).without({len(pieces) - 1})
    return Way(Around(b"<", (b">",)), ByteDetokenizer(table))


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
    around = shape.around(index)
    detokenizer = MODEL.detokenizer([1], skip_special_tokens=True)
    assert around is not None
    assert isinstance(detokenizer, ByteDetokenizer)
    way = Way(around, detokenizer)
    long = MODEL.detokenizer([1], skip_special_tokens=True)
    for token_id in token_ids:
        expected = shape.plain_chunk(index, long.feed(token_id), [token_id])
        if not way.takes(token_id):
            detokenizer.feed(token_id)
            way.begin()
            continue
        assert way.stream.events.pop() == expected
    assert way.stream.events == []
    assert way.bugs == []


def test_a_text_of_its_own_is_sent() -> None:
    """But not inside a character, no part of one, and nothing that is not shown."""
    table = ByteTable([b"a", b"\xc3", b"\xa9", b"</s>"]).without({3})
    detokenizer = ByteDetokenizer(table)
    way = Way(Around(b"<", (b">",)), detokenizer)

    assert way.takes(0)
    for token_id in (1, 2, 3, 4):
        assert not way.takes(token_id)
        way.begin()
    detokenizer.feed(1)
    way.begin()
    assert not way.takes(0)
    detokenizer.feed(2)
    way.begin()
    assert way.takes(0)
    assert way.stream.events == [b'<"a">'] * 2


def test_it_keeps_the_id_and_the_time() -> None:
    """As the generation and the choice would, behind what these had before."""
    way = plain(b"a", b"b", b"")
    assert way.takes(1)
    assert way.takes(0)

    assert bytes(way.output) == pack_ids([1, 0])
    assert way.way.num_tokens == 5
    # The choice began at 1, its first token came at 2.
    assert (way.way.started_at, way.way.first_at, way.way.last_at) == (1, 2, 4)
    assert way.metrics.inter_token_latency.total == 2
    assert way.metrics.time_to_first_token.total == 1


def test_it_takes_single_ids_alone() -> None:
    """Several at once, and those with logprobs, are the leg's."""
    way = plain(b"a", b"")
    assert not way.takes(0, 0)
    way.begin()
    row = Logprobs(1, bytes(4), bytes(4), bytes(4))
    assert not way.takes(0, logprobs=row)
    way.begin()
    assert way.takes(0)


def test_behind_what_it_leaves_all_is_the_legs() -> None:
    """Until it begins again: who took that may hold bytes of a character."""
    way = plain(b"a", b"")
    assert not way.takes(1)
    assert not way.takes(0)
    way.begin()
    assert way.takes(0)


def test_ids_of_other_weights_are_the_legs() -> None:
    """It notes from which id on they are others."""
    way = plain(b"a", b"")
    assert way.takes(0)
    way.leg.link.weight_version = "2"
    assert not way.takes(0)
    way.begin()
    assert way.takes(0)


def test_ends_are_the_legs() -> None:
    """With the id that they come with; a loss as well."""
    way = plain(b"a", b"")
    item, end = Tokens("r", 0, pack_ids([0])), Finished("r", FinishReason.STOP, 1)
    way.way.tokens(item, end)
    way.way.finished(end)
    way.way.lost("gone")

    assert way.leg.items == [(item, end)]
    assert way.leg.others == [end, "gone"]
    assert way.stream.events == []


def test_a_bug_is_told_and_ends_no_batch() -> None:
    """Those whose tokens came with it go on."""
    way = plain(b"a", b"")
    error = RuntimeError("a bug")

    way.stream.error = error
    way.way.tokens(Tokens("r", 0, pack_ids([0])), None)

    assert way.bugs == [error]


def test_it_waits_for_what_stands_before_its_first_event() -> None:
    """A completion's prompt ids are in its first chunk, which is a longer one."""
    shape = CompletionShape(Frame("id-1", 7, "model", MODEL, SELECTIONS[2], [[1, 2]]))
    shape.opening(0)
    assert shape.around(0) is None
    assert b'"prompt_token_ids":[1,2]' in shape.plain_chunk(0, "a", [5])

    assert shape.around(0) is not None
