"""One open request: from vLLM's outputs to ours, no I/O and no clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tokenwire.protocol.limits import MAX_ERROR_CHARS
from tokenwire.protocol.messages import (
    GRAMMAR_REJECTS_PREFIX,
    ErrorKind,
    FinishReason,
    JsonObject,
    Leg,
    Logprobs,
)
from tokenwire.worker.engine import (
    GRAMMAR_REFUSAL,
    EngineFinished,
    EngineRequest,
    EngineTokens,
)

from .capture import PATH_KEY, Capture
from .logprobs import pack
from .resume import GRAMMAR_FAILED

__all__ = ["OpenRequest", "Signal"]

VISIBLE = frozenset({PATH_KEY})
"""Keys of a prefill leg's transfer parameters that are a client's business; all the
others are handles of the hand-over (vLLM 0.32: NIXL's, and the capture connector's)."""


class Signal(asyncio.Event):
    """An event that also calls back when it is set.

    vLLM's ``RequestOutputCollector`` sets its ``ready`` event for each output. With
    this one in its place a single consumer serves all requests of a step: no task is
    woken per token.
    """

    def __init__(self, notify: Callable[[], None]) -> None:
        super().__init__()
        self._notify = notify

    def set(self) -> None:
        """Set the event and call back."""
        super().set()
        self._notify()


class OpenRequest:
    """What is known of a request that has not ended."""

    __slots__ = (
        "_prompt_logprobs",
        "aborted",
        "added",
        "capture",
        "collector",
        "ended",
        "moved",
        "request",
    )

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.collector: Any = None  # vLLM's RequestOutputCollector, once added
        self.added = asyncio.Event()  # the engine has it, or it has ended
        self.moved = asyncio.Event()  # its first token is there, or it has ended
        self.ended = asyncio.Event()
        self.aborted = False
        self.capture: Capture | None = None  # of its hidden states
        self._prompt_logprobs: Logprobs | None = None

    def take(
        self, output: Any
    ) -> tuple[EngineTokens | None, EngineFinished | None]:  # vLLM's RequestOutput
        """Return what *output* brings: new tokens, the end, or both."""
        sampling = self.request.sampling
        completion = output.outputs[0]
        if output.prompt_logprobs and sampling.prompt_logprobs is not None:
            self._prompt_logprobs = pack(
                output.prompt_logprobs, sampling.prompt_logprobs
            )
        tokens: EngineTokens | None = None
        token_ids = list(completion.token_ids)
        if token_ids:
            is_first = not self.moved.is_set()
            self.moved.set()
            logprobs = None
            if sampling.logprobs is not None and completion.logprobs is not None:
                logprobs = pack(completion.logprobs, sampling.logprobs)
            num_cached = output.num_cached_tokens or 0 if is_first else 0
            tokens = EngineTokens(
                self.request.request_id, token_ids, logprobs, num_cached
            )
        if not output.finished:
            return tokens, None
        return tokens, self._finished(output, completion)

    def failed(self, kind: ErrorKind, error: str) -> EngineFinished:
        """Return the end of a request that failed."""
        return EngineFinished(
            self.request.request_id,
            FinishReason.ERROR,
            num_prompt_tokens=self.request.num_prompt_tokens,
            error_kind=kind,
            error=error[:MAX_ERROR_CHARS],
        )

    def captured(self, end: EngineFinished, error: str) -> EngineFinished:
        """Return *end* now that its file is there, or, with an *error*, will not be.

        KV that it holds for a hand-over stays named: it has to be released.
        """
        if self.aborted:
            return replace(
                end,
                reason=FinishReason.ABORT,
                error_kind=None,
                error="",
                kv_transfer_params=None,
            )
        if not error:
            return end
        return replace(
            end,
            reason=FinishReason.ERROR,
            error_kind=ErrorKind.CAPTURE,
            error=error[:MAX_ERROR_CHARS],
            kv_transfer_params=None,
        )

    def stopped(self) -> EngineFinished:
        """Return the end of a request that was aborted before vLLM could say so."""
        return EngineFinished(
            self.request.request_id,
            FinishReason.ABORT,
            num_prompt_tokens=self.request.num_prompt_tokens,
        )

    def _finished(self, output: Any, completion: Any) -> EngineFinished:  # vLLM's
        reason, kind, error = self._reason(
            completion.finish_reason, completion.stop_reason
        )
        transfer: JsonObject = output.kv_transfer_params or {}
        visible: JsonObject = transfer
        handover: JsonObject | None = None
        if self.request.leg is not Leg.FULL:
            visible = {key: transfer[key] for key in transfer.keys() & VISIBLE}
        if self.request.leg is Leg.PREFILL:
            # vLLM 0.32 holds the blocks after "stop" as after "length", and names
            # them; after anything else it frees them at once and names nothing.
            if transfer.keys() - VISIBLE:
                handover = transfer
            elif reason in {FinishReason.STOP, FinishReason.LENGTH}:
                reason, kind = FinishReason.ERROR, ErrorKind.HANDOVER
                error = "the prefill engine kept no KV: has it a KV connector?"
        if self.aborted:
            reason, kind, error = FinishReason.ABORT, None, ""
        stop_reason = completion.stop_reason
        if kind is not None and stop_reason != GRAMMAR_REJECTS_PREFIX:
            stop_reason = None  # what it says is in the error
        queue_s, prefill_s = _times(output.metrics)
        prompt = output.prompt_token_ids  # as it came to vLLM, earlier output included
        if self.request.num_prior:
            prompt = prompt[: self.request.num_prompt_tokens]
        return EngineFinished(
            self.request.request_id,
            reason,
            num_prompt_tokens=len(prompt),
            num_cached_tokens=output.num_cached_tokens or 0,
            stop_reason=stop_reason,
            error_kind=kind,
            error=error,
            prompt_token_ids=prompt,
            handover=handover,
            kv_transfer_params=visible or None,
            prompt_logprobs=self._prompt_logprobs,
            queue_s=queue_s,
            prefill_s=prefill_s,
        )

    def _reason(
        self, finish_reason: str, stop_reason: int | str | None
    ) -> tuple[FinishReason, ErrorKind | None, str]:
        if stop_reason == GRAMMAR_REJECTS_PREFIX:
            return FinishReason.ERROR, ErrorKind.INVALID, GRAMMAR_REFUSAL
        if isinstance(stop_reason, str) and stop_reason.startswith(GRAMMAR_FAILED):
            cause = stop_reason.removeprefix(GRAMMAR_FAILED)
            text = f"the engine cannot hold an output to this grammar: {cause}"
            # Output that is there was held to it: by an engine with another backend.
            kind = ErrorKind.ENGINE if self.request.num_prior else ErrorKind.INVALID
            return FinishReason.ERROR, kind, text
        match finish_reason:
            case "stop" | "repetition":
                return FinishReason.STOP, None, ""
            case "length":
                return FinishReason.LENGTH, None, ""
            case "abort":
                # Nobody here asked: the engine is on its way out.
                text = "the engine aborted the request by itself"
                return FinishReason.ERROR, ErrorKind.ENGINE, text
            case _:
                if self.request.leg is Leg.DECODE and not self.moved.is_set():
                    text = "the prompt's KV did not arrive from the prefill engine"
                    return FinishReason.ERROR, ErrorKind.HANDOVER, text
                text = f"the engine ended the request with {finish_reason!r}"
                return FinishReason.ERROR, ErrorKind.ENGINE, text


def _times(metrics: Any) -> tuple[float, float]:  # vLLM's RequestStateStats or None
    """Return (queue_s, prefill_s), by the engine core's clock; 0 where it has none."""
    if metrics is None or not metrics.scheduled_ts:
        return 0.0, 0.0
    queue_s = metrics.scheduled_ts - metrics.queued_ts
    prefill_s = metrics.first_token_ts - metrics.scheduled_ts
    return max(queue_s, 0.0), max(prefill_s, 0.0)
