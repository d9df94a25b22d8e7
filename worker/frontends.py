"""Who has said hello, and what each has open: two rows of the worker's tables."""

from __future__ import annotations

from enum import Enum

import msgspec

from tokenwire.protocol.exchange import Exchange
from tokenwire.protocol.limits import MAX_ERROR_CHARS
from tokenwire.protocol.liveness import Liveness
from tokenwire.protocol.messages import (
    AGAIN,
    BY_PAUSE,
    CANCELLED,
    CAPTURE,
    GOES_ON,
    ErrorKind,
    Finished,
    FinishReason,
    Hello,
    JsonObject,
    Leg,
    Submit,
)
from tokenwire.protocol.numbering import Incoming, Outgoing
from tokenwire.protocol.tokens import TOKEN_BYTES, pack_ids
from tokenwire.worker.engine import EngineFinished

from .admission import Refusal
from .entry import Entry
from .outbox import Outbox
from .spans import LegSpans

__all__ = ["EndedBy", "Frontend", "Request", "refused_end"]


class EndedBy(Enum):
    """Why an Admin has cancelled a request."""

    PAUSE = "pause"  # with the mode abort: what it has is its answer
    UNLOAD = "unload"  # of its adapter
    OLD_KV = "old_kv"  # it has brought nothing, and may use KV that must not count


class Frontend:
    """A peer that has said hello."""

    __slots__ = (
        "hello",
        "identity",
        "incoming",
        "is_dirty",
        "is_lost",
        "liveness",
        "outbox",
        "outgoing",
        "requests",
        "scraped_at",
    )

    def __init__(self, identity: bytes, hello: Hello, liveness: Liveness) -> None:
        self.identity = identity
        self.hello = hello
        self.liveness = liveness
        self.requests: dict[str, Request] = {}  # by the frontend's id
        self.incoming, self.outgoing = Incoming(), Outgoing()
        self.outbox = Outbox()
        self.is_dirty = False  # whether the outbox waits for the next flush
        self.is_lost = False  # nothing is sent to it any more
        self.scraped_at = float("-inf")  # when it asked for the engine's metrics


