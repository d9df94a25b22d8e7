"""Earlier output, folded in silence: what a generation that goes on has said already."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from tokenwire.protocol.messages import FinishReason

from .continuation import Ended, ended_by
from .fold import Fold
from .job import Job
from .message import MessagePart
from .resume_errors import invalid_resume
from .tokenizer import TextModel

__all__ = ["Prior", "fold_prior", "folded_prior"]

LONG_PRIOR = 64
"""Ids folded on the event loop: a parser takes up to 0.3 ms for one."""


@dataclass(slots=True, frozen=True)
class Prior:
    """What earlier output has said."""

    text: str
    parsed: MessagePart | None  # in its place, where there is a parser
    num_tokens: int
    num_reasoning_tokens: int
    ended: Ended | None = None  # it is complete


async def folded_prior(
    job: Job, fold: Fold, model: TextModel, note: Callable[[list[int]], None]
) -> Prior:
    """Return what *job*'s earlier output has said; much of it beside the event loop.

    Args:
        job: Whose output it is.
        fold: Goes on behind it then.
        model: Its tokenizer's.
        note: Is given the ids, too.

    Raises:
        ApiError: 400, as ``fold_prior``.
    """
    token_ids = job.output_token_ids

    def fold_it() -> Prior:
        note(token_ids)
        return fold_prior(fold, job, model.end_ids)

    return await model.threads.run(len(token_ids) > LONG_PRIOR, fold_it)


def fold_prior(fold: Fold, job: Job, end_ids: Collection[int]) -> Prior:
    """Feed *fold* the job's earlier output, id by id, and return what it has said.

    What its end adds (text that was held back) is still to come, as it is for a client
    who has seen the ids and no finish reason.

    Args:
        fold: Fresh; goes on behind the output then.
        job: Whose output it is.
        end_ids: Those that end an answer, unless the job ignores them.

    Raises:
        ApiError: 400, the output goes on behind a stop string.
    """
    token_ids = job.output_token_ids
    ended = ended_by(job.sampling, job.output_token_ids, end_ids)
    is_stopped = ended is not None and ended.reason is FinishReason.STOP
    texts: list[str] = []
    for number, token_id in enumerate(token_ids[: len(token_ids) - is_stopped]):
        if fold.matched is not None:
            msg = (
                f"the output has the stop string {fold.matched!r:.80} before its token "
                f"{number}, and goes on behind it"
            )
            raise invalid_resume(msg)
        texts.append(fold.feed((token_id,))[0])
    parsed, num_reasoning = fold.take(), fold.num_reasoning_tokens
    if is_stopped:
        fold.feed(token_ids[-1:], stopped=True)
    elif fold.matched is not None:
        ended = Ended(FinishReason.STOP, fold.matched)
    return Prior("".join(texts), parsed, len(token_ids), num_reasoning, ended)
