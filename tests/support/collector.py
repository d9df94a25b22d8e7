"""A collector of traces: takes OTLP over HTTP, and tells what it has got as a tree."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanProto, Status

__all__ = ["Collector", "Seen", "collector"]


@dataclass
class Seen:
    """One span as it came."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str  # empty: it has none
    kind: str
    attributes: dict[str, Any]
    service: str
    failed: bool
    begun_ns: int
    ended_ns: int
    events: list[str] = field(default_factory=list[str])


class Collector:
    """All spans that came."""

    def __init__(self) -> None:
        self.spans: list[Seen] = []
        self.num_requests = 0
        self.status = 200  # that it answers
        self.url = ""

    def take(self, body: bytes) -> None:
        """Take one request."""
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            own = _attributes(resource.resource.attributes)
            for scope in resource.scope_spans:
                self.spans += [_seen(span, own["service.name"]) for span in scope.spans]

    def of(self, trace_id: str) -> list[Seen]:
        """Return the spans of one trace, as they began."""
        found = [span for span in self.spans if span.trace_id == trace_id]
        return sorted(found, key=lambda span: span.begun_ns)

    def named(self, name: str) -> list[Seen]:
        """Return the spans of one name, as they began."""
        found = [span for span in self.spans if span.name == name]
        return sorted(found, key=lambda span: span.begun_ns)

    def tree(self, trace_id: str) -> list[str]:
        """Return the names of a trace's spans, indented below their parents."""
        spans = self.of(trace_id)
        ids = {span.span_id for span in spans}

        def below(parent_id: str | None, depth: int) -> Iterator[str]:
            for span in spans:
                is_top = span.parent_id not in ids
                if is_top if parent_id is None else span.parent_id == parent_id:
                    yield "  " * depth + span.name
                    yield from below(span.span_id, depth + 1)

        return list(below(None, 0))


@contextmanager
def collector() -> Generator[Collector]:
    """Run a collector on loopback."""
    taken = Collector()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            taken.num_requests += 1
            if taken.status == 200 and self.path == "/v1/traces":
                taken.take(body)
            self.send_response(taken.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            del format, args

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    taken.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield taken
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _seen(span: SpanProto, service: str) -> Seen:
    return Seen(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        SpanProto.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        _attributes(span.attributes),
        service,
        span.status.code == Status.STATUS_CODE_ERROR,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        [event.name for event in span.events],
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind or "", None)
