"""Chunks and bodies: the fast path equals the general one; keys are OpenAI's."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from support.tiny_model import tiny_tokenizer
from tokenwire.frontend.choice import Delta
from tokenwire.frontend.frame import Finished, Frame, usage
from tokenwire.frontend.job import End
from tokenwire.frontend.logprobs import (
    FLOOR,
    TokenTexts,
    chat_logprobs,
    completion_logprobs,
)
from tokenwire.frontend.nvext import Placement, Selection
from tokenwire.frontend.shapes import ChatShape, CompletionShape
from tokenwire.frontend.tokenizer import SamplingDefaults, TextModel
from tokenwire.protocol.messages import FinishReason, Logprobs
from tokenwire.protocol.tokens import pack_floats, pack_ids

MODEL = TextModel(
    tiny_tokenizer(),
    vocab_size=264,
    chat_template=None,
    special_tokens={},
    sampling_defaults=SamplingDefaults(),
)
SHAPES = [ChatShape, CompletionShape]
IDS = Selection(completion_token_ids=True, prompt_token_ids=True)
NATIVE = replace(IDS, native=Placement.VLLM)


def frame(selection: Selection) -> Frame:
    """Return a frame."""
    return Frame("id-1", 7, 'mo"del', MODEL, selection, [[1, 2]])


def parsed(event: bytes) -> dict[str, Any]:
    """Return the JSON of an event."""
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    return dict(json.loads(event[6:]))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "selection", [Selection(), IDS, NATIVE, Selection(timing=True)]
)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"])),
    token_ids=st.lists(st.integers(0, 263), min_size=1, max_size=3),
    index=st.integers(0, 3),
)
def test_the_short_way_equals_the_general_one(
    shape: type[ChatShape | CompletionShape],
    selection: Selection,
    text: str,
    token_ids: list[int],
    index: int,
) -> None:
    """Byte for byte, whatever the text, the ids and the choice."""
    made = shape(frame(selection))

    plain = made.plain_chunk(index, text, token_ids)

    assert plain == made.chunk(index, Delta(text, token_ids, None, None), b"")


def test_ids_go_out_without_text() -> None:
    """A chunk with ids and an empty delta, where text is held back."""
    event = ChatShape(frame(IDS)).plain_chunk(0, "", [5])

    assert parsed(event)["choices"][0]["delta"] == {}
    assert parsed(event)["nvext"] == {"completion_token_ids": [5]}


def test_nothing_to_say_is_no_event() -> None:
    """Without ids, text that is held back makes no chunk at all."""
    assert ChatShape(frame(Selection())).plain_chunk(0, "", [5]) == b""


@pytest.mark.parametrize("shape", SHAPES)
def test_the_final_chunk_has_all_that_was_selected(
    shape: type[ChatShape | CompletionShape],
) -> None:
    """Ids of the chunk, prompt ids, kv_transfer_params verbatim, the finish reason."""
    manifest = {"hidden_states_path": "/x", "nested": [[1, 2], {"a": None}]}
    end = End(FinishReason.STOP, prompt_token_ids=[1, 2], kv_transfer_params=manifest)
    selection = Selection(
        completion_token_ids=True, prompt_token_ids=True, kv_transfer_params=True
    )

    body = parsed(shape(frame(selection)).chunk(0, Delta("x", [9], None, end), b""))

    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["model"] == 'mo"del'
    assert body["nvext"] == {
        "completion_token_ids": [9],
        "prompt_token_ids": [1, 2],
        "kv_transfer_params": manifest,
    }


def test_absent_is_absent_never_null() -> None:
    """What is selected and does not exist has no key."""
    selection = Selection(kv_transfer_params=True, stop_reason=True)
    end = End(FinishReason.LENGTH)

    body = parsed(ChatShape(frame(selection)).chunk(0, Delta("", [], None, end), b""))

    assert body["nvext"] == {}


def test_a_whole_response() -> None:
    """Body and usage of a response that is not streamed."""
    shape = CompletionShape(frame(Selection(completion_token_ids=True)))
    choice = Finished(0, "hi", [5, 6], None, End(FinishReason.LENGTH))

    body = json.loads(shape.response([choice], usage(3, 2, 1)))

    assert body["choices"] == [
        {"index": 0, "text": "hi", "logprobs": None, "finish_reason": "length"}
    ]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert body["nvext"] == {"completion_token_ids": [5, 6]}


def record(*rows: list[tuple[int, float]]) -> Logprobs:
    """Return a record of candidates."""
    flat = [one for row in rows for one in row]
    return Logprobs(
        len(rows[0]),
        pack_ids([token_id for token_id, _ in flat]),
        pack_floats([value for _, value in flat]),
        pack_ids([1] * len(flat)),
    )


def texts(length: int = 0) -> TokenTexts:
    """Return the texts of a choice with so many characters before."""
    return TokenTexts(MODEL, [5], skip_special_tokens=True, length=length)


A, B, C = (tiny_tokenizer().encode(char).ids[0] for char in "abc")


def test_infinities_never_reach_the_json() -> None:
    """-inf and NaN become a number that JSON has."""
    logprobs = chat_logprobs(
        record([(A, float("-inf")), (B, float("nan"))]),
        MODEL,
        2,
        texts(),
        as_ids=False,
    )

    assert '"logprob": -9999.0' in json.dumps(logprobs, allow_nan=False)
    assert FLOOR == -9999.0


def test_the_sampled_token_is_listed_once() -> None:
    """A sampled token that is also among the best appears once in the top list."""
    rows = record([(A, -1.0), (B, -0.5), (A, -1.0)])
    body = chat_logprobs(rows, MODEL, 2, texts(), as_ids=False)
    [entry] = json.loads(json.dumps(body))["content"]

    assert (entry["token"], entry["bytes"]) == ("a", [97])
    assert [top["token"] for top in entry["top_logprobs"]] == ["b", "a"]


def test_what_fills_a_row_up_hides_no_number() -> None:
    """A short row repeats its sampled token with -inf; the number is the first one's."""
    rows = record([(A, -1.0), (B, -0.5), (A, float("-inf"))])
    body = chat_logprobs(rows, MODEL, 3, texts(), as_ids=False)

    [entry] = json.loads(json.dumps(body))["content"]
    assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.5, -1.0]


