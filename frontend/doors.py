"""Where a frontend listens: for clients, for its operator, for probes.

On a socket of its own or, as one of several processes, on those that it has inherited.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aiohttp import web

from .acceptor import SharedSite, at_once
from .board import Turn
from .listener import Runner
from .tls import Tls

__all__ = ["Door", "listening", "scheme_of"]

_log = logging.getLogger("tokenwire.frontend")

BACKLOG = 1_024
"""Connections that wait for a process, while it is restarted or in a burst; the system
bounds it, too (``net.core.somaxconn``)."""


@dataclass(slots=True, frozen=True)
class Door:
    """One place to listen at.

    Args:
        what: It, for the log.
        runner: Of its application.
        tls: What its connections are opened with; None: nothing.
    """

    what: str
    runner: Runner
    tls: Tls | None = None

    async def open(self, host: str, port: int, *, reuse_port: bool = False) -> str:
        """Listen on a socket of its own; log, and return, the URL.

        Raises:
            OSError: The address cannot be listened on; it says which.
        """
        runner = self.runner
        await runner.setup()
        if self.tls is not None:
            listeners = await listening(host, port, reuse_port=reuse_port)
            await self.share(listeners)
            return self._say(listeners[0].getsockname())
        try:
            site = web.TCPSite(runner, host, port, reuse_port=reuse_port or None)
            await site.start()
        except OSError as error:
            raise _cannot_listen(host, port, error) from error
        return self._say(runner.addresses[0])

    async def share(
        self, listeners: Sequence[socket.socket], turn: Callable[[], Turn] = at_once
    ) -> None:
        """Listen on inherited sockets."""
        if self.runner.server is None:
            await self.runner.setup()
        for listener in listeners:
            await SharedSite(self.runner, listener, turn, self.tls).start()

    def _say(self, where: tuple[str, int]) -> str:
        url = f"{scheme_of(self.tls)}://{where[0]}:{where[1]}"
        _log.info("%s %s", self.what, url)
        return url


async def listening(
    host: str, port: int, *, reuse_port: bool = False
) -> list[socket.socket]:
    """Return sockets that listen on all addresses of *host*.

    Raises:
        OSError: One cannot be listened on; it says which.
    """
    loop = asyncio.get_running_loop()
    sockets: list[socket.socket] = []
    try:
        server = await loop.create_server(
            asyncio.Protocol,
            *(host, port),
            reuse_port=reuse_port or None,
            start_serving=False,
        )
        sockets = [one.dup() for one in server.sockets]
        server.close()
        for one in sockets:
            one.listen(BACKLOG)
            one.setblocking(False)
    except OSError as error:
        for one in sockets:
            one.close()
        raise _cannot_listen(host, port, error) from error
    return sockets


def scheme_of(tls: object | None) -> str:
    """Return how a URL of a listener begins."""
    return "http" if tls is None else "https"


def _cannot_listen(host: str, port: int, error: OSError) -> OSError:
    return OSError(f"cannot listen on {host}:{port}: {error.strerror or error}")
