"""From a request body to jobs: validate, render, tokenize, size."""

from __future__ import annotations

import secrets
import time
from functools import partial

import msgspec

from tokenwire.protocol.messages import Sampling

from .bounds import within
from .checks import check_cache_salt, check_common, check_model, refuse_chats_own
from .contract import Terms
from .errors import ApiError, bad_request
from .fold import Fold
from .frame import Frame, Shape
from .job import Job, Reasoning
from .kept import MAX_BODY_BYTES, NOTHING, Context, Known
from .large import MAX_TOKENS
from .nvext import SELECTOR, Nvext, Selection, root_or_nvext, select
from .parsing import ParsingFold
from .planning import plan_output, template_kwargs, tools_shown
from .plans import Plan
from .policy import Policy
from .pool import Pool
from .prefixes import Ahead
from .prior import Prior, folded_prior
from .prompts import (
    Prompt,
    chat_prompt,
    echoed_message,
    separate_prompts,
    truncated,
)
from .resumable import Resumable
from .resume import Resume, read_resume
from .resuming import ANYONE, Client, begin, check_resumable, pinned, root_id
from .sampling import make_sampling, stop_strings
from .schema import (
    ChatRequest,
    CommonRequest,
    CompletionRequest,
    Parsed,
    StreamOptions,
)
from .shapes import ChatShape, CompletionShape
from .stop import StopStrings
from .threads import LONG_IDS, Threads
from .tokenizer import TextModel
from .turns import given_by_fields

NO_REASONING = Reasoning()

__all__ = ["Call", "chat_call", "completion_call", "numbered"]


class Call(msgspec.Struct):
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
    counts_reasoning: bool = False  # whether the usage says how many ids are reasoning
    resumable: Resumable | None = None
    prior: Prior | None = None  # what it goes on from

    @property
    def is_plain(self) -> bool:
        """Whether chunks say nothing but text and ids."""
        return not self.continuous_usage and self.resumable is None

    def keep(self, route: str, body: bytes, owner: bytes) -> None:
        """Have what can be followed kept by its workers, with its request.

        Args:
            route: The request's.
            body: The same.
            owner: Whose it is.

        Raises:
            ApiError: 413, it is to outlive its client, and too large to be kept.
        """
        resumable = self.resumable
        if resumable is None or not self.stream:
            return
        if len(body) > MAX_BODY_BYTES:
            if resumable.outlives:
                msg = f"only a body of at most {MAX_BODY_BYTES} bytes is kept to go on"
                raise ApiError(413, msg, param="nvext.resumable.on_disconnect")
            return
        keeping = resumable.keeping(route, body, owner)
        self.jobs = [
            (msgspec.structs.replace(job, keeping=keeping), fold)
            for job, fold in self.jobs
        ]

    async def look_ahead(self, pool: Pool, threads: Threads) -> None:
        """Have what long prompts need on their way made beside the event loop."""
        if self.num_prompt_tokens <= LONG_IDS:
            return
        block_sizes = pool.block_sizes
        step = self.choices_per_prompt  # they share their prompt

        def made() -> list[Job]:
            jobs = [job for job, _ in self.jobs]
            for first in range(0, len(jobs), step):
                job = jobs[first]
                ahead = Ahead.of(
                    job.prompt_token_ids, job.cache_salt, job.lora, block_sizes
                )
                for number in range(first, min(first + step, len(jobs))):
                    jobs[number] = msgspec.structs.replace(jobs[number], ahead=ahead)
            return jobs

        jobs = await threads.run(True, made)
        self.jobs = [
            (job, fold) for job, (_, fold) in zip(jobs, self.jobs, strict=True)
        ]

    def of_session(self, session_id: str) -> None:
        """Take what a header says, unless the body has said it."""
        self.jobs = [
            (
                job
                if job.session_id
                else msgspec.structs.replace(job, session_id=session_id),
                fold,
            )
            for job, fold in self.jobs
        ]


