"""The types of the answers of token routes, for ``/openapi.json``; see ``answers``."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from .answers import (
    Answer,
    Count,
    FinishReason,
    Logprob,
    PromptLogprobs,
    TokenIds,
    Usage,
)

__all__ = ["Detokenized", "Generated", "GeneratedChunk", "Rendered", "Tokenized"]


class Tokenized(Answer):
    """An answer of ``/tokenize``."""

    count: Count
    max_model_len: Count
    tokens: TokenIds
    token_strs: list[str] | None


class Detokenized(Answer):
    """An answer of ``/detokenize``."""

    prompt: str


class TokenTopLogprob(Answer):
    """A likely token."""

    token: str  # token_id:N
    token_id: Count
    logprob: Logprob
    rank: Count | None


class TokenLogprob(TokenTopLogprob):
    """An output token; it is the first of its own ``top_logprobs``."""

    top_logprobs: list[TokenTopLogprob]


class TokenLogprobs(Answer):
    """One entry per output token."""

    content: list[TokenLogprob]


class WeightSpan(Answer):
    """The weights that produced the output ids from ``start`` to ``end``."""

    version: str
    start: Count
    end: Count


class _GeneratedChoice(Answer):
    index: Count
    stop_reason: int | str | None
    token_ids: TokenIds
    routed_experts: None
    sampling_mask: None
    weight_versions: list[WeightSpan] | None
    logprobs: TokenLogprobs | None


class GeneratedChoice(_GeneratedChoice):
    """One output."""

    finish_reason: FinishReason


class GeneratedChunkChoice(_GeneratedChoice):
    """A part of one output."""

    finish_reason: FinishReason | None


class Generated(Answer):
    """A whole answer of ``/inference/v1/generate``: vLLM's keys, each time all of them."""

    request_id: str
    model: str
    created: int  # Unix seconds
    usage: Usage
    prompt_logprobs: PromptLogprobs | None
    prompt_token_id_logprobs: None
    prompt_token_ids: TokenIds | None
    mm_placeholders: None
    metrics: None
    kv_transfer_params: dict[str, Any] | None
    ec_transfer_params: None
    output_mode: Literal["tokens"]
    choices: list[GeneratedChoice]


class GeneratedChunk(Answer):
    """One event of a streamed answer."""

    request_id: str
    usage: Usage | None
    output_mode: Literal["tokens"]
    choices: list[GeneratedChunkChoice]
    prompt_token_ids: TokenIds | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


class RenderedStreamOptions(Answer):
    """Those of the request."""

    include_usage: bool | None
    continuous_usage_stats: bool | None


class Rendered(Answer):
    """A body of ``/inference/v1/generate``."""

    request_id: str
    token_ids: TokenIds
    token_offsets: None
    features: None
    content_parts: None
    sampling_params: dict[str, Any]
    model: str | None
    reasoning_ended: bool | None
    reasoning_parser_kwargs: dict[str, Any] | None
    return_token_ids: None
    output_mode: Literal["tokens"]
    stream: bool
    stream_options: RenderedStreamOptions | None
    cache_salt: str | None
    priority: int
    kv_transfer_params: None
    ec_transfer_params: None
