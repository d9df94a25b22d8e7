"""The rows of log probabilities as ``/inference/v1/generate`` shows them."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from support.tiny_model import VOCAB_SIZE, tiny_tokenizer
from tokenwire.frontend.frame import Finished
from tokenwire.frontend.generate_shape import GenerateFrame, GenerateShape
from tokenwire.frontend.job import End
from tokenwire.frontend.tokenizer import SamplingDefaults, TextModel
from tokenwire.protocol.messages import FinishReason, Logprobs
from tokenwire.protocol.tokens import pack_floats, pack_ids

Row = list[tuple[int, float, int]]  # id, log probability, rank; the sampled first
MODEL = TextModel(
    tiny_tokenizer(),
    vocab_size=VOCAB_SIZE,
    chat_template=None,
    special_tokens={},
    sampling_defaults=SamplingDefaults(),
)


def shown(row: Row, num_logprobs: int) -> dict[str, Any]:
    """Return the entry of one token."""
    ids, values, ranks = zip(*row, strict=True)
    logprobs = Logprobs(len(row), pack_ids(ids), pack_floats(values), pack_ids(ranks))
    frame = GenerateFrame(
        "r", 0, "m", MODEL, prompt_token_ids=None, num_logprobs=num_logprobs
    )
    choice = Finished(0, "", [ids[0]], logprobs, End(FinishReason.LENGTH))
    body = json.loads(GenerateShape(frame).response([choice], b"{}"))
    [entry] = body["choices"][0]["logprobs"]["content"]
    return dict(entry)


@pytest.mark.parametrize(
    ("num_logprobs", "tops"), [(0, [9]), (1, [9]), (2, [9, 7]), (3, [9, 7, 8])]
)
def test_an_unlikely_token_comes_before_the_likely_ones(
    num_logprobs: int, tops: list[int]
) -> None:
    """In the engine's order, and as many as were asked for, it among them: as in vLLM."""
    row: Row = [(9, -4.0, 5), (7, -0.5, 1), (8, -1.0, 2), (6, -2.0, 3)]
    entry = shown(row[: num_logprobs + 1], num_logprobs)

    assert [one["token_id"] for one in entry["top_logprobs"]] == tops
    assert (entry["token_id"], entry["logprob"], entry["rank"]) == (9, -4.0, 5)


def test_a_token_stands_once_with_its_own_number() -> None:
    """What fills a row up to its width repeats the sampled token, and is not shown."""
    entry = shown([(9, -0.5, 1), (9, -0.5, 1), (9, -math.inf, 0)], 2)

    assert [one["logprob"] for one in entry["top_logprobs"]] == [-0.5]
    assert entry["rank"] == 1


@pytest.mark.parametrize("value", [-math.inf, math.nan])
def test_what_is_no_number_has_no_rank(value: float) -> None:
    """JSON has vLLM's floor in its place."""
    entry = shown([(9, value, 0)], 0)

    assert entry["logprob"] == -9999.0
    assert entry["rank"] is None
