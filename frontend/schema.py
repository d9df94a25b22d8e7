"""Request bodies, typed: every field is honoured, or refused by its name."""

from __future__ import annotations

import functools
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_type_hints

import msgspec

from .body import decode_object
from .errors import bad_request
from .nvext import Nvext, check_keys, fold_alias
from .tools import NamedTool, ReasoningEffort, Tool
from .unsupported import drop_neutral

__all__ = [
    "ChatRequest",
    "CommonRequest",
    "CompletionRequest",
    "Parsed",
    "StreamOptions",
    "convert",
    "parse_body",
    "typed",
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
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    request_id: str | None = None
    session_id: str | None = None  # a hint for routing
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
    required_prefix_token_ids: list[int] | None = None  # (num_kept,), see ``turns``
    tools: list[Tool] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool | None = None


class CompletionRequest(CommonRequest, kw_only=True):
    """``POST /v1/completions``."""

    prompt: str | list[Any]
    logprobs: int | None = None
    best_of: int | None = None


R = TypeVar("R", ChatRequest, CompletionRequest)
S = TypeVar("S", bound=msgspec.Struct)


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
    fields = decode_object(data)
    by_alias = fold_alias(fields)
    check_keys(fields.get("nvext"))
    return Parsed(typed(fields, kind, ignore_unknown=ignore_unknown), by_alias)


_EXACT = 2.0**53
"""Below it a float stands for one whole number alone."""


@functools.cache
def _names(kind: type[msgspec.Struct]) -> frozenset[str]:
    """Return the fields of a struct."""
    return frozenset(kind.__struct_fields__)


@functools.cache
def _whole_numbers(kind: type[msgspec.Struct]) -> frozenset[str]:
    """Return the fields of a struct that are whole numbers."""
    hints = get_type_hints(kind)
    return frozenset(name for name in hints if hints[name] in (int, int | None))


def convert(fields: dict[str, object], kind: type[S], where: str = "") -> S:
    """Return *fields* as the type they should have.

    ``16.0`` is a whole number, as in JSON Schema and in vLLM: languages without
    integers send it.

    Args:
        fields: Of a JSON object.
        kind: Its type.
        where: The path of that object, with a dot at its end.

    Raises:
        ApiError: 400, a wrong type.
    """
    for name, value in fields.items():
        if (
            isinstance(value, float)
            and name in _whole_numbers(kind)
            and value.is_integer()
            and abs(value) < _EXACT
        ):
            fields[name] = int(value)  # its place is there: nothing is added
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        message = str(error)
        path = _path(message)
        if where:
            message = message.replace("`$.", f"`$.{where}")
        raise bad_request(message, path and where + path) from error


def typed(fields: dict[str, object], kind: type[S], *, ignore_unknown: bool) -> S:
    """Return an object's fields as a request.

    Raises:
        ApiError: 400: an unknown field, one that is not supported, a wrong type.
    """
    drop_neutral(fields)
    unknown = sorted(fields.keys() - _names(kind))
    if unknown and not ignore_unknown:
        msg = f"unknown fields: {', '.join(unknown)}"
        raise bad_request(msg, unknown[0])
    return convert(fields, kind)


def _path(message: str) -> str | None:
    """Return the field that msgspec's message names at its end, as ``param``."""
    _, found, path = message.rpartition(" - at `$.")
    if found:
        return path.rstrip("`")
    _, found, field = message.rpartition("missing required field `")
    return field.rstrip("`") if found else None
