"""The benchmark's floor: write one finished chunk per token, and nothing else.

    python scripts/bench_floor.py PORT STEP_MS

Answers any GET with 200, and any POST with an endless stream: one chunk per step and
connection; with a step of 0 as fast as the sockets take them.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import uvloop

EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef01234567","object":"chat.completion.chunk",'
    b'"created":1700000000,"model":"bench","choices":[{"index":0,"delta":{"content":'
    b'" colours"},"logprobs":null,"finish_reason":null}]}\n\n'
)
CHUNK = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)
IDLE_S = 0.05  # between two looks for the first stream
HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


class Writer(asyncio.Protocol):
    """One connection."""

    def __init__(self, streams: set[Writer]) -> None:
        self._streams = streams
        self.transport: asyncio.Transport
        self.paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Answer a GET, or begin a stream."""
        if data.startswith(b"GET"):
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        elif self not in self._streams:
            self.transport.write(HEAD)
            self._streams.add(self)

    def pause_writing(self) -> None:
        """Note that the client reads too slowly."""
        self.paused = True

    def resume_writing(self) -> None:
        """Note that it has caught up."""
        self.paused = False

    def connection_lost(self, exc: Exception | None) -> None:
        """End the stream."""
        self._streams.discard(self)


async def main(port: int, step_s: float) -> None:
    """Serve until killed."""
    streams: set[Writer] = set()
    loop = asyncio.get_running_loop()
    await loop.create_server(lambda: Writer(streams), "127.0.0.1", port)
    while True:
        began = loop.time()
        for writer in tuple(streams):
            if not writer.paused:
                writer.transport.write(CHUNK)
        pause_s = step_s if streams else IDLE_S
        await asyncio.sleep(max(0.0, began + pause_s - loop.time()))


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), int(sys.argv[2]) / 1000))
