"""The benchmark's client, which counts events, and the figures it takes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import time
from collections.abc import AsyncGenerator
from typing import cast

import zmq
from bench_processes import MODEL_NAME, Stack

from tokenwire.protocol.codec import decode_from_worker, encode
from tokenwire.protocol.messages import (
    PROTOCOL_VERSION,
    Batch,
    Card,
    Hello,
    Sampling,
    Submit,
)
from tokenwire.protocol.tokens import pack_ids

__all__ = [
    "Counter",
    "connections",
    "direct_ttft_ms",
    "http_ttft_ms",
    "requests_per_s",
    "streamed",
    "streamed_cpu",
]


class Counter(asyncio.Protocol):
    """One connection that posts, counts events, and says when an answer is complete."""

    def __init__(self) -> None:
        self.num_events = 0
        self.first_at = 0.0
        self._tail = b""
        self._done: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Count events; the end of the chunked body or of a small body is the end."""
        if not self.first_at:
            self.first_at = time.perf_counter()
        self.num_events += data.count(b"data: {")
        window = self._tail + data
        self._tail = window[-16:]
        if self._done is not None and (
            window.endswith((b"0\r\n\r\n", b"}}")) and not self._done.done()
        ):
            self._done.set_result(None)

    async def post(self, body: bytes, path: str = "/v1/chat/completions") -> None:
        """Send a request and wait for its whole answer."""
        self._done = asyncio.get_running_loop().create_future()
        self.first_at = 0.0
        assert self._transport is not None
        self._transport.write(
            b"POST %s HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
            % (path.encode(), len(body), body)
        )
        await self._done

    def close(self) -> None:
        """Leave."""
        if self._transport is not None:
            self._transport.close()


@contextlib.asynccontextmanager
async def connections(port: int, number: int) -> AsyncGenerator[list[Counter]]:
    """Open connections, and close them."""
    loop = asyncio.get_running_loop()
    made = [
        (await loop.create_connection(Counter, "127.0.0.1", port))[1]
        for _ in range(number)
    ]
    try:
        yield made
    finally:
        for one in made:
            one.close()


def body(max_tokens: int, *, stream: bool, ids: bool) -> bytes:
    """Return a chat request."""
    request = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": "Tell me a long story."}],
        "max_tokens": max_tokens,
        "stream": stream,
        "temperature": 0,
    }
    if ids:
        request["return_token_ids"] = True
    return json.dumps(request).encode()


async def streamed_cpu(
    stack: Stack, *, streams: int, ids: bool, seconds: float
) -> float:
    """Return the frontend's CPU time per streamed token, in us."""
    return (await streamed(stack, streams=streams, ids=ids, seconds=seconds))[1]


async def streamed(
    stack: Stack, *, streams: int, ids: bool, seconds: float
) -> tuple[float, float]:
    """Return tokens/s, and the frontend's CPU time per streamed token in us."""
    request = body(1_000, stream=True, ids=ids)
    async with connections(stack.port, streams) as made:
        stop = asyncio.Event()

        async def client(one: Counter) -> None:
            while not stop.is_set():
                await one.post(request)

        clients = [asyncio.create_task(client(one)) for one in made]
        await asyncio.sleep(0.5)  # all streams are open
        began, cpu = time.perf_counter(), stack.cpu_s()
        events = sum(one.num_events for one in made)
        await asyncio.sleep(seconds)
        events = sum(one.num_events for one in made) - events
        elapsed, cpu = time.perf_counter() - began, stack.cpu_s() - cpu
        stop.set()
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    return events / elapsed, 1e6 * cpu / events


async def requests_per_s(stack: Stack, seconds: float) -> tuple[float, float]:
    """Return requests/s at ``max_tokens=1``, and the frontend's CPU per request in us."""
    request = body(1, stream=False, ids=False)
    number = 0
    async with connections(stack.port, 32) as made:
        end = time.perf_counter() + seconds
        began, cpu = time.perf_counter(), stack.cpu_s()

        async def client(one: Counter) -> None:
            nonlocal number
            while time.perf_counter() < end:
                await one.post(request)
                number += 1

        await asyncio.gather(*map(client, made))
        elapsed = time.perf_counter() - began
        cpu = stack.cpu_s() - cpu
    return number / elapsed, 1e6 * cpu / number


async def http_ttft_ms(stack: Stack, number: int) -> float:
    """Return the median time to the first byte at concurrency 1, in ms."""
    request = body(1, stream=False, ids=False)
    times: list[float] = []
    async with connections(stack.port, 1) as [one]:
        for _ in range(number):
            began = time.perf_counter()
            await one.post(request)
            times.append(1e3 * (one.first_at - began))
    return statistics.median(times)


def direct_ttft_ms(stack: Stack, number: int) -> float:
    """Return the worker's own time to the first token, over its socket, in ms."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(stack.worker_endpoint)
    socket.send(encode(Hello(PROTOCOL_VERSION, "bench", "bench")))
    while not isinstance(decode_from_worker(socket.recv()), Card):
        pass
    prompt = pack_ids(list(range(1_000, 1_032)))
    times: list[float] = []
    for n in range(number):
        began = time.perf_counter()
        socket.send(encode(Submit(f"direct-{n}", prompt, Sampling(max_tokens=1))))
        while not isinstance(decode_from_worker(socket.recv()), Batch):
            pass
        times.append(1e3 * (time.perf_counter() - began))
    socket.close()
    context.term()
    return statistics.median(times)
