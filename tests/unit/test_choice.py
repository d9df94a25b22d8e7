"""One choice: which way its tokens go, and many deltas put together."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import cast

from tokenwire.frontend.choice import Choice, Collected, Delta
from tokenwire.frontend.detokenize import ByteDetokenizer, ByteTable, StreamDetokenizer
from tokenwire.frontend.fold import Fold
from tokenwire.frontend.generation import Generation
from tokenwire.frontend.job import End, Job
from tokenwire.frontend.legs import Way
from tokenwire.frontend.message import MessagePart, ToolCallPart
from tokenwire.frontend.metrics import Metrics
from tokenwire.frontend.plain import Around, PlainWay
from tokenwire.frontend.pool import Pool
from tokenwire.frontend.sse import EventStream
from tokenwire.protocol.messages import FinishReason, Logprobs, Sampling

AROUND = Around(b"<", (b">",))
NOWHERE = cast("EventStream", None)


class Bends:
    """A generation that keeps which way its ids go."""

    spans = None

    def __init__(self) -> None:
        self.way: Way | None = None

    def straighten(self, way: Way) -> None:
        """Let them go another way."""
        self.way = way

    def bend(self) -> None:
        """Let them come to the choice."""
        self.way = None


class Running:
    """A choice that is released, and its ids' way."""

    def __init__(self, fold: Fold | None = None) -> None:
        self.generation = Bends()
        self.texts: list[str] = []
        pool = cast("Pool", SimpleNamespace(incarnation="test"))
        self.choice = choice = Choice(
            *(0, Job([1], Sampling(9)), fold or Fold(_bytes())),
            pool=pool,
            metrics=Metrics(),
            clock=time.monotonic,
            deliver=lambda _, delta: self.texts.append(delta.text),
            on_end=lambda _: None,
            broke=_fail,
        )
        choice.generation = cast("Generation", self.generation)
        choice.release()
        choice.deliver_plain = lambda _, text, __: self.texts.append(text)
        choice.straighten(AROUND, NOWHERE)

    def goes_straight(self) -> bool:
        """Return whether its ids pass it by."""
        return self.generation.way is not None


def _fail(error: Exception) -> None:
    raise error


def _bytes() -> ByteDetokenizer:
    return ByteDetokenizer(ByteTable([b"a", b"b"]))


def test_ids_go_straight_behind_one_that_came_here() -> None:
    """One choice counts what goes either way."""
    running = Running()
    assert not running.goes_straight()
    running.choice.tokens([0], None, None)

    way = running.generation.way
    assert isinstance(way, PlainWay)
    way.num_tokens += 2  # as it does with what it takes
    running.choice.tokens([0, 1], None, None)
    assert running.choice.num_tokens == way.num_tokens == 5
    assert running.texts == ["a", "ab"]


def test_what_is_held_goes_nowhere() -> None:
    """Not before the choice is released, and has had an id."""
    running = Running()
    running.choice.tokens([0], None, None)
    running.choice.hold()
    assert not running.goes_straight()
    running.choice.tokens([1], None, None)
    running.choice.release()
    assert not running.goes_straight()
    running.choice.tokens([0], None, None)

    assert running.goes_straight()
    assert running.texts == ["a", "", "b", "a"]
    assert running.choice.num_tokens == 3


def test_nothing_goes_straight_any_more_when_it_is_bent() -> None:
    """For good: an error is told in place of what comes."""
    running = Running()
    running.choice.tokens([0], None, None)
    running.choice.bend()
    assert not running.goes_straight()
    running.choice.tokens([0], None, None)

    assert not running.goes_straight()


def test_what_says_more_than_a_text_goes_the_long_way() -> None:
    """Logprobs, an end; and all of a choice whose ids are no texts of their own."""
    row = Logprobs(1, bytes(4), bytes(4), bytes(4))
    for logprobs, end in ((row, None), (None, End(FinishReason.STOP))):
        running = Running()
        running.choice.tokens([0], logprobs, end)
        assert not running.goes_straight()
    running = Running(Fold(StreamDetokenizer(lambda ids: "a" * len(ids), (), [])))
    running.choice.tokens([0], None, None)
    assert not running.goes_straight()


def test_many_deltas_are_one() -> None:
    """Texts, ids, logprobs and messages in order; one entry for each call; the end."""
    first = MessagePart("a", "r", [ToolCallPart(0, "id", "f", "{")])
    second = MessagePart(
        "b", "s", [ToolCallPart(0, None, None, "}"), ToolCallPart(1, "id2", "g", "[")]
    )
    rows = [Logprobs(1, bytes([n] * 4), bytes([n] * 4), bytes([n] * 4)) for n in (1, 2)]
    end = End(FinishReason.STOP)
    collected = Collected()
    collected.add(Delta("x", [1], rows[0], None, first))
    collected.add(Delta("", [], None, None))
    collected.add(Delta("y", [2, 3], rows[1], end, second))

    both = b"\1\1\1\1\2\2\2\2"
    assert collected.whole() == Delta(
        "xy",
        [1, 2, 3],
        Logprobs(1, both, both, both),
        end,
        MessagePart(
            "ab",
            "rs",
            [ToolCallPart(0, "id", "f", "{}"), ToolCallPart(1, "id2", "g", "[")],
        ),
    )
    assert first.tool_calls[0].arguments == "{"  # what was given stays as it was


def test_without_a_parser_there_is_no_message() -> None:
    """And without logprobs none of these."""
    collected = Collected()
    collected.add(Delta("x", [1], None, None))

    assert collected.whole() == Delta("x", [1], None, None)


def test_the_price_of_a_delta_is_its_own() -> None:
    """40,000 tokens that wait for a slow reader are copied once, not each time."""
    row = Logprobs(21, bytes(84), bytes(84), bytes(84))
    began = time.process_time()
    collected = Collected()
    for token_id in range(40_000):
        part = MessagePart("", "", [ToolCallPart(0, None, None, "text")])
        collected.add(Delta("text", [token_id], row, None, part))
    whole = collected.whole()

    # 0.1 s; joined at every token, 40 s.
    assert time.process_time() - began < 3
    assert len(whole.token_ids) == 40_000
    assert whole.parsed is not None
    assert len(whole.text) == len(whole.parsed.tool_calls[0].arguments) == 160_000
