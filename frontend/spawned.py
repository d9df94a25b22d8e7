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

from .control import Ask, FromChild, Kind, Page, Start, Up, framed, read

__all__ = ["Spawned"]


class Parent(Protocol):
    """Whom it belongs to."""

    def is_up(self, one: Spawned) -> None:
        """Note that it takes connections."""
        ...

    def told(self, one: Spawned, page: str, kind: Kind) -> None:
        """Keep what it has of a kind."""
        ...

    async def page(self, kind: Kind) -> str:
        """Return what all processes have of a kind."""
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
        # For what it has of a kind, until it answers.
        self._asked: dict[Kind, asyncio.Future[None]] = {}

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
                case Ask(number, kind):
                    tasks.create_task(self._answer(number, kind, parent))
                case Page(_, text, kind):
                    parent.told(self, text, kind)
                    asked = self._asked.pop(kind, None)
                    if asked is not None:
                        asked.set_result(None)

    async def _answer(self, number: int, kind: Kind, parent: Parent) -> None:
        self._writer.write(framed(Page(number, await parent.page(kind), kind)))

    def ask(self, kind: Kind) -> asyncio.Future[None]:
        """Ask for its page; once, however often this is called before it answers.

        Whoever waits for it waits by ``asyncio.wait``: others may do so, too.
        """
        asked = self._asked.get(kind)
        if asked is None:
            asked = self._asked[kind] = asyncio.get_running_loop().create_future()
            self._writer.write(framed(Ask(0, kind)))
        return asked

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
        while self._asked:
            self._asked.popitem()[1].cancel()