async def chat_call(
    parsed: Parsed[ChatRequest],
    model: TextModel,
    pool: Pool,
    policy: Policy,
    client: Client = ANYONE,
    known: Known = NOTHING,
) -> Call:
    """Return the call of a chat request.

    Raises:
        ApiError: Whatever is wrong with it.
    """
    request = parsed.request
    selection = select(request.nvext, policy.placement, by_alias=parsed.by_alias)
    check_common(request, selection, pool, num_prompts=1)
    keeps = partial(_keeps, pool, known)
    check_resumable(request.nvext, keeps, streams=bool(request.stream))
    key = client.authorization
    resume = await read_resume(request.nvext, policy, key, model, known)
    num_top = within("top_logprobs", request.top_logprobs or 0)
    if num_top and not request.logprobs:
        msg = "top_logprobs needs logprobs: true"
        raise bad_request(msg, "top_logprobs")
    plan = plan_output(request, policy)
    prompt = await _chat_prompt(request, model, policy, _longest(request, pool))
    max_tokens = request.max_tokens
    if request.max_completion_tokens is not None:
        max_tokens = within("max_completion_tokens", request.max_completion_tokens)
    return await _call(
        request,
        model,
        pool,
        policy,
        client,
        resume,
        known.context,
        selection,
        prompts=[prompt],
        max_tokens=max_tokens,
        logprobs=num_top if request.logprobs else None,
        prompt_logprobs=request.prompt_logprobs,
        kind=ChatShape,
        prefix="chatcmpl-",
        plan=plan,
    )


async def completion_call(
    parsed: Parsed[CompletionRequest],
    model: TextModel,
    pool: Pool,
    policy: Policy,
    client: Client = ANYONE,
    known: Known = NOTHING,
) -> Call:
    """Return the call of a completion request.

    Raises:
        ApiError: Whatever is wrong with it.
    """
    request = parsed.request
    prompts = separate_prompts(request.prompt)
    refuse_chats_own(request.nvext)
    selection = select(request.nvext, policy.placement, by_alias=parsed.by_alias)
    check_common(request, selection, pool, num_prompts=len(prompts))
    if request.best_of is not None and request.best_of != (request.n or 1):
        if selection.completion_token_ids:
            msg = f"best_of must equal n; nvext.extra_fields={[SELECTOR]} needs 1"
            raise bad_request(msg, "n")
        msg = f"best_of must equal n, {request.n or 1}: outputs are not ranked"
        raise bad_request(msg, "best_of")
    if request.logprobs is not None:
        within("logprobs", request.logprobs)
    prompt_logprobs = request.prompt_logprobs
    if request.echo and request.logprobs is not None:
        if request.stream:
            msg = "echo with logprobs is not available when stream=true"
            raise bad_request(msg, "echo")
        if prompt_logprobs is None:
            prompt_logprobs = request.logprobs
    encoded: list[Prompt] = []
    longest = _longest(request, pool)
    for prompt in prompts:
        if isinstance(prompt, str):
            special = request.add_special_tokens is not False
            ids = await model.encode(
                prompt, add_special_tokens=special, max_model_len=longest
            )
            if not ids:
                msg = "the prompt has no tokens"
                raise bad_request(msg, "prompt")
            text = prompt
        else:
            ids = await model.checked_ids(prompt, "prompt")
            text = model.decode(ids, skip_special_tokens=False) if request.echo else ""
        encoded.append(Prompt(ids, text if request.echo else None))
    max_tokens = 16 if request.max_tokens is None else request.max_tokens
    # The prompt alone, which OpenAI's clients score texts with; engines make one
    # token at least.
    prompt_only = bool(request.echo) and max_tokens == 0
    if prompt_only and (request.min_tokens or 0) > 0:
        msg = f"min_tokens={request.min_tokens} is above max_tokens=0"
        raise bad_request(msg, "min_tokens")
    check_resumable(
        request.nvext,
        partial(_keeps, pool, known),
        streams=bool(request.stream),
        prompt_only=prompt_only,
    )
    key = client.authorization
    resume = await read_resume(request.nvext, policy, key, model, known)
    return await _call(
        request,
        model,
        pool,
        policy,
        client,
        resume,
        known.context,
        selection,
        prompts=encoded,
        max_tokens=max_tokens,
        logprobs=request.logprobs,
        prompt_logprobs=prompt_logprobs,
        kind=CompletionShape,
        prefix="cmpl-",
        prompt_only=prompt_only,
    )


