"""The spans of a request on its worker, below that of its frontend's try.

Of requests alone that bring a trace: a worker begins none by itself.
"""

from __future__ import annotations

from tokenwire.protocol.messages import Card, Finished, FinishReason, Submit, Trace
from tokenwire.protocol.tokens import TOKEN_BYTES
from tokenwire.protocol.tracing import Span, Tracing, checked_trace, trace_id_of

__all__ = ["LegSpans", "about_submit", "begun"]

MAX_RESPONSE_ID_CHARS = 160
"""Of a response's id, in lines and spans: a client's own part of it has 128 at most."""


class LegSpans:
    """One Submit, from its coming to its Finished.

    Args:
        span: Of all of it; it is recorded.
    """

    __slots__ = ("_begun_ns", "_first_ns", "_span")

    def __init__(self, span: Span) -> None:
        self._span = span
        self._begun_ns = span.now_ns()
        self._first_ns = 0

    def first_token(self) -> None:
        """Note when it came."""
        self._first_ns = self._span.now_ns()

    def ended(self, end: Finished) -> None:
        """End it, with what its engine says of its time."""
        span = self._span
        now = span.now_ns()
        scheduled_ns = min(self._begun_ns + int(end.queue_s * 1e9), now)
        span.child("queue", begun_ns=self._begun_ns).end(scheduled_ns)
        engine = span.child(
            "engine",
            begun_ns=scheduled_ns,
            tokenwire__prefill_s=end.prefill_s or None,
            tokenwire__cached_tokens=end.num_cached_tokens,
            tokenwire__output_tokens=end.num_output_tokens,
            tokenwire__first_token_s=(
                (self._first_ns - self._begun_ns) / 1e9 if self._first_ns else None
            ),
        )
        engine.end(now)
        span.set(
            tokenwire__finish_reason=end.reason.value,
            tokenwire__output_tokens=end.num_output_tokens,
        )
        if end.reason is FinishReason.ERROR and end.error_kind is not None:
            span.failed(end.error_kind.value)
        span.end(now)

    def abandoned(self) -> None:
        """End it: nobody waits for its end any more."""
        self._span.event("abandoned")
        self._span.end()


def begun(
    tracing: Tracing | None, submit: Submit, engine_id: str, card: Card
) -> tuple[LegSpans | None, Trace | None]:
    """Return the spans of a Submit, if it is to have some, and what its engine is told.

    Args:
        tracing: Makes spans; None: nobody does.
        submit: What came.
        engine_id: The engine's id of it.
        card: The worker's.
    """
    given = submit.trace
    if given is None:
        return None, None
    trace = checked_trace(given.traceparent or None, given.tracestate)
    request_id = given.request_id[:MAX_RESPONSE_ID_CHARS]
    if tracing is None or not trace.traceparent:
        return None, Trace(request_id, trace.traceparent, trace.tracestate)
    span = tracing.begin(
        f"worker {submit.leg.value}",
        "SERVER",
        trace,
        tokenwire__worker_id=card.worker_id,
        tokenwire__role=card.role.value,
        tokenwire__engine=card.engine,
        tokenwire__leg_id=submit.request_id,
        tokenwire__engine_id=engine_id,
        tokenwire__request_id=request_id or None,
        tokenwire__prompt_tokens=len(submit.token_ids) // TOKEN_BYTES,
    )
    told = span.trace(request_id)
    return (LegSpans(span) if span.is_recording else None), told


def about_submit(submit: Submit) -> dict[str, str]:
    """Return what lines of the log about a Submit have beside them."""
    fields = {"leg_id": submit.request_id}
    trace = submit.trace
    if trace is not None:
        if trace.request_id:
            fields["request_id"] = trace.request_id[:MAX_RESPONSE_ID_CHARS]
        trace_id = trace_id_of(trace)
        if trace_id:
            fields["trace_id"] = trace_id
    return fields
