"""Traces over OTLP: the whole tree of a request, from its client's span to its engine's."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.collector import Collector, Seen, collector
from support.stack import Stack, eventually, stack
from tokenwire.protocol.messages import Role, Trace
from tokenwire.protocol.tracing import TraceSettings, Tracing, start_tracing

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CLIENT_SPAN = "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE_ID}-{CLIENT_SPAN}-01", "tracestate": "vendor=1"}
UNSAMPLED = {"traceparent": f"00-{TRACE_ID}-{CLIENT_SPAN}-00"}
PAIR = (Role.PREFILL, Role.DECODE)
CHAT = "POST /v1/chat/completions"


@pytest.fixture
def taken() -> Iterator[Collector]:
    """A collector."""
    with collector() as running:
        yield running


@dataclass
class Traced:
    """A stack whose both sides are traced."""

    stack: Stack
    tracings: list[Tracing]

    async def flush(self) -> None:
        """Have all spans that have ended exported."""
        for tracing in self.tracings:
            await asyncio.to_thread(tracing.flush)


@asynccontextmanager
async def traced(
    model: Path,
    taken: Collector,
    roles: Sequence[Role] = (Role.AGGREGATED,),
    *,
    options: Sequence[str] = ("--step-ms", "0"),
    arguments: Sequence[str] = (),
) -> AsyncGenerator[Traced]:
    """Run a stack that is traced."""
    settings = TraceSettings(taken.url)
    both = [start_tracing(settings, name, "0") for name in ("front", "work")]
    tracings = [one for one in both if one is not None]
    try:
        async with stack(
            *(model, roles, options, arguments),
            tracing=tracings[0],
            worker_tracing=tracings[1],
        ) as running:
            yield Traced(running, tracings)
    finally:
        for one in tracings:
            one.close()


def only(spans: list[Seen]) -> Seen:
    """Return the one span there is."""
    [span] = spans
    return span


async def test_a_request_of_one_worker_is_one_tree(
    tiny_model: Path, taken: Collector
) -> None:
    """Below the span of its client; with what OpenTelemetry calls things."""
    async with traced(tiny_model, taken) as served:
        url = "/v1/chat/completions"
        body = {
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 3,
            "temperature": 0.5,
        }
        headers = {**SAMPLED, "X-Request-Id": "mine-1"}
        reply = await served.stack.post(url, body, headers)
        await served.flush()

    assert taken.tree(TRACE_ID) == [
        CHAT,
        "  tokenize",
        "  queue",
        "  attempt",
        "    prefill",
        "    worker full",
        "      queue",
        "      engine",
        "    decode",
    ]
    server = only(taken.named(CHAT))
    assert (server.parent_id, server.kind, server.service) == (
        CLIENT_SPAN,
        "SERVER",
        "front",
    )
    usage = reply.json["usage"]
    expected = {
        "http.request.method": "POST",
        "http.route": url,
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 3,
        "gen_ai.response.id": reply.json["id"],
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": 3,
        "tokenwire.client_request_id": "mine-1",
    }
    assert {name: server.attributes.get(name) for name in expected} == expected
    worker = only(taken.named("worker full"))
    assert (worker.service, worker.kind) == ("work", "SERVER")
    assert worker.attributes["tokenwire.request_id"] == reply.json["id"]
    assert worker.attributes["tokenwire.worker_id"] == "aggregated-0"
    attempt = only(taken.named("attempt"))
    assert attempt.attributes["tokenwire.decode_worker_id"] == "aggregated-0"
    assert attempt.attributes["tokenwire.finish_reason"] == "length"
    assert not any(span.failed for span in taken.spans)
    assert all(
        server.begun_ns <= span.begun_ns <= span.ended_ns for span in taken.of(TRACE_ID)
    )


async def test_a_hand_over_has_a_span(tiny_model: Path, taken: Collector) -> None:
    """Between the prefill of one worker and the decode of the other, both below the try."""
    async with traced(tiny_model, taken, PAIR) as served:
        await served.stack.chat(max_tokens=3)
        await served.flush()

    server = only(taken.named(CHAT))
    assert not server.parent_id
    assert taken.tree(server.trace_id) == [
        CHAT,
        "  tokenize",
        "  queue",
        "  attempt",
        "    prefill",
        "    worker prefill",
        "      queue",
        "      engine",
        "    handover",
        "    worker decode",
        "      queue",
        "      engine",
        "    decode",
    ]
    attempt = only(taken.named("attempt"))
    assert attempt.attributes["tokenwire.prefill_worker_id"] == "prefill-0"
    assert attempt.attributes["tokenwire.decode_worker_id"] == "decode-1"


@pytest.mark.parametrize("roles", [PAIR, (Role.AGGREGATED,)])
async def test_a_stop_string_ends_a_try_well(
    tiny_model: Path, taken: Collector, roles: Sequence[Role]
) -> None:
    """It is a stop, though the worker was told to abort; and no client has left."""
    async with traced(tiny_model, taken, roles) as served:
        free = await served.stack.complete(prompt=[5, 6], max_tokens=20)
        stop = free.json["choices"][0]["text"][3:5]
        await served.stack.complete(prompt=[5, 6], max_tokens=20, stop=stop)
        await served.stack.idle()
        await served.flush()

    *_, attempt = taken.named("attempt")
    *_, server = taken.named("POST /v1/completions")
    assert attempt.parent_id == server.span_id
    assert attempt.attributes["tokenwire.finish_reason"] == "stop"
    assert server.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert not attempt.events


async def test_a_request_that_moves_has_two_tries(
    tiny_model: Path, taken: Collector
) -> None:
    """The first failed, and the second says behind how much output it goes on."""
    slow = ("--step-ms", "5")
    roles = (Role.AGGREGATED, Role.AGGREGATED)
    async with traced(tiny_model, taken, roles, options=slow) as served:
        running = asyncio.create_task(
            served.stack.chat(max_tokens=40, temperature=0, stream=True)
        )
        workers = served.stack.workers
        await eventually(lambda: any(w.engine.load().num_running for w in workers))
        [busy] = [w for w in workers if w.engine.load().num_running]
        await busy.die()
        reply = await running
        await served.flush()
    assert reply.status == 200

    first, second = taken.named("attempt")
    assert first.failed
    assert first.attributes["error.type"] == "engine"
    assert not second.failed
    assert second.attributes["tokenwire.attempt"] == 2
    assert first.attributes["tokenwire.decode_worker_id"] == busy.name
    assert second.attributes["tokenwire.decode_worker_id"] != busy.name
    assert not only(taken.named(CHAT)).failed


async def test_a_refused_request_ends_where_it_was_refused(
    tiny_model: Path, taken: Collector
) -> None:
    """With the status and the code; the client's own fault is no failure of ours."""
    async with traced(tiny_model, taken) as served:
        await served.stack.post("/v1/chat/completions", b"{", SAMPLED)
        await served.stack.chat(max_tokens=0)
        await served.flush()
    first, second = taken.named(CHAT)
    assert first.parent_id == CLIENT_SPAN
    for server in (first, second):
        assert server.attributes["http.response.status_code"] == 400
        assert server.attributes["error.type"] == "invalid_request_error"
        assert not server.failed
    assert taken.tree(first.trace_id) == [CHAT, "  tokenize"]