@pytest.mark.parametrize(
    ("num_top", "expected"),
    [
        (0, {"a": -3.0}),
        (1, {"a": -3.0, "b": -0.5}),
        (2, {"a": -3.0, "b": -0.5, "c": -1.0}),
    ],
)
def test_a_completions_sampled_token_is_among_the_best(
    num_top: int, expected: dict[str, float]
) -> None:
    """Whatever its rank: up to one entry more than was asked for, as in vLLM."""
    rows = record([(A, -3.0), (B, -0.5), (C, -1.0)])
    body = completion_logprobs(rows, num_top, texts(), as_ids=False)

    assert body["top_logprobs"] == [expected]


def test_a_completions_sampled_token_is_listed_once() -> None:
    """Among the best it is one of them, and its number is that of the token."""
    rows = record([(A, -1.0), (B, -0.5), (A, -1.0)])
    body = completion_logprobs(rows, 2, texts(), as_ids=False)

    assert body["top_logprobs"] == [{"a": -1.0, "b": -0.5}]


def test_tokens_can_be_written_as_ids() -> None:
    """``return_tokens_as_token_ids`` writes token_id:N everywhere."""
    body = completion_logprobs(record([(A, -1.0)]), 1, texts(4), as_ids=True)

    assert body == {
        "text_offset": [4],
        "token_logprobs": [-1.0],
        "tokens": [f"token_id:{A}"],
        "top_logprobs": [{f"token_id:{A}": -1.0}],
    }
