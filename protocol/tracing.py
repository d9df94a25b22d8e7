"""OpenTelemetry's traces, for who asks for them: its one door.

Laws:
- Without an endpoint nothing of OpenTelemetry is imported, and a request has no span.
- No request waits for a collector. Spans wait for it in a queue of bounded length, and
  what it does not take is lost, which is logged once, and once more when it does again.
- What came in W3C's headers goes on to workers and engines, also where nothing is traced.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from .collector import bounded_session
from .messages import Trace
from .settings import SettingsParser

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span as OtelSpan

__all__ = [
    "Span",
    "TraceSettings",
    "Tracing",
    "add_trace_options",
    "checked_trace",
    "start_tracing",
    "trace_id_of",
    "trace_settings",
]

_log = logging.getLogger(__name__)

FLUSH_S = 3.0
"""For the last spans when a process ends: a collector that is well takes them in
milliseconds, and one that is not must not hold up a rolling restart."""

MAX_TRACESTATE_CHARS = 512
"""What W3C Trace Context asks everyone to pass on at least (3.3.1.5)."""

_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)
_TRACESTATE = re.compile(r"[\x20-\x7e]*")

_NOISY = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.common.http",
    "opentelemetry.sdk._shared_internal",
)
"""Loggers that write a line for each try, or for each span that is lost (SDK 1.45)."""

MISSING = (
    "traces need OpenTelemetry, which is not installed: install tokenwire[otel], or "
    "leave {source} away"
)


class TraceSettings(msgspec.Struct, frozen=True):
    """Where traces go."""

    endpoint: str = ""  # the URL that takes them; empty: nothing is traced


def add_trace_options(parser: SettingsParser) -> None:
    """Add the option, under vLLM's name."""
    parser.add_argument(
        "--otlp-traces-endpoint",
        default="",
        metavar="URL",
        help="where traces go, by OTLP over HTTP: http://HOST:4318/v1/traces; also by the "
        "variables of OpenTelemetry (default: nowhere)",
    )


def trace_settings(
    parser: SettingsParser,
    given: Namespace,
    environ: Mapping[str, str] = os.environ,
) -> TraceSettings:
    """Return what the option or OpenTelemetry's own variables say.

    Raises:
        SystemExit: 2 after one sentence: a bad URL, another protocol, no OpenTelemetry.
    """
    source, url = "--otlp-traces-endpoint", str(given.otlp_traces_endpoint)
    if not url:
        if environ.get("OTEL_TRACES_EXPORTER", "").strip() == "none":
            return TraceSettings()
        source = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
        url = environ.get(source, "")
    if not url:
        source = "OTEL_EXPORTER_OTLP_ENDPOINT"
        base = environ.get(source, "")
        url = base and f"{base.rstrip('/')}/v1/traces"
    is_off = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if not url or is_off:
        return TraceSettings()
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        parser.error(f"argument {source}: {url!r} is not an http:// or https:// URL")
    if parts.path in {"", "/"}:
        url = parts._replace(path="/v1/traces").geturl()
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = environ.get(name, "")
        if protocol not in {"", "http/protobuf"}:
            parser.error(f"{name}={protocol}: only http/protobuf is spoken here")
        if protocol:
            break
    if not _is_installed():
        parser.error(MISSING.format(source=source))
    return TraceSettings(url)


def _is_installed() -> bool:
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        return False


def checked_trace(traceparent: str | None, tracestate: str | None) -> Trace:
    """Return W3C's headers as they are to go on; nothing, if they are no such headers."""
    if traceparent is None or _TRACEPARENT.fullmatch(traceparent) is None:
        return Trace()
    state = tracestate or ""
    if len(state) > MAX_TRACESTATE_CHARS or _TRACESTATE.fullmatch(state) is None:
        state = ""
    return Trace(traceparent=traceparent, tracestate=state)