async def test_a_client_that_leaves_ends_its_spans(
    tiny_model: Path, taken: Collector
) -> None:
    """At once, on both sides; the status is nginx's, or that of the stream that began."""
    slow = ("--step-ms", "20")
    async with traced(tiny_model, taken, options=slow) as served:
        body = {"prompt": [5, 6], "max_tokens": 500, "stream": True}
        url = served.stack.url + "/v1/completions"
        async with served.stack.client.post(url, json=body, headers=SAMPLED) as answer:
            await answer.content.readline()
        await served.stack.idle()
        links = list(served.stack.pool.links)
        await eventually(lambda: not any(link.num_open for link in links))
        await served.flush()
        await eventually(lambda: len(taken.of(TRACE_ID)) == 9, "all spans")
    server = only(taken.named("POST /v1/completions"))
    assert server.attributes["error.type"] == "client_left"
    assert server.attributes["http.response.status_code"] == 200
    attempt = only(taken.named("attempt"))
    assert attempt.events == ["client left"]
    worker = only(taken.named("worker full"))
    assert worker.attributes["tokenwire.finish_reason"] == "abort"


async def test_each_choice_has_its_tries(tiny_model: Path, taken: Collector) -> None:
    """They say which choice they are of."""
    async with traced(tiny_model, taken) as served:
        await served.stack.chat(max_tokens=1, n=2)
        await served.flush()
    tries = taken.named("attempt")
    assert [span.attributes["tokenwire.choice"] for span in tries] == [0, 1]


