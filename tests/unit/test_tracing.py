"""Where traces go, what goes on of W3C's headers, and an end that does not wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from tokenwire.protocol import tracing
from tokenwire.protocol.messages import Trace
from tokenwire.protocol.settings import SettingsParser
from tokenwire.protocol.tracing import (
    MAX_TRACESTATE_CHARS,
    TraceSettings,
    Tracing,
    add_trace_options,
    checked_trace,
    start_tracing,
    trace_id_of,
    trace_settings,
)

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
URL = "http://c:4318"


def endpoint(*arguments: str, **environ: str) -> str:
    """Return where traces go."""
    parser = SettingsParser(prog="p")
    add_trace_options(parser)
    given = parser.parse_settings(list(arguments))
    variables = {f"OTEL_{name}": value for name, value in environ.items()}
    return trace_settings(parser, given, variables).endpoint


def test_nothing_is_traced_unless_asked_for() -> None:
    """Nor after OpenTelemetry's own ways to say so."""
    assert endpoint() == ""
    assert endpoint(EXPORTER_OTLP_ENDPOINT=URL, SDK_DISABLED="true") == ""
    assert endpoint(EXPORTER_OTLP_ENDPOINT=URL, TRACES_EXPORTER="none") == ""
    assert endpoint("--otlp-traces-endpoint", URL, SDK_DISABLED="True") == ""
    assert start_tracing(TraceSettings(), "s", "i") is None


def test_the_option_wins_over_opentelemetry_s_variables() -> None:
    """A base gets the path of traces, the URL of traces stays as it is."""
    path = "/v1/traces"
    assert endpoint("--otlp-traces-endpoint", URL) == URL + path
    assert endpoint("--otlp-traces-endpoint", f"{URL}/x/") == f"{URL}/x/"
    assert endpoint(EXPORTER_OTLP_ENDPOINT=f"{URL}/base/") == f"{URL}/base{path}"
    both = {
        "EXPORTER_OTLP_ENDPOINT": URL,
        "EXPORTER_OTLP_TRACES_ENDPOINT": "https://d/t",
    }
    assert endpoint(**both) == "https://d/t"
    assert endpoint("--otlp-traces-endpoint", URL, **both) == URL + path


@pytest.mark.parametrize(
    ("arguments", "environ", "said"),
    [
        (["--otlp-traces-endpoint", "c:4317"], {}, "'c:4317' is not an http:// or"),
        (["--otlp-traces-endpoint", "grpc://c"], {}, "is not an http:// or"),
        ([], {"EXPORTER_OTLP_ENDPOINT": "c"}, "OTEL_EXPORTER_OTLP_ENDPOINT: 'c/v1"),
        (
            [],
            {"EXPORTER_OTLP_ENDPOINT": URL, "EXPORTER_OTLP_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_PROTOCOL=grpc: only http/protobuf",
        ),
    ],
)
def test_a_bad_value_is_one_sentence(
    arguments: list[str],
    environ: dict[str, str],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the name of what it came from."""
    with pytest.raises(SystemExit) as stopped:
        endpoint(*arguments, **environ)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_without_opentelemetry_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And from where it was asked for traces."""
    monkeypatch.setattr(tracing, "_is_installed", lambda: False)
    with pytest.raises(SystemExit):
        endpoint(EXPORTER_OTLP_ENDPOINT=URL)
    said = capsys.readouterr().err
    assert "install tokenwire[otel], or leave OTEL_EXPORTER_OTLP_ENDPOINT away" in said
    assert endpoint() == ""


@pytest.mark.parametrize(
    "bad",
    [
        None,
        "",
        PARENT.upper(),
        PARENT[:-1],
        f"{PARENT}-more",
        "ff" + PARENT[2:],
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-{'a' * 32}-{'0' * 16}-01",
        f"{PARENT}\n",
    ],
)
def test_only_w3c_s_headers_go_on(bad: str | None) -> None:
    """Nothing else that a client sends for one reaches a worker, or a line of the log."""
    assert checked_trace(bad, "a=1") == Trace()
    assert checked_trace(PARENT, "a=1") == Trace("", PARENT, "a=1")
    assert trace_id_of(checked_trace(PARENT, None)) == PARENT[3:35]


@pytest.mark.parametrize("state", ["é=1", "a=\n", "a" * (MAX_TRACESTATE_CHARS + 1)])
def test_a_bad_tracestate_is_left_away(state: str) -> None:
    """The parent goes on without it, as W3C has it."""
    assert checked_trace(PARENT, state) == Trace("", PARENT, "")


class Stuck(SpanExporter):
    """A collector that takes a connection and never answers."""

    def __init__(self) -> None:
        self.asked, self.released = threading.Event(), threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Answer when released."""
        self.asked.set()
        self.released.wait()
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Do nothing."""


def test_the_end_waits_for_a_collector_within_a_bound(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A process ends although its last spans are not taken, and says so."""
    stuck = Stuck()
    tracer = Tracing(stuck, "there", "s", "i")
    tracer.begin("a", "SERVER", Trace()).end()
    tracer.close(timeout_s=0.01)
    assert caplog.messages == ["traces were not exported within 0.01 s: some are lost"]
    stuck.released.set()
    assert stuck.asked.wait(10)


class Kept(SpanExporter):
    """Keeps what comes."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Keep them."""
        self.spans += spans
        return SpanExportResult.SUCCESS


def test_a_service_has_the_name_that_its_operator_gave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By OpenTelemetry's variables; else the program's."""
    for name in ("", "theirs"):
        monkeypatch.setenv("OTEL_SERVICE_NAME", name)
        kept = Kept()
        tracer = Tracing(kept, "there", "ours", "i")
        tracer.begin("a", "SERVER", Trace()).end()
        tracer.close()
        attributes = kept.spans[0].resource.attributes
        assert attributes["service.name"] == (name or "ours")
        assert attributes["service.instance.id"] == "i"


@pytest.mark.parametrize("leap_s", [86_400, -86_400])
def test_a_clock_that_is_set_turns_no_span_around(
    monkeypatch: pytest.MonkeyPatch, leap_s: int
) -> None:
    """All spans and events of a request have the time as it was when that began."""
    kept = Kept()
    tracer = Tracing(kept, "x", "s", "i")
    before = time.time_ns()
    span = tracer.begin("request", "SERVER", Trace())
    read = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: read() + leap_s * 10**9)
    child = span.child("stage")
    child.event("seen")
    child.child("queue", begun_ns=child.now_ns()).end()
    child.end()
    span.end()
    after = read()
    tracer.close()
    times: list[int | None] = []
    for one in kept.spans:
        times += [one.start_time, one.end_time, *(e.timestamp for e in one.events)]
    assert len(times) == 7
    assert all(at is not None and before <= at <= after for at in times)
