"""Clients that are slow, or many, or say too much: each is bounded, and others go on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from support.awake import within
from support.stack import Stack, eventually, stack
from tokenwire.frontend.connections import Connections
from tokenwire.frontend.listener import MAX_HEADERS

LIVE = b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"
LIMIT = 2_048
ARGUMENTS = ("--max-header-bytes", str(LIMIT), "--client-header-timeout-s", "3")


class Client:
    """One connection, byte by byte."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.reader = reader
        self.writer = writer

    async def ask(self, data: bytes = LIVE) -> int:
        """Send a request; return the status of its whole answer."""
        self.writer.write(data)
        return await self.status()

    async def status(self) -> int:
        """Return the status of the next answer, which has a length."""
        async with within(20):
            head = await self.reader.readuntil(b"\r\n\r\n")
            fields = dict(
                line.split(": ", 1) for line in head.decode().split("\r\n")[1:-2]
            )
            body = await self.reader.readexactly(int(fields["Content-Length"]))
        if not head.startswith(b"HTTP/1.1 2"):
            self.error = json.loads(body)["error"]
        self.head = head
        return int(head.split()[1])

    async def is_closed(self) -> bool:
        """Return whether the server has closed it, with nothing more said."""
        async with within(20):
            try:
                return await self.reader.read() == b""
            except ConnectionError:
                return True


@asynccontextmanager
async def client(served: Stack, *, limit: int = 2**16) -> AsyncGenerator[Client]:
    """Open a connection."""
    host, port = served.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=limit)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


def bounds(served: Stack) -> Connections:
    """Return what knows the frontend's connections."""
    assert served.runner is not None
    return served.runner.connections


async def looks(served: Stack, number: int) -> None:
    """Have so many seconds go by for whoever is slow."""
    for _ in range(number):
        bounds(served).look()
        await asyncio.sleep(0)


async def has_begun(served: Stack, number: int = 1) -> None:
    """Return when so many requests have begun and are not whole."""
    peers = bounds(served)._peers  # pyright: ignore[reportPrivateUsage]
    await eventually(
        lambda: (
            sum(bool(getattr(peer, "_num_head_bytes", 0)) for peer in peers) == number
        )
    )


async def refusals(served: Stack) -> dict[str, float]:
    """Return what was counted, by reason."""
    text = (await served.get("/metrics")).text
    prefix = 'tokenwire_connections_refused_total{reason="'
    return {
        line.removeprefix(prefix).partition('"')[0]: float(line.split()[-1])
        for line in text.splitlines()
        if line.startswith(prefix)
    }


async def test_headers_that_trickle_are_a_408(tiny_model: Path) -> None:
    """However often a byte comes; the answer says why, and the connection closes."""
    async with stack(tiny_model, arguments=ARGUMENTS) as served:
        async with client(served) as slow, client(served) as quick:
            assert await quick.ask() == 200
            for byte in LIVE[:4]:
                slow.writer.write(bytes([byte]))
                await has_begun(served)
                await looks(served, 1)
            assert await slow.status() == 408
            assert slow.error["code"] == "request_timeout"
            assert b"Connection: close" in slow.head or b"HTTP/1.0" in slow.head
            assert await slow.is_closed()
            assert await quick.ask() == 200
        assert (await refusals(served))["slow_request"] == 1


async def test_who_says_nothing_is_closed(tiny_model: Path) -> None:
    """Also one whose second request has begun; not one that only keeps its connection."""
    async with (
        stack(tiny_model, arguments=ARGUMENTS) as served,
        client(served) as silent,
        client(served) as again,
        client(served) as idle,
    ):
        assert await again.ask() == 200
        assert await idle.ask() == 200
        again.writer.write(LIVE[:5])
        await has_begun(served)
        await looks(served, 4)
        assert await silent.is_closed()
        assert await again.status() == 408
        assert await idle.ask() == 200


async def test_an_idle_connection_is_closed_in_time(tiny_model: Path) -> None:
    """By a bound of its own, which is long: proxies keep connections."""
    arguments = (*ARGUMENTS, "--keep-alive-timeout-s", "0.1")
    async with stack(tiny_model, arguments=arguments) as served, client(served) as idle:
        assert await idle.ask() == 200
        assert await idle.is_closed()


def headers(number: int, size: int) -> bytes:
    """Return a request with so many more headers, of so many bytes each."""
    more = b"".join(b"X-%d: %s\r\n" % (n, b"x" * size) for n in range(number))
    return b"GET /live HTTP/1.1\r\nHost: localhost\r\n" + more + b"\r\n"


