"""What one HTTP request leaves behind: who it is in lines of the log, its spans, its end.

A request's own task has its trail in ``current``; what goes on outside of that task takes
it along.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar

from tokenwire.protocol.messages import Trace
from tokenwire.protocol.tracing import trace_id_of

from .errors import ApiError
from .job import End, Job
from .spans import RequestSpans, SequenceSpans

__all__ = ["CLIENT_LEFT", "CURRENT", "Trail"]

CLIENT_LEFT = 499
"""The status of a request whose client left before it was answered, as nginx has it."""


class Trail:
    """The trail of one request.

    Args:
        trace: What its client, or our span of it, has workers and engines told.
        spans: Its spans; None: it has none.
        client_request_id: As its client calls it; empty: it does not, or not safely.
        counts_bytes: Whether what is sent counts.
    """

    __slots__ = (
        "_began_at",
        "_status",
        "about",
        "client_request_id",
        "counts_bytes",
        "ends",
        "error",
        "job",
        "model",
        "num_bytes",
        "num_tokens",
        "request_id",
        "spans",
        "started_at",
        "trace",
    )

    def __init__(
        self,
        trace: Trace,
        spans: RequestSpans | None = None,
        client_request_id: str = "",
        *,
        counts_bytes: bool = False,
    ) -> None:
        self.trace = trace
        self.spans = spans
        self.client_request_id = client_request_id
        self.counts_bytes = counts_bytes
        self.started_at = time.monotonic()
        self.request_id = ""  # the ``id`` of its answer
        self.about: dict[str, str] = {}  # for the lines of the log
        self.model = ""
        self.job: Job | None = None  # of its first sequence
        self.ends: list[End] = []  # of its sequences, as they come
        self.num_tokens = 0  # of all outputs, as delivered
        self.error = ""  # the code of what went wrong
        self.num_bytes: Callable[[], int] = _nothing  # of the body, sent so far
        self._began_at = 0.0  # when its sequences could begin to wait
        self._status = CLIENT_LEFT
        if client_request_id:
            self.about["client_request_id"] = client_request_id
        trace_id = trace_id_of(trace)
        if trace_id:
            self.about["trace_id"] = trace_id

    def stage(self, name: str) -> None:
        """Note that another stage begins; empty: none of those that have a name here."""
        if self.spans is not None:
            self.spans.stage(name)

    def prepared(
        self, route: str, response_id: str, model: str, jobs: Sequence[Job]
    ) -> None:
        """Note what is asked for: from now on it waits for its turn."""
        self.about["request_id"] = self.request_id = response_id
        self.trace = Trace(response_id, self.trace.traceparent, self.trace.tracestate)
        self.job = jobs[0]
        self.model = self.job.lora or model
        self._began_at = time.monotonic()
        if self.spans is not None:
            self.spans.prepared(route, response_id, self.model, jobs)
            self.spans.stage("queue")

    def sequence(self, index: int) -> SequenceSpans | None:
        """Return the spans of a choice of it; None: it has none."""
        return None if self.spans is None else self.spans.sequence(index)

    def opened(self, status: int, num_bytes: Callable[[], int] | None) -> None:
        """Note that an answer has begun.

        Args:
            status: What it says.
            num_bytes: Returns how much of it is sent; None: that does not count.
        """
        self._status = status
        if num_bytes is not None:
            self.num_bytes = num_bytes

    def failed(self, error: ApiError | str) -> None:
        """Note what went wrong, the first time."""
        if not self.error:
            code = error if isinstance(error, str) else error.code or error.kind
            self.error = code

    def ended(self, status: int | None) -> int:
        """Note that all is over, and return the status.

        Args:
            status: Of the answer; None: its client left before it was whole.
        """
        if status is None:
            self.failed("client_left")
            status = self._status
        if self.spans is not None:
            self.spans.ended(status, self.error, self.ends, self.num_tokens)
        return status

    def forget(self) -> None:
        """Let go of what was asked and how it ended, now that all is told.

        Its connection has the request, and with it this, until another one comes.
        """
        self.job = None
        self.ends.clear()
        self.num_bytes = _nothing  # it may have the body

    @property
    def first_token_s(self) -> float | None:
        """From its coming to the first token of any sequence, in s; None: there was none."""
        firsts = [end.timing["ttft_ms"] for end in self.ends if "ttft_ms" in end.timing]
        if not firsts:
            return None
        return self._began_at - self.started_at + min(firsts) / 1e3

    @property
    def worker_ids(self) -> list[str]:
        """Who served it last, prefill first."""
        names = [name for end in self.ends for name in end.worker_ids.values()]
        return list(dict.fromkeys(names))


def _nothing() -> int:
    return 0


CURRENT: ContextVar[Trail | None] = ContextVar("trail", default=None)
"""The trail of the request whose task this is; None: it is no request's."""
