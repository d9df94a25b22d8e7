"""From a request body to jobs: validate, render, tokenize, size."""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from tokenwire.protocol.messages import Sampling

from .errors import ApiError, bad_request, unavailable
from .fold import Fold
from .job import Job
from .nvext import SELECTOR, Selection, select
from .policy import Policy
from .pool import Pool
from .sampling import INT_BOUND, MAX_LOGPROBS, make_sampling, stop_strings
from .schema import (
    ChatRequest,
    CommonRequest,
    CompletionRequest,
    Parsed,
    StreamOptions,
)
from .shapes import ChatShape, CompletionShape, Frame, Shape
from .stop import StopStrings
from .tokenizer import TextModel

__all__ = ["Call", "chat_call", "check_request_id", "completion_call"]

MAX_CHOICES = 128
"""Choices of one request: OpenAI's limit of ``n``; also prompts times ``n``."""

_REQUEST_ID_FORM = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(slots=True)
class Call:
    """A checked request: what to run, and how to answer."""

    response_id: str
    shape: Shape
    jobs: list[tuple[Job, Fold]]  # one per choice, in order of their index
    choices_per_prompt: int
    num_prompt_tokens: int  # each prompt once
    stream: bool
    include_usage: bool
    continuous_usage: bool
    client_request_id: str | None = None  # of the body; for the headers


async def chat_call(
    parsed: Parsed[ChatRequest], model: TextModel, pool: Pool, policy: Policy
) -> Call:
    """Return the call of a chat request.

    Raises:
        ApiError: Whatever is wrong with it.
    """
    request = parsed.request
    selection = select(request.nvext, policy.placement, by_alias=parsed.by_alias)
    _check_common(request, selection, pool, num_prompts=1)
    num_top = request.top_logprobs or 0
    if request.top_logprobs is not None and not request.logprobs:
        msg = "top_logprobs needs logprobs: true"
        raise bad_request(msg, "top_logprobs")
    if not 0 <= num_top <= MAX_LOGPROBS:
        msg = f"top_logprobs must be at least 0 and at most {MAX_LOGPROBS}"
        raise bad_request(msg, "top_logprobs")
    if request.nvext is not None and request.nvext.token_data is not None:
        token_ids = _checked_ids(request.nvext.token_data, model, "nvext.token_data")
    else:
        token_ids = await _rendered(request, model, policy)
    max_tokens = request.max_completion_tokens
    if max_tokens is None:
        max_tokens = request.max_tokens
    return _call(
        request,
        model,
        pool,
        selection,
        prompts=[_Prompt(token_ids, _echoed_message(request))],
        max_tokens=max_tokens,
        logprobs=num_top if request.logprobs else None,
        prompt_logprobs=request.prompt_logprobs,
        kind=ChatShape,
        prefix="chatcmpl-",
    )


async def completion_call(
    parsed: Parsed[CompletionRequest], model: TextModel, pool: Pool, policy: Policy
) -> Call:
    """Return the call of a completion request.

    Raises:
        ApiError: Whatever is wrong with it.
    """
    request = parsed.request
    prompts = _prompts(request.prompt)
    selection = select(request.nvext, policy.placement, by_alias=parsed.by_alias)
    _check_common(request, selection, pool, num_prompts=len(prompts))
    if request.best_of is not None and request.best_of != (request.n or 1):
        param = "n" if selection.completion_token_ids else "best_of"
        msg = f"best_of must equal n; nvext.extra_fields={[SELECTOR]} needs 1"
        raise bad_request(msg, param)
    if request.logprobs is not None and not 0 <= request.logprobs <= MAX_LOGPROBS:
        msg = f"logprobs must be at least 0 and at most {MAX_LOGPROBS}"
        raise bad_request(msg, "logprobs")
    prompt_logprobs = request.prompt_logprobs
    if request.echo and request.logprobs is not None:
        if request.stream:
            msg = "echo with logprobs is not available when stream=true"
            raise bad_request(msg, "echo")
        if prompt_logprobs is None:
            prompt_logprobs = request.logprobs
    encoded: list[_Prompt] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            special = request.add_special_tokens is not False
            ids = await model.encode(prompt, add_special_tokens=special)
            if not ids:
                msg = "the prompt has no tokens"
                raise bad_request(msg, "prompt")
            text = prompt
        else:
            ids = _checked_ids(prompt, model, "prompt")
            text = model.decode(ids, skip_special_tokens=False) if request.echo else ""
        encoded.append(_Prompt(ids, text if request.echo else None))
    max_tokens = 16 if request.max_tokens is None else request.max_tokens
    return _call(
        request,
        model,
        pool,
        selection,
        prompts=encoded,
        max_tokens=max_tokens,
        logprobs=request.logprobs,
        prompt_logprobs=prompt_logprobs,
        kind=CompletionShape,
        prefix="cmpl-",
        # The prompt alone, which OpenAI's clients score texts with; engines make one
        # token at least.
        prompt_only=bool(request.echo) and max_tokens == 0,
    )


