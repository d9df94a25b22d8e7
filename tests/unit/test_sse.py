"""Event streams: what is written when, and whether the client keeps up."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web
from aiohttp.http import HttpVersion10, HttpVersion11

from tokenwire.frontend.sse import OUTGOING, EventStream, LivelyStream, Outgoing


class Client:
    """A connection that keeps what is written to it: transport and protocol in one."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.closing = False
        self.writing_paused = False
        self.slow_from = 1 << 30  # writes after which it reads too slowly

    def get_write_buffer_size(self) -> int:
        """Return how much of it waits, which is something where it is full."""
        return 70_000 if self.writing_paused else 0

    def is_closing(self) -> bool:
        """Return whether it is gone."""
        return self.closing

    def write(self, data: bytes) -> None:
        """Keep *data*."""
        self.writes.append(data)
        self.writing_paused = len(self.writes) >= self.slow_from


@pytest.fixture
def outgoing() -> Outgoing:
    """Return what the streams of a test share."""
    return Outgoing()


async def opened(
    outgoing: Outgoing, monkeypatch: pytest.MonkeyPatch, version: Any = HttpVersion11
) -> tuple[EventStream, Client]:
    """Return a stream whose headers are sent, and its client."""

    async def prepare(*_: object) -> None:
        """Send no headers."""

    monkeypatch.setattr(web.StreamResponse, "prepare", prepare)
    client = Client()
    request = SimpleNamespace(
        app={OUTGOING: outgoing}, protocol=client, transport=client, version=version
    )
    stream = EventStream(cast("web.Request", request), {})
    await stream.open(b"")
    return stream, client


async def turn() -> None:
    """Let the event loop run what is due."""
    await asyncio.sleep(0)


async def test_events_of_one_callback_leave_in_one_write(
    outgoing: Outgoing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in a chunk of its own, in order, when all that has come is read."""
    stream, client = await opened(outgoing, monkeypatch)
    other, other_client = await opened(outgoing, monkeypatch)
    for data in (b"data: 1\n\n", b"data: " + 2_000 * b"x" + b"\n\n"):
        stream.send(data)
        other.send(data)
    assert client.writes == []

    await turn()

    written = b"9\r\ndata: 1\n\n\r\n7d8\r\ndata: " + 2_000 * b"x" + b"\n\n\r\n"
    assert client.writes == other_client.writes == [written]
    stream.send(b"data: 3\n\n")
    await turn()
    assert client.writes == [written, b"9\r\ndata: 3\n\n\r\n"]


async def test_events_to_http_1_0_have_no_chunks(
    outgoing: Outgoing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clients know none."""
    stream, client = await opened(outgoing, monkeypatch, HttpVersion10)
    stream.send(b"data: 1\n\n")
    stream.send(b"data: 2\n\n")
    await turn()

    assert client.writes == [b"data: 1\n\ndata: 2\n\n"]


async def test_a_slow_client_is_noticed_and_forgiven(
    outgoing: Outgoing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``on_full`` says so with the write that has filled its buffer, and no other."""
    stream, client = await opened(outgoing, monkeypatch)
    num_calls = 0

    def full() -> None:
        nonlocal num_calls
        num_calls += 1

    stream.on_full = full
    client.slow_from = 2
    stream.send(b"data: 1\n\n")
    await turn()
    assert num_calls == 0
    stream.send(b"data: 2\n\n")
    await turn()
    assert num_calls == 1
    client.slow_from = 1 << 30
    stream.send(b"data: 3\n\n")
    await stream.drained(1.0)

    assert len(client.writes) == 3  # nothing is left behind
    assert num_calls == 1


async def test_nothing_is_written_to_a_client_that_is_gone(
    outgoing: Outgoing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was on its way to it is dropped, and nothing piles up."""
    stream, client = await opened(outgoing, monkeypatch)
    stream.send(b"data: 1\n\n")
    client.closing = True
    await turn()
    client.closing = False
    stream.send(b"data: 2\n\n")
    await turn()

    assert client.writes == [b"9\r\ndata: 2\n\n\r\n"]


async def test_a_lively_stream_says_nothing_behind_its_end(
    outgoing: Outgoing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client may take long to read the last of it; a comment then would be garbage."""
    client, asked = Client(), list[bool]()
    request = SimpleNamespace(
        app={OUTGOING: outgoing},
        protocol=client,
        transport=client,
        version=HttpVersion11,
    )
    stream = LivelyStream(cast("web.Request", request), {})

    async def nothing(*_: object) -> None:
        asked.append(stream._timer is not None)  # pyright: ignore[reportPrivateUsage]

    monkeypatch.setattr(web.StreamResponse, "prepare", nothing)
    monkeypatch.setattr(web.StreamResponse, "write_eof", nothing)
    await stream.open(b"")
    assert stream._timer is not None  # pyright: ignore[reportPrivateUsage]
    await stream.close(1.0)
    assert asked == [False, False]
