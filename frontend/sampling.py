"""Sampling parameters of a request: checked, defaulted, in the engine's words."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar, cast

import msgspec

from tokenwire.protocol.messages import Sampling, StructuredOutput

from .bounds import (
    MAX_BAD_WORDS_BYTES,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    check_depth,
    check_size,
    within,
)
from .errors import ApiError, bad_request

if TYPE_CHECKING:
    from .schema import CommonRequest
    from .tokenizer import TextModel

__all__ = ["make_sampling", "stop_strings", "structured_output"]

_ID_DIGITS = 10
"""Of 2**32 - 1, the largest id that the wire has a form for."""

N = TypeVar("N", int, float)


def make_sampling(
    request: CommonRequest,
    *,
    model: TextModel,
    max_model_len: int,
    num_prompt_tokens: int,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> Sampling:
    """Return the engine's parameters for *request*.

    Args:
        request: What the client asks.
        model: Gives the defaults of ``generation_config.json`` and the vocabulary.
        max_model_len: The smallest context length of the workers in use.
        num_prompt_tokens: The prompt's length.
        max_tokens: The client's bound under whichever name; None: what is left.
        logprobs: Alternatives per token; None: no logprobs.
        prompt_logprobs: The same for the prompt's tokens.

    Raises:
        ApiError: 400, with the field as ``param``.
    """
    room = max_model_len - num_prompt_tokens
    if room < 1:
        msg = (
            f"This model's maximum context length is {max_model_len} tokens, the prompt "
            f"has {num_prompt_tokens} and leaves no room for an output token"
        )
        raise bad_request(msg, "prompt", "context_length_exceeded")
    if max_tokens is not None:
        within("max_tokens", max_tokens)
        if max_tokens > room:
            msg = (
                f"This model's maximum context length is {max_model_len} tokens, but "
                f"{num_prompt_tokens} prompt tokens and max_tokens={max_tokens} "
                "were asked for"
            )
            raise bad_request(msg, "max_tokens", "context_length_exceeded")
    defaults = model.sampling_defaults
    limit = max_tokens if max_tokens is not None else room
    min_tokens = within("min_tokens", request.min_tokens or 0)
    if min_tokens > limit:
        msg = f"min_tokens={min_tokens} is above max_tokens={limit}"
        raise bad_request(msg, "min_tokens")
    vocab_size = model.vocab_size
    return Sampling(
        max_tokens=limit,
        min_tokens=min_tokens,
        temperature=_number(
            "temperature", request.temperature, defaults.temperature, 1.0
        ),
        top_p=_number("top_p", request.top_p, defaults.top_p, 1.0),
        top_k=max(0, _number("top_k", request.top_k, defaults.top_k, 0)),
        min_p=_number("min_p", request.min_p, defaults.min_p, 0.0),
        seed=None
        if request.seed is None or request.seed == -1  # -1: none, as in vLLM
        else within("seed", request.seed),
        presence_penalty=_number(
            "presence_penalty", request.presence_penalty, None, 0.0
        ),
        frequency_penalty=_number(
            "frequency_penalty", request.frequency_penalty, None, 0.0
        ),
        repetition_penalty=_number(
            "repetition_penalty",
            request.repetition_penalty,
            defaults.repetition_penalty,
            1.0,
        ),
        stop_token_ids=_ids("stop_token_ids", request.stop_token_ids or [], vocab_size),
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logit_bias=_logit_bias(request.logit_bias, vocab_size),
        allowed_token_ids=None
        if request.allowed_token_ids is None
        else _allowed(request.allowed_token_ids, vocab_size),
        bad_words=_bad_words(request.bad_words or []),
        structured_output=structured_output(request),
    )


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """Return the stop strings of a request.

    Raises:
        ApiError: 400: an empty one, too many, or one too long.
    """
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(strings) > MAX_STOP_STRINGS:
        msg = f"{len(strings)} stop strings, the limit is {MAX_STOP_STRINGS}"
        raise bad_request(msg, "stop")
    for text in strings:
        if not 0 < len(text) <= MAX_STOP_CHARS:
            msg = f"a stop string has 1 to {MAX_STOP_CHARS} characters, not {len(text)}"
            raise bad_request(msg, "stop")
    return strings


def _number(field: str, given: N | None, default: N | None, otherwise: N) -> N:
    """Return what is *given*, or the model's *default*, within bounds; or *otherwise*.

    Zero is a value.
    """
    value = default if given is None else given
    return otherwise if value is None else within(field, value)


def _ids(field: str, token_ids: Sequence[int], vocab_size: int) -> list[int]:
    _check_number(field, len(token_ids), vocab_size)
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            msg = f"{field}: token id {token_id} is out of vocabulary (0..{vocab_size - 1})"
            raise bad_request(msg, field)
    return list(token_ids)


def _check_number(field: str, number: int, vocab_size: int) -> None:
    """Refuse more ids than there are: an engine looks through all for every token."""
    if number > vocab_size:
        msg = f"{field} has {number} entries, the limit is {vocab_size}"
        raise bad_request(msg, field)


def _allowed(token_ids: list[int], vocab_size: int) -> list[int]:
    if not token_ids:
        msg = "allowed_token_ids must not be empty"
        raise bad_request(msg, "allowed_token_ids")
    return _ids("allowed_token_ids", token_ids, vocab_size)


def _logit_bias(
    bias: dict[str, float] | None, vocab_size: int
) -> dict[int, float] | None:
    if not bias:
        return None
    _check_number("logit_bias", len(bias), vocab_size)
    result: dict[int, float] = {}
    for key, value in bias.items():
        if len(key) > _ID_DIGITS or not key.isascii() or not key.isdecimal():
            msg = f"logit_bias: {key!r:.40} is not a token id"
            raise bad_request(msg, "logit_bias")
        [token_id] = _ids("logit_bias", [int(key)], vocab_size)
        result[token_id] = within("logit_bias", value)
    return result


def _bad_words(words: list[str]) -> list[str]:
    if any(not word for word in words):
        msg = "bad_words must not contain an empty string"
        raise bad_request(msg, "bad_words")
    num_bytes = sum(len(word.encode(errors="replace")) for word in words)
    if num_bytes > MAX_BAD_WORDS_BYTES:
        msg = f"bad_words has {num_bytes} bytes, the limit is {MAX_BAD_WORDS_BYTES}"
        raise bad_request(msg, "bad_words")
    return words


def structured_output(request: CommonRequest) -> StructuredOutput | None:
    """Return the grammar of ``response_format`` or ``structured_outputs``.

    Raises:
        ApiError: 400, it is none that there is, or there are two.
    """
    given = request.structured_outputs
    if request.response_format is not None:
        if given is not None:
            msg = "response_format and structured_outputs exclude each other"
            raise bad_request(msg, "structured_outputs")
        return _response_format(request.response_format)
    if given is None:
        return None
    given = {name: value for name, value in given.items() if value is not None}
    pattern = given.pop("whitespace_pattern", None)
    if pattern is not None and not isinstance(pattern, str):
        raise _bad_structure("whitespace_pattern", "must be a string")
    for name in sorted(given.keys() - _GRAMMARS):
        raise _bad_structure(name, f"is unknown; known are {sorted(_GRAMMARS)}")
    if len(given) != 1:
        msg = (
            f"structured_outputs needs exactly one of {sorted(_GRAMMARS)}, "
            f"got {sorted(given)}"
        )
        raise bad_request(msg, "structured_outputs")
    [(kind, value)] = given.items()
    spec = _structure(kind, value)
    text = spec + (pattern or "")
    check_size(f"structured_outputs.{kind}", len(text.encode(errors="replace")))
    return StructuredOutput(kind, spec, pattern)


def _structure(kind: str, value: object) -> str:
    """Return the text that describes a structure to the engine."""
    match kind:
        case "json_object":
            if value is not True:
                raise _bad_structure(kind, "must be true")
            return ""
        case "json":
            return _json_schema(value)
        case "choice":
            choices = cast("list[object]", value) if isinstance(value, list) else []
            if not choices or not all(isinstance(one, str) for one in choices):
                raise _bad_structure(kind, "must be a list of strings, not empty")
            return msgspec.json.encode(choices).decode()
        case _:
            if not isinstance(value, str):
                raise _bad_structure(kind, "must be a string")
            if kind == "structural_tag":
                with contextlib.suppress(msgspec.DecodeError):  # the engine says why
                    check_depth(f"structured_outputs.{kind}", _decoded(value))
            return value


def _decoded(text: str) -> object:
    """Return the JSON in *text*.

    Raises:
        DecodeError: It is none.
        ApiError: 400, it is deeper than can be read.
    """
    try:
        value: object = msgspec.json.decode(text)
    except RecursionError as error:
        raise _bad_structure("structural_tag", "is too deep") from error
    return value


def _json_schema(value: object) -> str:
    """Return a JSON schema, given as an object or as its text, as text."""
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    try:
        schema: object = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _bad_structure("json", f"is not valid JSON: {error}") from error
    if not isinstance(schema, dict):
        raise _bad_structure("json", "must be a schema: an object")
    check_depth("structured_outputs.json", cast("object", schema))
    return text


def _bad_structure(name: str, fault: str) -> ApiError:
    field = f"structured_outputs.{name}"
    return bad_request(f"{field} {fault}", field)


_GRAMMARS = {"json", "json_object", "regex", "choice", "grammar", "structural_tag"}


def _response_format(given: dict[str, object]) -> StructuredOutput | None:
    match given.get("type"):
        case "text":
            return None
        case "json_object":
            return StructuredOutput("json_object")
        case "json_schema":
            wrapper = given.get("json_schema")
            schema: object = None
            if isinstance(wrapper, dict):
                schema = cast("dict[str, object]", wrapper).get("schema")
            if not isinstance(schema, dict):
                msg = "response_format.json_schema.schema must be an object"
                raise bad_request(msg, "response_format.json_schema.schema")
            check_depth("response_format.json_schema.schema", cast("object", schema))
            spec = msgspec.json.encode(schema)
            check_size("response_format.json_schema.schema", len(spec))
            return StructuredOutput("json", spec.decode())
        case other:
            msg = f"response_format.type must be text, json_object or json_schema, not {other!r:.40}"
            raise bad_request(msg, "response_format.type")
