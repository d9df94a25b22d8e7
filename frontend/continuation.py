"""A sequence that goes on at another worker: what is left to ask for, and how exactly.

The other worker gets the prompt and the output so far as one prompt, P + O. That is
exact for greedy and for unseeded sampling. What an engine derives from the output
alone is lost on it: penalties that count output tokens, the draws of a seed, a bad
word across the cut. A grammar would begin again in the middle, which is no drift but a
wrong answer.
"""

from __future__ import annotations

import msgspec

from tokenwire.protocol.messages import Logprobs, Sampling
from tokenwire.protocol.tokens import TOKEN_BYTES

from .job import Job

__all__ = ["can_continue", "drifts", "prompt_rows", "rest"]


def rest(sampling: Sampling, num_output_tokens: int) -> Sampling:
    """Return the parameters of what is left after *num_output_tokens*."""
    if not num_output_tokens:
        return sampling
    return msgspec.structs.replace(
        sampling,
        max_tokens=sampling.max_tokens - num_output_tokens,
        min_tokens=max(0, sampling.min_tokens - num_output_tokens),
    )


def drifts(sampling: Sampling) -> list[str]:
    """Return the parameters that a continuation cannot honour exactly."""
    names = {
        "seed": sampling.seed is not None and sampling.temperature > 0,
        "presence_penalty": sampling.presence_penalty != 0,
        "frequency_penalty": sampling.frequency_penalty != 0,
        "bad_words": bool(sampling.bad_words),
    }
    return [name for name, used in names.items() if used]


def can_continue(job: Job) -> str:
    """Return why a sequence with output cannot go on elsewhere; empty: it can."""
    if not job.migratable:
        return "the request asked not to be moved (nvext.migratable)"
    if job.sampling.structured_output is not None:
        return "a structured output cannot be continued on another worker"
    changed = drifts(job.sampling)
    if changed and job.exact:
        return f"its {', '.join(changed)} would drift (nvext.exactness)"
    return ""


def prompt_rows(logprobs: Logprobs | None, num_prompt_tokens: int) -> Logprobs | None:
    """Return the rows of the prompt alone, where P + O was computed.

    Args:
        logprobs: A row for each id but the first.
        num_prompt_tokens: Of P.
    """
    if logprobs is None:
        return None
    size = (num_prompt_tokens - 1) * logprobs.width * TOKEN_BYTES
    if len(logprobs.token_ids) <= size:
        return logprobs
    return Logprobs(
        logprobs.width,
        logprobs.token_ids[:size],
        logprobs.logprobs[:size],
        logprobs.ranks[:size],
    )
