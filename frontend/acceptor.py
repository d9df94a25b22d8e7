"""Connections from a socket that several processes listen on.

An event loop takes all connections that wait, at once: whichever process wakes first would
have a whole burst of them. Here a process takes one at a time, and leaves it to another
that has fewer (``board.py``).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from aiohttp import web

from .board import STAND_BY_S, YIELD_S, Turn

__all__ = ["SharedSite"]

_log = logging.getLogger(__name__)

PAUSE_S = 1.0
"""After an error of the system's: no descriptors, no memory."""


class SharedSite(web.BaseSite):
    """Serves *runner*'s application on *listener*; *turn* says whose turn it is."""

    def __init__(
        self, runner: web.BaseRunner, listener: socket.socket, turn: Callable[[], Turn]
    ) -> None:
        super().__init__(runner)
        self._serves = runner.server
        self._listener = listener
        self._turn = turn
        self._timer: asyncio.TimerHandle | None = None
        self._opening: set[asyncio.Task[object]] = set()
        self._loop = asyncio.get_running_loop()

    @property
    def name(self) -> str:
        """Where it listens."""
        host, port = self._listener.getsockname()[:2]
        return f"http://{host}:{port}"

    async def start(self) -> None:
        """Take connections from now on."""
        await super().start()
        self._watch()

    async def stop(self) -> None:
        """Take none any more; the others may go on."""
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        await super().stop()

    def _watch(self) -> None:
        self._timer = None
        self._loop.add_reader(self._listener.fileno(), self._readable)

    def _look_away(self, for_s: float, then: Callable[[], None]) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._timer = self._loop.call_later(for_s, then)

    def _readable(self) -> None:
        match self._turn():
            case Turn.NOW:
                self._accept()
            case Turn.YIELD:
                self._look_away(YIELD_S, self._after_others)
            case Turn.STAND_BY:
                self._look_away(STAND_BY_S, self._watch)

    def _after_others(self) -> None:
        """Take what nobody else has taken meanwhile."""
        self._watch()
        if self._turn() is not Turn.STAND_BY:
            self._accept()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # another process has it, or its client has left
        except OSError as error:
            _log.error("no connection can be taken: %s", error.strerror or error)
            self._look_away(PAUSE_S, self._watch)
            return
        connection.setblocking(False)
        opening = self._loop.create_task(self._open(connection))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        if self._serves is None:
            connection.close()
            return
        try:
            await self._loop.connect_accepted_socket(self._serves, connection)
        except OSError:
            connection.close()  # its client has left