def trace_id_of(trace: Trace) -> str:
    """Return the id of the trace in *trace*; empty: it has none."""
    if not trace.traceparent:
        return ""
    match = _TRACEPARENT.fullmatch(trace.traceparent)
    return match[1] if match else ""


class Span:
    """One span; ``end`` it once. One that is not sampled costs little, and goes on as such.

    Attributes of one that is not recorded are dropped; look at ``is_recording`` before
    making costly ones. Its times, and those of the spans below it here, are of one reading
    of the wall clock: one that is set meanwhile makes none end before it begins.
    """

    __slots__ = ("_ahead_ns", "_span", "_tracing", "is_recording")

    def __init__(self, tracing: Tracing, span: OtelSpan, ahead_ns: int) -> None:
        self._tracing = tracing
        self._span = span
        self._ahead_ns = ahead_ns  # of the wall clock, before the monotonic one
        self.is_recording = span.is_recording()

    def now_ns(self) -> int:
        """Return the time since 1970, as this span and those below it have it."""
        return time.monotonic_ns() + self._ahead_ns

    def child(
        self,
        name: str,
        kind: str = "INTERNAL",
        *,
        begun_ns: int | None = None,
        **attributes: Any,
    ) -> Span:
        """Begin a span below this one.

        Args:
            name: Its name.
            kind: Of OpenTelemetry's kinds.
            begun_ns: Since 1970; None: now.
            attributes: With ``__`` for each dot in their names.
        """
        if begun_ns is None:
            begun_ns = self.now_ns()
        return self._tracing.below(
            self._span, name, kind, begun_ns, attributes, self._ahead_ns
        )

    def set(self, **attributes: Any) -> None:
        """Set attributes; their names have ``__`` for each dot. None sets nothing."""
        if self.is_recording:
            self._span.set_attributes(_named(attributes))

    def event(self, name: str, **attributes: Any) -> None:
        """Add an event, now."""
        if self.is_recording:
            self._span.add_event(name, _named(attributes), self.now_ns())

    def failed(self, error_type: str, text: str = "") -> None:
        """Let it be one of something that failed; not yet its end."""
        if self.is_recording:
            self._span.set_attribute("error.type", error_type)
            self._span.set_status(self._tracing.error_status, text or None)

    def end(self, ended_ns: int | None = None) -> None:
        """End it; None: now."""
        self._span.end(self.now_ns() if ended_ns is None else ended_ns)

    def trace(self, request_id: str = "") -> Trace:
        """Return what whoever goes on with this is told."""
        context = self._span.get_span_context()
        return Trace(
            request_id,
            f"00-{context.trace_id:032x}-{context.span_id:016x}"
            f"-{context.trace_flags:02x}",
            context.trace_state.to_header(),
        )


