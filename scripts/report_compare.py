"""What a case of the resume report measures: a broken run beside an uninterrupted one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from report_client import Answer, View

__all__ = ["EXACT", "Metrics", "compare", "first_divergence"]

EXACT = ("same_rng", "bitwise")
"""The claims that the same tokens come."""


@dataclass(frozen=True)
class Metrics:
    """One case. What is None could not be measured, or says nothing here."""

    prefix_exact: bool
    """Whether the engine had, behind the prompt, the very ids of the output so far."""
    post_resume_exact: bool
    """Whether the ids that came are those of the uninterrupted run, and no more."""
    first_divergence: int | None  # the first id that is not; counted from the output's
    text_exact: bool
    parsed_exact: bool  # reasoning, content, calls and the finish reason
    lost_tokens: int
    dup_tokens: int
    repeated_decode_tokens: int  # sampled again, although the client had them
    usage_ok: bool
    claim: str  # the exactness that was promised; empty: nothing was
    claim_ok: bool
    resume_ttft_ms: float | None = None
    prefix_cache_hit_tokens: int | None = None
    repeated_prefill_tokens: int | None = None  # computed again, of prompt and output
    remark: str = ""  # what went wrong, in a sentence

    @property
    def passed(self) -> bool:
        """Whether it is as if nothing had happened."""
        return (
            self.prefix_exact
            and self.post_resume_exact
            and self.text_exact
            and self.parsed_exact
            and self.usage_ok
            and self.claim_ok
            and not (self.lost_tokens or self.dup_tokens or self.repeated_decode_tokens)
        )


def first_divergence(found: Sequence[int], expected: Sequence[int]) -> int | None:
    """Return where two outputs part, their lengths included; None: nowhere."""
    for at, (one, other) in enumerate(zip(found, expected, strict=False)):
        if one != other:
            return at
    return None if len(found) == len(expected) else min(len(found), len(expected))


def compare(
    reference: Answer,
    k: int,
    rest: Answer,
    *,
    prefix: Sequence[int],
    ids: Sequence[int],
    num_sampled: int | None,
    usage_ok: bool,
    claim: str,
    ttft_s: float | None = None,
) -> Metrics:
    """Return what a case shows.

    Args:
        reference: The uninterrupted run.
        k: How many ids the client had.
        rest: What came then, its view on top of what the client had.
        prefix: Prompt and output so far, as the engine was given them.
        ids: The whole output, before and behind the cut.
        num_sampled: How many ids the stack says it has sampled behind the cut.
        usage_ok: Whether the usage counts what it should.
        claim: The exactness promised.
        ttft_s: From the break, or the request, to the first new id.
    """
    expected = [*reference.prompt_ids, *reference.ids[:k]]
    diverges = first_divergence(ids, reference.ids)
    is_exact = diverges is None
    num_missing = len(reference.ids) - k
    resume = rest.resume
    return Metrics(
        prefix_exact=list(prefix) == expected,
        post_resume_exact=is_exact,
        first_divergence=diverges,
        text_exact=text_of(rest.view) == text_of(reference.view),
        parsed_exact=rest.view == reference.view
        and rest.finish_reason == reference.finish_reason,
        lost_tokens=rest.num_lost + max(0, len(reference.ids) - len(ids)),
        dup_tokens=rest.num_dup,
        repeated_decode_tokens=0
        if num_sampled is None
        else max(0, num_sampled - num_missing),
        usage_ok=usage_ok,
        claim=claim,
        claim_ok=is_exact or claim not in EXACT,
        resume_ttft_ms=None if ttft_s is None else ttft_s * 1000,
        prefix_cache_hit_tokens=resume.get("cached_tokens"),
        repeated_prefill_tokens=resume.get("recomputed_tokens"),
        remark=str(rest.error.get("message", "")),
    )


def text_of(view: View) -> str:
    """Return all that a message says, whatever it is for."""
    return "\n".join([view.reasoning, view.content, *map("".join, view.calls)])