@dataclass(slots=True, frozen=True)
class _Prompt:
    """A prompt as ids, and what to repeat of it before the output."""

    token_ids: list[int]  # (num_prompt_tokens,)
    echo: str | None = None


def check_request_id(value: str, param: str) -> None:
    """Refuse a client's request id that is not safe to repeat in a header.

    Raises:
        ApiError: 400 with *param*.
    """
    if _REQUEST_ID_FORM.fullmatch(value) is None:
        msg = f"{param} must match {_REQUEST_ID_FORM.pattern}"
        raise bad_request(msg, param)


def _check_common(
    request: CommonRequest, selection: Selection, pool: Pool, *, num_prompts: int
) -> None:
    """Check what needs no tokens."""
    if request.model is not None and request.model != pool.model:
        msg = f"The model {request.model!r:.200} does not exist; {pool.model!r} does"
        raise ApiError(404, msg, param="model", code="model_not_found")
    if request.request_id is not None:
        check_request_id(request.request_id, "request_id")
    n = 1 if request.n is None else request.n
    if n < 1:
        msg = f"n must be at least 1, not {n}"
        raise bad_request(msg, "n")
    if selection.completion_token_ids:
        only = f"nvext.extra_fields={[SELECTOR]} needs exactly one choice"
        if n != 1:
            msg = f"{only}: n must be 1, not {n}"
            raise bad_request(msg, "n")
        if num_prompts != 1:
            msg = f"{only}: one prompt, not {num_prompts}"
            raise bad_request(msg, "prompt")
    elif n * num_prompts != 1 and selection.any:
        msg = "nvext.extra_fields needs exactly one choice: n=1 and one prompt"
        raise bad_request(msg, "n" if n != 1 else "prompt")
    if n * num_prompts > MAX_CHOICES:
        msg = f"{n * num_prompts} choices were asked for, the limit is {MAX_CHOICES}"
        raise bad_request(msg, "n")
    if not -INT_BOUND <= (request.priority or 0) < INT_BOUND:
        msg = "priority must be a signed 64-bit integer"
        raise bad_request(msg, "priority")
    if request.stream_options is not None and not request.stream:
        msg = "stream_options needs stream: true"
        raise bad_request(msg, "stream_options")
    if request.prompt_logprobs is not None:
        if not 0 <= request.prompt_logprobs <= MAX_LOGPROBS:
            msg = f"prompt_logprobs must be at least 0 and at most {MAX_LOGPROBS}"
            raise bad_request(msg, "prompt_logprobs")
        if request.stream and not selection.prompt_logprobs:
            msg = (
                "prompt_logprobs are available when stream=true only with "
                "nvext.extra_fields=['prompt_logprobs']"
            )
            raise bad_request(msg, "prompt_logprobs")


