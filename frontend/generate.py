"""``POST /inference/v1/generate``: token ids in, token ids out, no text between.

Trainers roll out through it (renderers, verifiers, Prime-RL), so nothing is added to
what they ask: the defaults of ``generation_config.json`` do not count here, as in vLLM.
"""

from __future__ import annotations

import secrets
import time
from typing import Any, Literal, cast

import msgspec

from tokenwire.protocol.messages import Sampling

from .bounds import within
from .calls import Call, numbered
from .checks import check_cache_salt, check_common, check_model
from .errors import ApiError, bad_request
from .fold import Fold
from .generate_shape import GenerateFrame, GenerateShape, NoText
from .job import Job, Reasoning
from .nvext import Selection
from .pool import Pool
from .sampling import make_sampling, stop_strings
from .schema import CommonRequest, StreamOptions, convert
from .stop import StopStrings
from .tokenizer import TextModel

__all__ = ["PARAMS", "GenerateParams", "GenerateRequest", "generate_call"]


class GenerateRequest(msgspec.Struct, kw_only=True):
    """The body; what a render route answers is one, with nulls and all."""

    token_ids: list[Any]  # (num_prompt_tokens,)
    sampling_params: dict[str, Any]
    model: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    output_mode: Literal["tokens"] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int | None = None
    # For the engine's own reasoning parser, behind whose reasoning a grammar binds.
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    # What a multimodal prompt would need.
    features: None = None
    content_parts: None = None
    token_offsets: None = None


class GenerateParams(CommonRequest, kw_only=True):
    """``sampling_params``, with vLLM's own defaults, and the root's fields beside them."""

    temperature: float | None = 1.0
    top_p: float | None = 1.0
    top_k: int | None = 0
    min_p: float | None = 0.0
    repetition_penalty: float | None = 1.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None


PARAMS = {
    "allowed_token_ids", "bad_words", "frequency_penalty", "ignore_eos",
    "include_stop_str_in_output", "logit_bias", "logprobs", "max_tokens", "min_p",
    "min_tokens", "n", "presence_penalty", "prompt_logprobs", "repetition_penalty",
    "seed", "skip_special_tokens", "stop", "stop_token_ids", "structured_outputs",
    "temperature", "top_k", "top_p",
}  # fmt: skip
"""Those of vLLM's ``SamplingParams`` that are honoured. The renderers library puts into
the same object whatever its user gave, so a key that is not known is no error here."""

_REFUSED = {
    "logprob_token_ids", "prompt_logprob_token_ids", "repetition_detection",
    "thinking_token_budget", "trace_decode_token_ids",
}  # fmt: skip
"""Those of them that would change the answer, and that no worker can do yet."""


async def generate_call(request: GenerateRequest, model: TextModel, pool: Pool) -> Call:
    """Return the call of a generate request.

    Raises:
        ApiError: Whatever is wrong with it.
    """
    params = _params(request)
    check_cache_salt(request.cache_salt)
    token_ids = await model.checked_ids(request.token_ids, "token_ids")
    try:
        if params.logprobs is not None:
            within("logprobs", params.logprobs)
        check_common(params, Selection(), pool, num_prompts=1)
        sampling = _sampling(params, len(token_ids), model, pool)
        strings = stop_strings(params.stop)
    except ApiError as error:
        raise _placed(error) from error
    wants_ids = bool(request.return_token_ids)
    n = params.n or 1
    reasoning = _reasoning(request)
    lora = check_model(request.model, pool)
    jobs = [
        (
            Job(
                token_ids,
                numbered(sampling, number),
                echo_prompt=wants_ids and number == 0,
                priority=request.priority or 0,
                cache_salt=request.cache_salt,
                reasoning=reasoning,
                lora=lora,
                capture=number == 0,  # one path is told; the others have the same
                end_ids=model.end_ids,
            ),
            _fold(params, strings, sampling.min_tokens, model, token_ids),
        )
        for number in range(n)
    ]
    request_id = "generate-tokens-" + (request.request_id or secrets.token_hex(12))
    frame = GenerateFrame(
        request_id,
        int(time.time()),
        lora or pool.model,
        model,
        prompt_token_ids=token_ids if wants_ids else None,
        num_logprobs=params.logprobs,
        num_prompt_logprobs=params.prompt_logprobs,
    )
    options = request.stream_options or StreamOptions()
    return Call(
        request_id,
        GenerateShape(frame),
        jobs,
        choices_per_prompt=n,
        num_prompt_tokens=len(token_ids),
        stream=bool(request.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
        client_request_id=request.request_id,
    )


def _reasoning(request: GenerateRequest) -> Reasoning:
    """Return what the engine is told of reasoning; its parser is made of it."""
    kwargs = request.reasoning_parser_kwargs
    if kwargs is not None and not (
        kwargs.keys() == {"chat_template_kwargs"}
        and isinstance(kwargs["chat_template_kwargs"], dict)
    ):
        msg = "reasoning_parser_kwargs must hold one object, chat_template_kwargs"
        raise bad_request(msg, "reasoning_parser_kwargs")
    return Reasoning(request.reasoning_ended, kwargs)


def _params(request: GenerateRequest) -> GenerateParams:
    """Return the known parameters; null says nothing, whatever the parameter."""
    given = {k: v for k, v in request.sampling_params.items() if v is not None}
    refused = sorted(given.keys() & _REFUSED)
    if refused:
        msg = f"sampling_params.{refused[0]} is not supported"
        raise bad_request(msg, f"sampling_params.{refused[0]}")
    known = {name: value for name, value in given.items() if name in PARAMS}
    structure = known.get("structured_outputs")
    if isinstance(structure, dict):
        # vLLM's object has switches too, which are off.
        switches = cast("dict[str, object]", structure)
        known["structured_outputs"] = {
            name: value for name, value in switches.items() if value is not False
        }
    params = convert(known, GenerateParams, "sampling_params.")
    if params.prompt_logprobs is not None and request.stream:
        msg = "prompt_logprobs are not available when stream=true"
        raise bad_request(msg, "sampling_params.prompt_logprobs")
    params.model = request.model
    params.stream = request.stream
    params.stream_options = request.stream_options
    params.priority = request.priority
    params.request_id = request.request_id
    return params


def _sampling(
    params: GenerateParams, num_prompt_tokens: int, model: TextModel, pool: Pool
) -> Sampling:
    max_model_len = pool.max_model_len
    if max_model_len is None:
        raise pool.no_worker()
    max_tokens = params.max_tokens
    room = max_model_len - num_prompt_tokens
    if max_tokens is not None and max_tokens > room > 0:
        max_tokens = room  # cut here, not refused, as in vLLM: trainers ask for much
    return make_sampling(
        params,
        model=model,
        max_model_len=max_model_len,
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=max_tokens,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
    )


def _fold(
    params: GenerateParams,
    strings: tuple[str, ...],
    min_tokens: int,
    model: TextModel,
    token_ids: list[int],
) -> Fold:
    """Return a fold that makes text only if stop strings are looked for."""
    if not strings:
        return Fold(NoText())
    stop = StopStrings(strings, include=True)
    skip = params.skip_special_tokens is not False
    detokenizer = model.detokenizer(token_ids, skip_special_tokens=skip)
    return Fold(detokenizer, stop, min_tokens)


def _placed(error: ApiError) -> ApiError:
    """Return *error* with the path of its field in this body."""
    if error.param == "prompt":
        error.param = "token_ids"
    elif error.param is not None and error.param in PARAMS:
        error.param = f"sampling_params.{error.param}"
    return error