def _keeps(pool: Pool, known: Known) -> bool:
    """Return whether workers keep what they generate; one does of what is told again."""
    return known.context is not None or pool.keeps


def _longest(request: CommonRequest, pool: Pool) -> int | None:
    """Return what a prompt must fit into; None: it will be cut, see ``check_length``."""
    nvext = request.nvext or Nvext()
    limits = (request.truncate_prompt_tokens, nvext.truncate_prompt_tokens)
    is_cut = any(limit is not None for limit in limits)
    longest = pool.max_model_len
    if is_cut and longest is not None and 2 * longest <= MAX_TOKENS:
        return None
    return longest


async def _chat_prompt(
    request: ChatRequest, model: TextModel, policy: Policy, max_model_len: int | None
) -> Prompt:
    nvext = request.nvext or Nvext()
    field = "required_prefix_token_ids"
    required = root_or_nvext(
        request.required_prefix_token_ids, nvext.required_prefix_token_ids, field
    )
    echo = echoed_message(request) if request.echo else None
    if nvext.token_data is not None:
        if required is not None:
            msg = f"{field} and nvext.token_data exclude each other"
            raise bad_request(msg, field)
        token_ids = await model.checked_ids(nvext.token_data, "nvext.token_data")
        return Prompt(token_ids, echo)
    prompt = await chat_prompt(
        request,
        model,
        policy,
        tools=tools_shown(request, policy),
        template_kwargs=template_kwargs(request),
        given=given_by_fields(request.messages, required, field),
        # A salt asks that nobody can tell what was there before.
        shared=request.cache_salt is None and nvext.cache_salt is None,
        max_model_len=max_model_len,
    )
    return prompt if echo is None else msgspec.structs.replace(prompt, echo=echo)


async def _call(
    request: ChatRequest | CompletionRequest,
    model: TextModel,
    pool: Pool,
    policy: Policy,
    client: Client,
    resume: Resume | None,
    context: Context | None,
    selection: Selection,
    *,
    prompts: list[Prompt],
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    kind: type[ChatShape | CompletionShape],
    prefix: str,
    prompt_only: bool = False,
    plan: Plan | None = None,
) -> Call:
    max_model_len = pool.max_model_len
    if max_model_len is None:
        raise pool.no_worker()
    strings = stop_strings(request.stop)
    nvext = request.nvext or Nvext()
    response_id, created = prefix + secrets.token_hex(12), int(time.time())
    if context is not None:
        response_id, created = context.response_id, context.created
    root = root_id(resume) or response_id  # what ids of tool calls derive from
    jobs: list[tuple[Job, Fold]] = []
    if selection.prompt_logprobs and prompt_logprobs is None:
        prompt_logprobs = 0  # each prompt token's own
    prompts = [_cut(request, prompt, model, max_model_len) for prompt in prompts]
    cache_salt = _cache_salt(request)
    lora = check_model(request.model, pool)
    seed_source = None
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
        if nvext.is_resumable:
            sampling, seed_source = pinned(sampling, nvext, pool, resume, context)
        reasoning = NO_REASONING
        if plan is not None:
            sampling = msgspec.structs.replace(
                sampling, structured_output=plan.structured_output
            )
            reasoning = plan.reasoning(token_ids)
        for number in range(request.n or 1):
            job = Job(
                token_ids,
                numbered(sampling, number),
                echo_prompt=selection.needs_prompt_ids,
                priority=request.priority or 0,
                cache_salt=cache_salt,
                prompt_only=prompt_only,
                migratable=nvext.migratable is not False,
                exactness=nvext.least_exactness,
                reasoning=reasoning,
                session_id=request.session_id,
                capture=selection.kv_transfer_params,
                lora=lora,
                output_token_ids=[] if resume is None else resume.output_token_ids,
                cached=resume.cached(len(token_ids), created) if resume else None,
                comes_back=nvext.is_resumable or selection.completion_token_ids,
                end_ids=model.end_ids,
            )
            fold = _fold(request, model, job, strings, plan, (root, len(jobs)))
            jobs.append((job, fold))
    options = request.stream_options or StreamOptions()
    resumable = None
    if nvext.is_resumable:
        terms = Terms(
            request,
            jobs[0][0],
            model,
            policy,
            pool.model,
            context.adapter_update if context else pool.weights.adapters.get(lora, 0),
        )
        resumable = begin(
            terms,
            pool,
            strings,
            response_id,
            created,
            seed_source,
            client,
            resume,
            context,
        )
    frame = Frame(
        response_id,
        created,
        lora or pool.model,
        model,
        selection,
        prompts=[prompt.token_ids for prompt in prompts],
        # What goes on has been echoed.
        echoes=[prompt.echo if resume is None else None for prompt in prompts],
        choices_per_prompt=request.n or 1,
        num_logprobs=logprobs,
        num_prompt_logprobs=request.prompt_logprobs,
        tokens_as_ids=bool(request.return_tokens_as_token_ids),
        prefix=prompts[0].prefix,
        skip_special_tokens=_skips_special(request, plan),
        with_reasoning=plan is not None and plan.has_reasoning,
        call_forced=plan is not None and plan.call_forced,
    )
    shape = kind(frame, resumable)
    prior = None
    if resume is not None:
        prior = await folded_prior(*jobs[0], model, shape.go_on)
    return Call(
        response_id,
        shape,
        jobs,
        choices_per_prompt=request.n or 1,
        num_prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts),
        stream=bool(request.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
        client_request_id=request.request_id,
        counts_reasoning=plan is not None and plan.has_reasoning,
        resumable=resumable,
        prior=prior,
    )


