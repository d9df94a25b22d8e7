"""One process of a frontend, seen from its parent."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Protocol

import msgspec

from .control import Ask, FromChild, Page, Start, Up, framed, read

__all__ = ["Spawned"]


class Parent(Protocol):
    """Whom it belongs to."""

    def is_up(self, one: Spawned) -> None:
        """Note that it takes connections."""
        ...

    def told(self, one: Spawned, page: str) -> None:
        """Keep its metrics."""
        ...

    async def page(self) -> str:
        """Return the metrics of all processes."""
        ...


_decoder = msgspec.msgpack.Decoder(FromChild)


class Spawned:
    """A running process. ``attend`` to it exactly once."""

    def __init__(
        self,
        start: Start,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.number = start.process
        self.pid = process.pid
        self.is_up = False
        self._process = process
        self._reader = reader
        self._writer = writer
        self._asked: asyncio.Future[None] | None = (
            None  # for its page, until it answers
        )

    @classmethod
    async def spawn(cls, start: Start, arguments: Sequence[str]) -> Spawned:
        """Start a process with the command line *arguments*, and tell it *start*.

        Never a fork of this one: what has threads or sockets of ZeroMQ's cannot be forked.

        Raises:
            OSError: No process can be made.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", "tokenwire.frontend.child"),
                    *arguments,
                    stdin=theirs.fileno(),
                    pass_fds=start.descriptors,
                    start_new_session=True,  # a Ctrl-C reaches it only through us
                )
            except BaseException:
                ours.close()
                raise
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        writer.write(framed(start))
        return cls(start, process, reader, writer)

    async def attend(self, parent: Parent) -> int:
        """Answer it until it ends; return its exit status (``-N`` for signal N)."""
        async with asyncio.TaskGroup() as tasks:
            talk = tasks.create_task(self._talk(tasks, parent))
            status = await self._process.wait()
            self._writer.close()
            talk.cancel()
        self._forget()
        return status

    async def _talk(self, tasks: asyncio.TaskGroup, parent: Parent) -> None:
        while (message := await read(self._reader, _decoder)) is not None:
            match message:
                case Up():
                    self.is_up = True
                    parent.is_up(self)
                case Ask(number):
                    tasks.create_task(self._answer(number, parent))
                case Page(_, text):
                    parent.told(self, text)
                    asked, self._asked = self._asked, None
                    if asked is not None:
                        asked.set_result(None)

    async def _answer(self, number: int, parent: Parent) -> None:
        self._writer.write(framed(Page(number, await parent.page())))

    def ask(self) -> asyncio.Future[None]:
        """Ask for its page; once, however often this is called before it answers.

        Whoever waits for it waits by ``asyncio.wait``: others may do so, too.
        """
        if self._asked is None:
            self._asked = asyncio.get_running_loop().create_future()
            self._writer.write(framed(Ask(0)))
        return self._asked

    def stop(self) -> None:
        """Ask it to end when its requests have."""
        self._signal(signal.SIGTERM)

    def hurry(self) -> None:
        """Ask it to end now. SIGTERM may reach it twice, from others too; not this one."""
        self._signal(signal.SIGINT)

    def kill(self) -> None:
        """End it."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def _forget(self) -> None:
        asked, self._asked = self._asked, None
        if asked is not None:
            asked.cancel()
