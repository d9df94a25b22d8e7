"""When a process takes a connection from a socket that others listen on, too."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest_asyncio
from aiohttp import web

from support.stack import eventually
from tokenwire.frontend.acceptor import SharedSite
from tokenwire.frontend.board import Turn
from tokenwire.frontend.listener import Runner


@dataclass
class Served:
    """A process that takes connections when *turn* says so."""

    port: int
    turn: Turn = Turn.NOW
    asked: list[Turn] = field(default_factory=list[Turn])
    counts: list[int] = field(default_factory=list[int])

    def whose(self) -> Turn:
        """Answer, and note it."""
        self.asked.append(self.turn)
        return self.turn

    async def live(self) -> bytes:
        """Ask something on a connection of its own; return the status line."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        line = await reader.readline()
        await reader.read()
        writer.close()
        return line


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Served]:
    """Serve one route on a shared socket."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    made = Served(listener.getsockname()[1])

    async def answer(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_get("/", answer)
    runner = Runner(app)
    runner.on_count = made.counts.append
    await runner.setup()
    await SharedSite(runner, listener, made.whose).start()
    yield made
    await runner.cleanup()


async def test_it_takes_what_comes_and_counts_it(served: Served) -> None:
    """At its turn; the count goes up with each connection and down again."""
    for _ in range(2):
        assert await served.live() == b"HTTP/1.1 200 OK\r\n"
    await eventually(lambda: served.counts == [1, 0, 1, 0], "counted")


async def test_it_takes_what_nobody_else_has_taken(served: Served) -> None:
    """Whoever has fewer connections has a head start, and no more."""
    served.turn = Turn.YIELD
    assert await served.live() == b"HTTP/1.1 200 OK\r\n"
    assert len(served.asked) >= 2


async def test_it_leaves_connections_to_those_that_can_serve(served: Served) -> None:
    """For as long as there is one, however long that is."""
    served.turn = Turn.STAND_BY
    asking = asyncio.create_task(served.live())
    await eventually(lambda: len(served.asked) >= 2, "it has looked twice")
    assert not asking.done()
    assert not served.counts
    served.turn = Turn.NOW
    assert await asking == b"HTTP/1.1 200 OK\r\n"
