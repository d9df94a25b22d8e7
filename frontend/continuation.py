"""A sequence that goes on behind output: what is left to ask for, and how exactly.

A worker whose Card says so goes on exactly: it is told how much of the ids is output, and
what the whole request asked for. To any other worker the prompt and the output so far
are one prompt, P + O. That is exact for greedy and for unseeded sampling. What an engine
derives from the output alone is lost on it: penalties that count output tokens, the draws
of a seed, a bad word across the cut. A grammar would begin again in the middle, which is
no drift but a wrong answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import msgspec

from tokenwire.protocol.messages import FinishReason, Logprobs, Sampling

from .job import Job
from .rows import rows

__all__ = [
    "Ended",
    "draws_again",
    "drifts",
    "ended_by",
    "ends_at",
    "is_plain",
    "meets",
    "needed",
    "obstacle",
    "prompt_rows",
    "rest",
]

_LEVELS = {"": 0, "same_rng": 1, "bitwise": 2}


def meets(offered: str, asked: str) -> bool:
    """Return whether what a worker offers is as exact as asked, see ``Card``."""
    return _LEVELS.get(offered, 0) >= _LEVELS[asked]


@dataclass(slots=True, frozen=True)
class Ended:
    """Why an output needs nothing more."""

    reason: FinishReason
    stop_reason: int | str | None = None


def ended_by(
    sampling: Sampling, token_ids: Sequence[int], end_ids: Collection[int]
) -> Ended | None:
    """Return why an output needs nothing more, as its engine would: by its last id.

    Args:
        sampling: What was asked for.
        token_ids: The output.
        end_ids: Those that end an answer, unless they are ignored.
    """
    if not token_ids:
        return None
    last = token_ids[-1]
    if ends_at(sampling, last, len(token_ids), end_ids):
        is_eos = last in end_ids and not sampling.ignore_eos
        return Ended(FinishReason.STOP, None if is_eos else last)
    if len(token_ids) == sampling.max_tokens:
        return Ended(FinishReason.LENGTH)
    return None


def ends_at(
    sampling: Sampling, token_id: int, num_tokens: int, end_ids: Collection[int]
) -> bool:
    """Return whether an output ends by *token_id*, as the last of *num_tokens*."""
    return num_tokens >= sampling.min_tokens and (
        (token_id in end_ids and not sampling.ignore_eos)
        or token_id in sampling.stop_token_ids
    )


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
    """Return the parameters that P + O as a prompt cannot honour exactly."""
    names = {
        "seed": sampling.seed is not None and sampling.temperature > 0,
        "presence_penalty": sampling.presence_penalty != 0,
        "frequency_penalty": sampling.frequency_penalty != 0,
        "bad_words": bool(sampling.bad_words),
    }
    return [name for name, used in names.items() if used]


def is_plain(sampling: Sampling) -> bool:
    """Return whether P + O as a prompt gives what the request would have had."""
    return sampling.structured_output is None and not drifts(sampling)


def needed(job: Job) -> str:
    """Return how exactly a worker must go on with *job*, at least; see ``Card``."""
    if job.exactness == "bitwise":
        return "bitwise"
    sampling = job.sampling
    if sampling.structured_output is not None or (job.exactness and drifts(sampling)):
        return "same_rng"
    return ""


def obstacle(job: Job, offered: Callable[[str], bool]) -> str:
    """Return why a sequence with output cannot go on elsewhere; empty: it can.

    Args:
        job: Whose it is.
        offered: Returns whether some worker goes on as exactly.
    """
    if not job.migratable:
        return "the request asked not to be moved (nvext.migratable)"
    level = needed(job)
    if offered(level):
        return ""
    if job.sampling.structured_output is not None:
        return "no worker can go on with a structured output"
    changed = drifts(job.sampling)
    if changed:
        return f"its {', '.join(changed)} would drift (nvext.exactness)"
    return f"no worker goes on {level} (nvext.exactness)"


def draws_again(job: Job, num_output_tokens: int) -> str:
    """Return why an output whose last draw was lost must not have it again; or empty.

    It is lost when the output has ended by it, but not what was to be saved at the end.
    Drawing until something is no end would make ends too rare.

    Args:
        job: What was asked for.
        num_output_tokens: That were delivered before the lost one.
    """
    is_end_anyway = job.sampling.max_tokens == 1
    if not num_output_tokens and (job.repeatable or is_end_anyway):
        return ""
    return "its last token would be drawn again"


def prompt_rows(logprobs: Logprobs | None, num_prompt_tokens: int) -> Logprobs | None:
    """Return the rows of the prompt alone, where P + O was computed.

    Args:
        logprobs: A row for each id but the first.
        num_prompt_tokens: Of P.
    """
    if logprobs is None:
        return None
    return rows(logprobs, 0, num_prompt_tokens - 1)
