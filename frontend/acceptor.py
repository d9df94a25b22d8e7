"""Connections from a socket, taken one by one: by several processes, or over TLS.

An event loop takes all connections that wait, at once: whichever process wakes first would
have a whole burst of them. Here a process takes one at a time, and leaves it to another
that has fewer (``board.py``). Over TLS, each is opened with the certificate of its moment.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from aiohttp import web

from .board import STAND_BY_S, YIELD_S, Turn
from .listener import Runner
from .tls import Tls

__all__ = ["SharedSite", "at_once"]

_log = logging.getLogger(__name__)

PAUSE_S = 1.0
"""After an error of the system's: no descriptors, no memory."""

OPENING_SHARE = 4
"""For so many connections that may be open, one more may be in its TLS handshake: each has
a descriptor. A process opens a thousand a second."""

MIN_OPENING = 16
"""The same where few may be open: a burst."""

TLS_CLOSE_S = 2.0
"""How long a client may take to say that it has heard of the end of TLS."""


def at_once() -> Turn:
    """Return that the only process takes a connection."""
    return Turn.NOW


class SharedSite(web.BaseSite):
    """Serves *runner*'s application on *listener*.

    Args:
        runner: The application's.
        listener: The socket, which does not block.
        turn: Returns whose turn it is.
        tls: With what connections are opened; None: in plain text.
    """

    def __init__(
        self,
        runner: Runner,
        listener: socket.socket,
        turn: Callable[[], Turn] = at_once,
        tls: Tls | None = None,
    ) -> None:
        super().__init__(runner)
        self._serves = runner.server
        self._bounds = runner.connections
        most = runner.connections.limits.max_connections
        self._max_opening = max(MIN_OPENING, most // OPENING_SHARE)
        self._listener = listener
        self._turn = turn
        self._tls = tls
        self._timer: asyncio.TimerHandle | None = None
        self._opening: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._loop = asyncio.get_running_loop()

    @property
    def name(self) -> str:
        """Where it listens."""
        host, port = self._listener.getsockname()[:2]
        return f"{'http' if self._tls is None else 'https'}://{host}:{port}"

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
        if len(self._opening) >= self._max_opening:
            oldest = next(iter(self._opening))  # it has not said who it is for longest
            self._opened(oldest)  # now, or the next to come would cancel it once more
            oldest.cancel()
        opening = self._loop.create_task(self._open(connection))
        self._opening[opening] = None
        opening.add_done_callback(self._opened)

    def _opened(self, opening: asyncio.Task[None]) -> None:
        self._opening.pop(opening, None)

    async def _open(self, connection: socket.socket) -> None:
        if self._serves is None:
            connection.close()
            return
        try:
            if self._tls is None:
                await self._loop.connect_accepted_socket(self._serves, connection)
                return
            await self._loop.connect_accepted_socket(
                self._serves,
                connection,
                ssl=self._tls.context(),
                ssl_handshake_timeout=self._bounds.limits.header_timeout_s,
                ssl_shutdown_timeout=TLS_CLOSE_S,
            )
        except OSError as error:
            connection.close()  # its client has left, or speaks no TLS of ours
            if self._tls is not None:
                self._bounds.refused("tls")
                _log.debug("a TLS connection was not opened: %s", error)
