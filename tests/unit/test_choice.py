"""What one choice brings in many deltas, put together."""

from __future__ import annotations

import time

from tokenwire.frontend.choice import Collected, Delta
from tokenwire.frontend.job import End
from tokenwire.frontend.message import MessagePart, ToolCallPart
from tokenwire.protocol.messages import FinishReason, Logprobs


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
