"""What a parent and its processes say to each other, over the pair of sockets between them.

A frame is four bytes with its length, big-endian, and a MessagePack map. Both sides are of
one installation, started by the same command: nothing here needs to be understood by
another version. The end of the stream says that the other side is gone.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Literal, TypeVar

import msgspec

__all__ = [
    "Ask",
    "FromChild",
    "FromParent",
    "Kind",
    "Page",
    "Start",
    "Up",
    "framed",
    "read",
    "read_start",
]

MAX_FRAME_BYTES = 16 * 1024 * 1024
"""The longest is a page of metrics: some 50 kB."""

_LENGTH_BYTES = 4


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first frame of a parent: who a process is, and what it has inherited."""

    process: int  # its number, from 0
    num_processes: int
    frontend_id: str
    started: int  # Unix seconds; of the whole frontend
    board: int  # file descriptors
    ledger: int
    listeners: list[int]
    admin_listeners: list[int]
    metrics_listeners: list[int]

    @property
    def descriptors(self) -> list[int]:
        """All that a process inherits."""
        return [
            self.board,
            self.ledger,
            *self.listeners,
            *self.admin_listeners,
            *self.metrics_listeners,
        ]


Kind = Literal["metrics", "live"]
"""What is asked for: the metrics; or what ``/ui`` shows, as JSON, of all as a list."""


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Of a parent: for a process's own page. Of a process: for that of all."""

    number: int
    kind: Kind = "metrics"


class Page(msgspec.Struct, frozen=True, tag=True):
    """The answer to ``Ask``."""

    number: int
    text: str
    kind: Kind = "metrics"


class Up(msgspec.Struct, frozen=True, tag=True):
    """Of a process: it takes connections from now on."""


FromParent = Start | Ask | Page
FromChild = Up | Ask | Page

Frame = TypeVar("Frame")

_encoder = msgspec.msgpack.Encoder()


def framed(message: FromParent | FromChild) -> bytes:
    """Return *message* as it is sent."""
    body = _encoder.encode(message)
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


async def read(
    reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[Frame]
) -> Frame | None:
    """Return the next frame; None: the other side is gone."""
    try:
        length = _checked(await reader.readexactly(_LENGTH_BYTES))
        return decoder.decode(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def read_start(control: socket.socket) -> Start | None:
    """Return the first frame, before there is an event loop; None: nobody sends one."""
    with control.makefile("rb", buffering=0) as file:
        length = _exactly(file.read, _LENGTH_BYTES)
        if length is None:
            return None
        body = _exactly(file.read, _checked(length))
    return None if body is None else msgspec.msgpack.decode(body, type=Start)


def _exactly(read: Callable[[int], bytes | None], number: int) -> bytes | None:
    data = b""
    while len(data) < number:
        part = read(number - len(data))
        if not part:
            return None
        data += part
    return data


def _checked(length: bytes) -> int:
    number = int.from_bytes(length, "big")
    if number > MAX_FRAME_BYTES:
        msg = f"a frame of {number} bytes between processes of one frontend"
        raise ConnectionError(msg)
    return number
