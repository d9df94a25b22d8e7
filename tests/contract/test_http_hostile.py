"""Requests that mean harm, or only look like it: an answer each, and nothing left."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from support.awake import within
from support.stack import Stack, eventually, stack
from tokenwire.frontend.bounds import MAX_GRAMMAR_BYTES
from tokenwire.frontend.sse import OUTGOING, EventStream, Outgoing

IDS: dict[str, Any] = {"return_token_ids": True}


def request_bytes(body: bytes, version: str, *headers: str) -> bytes:
    """Return a completion request as it goes over the wire."""
    lines = [
        f"POST /v1/completions HTTP/{version}",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def raw(url: str, data: bytes) -> bytes:
    """Send *data*; return all that comes until the server closes."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    try:
        async with within(60):
            return await reader.read()
    finally:
        writer.close()


# --- usage and ids ---------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_loses_no_prompt_ids_and_no_cached_tokens(
    served: Stack, stream: bool
) -> None:
    """What only the end of a leg tells is there, too, when a stop string ends it."""
    prompt = list(range(10, 74))
    free = await served.complete(prompt=prompt, max_tokens=40)
    stop = free.json["choices"][0]["text"][3:5]
    options = {"stream_options": {"include_usage": True}} if stream else {}

    reply = await served.complete(
        prompt=prompt, max_tokens=40, stop=stop, stream=stream, **options, **IDS
    )

    if stream:
        *_, final, last, _ = reply.events
        usage, nvext = (last.body or {})["usage"], final.nvext
    else:
        usage, nvext = reply.json["usage"], reply.json["nvext"]
    assert nvext["prompt_token_ids"] == prompt
    assert usage["prompt_tokens_details"]["cached_tokens"] == 48


@pytest.mark.pitfall(11)
async def test_choices_of_one_prompt_count_its_cached_tokens_once(
    served: Stack,
) -> None:
    """``cached_tokens`` is never above ``prompt_tokens``, however many choices."""
    prompt = list(range(10, 74))
    await served.complete(prompt=prompt, max_tokens=2)

    usage = (await served.complete(prompt=prompt, max_tokens=2, n=4)).json["usage"]

    assert usage["prompt_tokens"] == 64
    assert usage["prompt_tokens_details"] == {"cached_tokens": 48}


# --- bodies ----------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["priority", "top_k"])
@pytest.mark.parametrize("value", [2**64, 10**400])
async def test_numbers_that_cannot_travel_are_400s(
    served: Stack, field: str, value: int
) -> None:
    """A number beyond 64 bits is refused by its name, and holds no leg open."""
    reply = await served.complete(prompt=[5], max_tokens=2, **{field: value})

    assert (reply.status, reply.error["param"]) == (400, field)


async def test_a_broken_encoding_is_a_400(
    served: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    """A body that is not what Content-Encoding says is the caller's fault, no bug."""
    reply = await served.post(
        "/v1/completions", b'{"prompt": [5]}', {"Content-Encoding": "gzip"}
    )

    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"
    assert not caplog.records


async def test_a_compressed_body_counts_as_what_it_unpacks_to(served: Stack) -> None:
    """A small body that becomes a large one is a 413."""
    bomb = gzip.compress(b" " * (65 * 1024 * 1024))
    reply = await served.post("/v1/completions", bomb, {"Content-Encoding": "gzip"})

    assert reply.status == 413


async def test_a_part_with_an_image_is_not_taken_for_its_text(served: Stack) -> None:
    """A part is refused by its type, also if it has text beside what it is."""
    image = {"type": "image_url", "image_url": {"url": "x"}, "text": "a cat"}
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, image]}]

    reply = await served.post("/v1/chat/completions", {"messages": messages})

    assert (reply.status, reply.error["param"]) == (400, "messages[0].content")


# --- connections -----------------------------------------------------------------------


