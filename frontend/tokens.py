"""Text to ids and back, and prompts as they would be: no worker runs anything.

``/tokenize``, ``/detokenize`` and the render routes, in vLLM's shapes. What a render
route answers is a body of ``/inference/v1/generate``.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tokenwire.protocol.messages import Sampling

from .body import decode_object
from .calls import Call, chat_call, completion_call
from .checks import check_model
from .errors import bad_request
from .policy import Policy
from .pool import Pool
from .prompts import chat_prompt
from .reading import parsed_body, typed_body
from .sampling import stop_strings
from .schema import (
    ChatRequest,
    CommonRequest,
    CompletionRequest,
    typed,
)
from .tokenizer import TextModel
from .tools import Tool, template_tools
from .turns import given_by_fields

__all__ = [
    "Detokenize",
    "TokenizeChat",
    "TokenizeText",
    "detokenize",
    "render_chat",
    "render_completion",
    "tokenize",
]


class TokenizeText(msgspec.Struct, kw_only=True):
    """``POST /tokenize`` with a text."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None  # true
    return_token_strs: bool | None = None


class TokenizeChat(msgspec.Struct, kw_only=True):
    """``POST /tokenize`` with a conversation."""

    messages: list[dict[str, Any]]
    model: str | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None  # false: the template writes its own
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None
    required_prefix_token_ids: list[int] | None = None  # (num_kept,), see ``turns``


class Detokenize(msgspec.Struct, kw_only=True):
    """``POST /detokenize``."""

    tokens: list[Any]  # (num_tokens,)
    model: str | None = None


async def tokenize(body: bytes, model: TextModel, pool: Pool, policy: Policy) -> bytes:
    """Return the answer of ``/tokenize``.

    Raises:
        ApiError: Whatever is wrong with the body; 503 while no worker is known, whose
            context length is part of the answer.
    """
    fields = await model.threads.of_body(body, lambda: decode_object(body))
    ignore_unknown = policy.ignore_unknown_fields
    request: TokenizeChat | TokenizeText
    if "messages" in fields:
        request = typed(fields, TokenizeChat, ignore_unknown=ignore_unknown)
        check_model(request.model, pool)
        prompt = await chat_prompt(
            request,
            model,
            policy,
            tools=template_tools(request.tools or ()),
            given=given_by_fields(
                request.messages,
                request.required_prefix_token_ids,
                "required_prefix_token_ids",
            ),
        )
        token_ids = prompt.token_ids
    else:
        request = typed(fields, TokenizeText, ignore_unknown=ignore_unknown)
        check_model(request.model, pool)
        special = request.add_special_tokens is not False
        token_ids = await model.encode(request.prompt, add_special_tokens=special)
    if pool.max_model_len is None:
        raise pool.no_worker()
    strings = model.token_strings(token_ids) if request.return_token_strs else None
    return msgspec.json.encode(
        {
            "count": len(token_ids),
            "max_model_len": pool.max_model_len,
            "tokens": token_ids,
            "token_strs": strings,
        }
    )


async def detokenize(
    body: bytes, model: TextModel, pool: Pool, policy: Policy
) -> bytes:
    """Return the answer of ``/detokenize``: the text, special tokens too.

    Raises:
        ApiError: Whatever is wrong with the body.
    """
    request = await typed_body(body, Detokenize, model, policy)
    check_model(request.model, pool)
    token_ids = await model.checked_ids(request.tokens, "tokens", empty=True)
    return msgspec.json.encode({"prompt": await model.decode_any(token_ids)})


async def render_chat(
    body: bytes, model: TextModel, pool: Pool, policy: Policy
) -> bytes:
    """Return the answer of ``/v1/chat/completions/render``.

    Raises:
        ApiError: What the chat route itself would refuse.
    """
    parsed = await parsed_body(body, ChatRequest, model, policy)
    call = await chat_call(parsed, model, pool, policy)
    [rendered] = _rendered(call, parsed.request)
    return msgspec.json.encode(rendered)


async def render_completion(
    body: bytes, model: TextModel, pool: Pool, policy: Policy
) -> bytes:
    """Return the answer of ``/v1/completions/render``: a list, one for each prompt.

    Raises:
        ApiError: What the completions route itself would refuse.
    """
    parsed = await parsed_body(body, CompletionRequest, model, policy)
    if parsed.request.echo:
        msg = "echo has no place in a rendered request"
        raise bad_request(msg, "echo")
    call = await completion_call(parsed, model, pool, policy)
    return msgspec.json.encode(_rendered(call, parsed.request))


def _rendered(call: Call, request: CommonRequest) -> list[dict[str, object]]:
    """Return a generate request for each prompt of a call."""
    first_jobs = [job for job, _ in call.jobs[:: call.choices_per_prompt]]
    only = len(first_jobs) == 1
    return [
        {
            "request_id": call.response_id if only else f"{call.response_id}-{number}",
            "token_ids": job.prompt_token_ids,
            "token_offsets": None,
            "features": None,
            "content_parts": None,
            "sampling_params": _params(
                job.sampling, request, n=call.choices_per_prompt
            ),
            "model": request.model,
            "reasoning_ended": job.reasoning.ended,
            "reasoning_parser_kwargs": job.reasoning.parser_kwargs,
            "return_token_ids": None,
            "output_mode": "tokens",
            "stream": call.stream,
            "stream_options": request.stream_options if call.stream else None,
            "cache_salt": job.cache_salt,
            "priority": job.priority,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
        }
        for number, job in enumerate(first_jobs)
    ]


def _params(sampling: Sampling, request: CommonRequest, *, n: int) -> dict[str, object]:
    """Return ``sampling_params``: vLLM's always-present ones, and what was asked for."""
    params: dict[str, object] = {
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "stop": list(stop_strings(request.stop)),
        "stop_token_ids": sampling.stop_token_ids,
        "max_tokens": sampling.max_tokens,
        "bad_words": sampling.bad_words,
    }
    optional: dict[str, object] = {
        "n": n if n > 1 else None,
        "top_k": sampling.top_k or None,
        "min_tokens": sampling.min_tokens or None,
        "seed": sampling.seed,
        "ignore_eos": sampling.ignore_eos or None,
        "logprobs": sampling.logprobs,
        "prompt_logprobs": sampling.prompt_logprobs,
        "logit_bias": sampling.logit_bias,
        "allowed_token_ids": sampling.allowed_token_ids,
        "structured_outputs": _structured(sampling),
        "skip_special_tokens": request.skip_special_tokens,
        "include_stop_str_in_output": request.include_stop_str_in_output,
    }
    return params | {name: v for name, v in optional.items() if v is not None}


def _structured(sampling: Sampling) -> dict[str, object] | None:
    grammar = sampling.structured_output
    if grammar is None:
        return None
    value: object = grammar.spec
    if grammar.kind == "json_object":
        value = True
    elif grammar.kind == "choice":
        value = msgspec.json.decode(grammar.spec)
    structured = {grammar.kind: value}
    if grammar.whitespace_pattern is not None:
        structured["whitespace_pattern"] = grammar.whitespace_pattern
    return structured