async def test_what_is_resumed_says_so(tiny_model: Path, taken: Collector) -> None:
    """A stream that is followed again has a span for finding it."""
    async with traced(tiny_model, taken) as served:
        body = {
            "prompt": [5, 6],
            "max_tokens": 4,
            "stream": True,
            "nvext": {"resumable": {"on_disconnect": "continue"}},
        }
        reply = await served.stack.post("/v1/completions", body)
        first = json.loads(reply.text.split("data: ")[1].split("\n")[0])
        again = await served.stack.get(f"/v1/generations/{first['id']}/stream")
        assert again.status == 200
        await served.flush()
    server = only(taken.named("GET /v1/generations/{id}/stream"))
    assert taken.tree(server.trace_id)[:2] == [server.name, "  resume"]
    assert server.attributes["gen_ai.response.id"] == first["id"]


async def test_what_is_not_sampled_is_not_exported(
    tiny_model: Path, taken: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the client's flag, and by OpenTelemetry's own variables; probes never are."""
    async with traced(tiny_model, taken) as served:
        reply = await served.stack.post(
            "/v1/completions", {"prompt": [5], "max_tokens": 1}, UNSAMPLED
        )
        assert reply.status == 200
        await served.stack.get("/ready")
        await served.flush()
    assert not taken.spans
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    async with traced(tiny_model, taken) as served:
        await served.stack.complete(prompt=[5], max_tokens=1)
        await served.flush()
    assert not taken.spans
    assert not taken.num_requests


async def test_headers_go_on_where_nothing_is_traced(tiny_model: Path) -> None:
    """To the worker as they came: its own traces, or its engine's, hang below them."""
    seen: list[object] = []
    async with stack(tiny_model) as served:
        engine = served.workers[0].engine
        submit = engine.submit

        def spied(request: object) -> None:
            seen.append(getattr(request, "trace", None))
            submit(request)  # type: ignore[arg-type]

        engine.submit = spied  # type: ignore[method-assign]
        body = {"prompt": [5], "max_tokens": 1}
        for headers in (SAMPLED, {"traceparent": "00-zz"}, {}):
            await served.post("/v1/completions", body, headers)
    traces = [(t.traceparent, t.tracestate) for t in seen]  # type: ignore[attr-defined]
    assert traces == [(SAMPLED["traceparent"], "vendor=1"), ("", ""), ("", "")]


async def test_a_dead_collector_costs_requests_nothing(
    tiny_model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are served, it is logged once, and the end of the process does not wait."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")
    dead = Collector()
    dead.url = "http://127.0.0.1:9/v1/traces"
    async with traced(tiny_model, dead) as served:
        for _ in range(2):
            reply = await served.stack.complete(prompt=[5], max_tokens=1)
            assert reply.status == 200
            await served.flush()
        begun_at = time.monotonic()
    assert time.monotonic() - begun_at < 60  # not for ever; it is some 0.1 s
    said = [text for text in caplog.messages if "takes no traces" in text]
    assert len(said) == 2  # one for each of the two processes that it stands for
    assert said[0].startswith(dead.url)
    assert not [r for r in caplog.records if r.name.startswith("opentelemetry")]


def test_a_collector_that_comes_back_is_told_of(
    taken: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    """With how many spans were lost."""
    tracing = start_tracing(TraceSettings(taken.url), "t", "0")
    assert tracing is not None
    taken.status = 400
    tracing.begin("a", "SERVER", Trace()).end()
    tracing.flush()
    taken.status = 200
    tracing.begin("b", "SERVER", Trace()).end()
    tracing.flush()
    tracing.close()
    assert [span.name for span in taken.spans] == ["b"]
    assert f"{taken.url} takes traces again; 1 spans are lost" in caplog.messages
