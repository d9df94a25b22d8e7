"""The spans of a request: of its stages here, and of each try at the workers.

``docs/observability.md`` has their names and attributes in one table. Only requests that
are sampled have any; what happens per token makes none.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenwire.protocol.messages import ErrorKind, Leg, Trace
from tokenwire.protocol.tracing import Span

from .job import End, Job
from .link import Link
from .record import Record

__all__ = ["RequestSpans", "SequenceSpans"]

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/inference/v1/generate": "generate_tokens",
}
"""``gen_ai.operation.name`` by route; the last is none of OpenTelemetry's."""


class RequestSpans:
    """The spans of one HTTP request.

    Args:
        span: Of all of it; it is recorded.
    """

    __slots__ = ("_sequences", "_span", "_stage")

    def __init__(self, span: Span) -> None:
        self._span = span
        self._stage: Span | None = None
        self._sequences: list[SequenceSpans] = []

    def stage(self, name: str) -> None:
        """End the stage of now, and begin another one; empty: none."""
        if self._stage is not None:
            self._stage.end()
        self._stage = self._span.child(name) if name else None

    def prepared(
        self, route: str, response_id: str, model: str, jobs: Sequence[Job]
    ) -> None:
        """Note what is asked for; its prompt is there."""
        job = jobs[0]
        sampling = job.sampling
        num_prompt_tokens = len(job.prompt_token_ids)
        if self._stage is not None:
            self._stage.set(tokenwire__prompt_tokens=num_prompt_tokens)
        self._span.set(
            gen_ai__operation__name=OPERATIONS.get(route),
            gen_ai__provider__name="tokenwire",
            gen_ai__request__model=model,
            gen_ai__request__max_tokens=sampling.max_tokens,
            gen_ai__request__temperature=sampling.temperature,
            gen_ai__request__top_p=sampling.top_p,
            gen_ai__request__seed=sampling.seed,
            gen_ai__request__choice__count=len(jobs) if len(jobs) > 1 else None,
            gen_ai__response__id=response_id,
            gen_ai__response__model=model,
            tokenwire__session_id=job.session_id,
            tokenwire__resumed_tokens=len(job.output_token_ids) or None,
        )

    def sequence(self, index: int) -> SequenceSpans:
        """Return the spans of a choice of it."""
        one = SequenceSpans(self._span, index)
        self._sequences.append(one)
        return one

    def ended(
        self, status: int, error: str, ends: Sequence[End], num_tokens: int
    ) -> None:
        """End all that has not ended.

        Args:
            status: Of the answer.
            error: The code of what went wrong; empty: nothing.
            ends: Of its sequences, as far as they have come.
            num_tokens: Of all outputs.
        """
        self.stage("")
        for one in self._sequences:
            one.left()
        span = self._span
        span.set(http__response__status_code=status)
        if ends:
            span.set(
                gen_ai__response__finish_reasons=[end.finish_reason for end in ends],
                gen_ai__usage__input_tokens=sum(end.num_prompt_tokens for end in ends),
                gen_ai__usage__output_tokens=num_tokens,
                tokenwire__cached_tokens=sum(end.num_cached_tokens for end in ends),
            )
        if error and (status >= 500 or status < 400):
            span.failed(error)
        elif error:
            span.set(error__type=error)  # the client's own fault is no server's error
        span.end()


class SequenceSpans:
    """The tries of one sequence, and in each the stages: prefill, hand-over, decode.

    Args:
        parent: The request's.
        index: Of the choice.
    """

    __slots__ = ("_attempt", "_index", "_parent", "_stage")

    def __init__(self, parent: Span, index: int) -> None:
        self._parent = parent
        self._index = index
        self._attempt: Span | None = None
        self._stage: Span | None = None

    def submitted(
        self,
        link: Link,
        kind: Leg,
        number: int,
        leg_id: str,
        record: Record,
        num_prior: int,
        response_id: str,
    ) -> Trace:
        """Begin a try, or its second leg; return what the worker is told.

        Args:
            link: Who gets it.
            kind: Which leg it is.
            number: Of the try.
            leg_id: The leg's own id.
            record: What is known of the sequence.
            num_prior: Ids of output that it goes on behind.
            response_id: As its client is told it.
        """
        worker, attempt = link.worker_id, self._attempt
        if kind is Leg.DECODE and attempt is not None:
            end = record.prefill_end
            if end is not None and self._stage is not None:
                self._stage.set(
                    tokenwire__cached_tokens=end.num_cached_tokens,
                    tokenwire__queue_s=end.queue_s,
                )
            attempt.set(tokenwire__decode_worker_id=worker)
            self._begin("handover", worker, leg_id)
        else:
            self._end()
            is_prefill = kind is Leg.PREFILL
            attempt = self._attempt = self._parent.child(
                "attempt",
                "CLIENT",
                tokenwire__attempt=number,
                tokenwire__choice=self._index,
                tokenwire__prior_tokens=num_prior or None,
                tokenwire__prefill_worker_id=worker if is_prefill else None,
                tokenwire__decode_worker_id=None if is_prefill else worker,
            )
            self._begin("prefill", worker, leg_id)
        return attempt.trace(response_id)

    def first_token(self, link: Link, num_cached_tokens: int) -> None:
        """Begin to decode."""
        if self._attempt is not None:
            if self._stage is not None:
                self._stage.set(tokenwire__cached_tokens=num_cached_tokens)
            self._begin("decode", link.worker_id, None)

    def followed(self, link: Link) -> None:
        """Begin with what a worker has kept, and goes on with."""
        self._attempt = self._parent.child(
            "follow", "CLIENT", tokenwire__decode_worker_id=link.worker_id
        )

    def failed(self, kind: ErrorKind) -> None:
        """End a try that has failed; what its worker says may quote the request."""
        for one in (self._stage, self._attempt):
            if one is not None:
                one.failed(kind.value)
        self._end()

    def ended(self, end: End) -> None:
        """End the last try."""
        if self._attempt is not None:
            self._attempt.set(
                tokenwire__finish_reason=end.finish_reason,
                tokenwire__cached_tokens=end.num_cached_tokens,
            )
            if end.error is not None:
                self._attempt.failed(end.error.code or end.error.kind)
        self._end()

    def left(self, *, goes_on: bool = False) -> None:
        """End what still runs: its client has left. Harmless if nothing does."""
        if self._attempt is not None:
            self._attempt.event("client left", tokenwire__goes_on=goes_on)
        self._end()

    def _begin(self, name: str, worker_id: str, leg_id: str | None) -> None:
        if self._stage is not None:
            self._stage.end()
        if self._attempt is not None:
            self._stage = self._attempt.child(
                name, tokenwire__worker_id=worker_id, tokenwire__leg_id=leg_id
            )

    def _end(self) -> None:
        stage, self._stage = self._stage, None
        attempt, self._attempt = self._attempt, None
        for one in (stage, attempt):
            if one is not None:
                one.end()