class Request:
    """A Submit without a Finished."""

    __slots__ = (
        "ended_by",
        "engine_id",
        "entry",
        "exchange",
        "frontend",
        "is_cancelled",
        "is_evicted",
        "is_followed",
        "is_left",
        "num_queued_tokens",
        "request_id",
        "spans",
        "submit",
        "submitted_at",
    )

    def __init__(
        self, frontend: Frontend, submit: Submit, engine_id: str, now: float
    ) -> None:
        # Who follows it, or did last, and by which id: its Submit's, or a Recall's.
        self.frontend = frontend
        self.request_id = submit.request_id
        self.is_followed = True
        self.is_left = False  # nobody follows it, since its frontend was lost
        self.submit = submit
        self.engine_id = engine_id
        self.submitted_at = now
        self.exchange = Exchange()  # with who follows it
        self.entry: Entry | None = None  # what is kept of it
        self.is_cancelled = False  # by a Recall: it must not go on elsewhere
        self.is_evicted = False  # cancelled by the worker, which leaves
        self.spans: LegSpans | None = None  # of its Submit; most have none
        self.ended_by: EndedBy | None = None  # an Admin, for this reason
        # To be computed before the first token, and 0 from it on.
        self.num_queued_tokens = len(submit.token_ids) // TOKEN_BYTES

    @property
    def num_prompt_tokens(self) -> int:
        """The prompt's length, without output that the sequence had before."""
        return len(self.submit.token_ids) // TOKEN_BYTES - self.submit.num_prior

    def _stop_reason(
        self, reason: FinishReason, of_engine: int | str | None
    ) -> int | str | None:
        if self.is_cancelled and reason is FinishReason.ABORT:
            return CANCELLED
        by_pause = self.ended_by is EndedBy.PAUSE and reason is FinishReason.ABORT
        return BY_PAUSE if by_pause else of_engine

    def _kind(self, of_engine: ErrorKind | None) -> ErrorKind | None:
        is_known = CAPTURE in self.frontend.hello.capabilities
        if of_engine is ErrorKind.CAPTURE and not is_known:
            return ErrorKind.ENGINE
        return of_engine

    def end(self, end: EngineFinished) -> Finished:
        """Return what the frontend is told of the engine's *end*."""
        is_old = self.ended_by is EndedBy.OLD_KV
        if self.is_cancelled and (is_old or end.reason is FinishReason.ERROR):
            return self.made_up_end(FinishReason.ABORT)
        if end.reason is FinishReason.ABORT and not self.is_cancelled:
            if self.is_evicted:
                return self.evicted_end()
            if self.ended_by is EndedBy.UNLOAD:
                return self._unloaded_end()
        if is_old and end.reason is not FinishReason.ERROR:
            return self._old_kv_end(end.handover)
        prompt = pack_ids(end.prompt_token_ids) if self.submit.echo_prompt else None
        return Finished(
            request_id=self.request_id,
            reason=end.reason,
            num_output_tokens=self.exchange.num_tokens,
            num_prompt_tokens=end.num_prompt_tokens,
            num_cached_tokens=end.num_cached_tokens,
            stop_reason=self._stop_reason(end.reason, end.stop_reason),
            error_kind=self._kind(end.error_kind),
            error=end.error[:MAX_ERROR_CHARS],
            prompt_token_ids=prompt,
            handover=end.handover,
            kv_transfer_params=end.kv_transfer_params,
            prompt_logprobs=end.prompt_logprobs,
            queue_s=end.queue_s,
            prefill_s=end.prefill_s,
        )

    def made_up_end(
        self, reason: FinishReason, kind: ErrorKind | None = None, error: str = ""
    ) -> Finished:
        """Return an end for a request that the engine does not end."""
        return Finished(
            request_id=self.request_id,
            reason=reason,
            num_output_tokens=self.exchange.num_tokens,
            num_prompt_tokens=self.num_prompt_tokens,
            stop_reason=self._stop_reason(reason, None),
            error_kind=kind,
            error=error[:MAX_ERROR_CHARS],
        )

    def given_up_end(self) -> Finished:
        """Return an end for a request that the engine does not end after an abort."""
        if self.is_evicted or self.is_cancelled:
            return self.evicted_end()
        if self.ended_by is EndedBy.OLD_KV:
            return self._old_kv_end()
        if self.ended_by is EndedBy.UNLOAD:
            return self._unloaded_end()
        return self.made_up_end(FinishReason.ABORT)

    def dead_end(self, reason: str) -> Finished:
        """Return the end of what runs when its engine dies."""
        if self.is_cancelled:
            return self.made_up_end(FinishReason.ABORT)
        return self.made_up_end(FinishReason.ERROR, ErrorKind.ENGINE, reason)

    def goes_on_end(self) -> Finished:
        """Return the end for who follows it no longer, while it goes on."""
        end = self.made_up_end(FinishReason.ABORT)
        return msgspec.structs.replace(end, stop_reason=GOES_ON)

    def _old_kv_end(self, handover: JsonObject | None = None) -> Finished:
        """Return the end of what may use KV that must not count any more.

        Also where the engine came to a good end meanwhile: its frontend has KV that is
        held for a hand-over released.
        """
        is_decode = self.submit.leg is Leg.DECODE
        kind = ErrorKind.HANDOVER if is_decode else ErrorKind.DRAINING
        text = "the KV that it would have used is of no use any more"
        end = self.made_up_end(FinishReason.ERROR, kind, text)
        return msgspec.structs.replace(end, stop_reason=AGAIN, handover=handover)

    def _unloaded_end(self) -> Finished:
        """Return the end of what can go on only where its adapter is."""
        text = f"the adapter {self.submit.lora!r:.140} is unloaded here"
        return self.made_up_end(FinishReason.ERROR, ErrorKind.DRAINING, text)

    def evicted_end(self) -> Finished:
        """Return the end of what the worker did not finish before it left."""
        if self.is_cancelled:
            return self.made_up_end(FinishReason.ABORT)
        return self.made_up_end(
            FinishReason.ERROR, ErrorKind.DRAINING, "the worker is leaving"
        )


def refused_end(submit: Submit, refusal: Refusal) -> Finished:
    """Return the end of a Submit that never becomes a request."""
    num_prompt = len(submit.token_ids) // TOKEN_BYTES
    if 0 <= submit.num_prior <= num_prompt:
        num_prompt -= submit.num_prior
    prompt = submit.token_ids[: num_prompt * TOKEN_BYTES]
    return Finished(
        request_id=submit.request_id,
        reason=FinishReason.ERROR,
        num_output_tokens=0,
        num_prompt_tokens=num_prompt,
        error_kind=refusal.kind,
        error=refusal.error,
        prompt_token_ids=prompt if submit.echo_prompt else None,
    )
