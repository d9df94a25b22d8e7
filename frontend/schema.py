"""Request bodies, typed: every field is honoured, or refused by its name."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import msgspec

from .errors import bad_request
from .nvext import Nvext, check_keys, fold_alias

__all__ = [
    "ChatRequest",
    "CommonRequest",
    "CompletionRequest",
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
    user: str | None = None  # OpenAI's label for abuse reports; nothing to do
    metadata: dict[str, Any] | None = None  # stored by OpenAI; nothing to do
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
    nvext: Nvext | None = None


class ChatRequest(CommonRequest, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(CommonRequest, kw_only=True):
    """``POST /v1/completions``."""

    prompt: str | list[Any]
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None


R = TypeVar("R", ChatRequest, CompletionRequest)


def parse_body(data: bytes, kind: type[R]) -> R:
    """Return the request in a body, its alias folded into ``nvext``.

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
    fold_alias(fields)
    unknown = sorted(fields.keys() - set(kind.__struct_fields__))
    if unknown:
        msg = f"unknown or unsupported fields: {', '.join(unknown)}"
        raise bad_request(msg, unknown[0])
    check_keys(fields.get("nvext"))
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise bad_request(str(error), _path(str(error))) from error


def _path(message: str) -> str | None:
    """Return the field that msgspec's message names at its end, as ``param``."""
    _, found, path = message.rpartition(" - at `$.")
    if found:
        return path.rstrip("`")
    _, found, field = message.rpartition("missing required field `")
    return field.rstrip("`") if found else None