def _call(
    request: ChatRequest | CompletionRequest,
    model: TextModel,
    pool: Pool,
    selection: Selection,
    *,
    prompts: list[_Prompt],
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    kind: type[ChatShape | CompletionShape],
    prefix: str,
    prompt_only: bool = False,
) -> Call:
    max_model_len = pool.max_model_len
    if max_model_len is None:
        raise unavailable("no worker is connected yet")
    strings = stop_strings(request.stop)
    jobs: list[tuple[Job, Fold]] = []
    if selection.prompt_logprobs and prompt_logprobs is None:
        prompt_logprobs = 0  # each prompt token's own
    for prompt in prompts:
        token_ids = prompt.token_ids
        sampling = make_sampling(
            request,
            model=model,
            max_model_len=max_model_len,
            num_prompt_tokens=len(token_ids),
            max_tokens=1 if prompt_only else max_tokens,
            logprobs=0 if selection.engine_data and logprobs is None else logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        for number in range(request.n or 1):
            job = Job(
                token_ids,
                _numbered(sampling, number),
                echo_prompt=selection.needs_prompt_ids,
                priority=request.priority or 0,
                cache_salt=request.cache_salt,
                prompt_only=prompt_only,
            )
            jobs.append((job, _fold(request, model, token_ids, strings, sampling)))
    response_id = prefix + secrets.token_hex(12)
    options = request.stream_options or StreamOptions()
    frame = Frame(
        response_id,
        int(time.time()),
        pool.model,
        model,
        selection,
        prompts=[prompt.token_ids for prompt in prompts],
        echoes=[prompt.echo for prompt in prompts],
        choices_per_prompt=request.n or 1,
        num_logprobs=logprobs,
        num_prompt_logprobs=request.prompt_logprobs,
        tokens_as_ids=bool(request.return_tokens_as_token_ids),
    )
    return Call(
        response_id,
        kind(frame),
        jobs,
        choices_per_prompt=request.n or 1,
        num_prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts),
        stream=bool(request.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
        client_request_id=request.request_id,
    )


def _numbered(sampling: Sampling, number: int) -> Sampling:
    """Return the parameters of one of ``n`` choices: seeds differ, as in vLLM."""
    if sampling.seed is None or number == 0:
        return sampling
    return msgspec.structs.replace(sampling, seed=sampling.seed + number)


def _fold(
    request: CommonRequest,
    model: TextModel,
    prompt_token_ids: list[int],
    strings: tuple[str, ...],
    sampling: Sampling,
) -> Fold:
    stop = None
    if strings:
        stop = StopStrings(strings, include=bool(request.include_stop_str_in_output))
    detokenizer = model.detokenizer(
        prompt_token_ids, skip_special_tokens=request.skip_special_tokens is not False
    )
    return Fold(detokenizer, stop, sampling.min_tokens)


def _echoed_message(request: ChatRequest) -> str | None:
    """Return what ``echo`` repeats: the last message, if the output goes on with it."""
    if not request.echo or not request.messages:
        return None
    last = request.messages[-1]
    if last.get("role") != "assistant":
        return None
    content: str = _message(last, len(request.messages) - 1)["content"]
    return content


async def _rendered(
    request: ChatRequest, model: TextModel, policy: Policy
) -> list[int]:
    if request.chat_template is not None and not policy.trust_chat_template:
        msg = (
            "chat_template is refused: the operator has not set "
            "--trust-request-chat-template"
        )
        raise bad_request(msg, "chat_template")
    if not request.messages:
        msg = "messages must not be empty"
        raise bad_request(msg, "messages")
    continued = bool(request.continue_final_message)
    generation_prompt = request.add_generation_prompt
    if generation_prompt is None:
        generation_prompt = not continued
    elif generation_prompt and continued:
        msg = "continue_final_message and add_generation_prompt exclude each other"
        raise bad_request(msg, "continue_final_message")
    text = model.render_chat(
        [_message(message, n) for n, message in enumerate(request.messages)],
        add_generation_prompt=generation_prompt,
        continue_final_message=continued,
        template_kwargs=request.chat_template_kwargs or {},
        documents=request.documents,
        chat_template=request.chat_template,
    )
    special = bool(request.add_special_tokens)  # the template writes its own
    token_ids = await model.encode(text, add_special_tokens=special)
    if not token_ids:
        msg = "the messages have no tokens"
        raise bad_request(msg, "messages")
    return token_ids


def _message(message: dict[str, Any], number: int) -> dict[str, Any]:
    """Return *message* with text parts joined, as templates expect it."""
    where = f"messages[{number}]"
    if not isinstance(message.get("role"), str):
        msg = f"{where}.role must be a string"
        raise bad_request(msg, f"{where}.role")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return {**message, "content": content or ""}
    if not isinstance(content, list):
        msg = f"{where}.content must be a string or a list of parts"
        raise bad_request(msg, f"{where}.content")
    texts: list[str] = []
    for part in cast("list[object]", content):
        text: object = None
        if isinstance(part, dict):
            fields = cast("dict[str, object]", part)
            text = fields.get("text") if fields.get("type", "text") == "text" else None
        if not isinstance(text, str):
            msg = f"{where}.content: only text parts are supported"
            raise bad_request(msg, f"{where}.content")
        texts.append(text)
    return {**message, "content": "\n".join(texts)}


def _prompts(prompt: str | list[Any]) -> list[str | list[Any]]:
    """Return the prompts of a completion request."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        msg = "You must pass at least one prompt"
        raise bad_request(msg, "prompt")
    first = prompt[0]
    kind = str if isinstance(first, str) else list
    if isinstance(first, str | list):
        if not all(isinstance(one, kind) for one in prompt):
            msg = "prompt mixes strings and lists"
            raise bad_request(msg, "prompt")
        return list(prompt)
    return [prompt]


def _checked_ids(token_ids: list[Any], model: TextModel, field: str) -> list[int]:
    """Return *token_ids* if all are ids of the vocabulary.

    Raises:
        ApiError: 400, naming the first that is not.
    """
    if not token_ids:
        msg = f"{field} must not be empty"
        raise bad_request(msg, field)
    bound = model.vocab_size
    for token_id in token_ids:
        if type(token_id) is not int:  # a boolean is an int, but no id
            msg = f"{field}: {token_id!r:.40} is not a token id"
            raise bad_request(msg, field)
        if not 0 <= token_id < bound:
            msg = f"Token id {token_id} is out of vocabulary (0..{bound - 1})"
            raise bad_request(msg, field)
    return token_ids
