"""Server-sent events straight to the transport, with back-pressure at its buffer.

aiohttp's ``StreamResponse.write`` is a coroutine; awaiting it per token costs more
than making the token's chunk. Headers, end and draining stay aiohttp's.

A write to a socket costs as much as all else that a token takes. So events wait until
what has come from the workers is read, and each stream's leave in one write: one event a
write where the frontend keeps up, several where steps have piled up meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from aiohttp import web

from .access_log import Counted

__all__ = [
    "DONE",
    "OUTGOING",
    "EventStream",
    "LivelyStream",
    "Outgoing",
    "error_event",
]

DONE = b"data: [DONE]\n\n"

PING_S = 1.0
"""After so long without an event a lively stream sends a comment: a client, or a proxy
between, can then tell silence from a dead connection within seconds."""

PING = b": ping\n"
"""A comment, without the empty line that would end an event: OpenAI's client would take
that for one without data, and fail."""

_CRLF = b"\r\n"
_NUM_HEADS = 1024
_CHUNK_HEADS = tuple(b"%x\r\n" % size for size in range(_NUM_HEADS))
"""What stands before an HTTP chunk of so many bytes; a token's has 200 to 400."""


class Outgoing:
    """The streams with events to write, on the event loop's next turn."""

    __slots__ = ("_streams",)

    def __init__(self) -> None:
        self._streams: list[EventStream] = []

    def add(self, stream: EventStream) -> None:
        """Have *stream* written when the callback that runs now has returned."""
        if not self._streams:
            asyncio.get_running_loop().call_soon(self._write)
        self._streams.append(stream)

    def _write(self) -> None:
        streams, self._streams = self._streams, []
        for stream in streams:
            stream.flush()


OUTGOING = web.AppKey("outgoing", Outgoing)
"""Where an application has the one that its streams share."""


class EventStream:
    """An event stream to one client.

    ``send`` never waits. When the client reads too slowly, ``on_full`` is called: hold
    the choices, ``await drained()``, then go on.
    """

    __slots__ = (
        "_chunked",
        "_outgoing",
        "_pending",
        "_protocol",
        "_request",
        "_response",
        "_transport",
        "on_full",
    )

    def __init__(self, request: web.Request, headers: Mapping[str, str]) -> None:
        self._request = request
        self._outgoing = request.app[OUTGOING]
        self._pending: bytes | list[bytes] | None = None  # what is to be written
        self.on_full: Callable[[], None] = _ignore
        """Called when a write has filled the client's buffer."""
        self._response = web.StreamResponse(headers=headers)
        self._response.content_type = "text/event-stream"
        self._response.charset = "utf-8"
        self._response.headers.setdefault("Cache-Control", "no-cache")
        self._transport: asyncio.Transport | Counted | None = None
        self._protocol = request.protocol
        self._chunked = False

    async def open(self, first: bytes) -> None:
        """Send the headers and the first events."""
        request, response = self._request, self._response
        if request.version >= (1, 1):
            response.enable_chunked_encoding()
            self._chunked = True
        else:
            response.force_close()  # nothing else says where the stream ends
        await response.prepare(request)
        if first:
            await response.write(first)
        self._transport = request.transport

    def count(self, num_bytes: int) -> Callable[[], int]:
        """Count what is sent from now on, *num_bytes* are; returns who tells the count."""
        counted = Counted(self._transport, num_bytes)
        self._transport = counted
        return lambda: counted.num_bytes

    @property
    def is_open(self) -> bool:
        """Whether the client is there: what is sent may reach it."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, data: bytes) -> None:
        """Send events; called per token."""
        if self._chunked:
            size = len(data)
            head = _CHUNK_HEADS[size] if size < _NUM_HEADS else b"%x\r\n" % size
            data = b"".join((head, data, _CRLF))
        pending = self._pending
        if pending is None:
            self._pending = data
            self._outgoing.add(self)
        elif isinstance(pending, bytes):
            self._pending = [pending, data]
        else:
            pending.append(data)

    def flush(self) -> None:
        """Write what was sent, now."""
        data, self._pending = self._pending, None
        if data is None:
            return
        if not isinstance(data, bytes):
            data = b"".join(data)
        transport = self._transport
        if transport is None or transport.is_closing():
            return  # the handler is about to be cancelled
        transport.write(data)
        # What waits there is looked at first: it costs a third of asking the protocol.
        if transport.get_write_buffer_size() and self._protocol.writing_paused:
            self.on_full()

    async def drained(self, timeout_s: float) -> None:
        """Wait until the client has read.

        Raises:
            TimeoutError: It has not within *timeout_s*.
            ConnectionError: It is gone.
        """
        self.flush()
        # StreamResponse.drain is deprecated, and its write waits only now and then.
        writer = self._response._payload_writer  # pyright: ignore[reportPrivateUsage]
        if writer is not None:
            async with asyncio.timeout(timeout_s):
                await writer.drain()

    async def close(self, timeout_s: float) -> web.StreamResponse:
        """End the response; returns it for aiohttp.

        Raises:
            TimeoutError: The client has not read the last of it within *timeout_s*.
        """
        self.be_quiet()  # nothing may stand behind the end
        self.flush()
        async with asyncio.timeout(timeout_s):
            await self._response.write_eof()
        return self._response

    def be_quiet(self) -> None:
        """Send nothing more of its own."""

    def abort(self) -> web.StreamResponse:
        """Drop the connection of a client that does not read."""
        if self._transport is not None:
            self._transport.abort()
        return self._response


class LivelyStream(EventStream):
    """An event stream that is never silent for long, until ``be_quiet``."""

    __slots__ = ("_loop", "_sent_at", "_timer")

    def __init__(self, request: web.Request, headers: Mapping[str, str]) -> None:
        super().__init__(
            request,
            {
                **headers,
                "Cache-Control": "no-cache, no-transform",
                "X-Accel-Buffering": "no",  # nginx would collect events
            },
        )
        self._loop = asyncio.get_running_loop()
        self._sent_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def open(self, first: bytes) -> None:
        """Send the headers and the first events."""
        await super().open(first)
        self._sent_at = self._loop.time()
        self._timer = self._loop.call_at(self._sent_at + PING_S, self._look)

    def send(self, data: bytes) -> None:
        """Send events."""
        self._sent_at = self._loop.time()
        super().send(data)

    def be_quiet(self) -> None:
        """Send nothing more of its own."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        """Send a comment if nothing else was sent; look again when that may be due."""
        now = self._loop.time()
        if now >= self._sent_at + PING_S:
            self._sent_at = now
            if not self._protocol.writing_paused:  # else there is something to read
                self.send(PING)
        self._timer = self._loop.call_at(self._sent_at + PING_S, self._look)


def _ignore() -> None:
    """Do nothing."""


def error_event(body: bytes) -> bytes:
    """Return the event of an error object."""
    return b"data: " + body + b"\n\n"