class Tracing:
    """Makes spans, and has them exported beside the event loop.

    Args:
        exporter: Takes them; in a thread of its own.
        target: Where it sends them, for the log.
        service: Name of the program, unless OpenTelemetry's variables say another.
        instance: Name of this process.
    """

    def __init__(
        self, exporter: SpanExporter, target: str, service: str, instance: str
    ) -> None:
        from opentelemetry.context import Context
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import (
            TraceContextTextMapPropagator,
        )

        version = metadata.version("tokenwire")
        own = {"service.instance.id": instance, "service.version": version}
        resource = Resource.create(own)
        named = str(resource.attributes.get("service.name", ""))
        if not named or named.startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": service}))
        # Sampler, queue and batches are as OpenTelemetry's variables say.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._watched = _watched(exporter, target)
        self._provider.add_span_processor(BatchSpanProcessor(self._watched))
        self._tracer = self._provider.get_tracer("tokenwire", version)
        self._kinds = SpanKind
        self._nothing = Context()
        self._in_context = set_span_in_context
        self._propagator = TraceContextTextMapPropagator()
        self.error_status = StatusCode.ERROR

    def begin(self, name: str, kind: str, trace: Trace, **attributes: Any) -> Span:
        """Begin a span below one of another process, or a trace of its own.

        Args:
            name: Its name.
            kind: Of OpenTelemetry's kinds.
            trace: What the other process has said, checked.
            attributes: With ``__`` for each dot in their names; samplers see them.
        """
        context = self._nothing
        if trace.traceparent:
            carrier = {"traceparent": trace.traceparent, "tracestate": trace.tracestate}
            context = self._propagator.extract(carrier, self._nothing)
        begun_ns = time.time_ns()
        ahead_ns = begun_ns - time.monotonic_ns()
        return self._begin(name, context, kind, begun_ns, attributes, ahead_ns)

    def below(
        self,
        parent: OtelSpan,
        name: str,
        kind: str,
        begun_ns: int,
        attributes: Mapping[str, Any],
        ahead_ns: int,
    ) -> Span:
        """Begin a span below one of ours; see ``Span.child``."""
        context = self._in_context(parent, self._nothing)
        return self._begin(name, context, kind, begun_ns, attributes, ahead_ns)

    def _begin(
        self,
        name: str,
        context: Context,
        kind: str,
        begun_ns: int,
        attributes: Mapping[str, Any],
        ahead_ns: int,
    ) -> Span:
        span = self._tracer.start_span(
            name,
            context,
            self._kinds[kind],
            _named(attributes),
            start_time=begun_ns,
            record_exception=False,
        )
        return Span(self, span, ahead_ns)

    def flush(self) -> None:
        """Export what has ended, and wait for it: for tests."""
        self._provider.force_flush()

    def close(self, timeout_s: float = FLUSH_S) -> None:
        """Export what is left, for at most *timeout_s*; then make no spans any more."""
        if self._watched.is_failing:
            self._watched.shutdown()  # it would try again until the time is over
        # The SDK waits for 30 s, and offers no other bound.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(timeout_s)
        if closing.is_alive():
            _log.warning(
                "traces were not exported within %g s: some are lost", timeout_s
            )


def start_tracing(
    settings: TraceSettings, service: str, instance: str
) -> Tracing | None:
    """Return who makes spans; None: nobody asked for them.

    Args:
        settings: Where they go.
        service: Name of the program.
        instance: Name of this process.
    """
    if not settings.endpoint:
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    target = settings.endpoint
    exporter = OTLPSpanExporter(endpoint=target, session=bounded_session())
    _log.info("traces go to %s", _shown(target))
    return Tracing(exporter, _shown(target), service, instance)


def _named(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name.replace("__", "."): value
        for name, value in attributes.items()
        if value is not None
    }


def _shown(url: str) -> str:
    """Return *url* without a password or a token in it."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _watched(exporter: SpanExporter, target: str) -> Any:
    """Return *exporter* with one line when it begins to fail, and one when it is well.

    A function, since its base class is imported only where traces are wanted.
    """
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    reason = _LastWord()
    for name in _NOISY:
        noisy = logging.getLogger(name)
        for one in [one for one in noisy.filters if isinstance(one, _LastWord)]:
            noisy.removeFilter(one)
        noisy.addFilter(reason)

    class Watched(SpanExporter):
        is_failing = False
        num_lost = 0

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            result = exporter.export(spans)
            if result is SpanExportResult.SUCCESS:
                if self.is_failing:
                    _log.warning(
                        "%s takes traces again; %d spans are lost",
                        target,
                        self.num_lost,
                    )
                self.is_failing, self.num_lost = False, 0
                return result
            self.num_lost += len(spans)
            if not self.is_failing:
                self.is_failing = True
                _log.warning(
                    "%s takes no traces, and they are lost until it does: %s",
                    target,
                    reason.text,
                )
            return result

        def shutdown(self) -> None:
            exporter.shutdown()

    return Watched()


class _LastWord(logging.Filter):
    """Keeps the last line that OpenTelemetry would write, and writes none."""

    text = "the collector did not answer"

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep the text of *record*, unless it only says that there were several."""
        text = record.getMessage()[:400]
        if "max retries" not in text:
            self.text = text
        return False
