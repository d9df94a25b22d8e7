"""Stands between one frontend and one worker, and sees every message of theirs.

It relays TCP and reads ZMTP (the wire of ZeroMQ, https://rfc.zeromq.org/spec/23): a
greeting of 64 bytes, then frames of a flag, a length and a body. So a message can be
dropped, repeated, held or changed exactly where it passes, and a connection cut there.
Plain text alone: what CURVE encrypts nobody between can read.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from tokenwire.protocol.codec import decode_from_frontend, decode_from_worker
from tokenwire.protocol.errors import ProtocolError
from tokenwire.protocol.messages import FromFrontend, FromWorker

__all__ = ["Proxy", "Verdict", "Watcher"]

GREETING_BYTES = 64
_LONG, _COMMAND = 2, 4  # flags of a frame
_SHORT_BYTES = 255


@dataclass
class Verdict:
    """What becomes of a message, and what happens once it has passed."""

    bodies: list[bytes]
    hold_s: float = 0.0  # it, and all that follows it in its direction
    swap: bool = False  # the next message overtakes it
    after: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])


class Watcher(Protocol):
    """Who decides."""

    def passes(
        self, proxy: Proxy, message: FromFrontend | FromWorker, body: bytes
    ) -> Verdict:
        """Return what becomes of *message*."""
        ...


class Proxy:
    """One address in front of one worker, for one frontend."""

    def __init__(self, frontend: int, worker: str, watcher: Watcher) -> None:
        self.frontend = frontend
        self.worker = worker
        self.port: int | None = None  # the worker's; None: it is not there
        self._watcher = watcher
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._moving = asyncio.Event()
        self._moving.set()

    async def listen(self) -> str:
        """Return the address for the frontend."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        return f"tcp://127.0.0.1:{port}"

    def cut(self) -> None:
        """Break every connection."""
        for writer in list(self._writers):
            writer.transport.abort()

    def still(self) -> None:
        """Let nothing pass, in both directions, and let the connections stand."""
        self._moving.clear()

    def go_on(self) -> None:
        """Let pass again."""
        self._moving.set()

    async def close(self) -> None:
        """Leave nothing behind."""
        if self._server is not None:
            self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(asyncio.CancelledError):  # by ``close``
            await self._connect(reader, writer)

    async def _connect(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        ends = [writer]
        self._writers.add(writer)
        try:
            if self.port is None:
                return
            there, to_worker = await asyncio.open_connection("127.0.0.1", self.port)
            ends.append(to_worker)
            self._writers.add(to_worker)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._relay(reader, to_worker, down=False))
                group.create_task(self._relay(there, writer, down=True))
        except* (OSError, EOFError):
            pass  # one side is gone: so is the other, below
        finally:
            for end in ends:
                self._writers.discard(end)
                end.transport.abort()

    async def _relay(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, down: bool
    ) -> None:
        await _greet(reader, writer)
        kept: bytes | None = None
        while True:
            flags, body = await _frame(reader)
            await self._moving.wait()
            if flags & _COMMAND:
                writer.write(_framed(flags, body))
                await writer.drain()
                continue
            verdict = self._judge(body, down=down)
            if verdict.hold_s:
                await asyncio.sleep(verdict.hold_s)
            if verdict.swap and verdict.bodies and kept is None:
                kept = verdict.bodies[0]
            else:
                for one in verdict.bodies:
                    writer.write(_framed(0, one))
                if kept is not None and verdict.bodies:
                    writer.write(_framed(0, kept))
                    kept = None
                await writer.drain()
            for call in verdict.after:
                call()

    def _judge(self, body: bytes, *, down: bool) -> Verdict:
        try:
            message = decode_from_worker(body) if down else decode_from_frontend(body)
        except ProtocolError:
            return Verdict([body])
        return self._watcher.passes(self, message, body)


async def _greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Relay a greeting as it comes: each side waits for parts of the other's."""
    left = GREETING_BYTES
    while left:
        part = await reader.read(left)
        if not part:
            raise EOFError
        writer.write(part)
        left -= len(part)


async def _frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    flags = (await reader.readexactly(1))[0]
    size = int.from_bytes(await reader.readexactly(8 if flags & _LONG else 1), "big")
    return flags, await reader.readexactly(size)


def _framed(flags: int, body: bytes) -> bytes:
    flags &= ~_LONG
    size = len(body)
    if size > _SHORT_BYTES:
        return bytes([flags | _LONG]) + size.to_bytes(8, "big") + body
    return bytes([flags, size]) + body
