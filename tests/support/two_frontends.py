"""Two frontends that clients can lose, before a prefill worker and two decode workers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from resume_client import Outcome, Patience, ResumableStream
from resume_state import Message, member

from support.stack import SimWorker, Stack, eventually, frontend
from tokenwire.frontend.parsers import Parsers
from tokenwire.frontend.pool import Pool
from tokenwire.protocol.messages import Role

__all__ = ["LIVES", "STRIKES", "Two", "as_promised", "same", "struck", "two"]


class Relay:
    """Stands before a frontend, and can be as dead to its clients as a killed one."""

    def __init__(self, url: str) -> None:
        self._port = int(url.rpartition(":")[2])
        self._server: asyncio.Server | None = None
        self._writers = set[asyncio.StreamWriter]()
        self.url = ""

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Break all connections."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def die(self) -> None:
        """Break all connections; nobody listens any more."""
        if self._server is not None:
            self._server.close()
        self.cut()

    async def _take(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers |= {writer, back}
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pass(reader, back))
            tasks.create_task(self._pass(there, writer))

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()


@dataclass
class Two:
    """Two frontends behind relays, and their workers."""

    model: Path
    options: list[str]
    frontends: list[Stack]
    relays: list[Relay]
    workers: list[SimWorker]

    @property
    def urls(self) -> list[str]:
        """Where they are for clients."""
        return [relay.url for relay in self.relays]

    @asynccontextmanager
    async def another_worker(self, name: str) -> AsyncGenerator[SimWorker]:
        """Run one more decode worker; nobody knows it yet."""
        worker = SimWorker(self.model, Role.DECODE, name, self.options)
        try:
            await worker.start()
            yield worker
        finally:
            await worker.stop()

    async def kill_worker(self) -> None:
        """Kill the decode worker that generates."""
        [worker] = self._decoding()
        await worker.die()

    def _decoding(self) -> list[SimWorker]:
        decode = [one for one in self.workers if one.role is Role.DECODE]
        return [one for one in decode if not one.dead and one.engine.load().num_running]

    async def kill_frontend(self) -> None:
        """Kill the first one: to its clients and to all workers."""
        self.relays[0].die()
        cut(self.frontends[0].pool)

    async def kill_both(self) -> None:
        """At once."""
        await asyncio.gather(self.kill_worker(), self.kill_frontend())

    async def kill_worker_and_cut(self) -> None:
        """Kill the worker; and the connection, when another one has taken over."""
        await self.kill_worker()
        await eventually(lambda: self._decoding() != [], "it goes on elsewhere")
        await self.cut_connection()

    async def cut_connection(self) -> None:
        """Cut the client's connection alone."""
        self.relays[0].cut()


def cut(pool: Pool) -> None:
    """Take a frontend off the network, as SIGKILL does: nothing more is said."""
    for link in pool.links:
        link._channel.close()  # pyright: ignore[reportPrivateUsage]
        link.tick = lambda: None  # type: ignore[method-assign]


OPTIONS = ("--step-ms", "2", "--output-draws")


@asynccontextmanager
async def two(
    model: Path,
    *options: str,
    arguments: tuple[str, ...] = (),
    parsers: Parsers | None = None,
) -> AsyncGenerator[Two]:
    """Run two frontends, a prefill worker and two decode workers."""
    async with AsyncExitStack() as stack:
        given = [*OPTIONS, *options]
        workers: list[SimWorker] = []
        roles = (Role.PREFILL, Role.DECODE, Role.DECODE)
        for number, role in enumerate(roles):
            name = f"{role.value}-{number}"
            workers.append(SimWorker(model, role, name, given))
            stack.push_async_callback(workers[-1].stop)
            await workers[-1].start()
        running = Two(model, given, [], [], workers)
        for _ in range(2):
            served = frontend(model, arguments, None, parsers)
            running.frontends.append(await stack.enter_async_context(served))
            running.relays.append(Relay(running.frontends[-1].url))
            await running.relays[-1].start()
            stack.callback(running.relays[-1].die)
            await running.frontends[-1].know(workers)
        yield running


QUICK = Patience(first_s=0.001, longest_s=0.01, longest_asked_s=0.01)

LIVES = ("cancel", "continue")
"""Of a generation whose client is gone."""

STRIKES: dict[str, Callable[[Two], Awaitable[None]]] = {
    "connection": Two.cut_connection,
    "worker": Two.kill_worker,
    "frontend": Two.kill_frontend,
    "both": Two.kill_both,
    "worker, then connection": Two.kill_worker_and_cut,
}


async def struck(
    stack: Two,
    route: str,
    body: dict[str, Any],
    at: int,
    strike: Callable[[Two], Awaitable[None]],
) -> tuple[Outcome, str]:
    """Stream, and strike when so many ids have come; also return the first one's id."""
    async with ResumableStream(stack.urls, route, body, patience=QUICK) as stream:
        async for _ in stream:
            if len(stream.progress.token_ids) >= at:
                break
        generation_id = stream.progress.generation_id
        await strike(stack)
        assert stream.progress.finish_reason is None
        return await stream.complete(), generation_id


def without_ids(message: Message) -> Message:
    """Return a message without what follows from the generation's id."""
    calls = [{**call, "id": None} for call in message.tool_calls]
    return replace(message, tool_calls=calls)


def as_promised(outcome: Outcome, name: str, life: str) -> None:
    """Assert that it went on as cheaply as it could."""
    how = outcome.num_reconnects, outcome.num_resumes
    if name == "worker":
        assert how == (0, 0), outcome.log  # the frontend's doing
    elif name == "both":
        assert how == (0, 1), outcome.log
    elif life == "continue":
        assert how == (1, 0), outcome.log
    else:  # cancelled, unless it was followed before its loss was noticed
        assert how in {(1, 0), (1, 1)}, outcome.log


def same(outcome: Outcome, calm: Outcome) -> None:
    """Assert that nothing tells the one from the other but ids of generations."""
    assert outcome.token_ids == calm.token_ids
    assert outcome.finish_reason == calm.finish_reason
    assert without_ids(outcome.message) == without_ids(calm.message)
    assert outcome.usage is not None
    assert calm.usage is not None
    details = member(outcome.usage, "completion_tokens_details")
    num_new = len(calm.token_ids) - details.get("resumed_prefix_tokens", 0)
    assert outcome.usage["completion_tokens"] == num_new
    assert outcome.usage["prompt_tokens"] == calm.usage["prompt_tokens"]
    assert all(claim["exactness"] == "same_rng" for claim in outcome.claims)
