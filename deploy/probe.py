"""Questions to a TCP port: is it free, and what does a GET on it answer."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket

__all__ = ["PortUnusable", "browsable", "http_status", "usable_port"]

TIMEOUT_S = 2.0
"""For one answer on this machine; a frontend answers /ready in a millisecond."""

MAX_STATUS_LINE_BYTES = 1_024


class PortUnusable(Exception):
    """The port cannot be listened on; one sentence."""


def usable_port(host: str, port: int) -> int:
    """Return *port* if a server may listen there, or a free one for 0.

    Raises:
        PortUnusable: It is taken, or *host* is not an address of this machine.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, proto) as trial:
            # As servers do, so that a port in TIME_WAIT counts as free.
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
            # Two binders with SO_REUSEADDR may both bind; only one may listen.
            trial.listen(1)
            return int(trial.getsockname()[1])
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            msg = f"port {port} on {host} is already in use: choose another with --port"
        else:
            msg = f"cannot listen on {host} port {port}: {error.strerror or error}"
        raise PortUnusable(msg) from error


def browsable(host: str) -> str:
    """Return the host to put in a URL for a server that listens on *host*."""
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - replaced
    return f"[{host}]" if ":" in host else host


async def http_status(host: str, port: int, path: str) -> int:
    """Return the status of ``GET path``, or 0 if no HTTP answer comes in time."""
    with contextlib.suppress(OSError, TimeoutError, ValueError, IndexError):
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_connection(
                browsable(host).strip("[]"), port, limit=MAX_STATUS_LINE_BYTES
            )
            try:
                writer.write(
                    f"GET {path} HTTP/1.1\r\nHost: {browsable(host)}\r\n"
                    "Connection: close\r\n\r\n".encode()
                )
                return int((await reader.readline()).split()[1])
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    return 0