def _cut(
    request: CommonRequest, prompt: Prompt, model: TextModel, max_model_len: int
) -> Prompt:
    """Return *prompt* within the bound that the request sets."""
    nvext = request.nvext or Nvext()
    limit = root_or_nvext(
        request.truncate_prompt_tokens,
        nvext.truncate_prompt_tokens,
        "truncate_prompt_tokens",
    )
    token_ids = truncated(
        prompt.token_ids, limit, request.truncation_side, max_model_len
    )
    if len(token_ids) == len(prompt.token_ids):
        return prompt
    if prompt.prefix is not None:
        msg = "truncate_prompt_tokens would cut the ids that the prompt must start with"
        raise bad_request(msg, "truncate_prompt_tokens")
    echo = prompt.echo and model.decode(token_ids, skip_special_tokens=False)
    return Prompt(token_ids, echo)


def _cache_salt(request: CommonRequest) -> str | None:
    nvext = request.nvext or Nvext()
    salt = root_or_nvext(request.cache_salt, nvext.cache_salt, "cache_salt")
    check_cache_salt(salt)
    return salt


def numbered(sampling: Sampling, number: int) -> Sampling:
    """Return the parameters of one of ``n`` choices: seeds differ, as in vLLM."""
    if sampling.seed is None or number == 0:
        return sampling
    return msgspec.structs.replace(sampling, seed=sampling.seed + number)


def _fold(
    request: CommonRequest,
    model: TextModel,
    job: Job,
    strings: tuple[str, ...],
    plan: Plan | None,
    place: tuple[str, int],  # the response's id and the choice's index
) -> Fold:
    include_stop = bool(request.include_stop_str_in_output)
    stop = StopStrings(strings, include=include_stop) if strings else None
    prompt, min_tokens = job.prompt_token_ids, job.sampling.min_tokens
    skip = _skips_special(request, plan)
    detokenizer = model.detokenizer(prompt, skip_special_tokens=skip)
    if plan is None:
        return Fold(detokenizer, stop, min_tokens, include_stop=include_stop)
    parser = plan.parser(prompt, *place)
    return ParsingFold(parser, detokenizer, stop, min_tokens, include_stop=include_stop)


def _skips_special(request: CommonRequest, plan: Plan | None) -> bool:
    """Return whether special tokens have no text; parsers may need to see them."""
    if plan is not None:
        return plan.skip_special_tokens
    return request.skip_special_tokens is not False