@pytest.mark.parametrize("headers", [(), ("Connection: keep-alive",)])
async def test_a_stream_to_an_http_1_0_client_ends(
    served: Stack, headers: tuple[str, ...]
) -> None:
    """Without chunks the closed connection is the end, also if it was to be kept."""
    body = b'{"prompt": [5], "max_tokens": 3, "stream": true}'
    answer = await raw(served.url, request_bytes(body, "1.0", *headers))

    assert answer.startswith(b"HTTP/1.0 200")
    assert b"chunked" not in answer
    assert answer.endswith(b"data: [DONE]\n\n")


async def test_streams_and_whole_answers_share_a_connection(served: Stack) -> None:
    """Requests sent without waiting are answered in order, each with its own end."""
    body = b'{"prompt": [5], "max_tokens": 3}'
    stream = body[:-1] + b', "stream": true}'
    answer = await raw(
        served.url,
        request_bytes(stream, "1.1")
        + request_bytes(body, "1.1")
        + request_bytes(stream, "1.1", "Connection: close"),
    )

    assert answer.count(b"HTTP/1.1 200 OK") == 3
    assert answer.count(b"data: [DONE]\n\n\r\n0\r\n\r\n") == 2


async def test_the_last_of_a_stream_waits_for_a_reader_within_its_bound() -> None:
    """A client that never reads the last events does not hold its request for ever."""
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def handler(request: web.Request) -> web.StreamResponse:
        stream = EventStream(request, {})
        await stream.open(b"")
        stream.send(b"x" * 32 * 1024 * 1024)  # more than any socket's buffers
        try:
            await stream.close(0.05)
        except TimeoutError:
            ended.set_result("timeout")
            return stream.abort()
        ended.set_result("sent")
        return web.Response()

    app = web.Application()
    app[OUTGOING] = Outgoing()
    app.router.add_get("/", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        _, writer = await asyncio.open_connection(host, port, limit=1024)
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with within(60):
            assert await ended == "timeout"
        writer.close()
    finally:
        await runner.cleanup()


# --- what never reaches a route ----------------------------------------------------------

MALFORMED = {
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "request line": b"POST\r\n\r\n",
    "method": b"P\x00ST / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "version": b"GET / HTTP/9.9.9\r\nHost: localhost\r\n\r\n",
    "header": b"GET /live HTTP/1.1\r\nHost x\r\n\r\n",
    "header too long": b"GET /live HTTP/1.1\r\nA: " + b"x" * 20_000 + b"\r\n\r\n",
    "line too long": b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "length": b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    "lengths": b"POST / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
    "smuggled": b"POST / HTTP/1.1\r\nContent-Length: 5\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "expectation": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nExpect: miracles\r\n"
    b"Content-Length: 0\r\nConnection: close\r\n\r\n",
}


@pytest.mark.parametrize("case", MALFORMED)
async def test_what_is_no_http_is_answered_in_openais_shape(
    served: Stack, case: str
) -> None:
    """A request that no route sees is a 4xx with an error object, and others go on."""
    answer = await raw(served.url, MALFORMED[case])
    head, _, body = answer.partition(b"\r\n\r\n")

    status = 431 if case.endswith("too long") else 417 if case == "expectation" else 400
    assert head.startswith((b"HTTP/1.1 %d" % status, b"HTTP/1.0 %d" % status)), answer
    assert b"Content-Type: application/json" in head
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(error["message"]) < 400
    assert (await served.complete(prompt=[5], max_tokens=1)).status == 200


async def test_a_body_that_does_not_arrive_is_a_408(tiny_model: Path) -> None:
    """It holds its place no longer than the setting says; the connection closes."""
    arguments = ("--client-read-timeout-s", "0.2", "--max-inflight-requests", "1")
    async with stack(tiny_model, arguments=arguments) as running:
        host, port = running.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        whole = request_bytes(b'{"prompt": [5]}', "1.1", "X-Request-Id: slow-1")
        writer.write(whole[:-1])
        head = await reader.readuntil(b"\r\n\r\n")
        error = json.loads(await reader.readuntil(b"}}"))["error"]

        assert head.startswith(b"HTTP/1.1 408")
        assert b"X-Request-Id: slow-1" in head
        assert b"Connection: close" in head
        assert error["code"] == "request_timeout"
        assert (await running.complete(prompt=[5], max_tokens=1)).status == 200
        writer.close()


@pytest.mark.pitfall(31)
async def test_a_length_above_the_limit_holds_nobody_up(served: Stack) -> None:
    """It is refused at once: what was only announced keeps no other body out."""
    host, port = served.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    length = b"Content-Length: %d"
    writer.write(request_bytes(b"", "1.1").replace(length % 0, length % 10**12))
    others = [served.complete(prompt=[5], max_tokens=1) for _ in range(3)]
    assert {one.status for one in await asyncio.gather(*others)} == {200}
    assert (await reader.readline()).startswith(b"HTTP/1.1 413")
    writer.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.pitfall(30)
async def test_a_half_closed_connection_is_a_client_that_left(
    tiny_model: Path, stream: bool
) -> None:
    """Closing the sending side ends the request: no proxy does it, a leaving client may."""
    async with stack(tiny_model, options=("--step-ms", "20")) as running:
        host, port = running.url.removeprefix("http://").split(":")
        body = json.dumps({"prompt": [5], "max_tokens": 1000, "stream": stream})
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(request_bytes(body.encode(), "1.1"))
        await eventually(lambda: running.workers[0].engine.load().num_running == 1)

        writer.write_eof()

        await running.idle()
        assert not (await reader.read()).endswith(b"[DONE]\n\n")
        writer.close()


async def test_a_schema_that_is_deep_reaches_no_engine(served: Stack) -> None:
    """Its grammar would take a worker seconds in which it hears nothing, and is lost."""
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(70):
        deep = {"type": "object", "properties": {"a": deep}}
    tag = json.dumps({"structures": [deep]})
    form = {"type": "json_schema", "json_schema": {"schema": deep}}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    chat = {"messages": [{"role": "user", "content": "a"}]}
    for fields, param in (
        ({"structured_outputs": {"json": deep}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": json.dumps(deep)}}, "structured_outputs.json"),
        (
            {"structured_outputs": {"structural_tag": tag}},
            "structured_outputs.structural_tag",
        ),
        ({"response_format": form}, "response_format.json_schema.schema"),
        ({"tools": [tool]}, "tools"),
    ):
        reply = await served.post("/v1/chat/completions", {**chat, **fields})
        assert (reply.status, reply.error["param"]) == (400, param)
        assert "levels" in reply.error["message"]


async def test_a_grammar_that_is_long_reaches_no_engine(served: Stack) -> None:
    """It would be compiled for minutes, at one worker after the other, whoever leaves."""
    long = "a" * MAX_GRAMMAR_BYTES
    schema = {"enum": [long]}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    half = {"enum": [long[: len(long) // 2]]}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": half}}
        for name in ("f", "g")
    ]
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    outputs = "structured_outputs"
    for fields, param in (
        ({outputs: {"json": schema}}, f"{outputs}.json"),
        ({outputs: {"json": json.dumps(schema)}}, f"{outputs}.json"),
        ({outputs: {"regex": f"{long}b"}}, f"{outputs}.regex"),
        ({outputs: {"choice": [long]}}, f"{outputs}.choice"),
        ({outputs: {"grammar": f"{long}b"}}, f"{outputs}.grammar"),
        ({outputs: {"structural_tag": f"{long}b"}}, f"{outputs}.structural_tag"),
        (
            {outputs: {"json": "{}", "whitespace_pattern": long}},
            f"{outputs}.json",
        ),
        ({"response_format": form}, "response_format.json_schema.schema"),
        ({"tools": tools}, "tools"),
    ):
        reply = await served.post("/v1/chat/completions", {**chat, **fields})
        assert (reply.status, reply.error["param"]) == (400, param)
        assert "bytes, a grammar has at most" in reply.error["message"]
    for taken in (
        {outputs: {"regex": long}},  # of which the simulated engine knows nothing
        {"tools": tools[:1], "tool_choice": "none"},
    ):
        reply = await served.post("/v1/chat/completions", {**chat, **taken})
        assert "grammar has at most" not in reply.text