@pytest.mark.parametrize(
    "how", ["at once", "in pieces", "without end", "one line", "the path"]
)
async def test_headers_above_the_limit_are_a_431(tiny_model: Path, how: str) -> None:
    """One of them, or all together; in whatever pieces they come."""
    sent = {
        "at once": [headers(10, LIMIT // 8)],
        "in pieces": [headers(1, LIMIT - 400)[:-4], headers(10, 200)[27:]],
        "without end": [headers(1, LIMIT - 400)[:-4], headers(10, 200)[27:-4]],
        "one line": [headers(1, LIMIT + 1)],
        "the path": [LIVE.replace(b"/live", b"/live?" + b"x" * LIMIT)],
    }[how]
    async with (
        stack(tiny_model, arguments=ARGUMENTS) as served,
        client(served) as large,
        client(served) as usual,
    ):
        for piece in sent:
            large.writer.write(piece)
            await large.writer.drain()
            assert await usual.ask(headers(4, 100)) == 200  # in between
        assert await large.status() == 431
        assert large.error["code"] == "headers_too_long"
        assert f"{LIMIT} bytes" in large.error["message"]
        assert await large.is_closed()


async def test_headers_behind_a_request_are_bounded_as_well(tiny_model: Path) -> None:
    """Sent with it, or while it is served."""
    body = b'{"prompt": "a"}'
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: %d\r\n\r\n" % len(body)
    long = headers(10, LIMIT // 8)
    async with stack(tiny_model, arguments=ARGUMENTS) as served:
        async with client(served) as together:
            assert await together.ask(LIVE + long) == 200
            assert await together.status() == 431
        async with client(served) as behind:
            behind.writer.write(head)
            await eventually(lambda: len(served.intake.visits) == 1)
            behind.writer.write(body[:1])
            await looks(served, 1)
            behind.writer.write(body[1:] + long[:LIMIT])
            assert await behind.status() == 200
            assert await behind.ask(long[LIMIT:]) == 431


async def test_too_many_headers_are_a_400(tiny_model: Path) -> None:
    """However short they are."""
    async with (
        stack(tiny_model) as served,
        client(served) as many,
        client(served) as enough,
    ):
        assert await many.ask(headers(MAX_HEADERS + 1, 1)) == 400
        assert await enough.ask(headers(MAX_HEADERS - 1, 1)) == 200


async def test_a_body_behind_long_headers_is_no_part_of_them(tiny_model: Path) -> None:
    """A large request that comes in one piece is none with long headers."""
    body = json.dumps({"prompt": "a" * 4 * LIMIT}).encode()
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: %d\r\n\r\n" % len(body)
    async with stack(tiny_model, arguments=ARGUMENTS) as served, client(served) as one:
        assert await one.ask(head + body) == 200


async def test_connections_have_a_bound(tiny_model: Path) -> None:
    """Those without a request make room; where all have one, new ones get 503."""
    arguments = ("--max-connections", "2")
    options = ("--step-ms", "20")
    long = json.dumps({"prompt": [5], "max_tokens": 1_000, "stream": True}).encode()
    stream = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n"
    )
    stream += b"Content-Type: application/json\r\n\r\n"
    async with stack(tiny_model, options=options, arguments=arguments) as served:
        async with client(served) as idle, client(served) as first:
            assert await idle.ask() == 200
            first.writer.write(stream % len(long) + long)
            await first.reader.readuntil(b"data: ")
            async with client(served) as second:
                second.writer.write(stream % len(long) + long)
                await second.reader.readuntil(b"data: ")
                assert await idle.is_closed()
                async with client(served) as late:
                    assert await late.status() == 503
                    assert b"Retry-After: 1" in late.head
                    assert late.error["code"] == "overloaded"
                    assert await late.is_closed()
            await eventually(lambda: len(bounds(served)) == 1)
            assert await first.reader.readuntil(b"data: ")
        await served.idle()


async def test_one_address_has_a_bound(tiny_model: Path) -> None:
    """Where the operator sets one."""
    arguments = ("--max-connections-per-client", "2")
    async with stack(tiny_model, arguments=arguments) as served:
        async with client(served) as one, client(served):
            assert await one.ask() == 200
            async with client(served) as third:
                assert await third.status() == 503
        await eventually(lambda: not len(bounds(served)))
        assert (await refusals(served))["client_limit"] == 1


async def test_a_whole_answer_waits_for_a_reader_within_its_bound(
    tiny_model: Path,
) -> None:
    """One that is larger than any buffer, and that nobody reads, is not kept for ever."""
    arguments = ("--client-write-timeout-s", "2")
    ask = LIVE.replace(b"/live", b"/openapi.json")  # some 100 kB
    async with stack(tiny_model, arguments=arguments) as served:
        async with client(served, limit=1_024) as deaf:
            deaf.writer.write(ask * 200)
            stalled = bounds(served)._stalled  # pyright: ignore[reportPrivateUsage]
            await eventually(lambda: bool(stalled))
            await looks(served, 10)
            await eventually(lambda: not len(bounds(served)))
        assert (await refusals(served))["slow_reader"] == 1
