"""Sampling parameters: zero is a value, ranges are kept, grammars are translated."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest

from support.tiny_model import tiny_tokenizer
from tokenwire.frontend.bounds import MAX_BAD_WORDS_BYTES
from tokenwire.frontend.errors import ApiError
from tokenwire.frontend.sampling import make_sampling, stop_strings
from tokenwire.frontend.schema import CompletionRequest
from tokenwire.frontend.tokenizer import SamplingDefaults, TextModel
from tokenwire.protocol.messages import Sampling, StructuredOutput


def model(defaults: SamplingDefaults | None = None) -> TextModel:
    """Return a text model with generation defaults."""
    return TextModel(
        tiny_tokenizer(),
        vocab_size=264,
        chat_template=None,
        special_tokens={},
        sampling_defaults=defaults or SamplingDefaults(),
    )


def sampling(
    defaults: SamplingDefaults | None = None,
    *,
    max_tokens: int | None = 5,
    num_prompt_tokens: int = 10,
    **fields: Any,
) -> Sampling:
    """Return the parameters of a request with *fields*."""
    request = msgspec.convert({"prompt": "a", **fields}, CompletionRequest)
    return make_sampling(
        request,
        model=model(defaults),
        max_model_len=100,
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=max_tokens,
        logprobs=None,
    )


@pytest.mark.pitfall(8)
def test_zero_is_a_value() -> None:
    """temperature=0 and seed=0 reach the engine, whatever the defaults."""
    made = sampling(SamplingDefaults(temperature=0.6), temperature=0, seed=0)

    assert (made.temperature, made.seed) == (0, 0)


def test_the_models_defaults_fill_what_is_not_given() -> None:
    """``generation_config.json`` decides, as in vLLM, and the request over it."""
    defaults = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20)
    made = sampling(defaults, top_k=5)

    assert (made.temperature, made.top_p, made.top_k) == (0.6, 0.9, 5)


def test_as_many_ids_as_there_are_and_no_more_words_than_may_be() -> None:
    """The bounds themselves are within."""
    every = list(range(264))
    word = "a" * MAX_BAD_WORDS_BYTES
    made = sampling(stop_token_ids=every, allowed_token_ids=every, bad_words=[word])
    assert made.stop_token_ids == made.allowed_token_ids == every
    assert made.bad_words == [word]


def test_top_k_minus_one_means_all() -> None:
    """-1 and 0 both switch it off."""
    assert sampling(top_k=-1).top_k == sampling(top_k=0).top_k == 0


def test_seed_minus_one_means_none() -> None:
    """As in vLLM: such a request draws at random, also for the hand-over's sake."""
    assert sampling(seed=-1).seed is None


def test_no_max_tokens_means_what_is_left() -> None:
    """The rest of the context length."""
    assert sampling(max_tokens=None).max_tokens == 90


@pytest.mark.parametrize(("num_prompt_tokens", "max_tokens"), [(100, 1), (96, 5)])
def test_too_long_names_the_context_length(
    num_prompt_tokens: int, max_tokens: int
) -> None:
    """One token too many is refused with the length in the message."""
    with pytest.raises(
        ApiError, match="maximum context length is 100 tokens"
    ) as caught:
        sampling(max_tokens=max_tokens, num_prompt_tokens=num_prompt_tokens)

    assert caught.value.code == "context_length_exceeded"


def test_exactly_full_is_allowed() -> None:
    """The last token that fits is not refused."""
    assert sampling(max_tokens=4, num_prompt_tokens=96).max_tokens == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.01),
        ("temperature", 101.0),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 2**63),
        ("min_p", 1.5),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("min_tokens", -1),
        ("min_tokens", 6),
        ("seed", 2**63),
        ("stop_token_ids", [264]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("bad_words", [""]),
        ("bad_words", ["a", "ä" * (MAX_BAD_WORDS_BYTES // 2)]),
        ("stop_token_ids", [5] * 265),
        ("allowed_token_ids", [5] * 265),
        ("logit_bias", {**{str(n): 1 for n in range(264)}, "05": 1}),
    ],
)
def test_out_of_range_names_the_field(field: str, value: object) -> None:
    """Every bound has its 400."""
    with pytest.raises(ApiError) as caught:
        sampling(**cast("dict[str, Any]", {field: value}))

    assert caught.value.param == field


@pytest.mark.parametrize(
    ("bias", "good"),
    [({"5": 1.5}, True), ({"x": 1}, False), ({"264": 1}, False), ({"5": 101}, False),
     ({"9" * 5000: 1}, False), ({"-1": 1}, False),
     ({"0000000000005": 1.5}, False)],
)  # fmt: skip
def test_logit_bias(bias: dict[str, float], good: bool) -> None:
    """Keys are ids of the vocabulary, values within -100..100."""
    if good:
        assert sampling(logit_bias=bias).logit_bias == {5: 1.5}
    else:
        with pytest.raises(ApiError) as caught:
            sampling(logit_bias=bias)
        assert caught.value.param == "logit_bias"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutput("json_object")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            StructuredOutput("json", "{}"),
        ),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutput("regex", "a+")),
        (
            {"structured_outputs": {"choice": ["a", "b"]}},
            StructuredOutput("choice", '["a","b"]'),
        ),
        (
            {"structured_outputs": {"json": {"type": "object"}, "regex": None}},
            StructuredOutput("json", '{"type":"object"}'),
        ),
        (
            {"structured_outputs": {"json": "{}", "whitespace_pattern": " ?"}},
            StructuredOutput("json", "{}", " ?"),
        ),
        (
            {"structured_outputs": {"json_object": True}},
            StructuredOutput("json_object"),
        ),
        (
            {"structured_outputs": {"grammar": 'root ::= "a"'}},
            StructuredOutput("grammar", 'root ::= "a"'),
        ),
    ],
)
def test_grammars(fields: dict[str, Any], expected: StructuredOutput | None) -> None:
    """Both ways to ask for a grammar come to one form."""
    assert sampling(**fields).structured_output == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "yaml"}},
        {"response_format": {"type": "json_schema"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        {"structured_outputs": {"regex": 7}},
        {"structured_outputs": {"x": 1}},
        {"structured_outputs": {"json_object": False}},
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}},
    ],
)
def test_broken_grammars_are_refused(fields: dict[str, Any]) -> None:
    """What is no grammar of ours is a 400."""
    with pytest.raises(ApiError) as caught:
        sampling(**fields)

    assert caught.value.status == 400


def test_stop_strings() -> None:
    """One or several; empty, too many and too long ones are refused."""
    assert stop_strings(None) == ()
    assert stop_strings("a") == ("a",)
    assert stop_strings(["a", "b"]) == ("a", "b")
    for bad in ("", ["x"] * 17, ["x" * 1001]):
        with pytest.raises(ApiError):
            stop_strings(bad)
