"""Request bodies, typed: every field is honoured, or refused by its name."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar, cast

import msgspec

from .errors import bad_request
from .nvext import Nvext, check_keys, fold_alias
from .unsupported import drop_neutral

__all__ = [
    "ChatRequest",
    "CommonRequest",
    "CompletionRequest",
    "Parsed",
    "StreamOptions",
    "parse_body",
]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """``stream_options`` of a request."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's


class CommonRequest(msgspec.Struct, kw_only=True):
    """What both endpoints take. ``None`` means "not given" everywhere."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None
    # OpenAI's labels, for its reports and its cache; there is nothing to do
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # vLLM's extensions
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    structured_outputs: dict[str, Any] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    request_id: str | None = None
    session_id: str | None = None  # a hint for routing, which needs none yet
    nvext: Nvext | None = None


class ChatRequest(CommonRequest, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None


class CompletionRequest(CommonRequest, kw_only=True):
    """``POST /v1/completions``."""

    prompt: str | list[Any]
    logprobs: int | None = None
    best_of: int | None = None


R = TypeVar("R", ChatRequest, CompletionRequest)


class Parsed(NamedTuple, Generic[R]):
    """A request, and what its body said beside the fields."""

    request: R
    by_alias: bool  # ``return_token_ids: true`` was there


def parse_body(
    data: bytes, kind: type[R], *, ignore_unknown: bool = False
) -> Parsed[R]:
    """Return the request in a body, its alias folded into ``nvext``.

    Args:
        data: JSON.
        kind: What it should be.
        ignore_unknown: Drop root fields that nobody knows, as vLLM does.

    Raises:
        ApiError: 400: not JSON, not an object, an unknown field, a wrong type.
    """
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        msg = f"the body is not valid JSON: {error}"
        raise bad_request(msg) from error
    if not isinstance(body, dict):
        msg = "the body must be a JSON object"
        raise bad_request(msg)
    fields = cast("dict[str, object]", body)
    by_alias = fold_alias(fields)
    drop_neutral(fields)
    unknown = sorted(fields.keys() - set(kind.__struct_fields__))
    if unknown and not ignore_unknown:
        msg = f"unknown fields: {', '.join(unknown)}"
        raise bad_request(msg, unknown[0])
    check_keys(fields.get("nvext"))
    try:
        return Parsed(msgspec.convert(fields, kind), by_alias)
    except msgspec.ValidationError as error:
        raise bad_request(str(error), _path(str(error))) from error


def _path(message: str) -> str | None:
    """Return the field that msgspec's message names at its end, as ``param``."""
    _, found, path = message.rpartition(" - at `$.")
    if found:
        return path.rstrip("`")
    _, found, field = message.rpartition("missing required field `")
    return field.rstrip("`") if found else None
