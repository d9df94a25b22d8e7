"""What a worker is asked for, for one leg of a sequence."""

from __future__ import annotations

import msgspec

from tokenwire.protocol.messages import JsonObject, Keep, Leg, Submit, Trace

from .continuation import is_plain, rest
from .job import Job
from .link import Link

__all__ = ["counts", "submission"]


def counts(job: Job, link: Link, num_output_tokens: int) -> bool:
    """Return whether the token that a prefill leg draws is what the output has next.

    Where two workers draw the same, and this one knows what the draw depends on.
    """
    knows = not num_output_tokens or bool(link.exactness) or is_plain(job.sampling)
    return job.repeatable and knows


def submission(
    job: Job,
    request_id: str,
    link: Link,
    kind: Leg,
    packed: bytes,
    num_output_tokens: int,
    *,
    handover: JsonObject | None = None,
    handover_update: int | None = None,
    captures: bool = False,
    keep: Keep | None = None,
    trace: Trace | None = None,
) -> Submit:
    """Return the message for one leg.

    Args:
        job: The sequence as asked for.
        request_id: The leg's.
        link: Whose worker gets it.
        kind: Which leg it is.
        packed: The prompt and the output so far, packed.
        num_output_tokens: Of these, the output's.
        handover: See ``Submit``.
        handover_update: See ``Submit``.
        captures: The prompt's hidden states are to be saved here.
        keep: How the worker is to keep what it brings.
        trace: What it is part of.
    """
    is_exact = bool(num_output_tokens and link.exactness)
    sampling = job.sampling if is_exact else rest(job.sampling, num_output_tokens)
    if kind is Leg.PREFILL and not counts(job, link, num_output_tokens):
        # This draw does not count, so it must not end the leg.
        sampling = msgspec.structs.replace(
            sampling, ignore_eos=True, stop_token_ids=[], logprobs=None
        )
        if num_output_tokens:  # a grammar is past its beginning here
            sampling = msgspec.structs.replace(sampling, structured_output=None)
            is_exact = False
    return Submit(
        request_id,
        packed,
        sampling,
        leg=kind,
        handover=handover,
        priority=job.priority,
        cache_salt=job.cache_salt,
        echo_prompt=job.echo_prompt
        and kind is not Leg.DECODE
        and not num_output_tokens,
        reasoning_ended=job.reasoning.ended,
        reasoning_parser_kwargs=job.reasoning.parser_kwargs,
        capture_tokens=len(job.prompt_token_ids) if captures else 0,
        lora=job.lora,
        handover_update=handover_update,
        num_prior=num_output_tokens if is_exact else 0,
        keep=keep,
        trace=trace,
    )
