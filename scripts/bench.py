"""Measure the frontend: CPU per streamed token, latency, requests/s, memory.

The engine is simulated. One frontend is pinned to the first core, the worker and this
client to the second; the client only counts events, so that it is not the limit. Arms
are rotated and repeated; every figure is a median with its spread. CPU time is the
kernel's own for all threads of the process, so a busy machine stretches the run and
not the figures, apart from cold caches.

    python scripts/bench.py [--repeats 5] [--seconds 4] [--output docs/benchmarks.md]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import platform
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import uvloop
import zmq

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

MODEL_NAME = "bench"
READY_S = 60.0
STEP_10_MS, STEP_0 = "10", "0"


# --- processes ------------------------------------------------------------------------


@dataclass
class Stack:
    """A worker and a frontend, running."""

    port: int
    frontend_pid: int
    worker_endpoint: str


@contextlib.contextmanager
def running(
    command: list[str], core: int, log: Path
) -> Generator[subprocess.Popen[bytes]]:
    """Run a process of ours on one core, and end it."""
    with log.open("ab") as file:
        process = subprocess.Popen(
            ["taskset", "-c", str(core), sys.executable, "-m", *command],
            stdout=file,
            stderr=file,
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def stack(model: str, step_ms: str, cores: list[int], folder: Path) -> Generator[Stack]:
    """Run a worker with the given step and a frontend, and wait until it serves."""
    announce = folder / f"worker-{step_ms}.json"
    port = free_port()
    worker = [
        *("tokenwire.worker", "--engine", "sim", "--role", "aggregated"),
        *("--model", model, "--served-model-name", MODEL_NAME),
        *("--listen", "tcp://127.0.0.1:0", "--announce", str(announce)),
        *("--", "--step-ms", step_ms, "--prefill-tokens-per-s", "0"),
        *("--num-blocks", "65536", "--max-num-seqs", "1024"),
    ]
    with running(worker, cores[-1], folder / "worker.log") as process:
        wait_for(announce.exists, process)
        endpoint = json.loads(announce.read_text())["endpoint"]
        frontend = [
            *(
                "tokenwire.frontend",
                "--model",
                model,
                "--served-model-name",
                MODEL_NAME,
            ),
            *("--port", str(port), "--worker", endpoint, "--log-level", "warning"),
        ]
        with running(frontend, cores[0], folder / "frontend.log") as process:
            wait_for(lambda: is_ready(port), process)
            yield Stack(port, process.pid, endpoint)


def free_port() -> int:
    """Return a port that was free a moment ago."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Return when *condition* holds; fail if the process ends or it takes too long."""
    deadline = time.monotonic() + READY_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"bench: {process.args!r} did not come up")
        time.sleep(0.05)


def is_ready(port: int) -> bool:
    """Return whether the frontend serves."""
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=1):
            return True
    except (urllib.error.URLError, OSError):
        return False


def cpu_s(pid: int) -> float:
    """Return the CPU time of all threads of a process, in s."""
    total_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total_ns += int((task / "schedstat").read_text().split()[0])
    return total_ns / 1e9


def rss_mib(pid: int) -> float:
    """Return the resident memory of a process, in MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


# --- the client -----------------------------------------------------------------------


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

    async def post(self, body: bytes) -> None:
        """Send a request and wait for its whole answer."""
        self._done = asyncio.get_running_loop().create_future()
        self.first_at = 0.0
        assert self._transport is not None
        self._transport.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
            % (len(body), body)
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


# --- figures --------------------------------------------------------------------------


async def streamed_cpu(
    stack: Stack, *, streams: int, ids: bool, seconds: float
) -> float:
    """Return the frontend's CPU time per streamed token, in us."""
    request = body(1_000, stream=True, ids=ids)
    async with connections(stack.port, streams) as made:
        stop = asyncio.Event()

        async def client(one: Counter) -> None:
            while not stop.is_set():
                await one.post(request)

        clients = [asyncio.create_task(client(one)) for one in made]
        await asyncio.sleep(0.5)  # all streams are open
        events, cpu = sum(one.num_events for one in made), cpu_s(stack.frontend_pid)
        await asyncio.sleep(seconds)
        events = sum(one.num_events for one in made) - events
        cpu = cpu_s(stack.frontend_pid) - cpu
        stop.set()
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    return 1e6 * cpu / events


async def requests_per_s(stack: Stack, seconds: float) -> tuple[float, float]:
    """Return requests/s at ``max_tokens=1``, and the frontend's CPU per request in us."""
    request = body(1, stream=False, ids=False)
    number = 0
    async with connections(stack.port, 32) as made:
        end = time.perf_counter() + seconds
        began, cpu = time.perf_counter(), cpu_s(stack.frontend_pid)

        async def client(one: Counter) -> None:
            nonlocal number
            while time.perf_counter() < end:
                await one.post(request)
                number += 1

        await asyncio.gather(*map(client, made))
        elapsed = time.perf_counter() - began
        cpu = cpu_s(stack.frontend_pid) - cpu
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


# --- the run --------------------------------------------------------------------------


@dataclass
class Figure:
    """A figure's name, unit and values."""

    name: str
    unit: str
    values: list[float] = field(default_factory=list[float])

    def row(self) -> str:
        """Return a row of the table."""
        median = statistics.median(self.values)
        return (
            f"| {self.name} | {median:.2f} | {min(self.values):.2f} to "
            f"{max(self.values):.2f} | {self.unit} |"
        )


class Run:
    """All figures of one run."""

    def __init__(
        self, model: str, cores: list[int], repeats: int, seconds: float
    ) -> None:
        self._model = model
        self._cores = cores
        self._repeats = repeats
        self._seconds = seconds
        self.figures: dict[str, Figure] = {}

    def add(self, name: str, unit: str, value: float) -> None:
        """Keep a value."""
        print(f"bench: {name}: {value:.2f} {unit}", flush=True)
        self.figures.setdefault(name, Figure(name, unit)).values.append(value)

    async def all(self, folder: Path) -> None:
        """Measure everything, arms rotated within each repeat."""
        with (
            stack(self._model, STEP_10_MS, self._cores, folder) as paced,
            stack(self._model, STEP_0, self._cores, folder) as fast,
        ):
            self.add("RSS, idle", "MiB", rss_mib(fast.frontend_pid))
            arms = [
                *(
                    self._cpu(paced, "48 streams, 10 ms step", ids)
                    for ids in (False, True)
                ),
                *(
                    self._cpu(fast, "48 streams, saturated", ids)
                    for ids in (False, True)
                ),
                self._requests(fast),
                self._latency(fast),
            ]
            for repeat in range(self._repeats):
                shift = repeat % len(arms)
                for arm in arms[shift:] + arms[:shift]:
                    await arm()
            self.add("RSS, after the load", "MiB", rss_mib(fast.frontend_pid))

    def _cpu(self, stack: Stack, load: str, ids: bool) -> Callable[[], Awaitable[None]]:
        name = f"CPU per streamed token, {load}{', with token ids' if ids else ''}"

        async def arm() -> None:
            value = await streamed_cpu(
                stack, streams=48, ids=ids, seconds=self._seconds
            )
            self.add(name, "us", value)

        return arm

    def _requests(self, stack: Stack) -> Callable[[], Awaitable[None]]:
        async def arm() -> None:
            rate, cpu = await requests_per_s(stack, self._seconds)
            self.add("Requests/s, max_tokens=1, 32 at once", "1/s", rate)
            self.add("CPU per request, max_tokens=1", "us", cpu)

        return arm

    def _latency(self, stack: Stack) -> Callable[[], Awaitable[None]]:
        async def arm() -> None:
            http = await http_ttft_ms(stack, 200)
            direct = direct_ttft_ms(stack, 200)
            self.add("TTFT over HTTP, one at a time", "ms", http)
            self.add("TTFT of the worker alone", "ms", direct)
            self.add("Added latency to the first token", "ms", http - direct)

        return arm


def report(figures: list[Figure], cores: int, repeats: int, seconds: float) -> str:
    """Return the page."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    date = datetime.datetime.now(tz=datetime.UTC).date()
    rows = "\n".join(figure.row() for figure in figures)
    return f"""# Benchmarks

Written by `make bench` on {date}: {cores} cores, {memory:.0f} GiB, {platform.machine()},
Python {platform.python_version()}. {repeats} repeats of {seconds:g} s an arm, arms rotated.

One frontend on its own core; the simulated engine and the client share the other. A
streamed token is one SSE event: ZeroMQ in, detokenize, JSON, socket out. CPU time is the
kernel's for all threads of the frontend.

| Figure | Median | Spread | Unit |
|---|---|---|---|
{rows}

Targets: 14 us per token at 48 streams with a 10 ms step, 11 us saturated, under 1 ms of
added latency. Not measured here: anything on a GPU, and more than one machine.
"""


def main() -> None:
    """Run the benchmark and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model",
        default=os.environ.get("TOKENWIRE_DEMO_MODEL"),
        help="model folder, for its tokenizer (default: $TOKENWIRE_DEMO_MODEL)",
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--output", default="docs/benchmarks.md")
    given = parser.parse_args()
    if not given.model:
        parser.error("--model is required")
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1]})
    run = Run(given.model, cores, given.repeats, given.seconds)
    with tempfile.TemporaryDirectory(prefix="tokenwire-bench-") as folder:
        uvloop.run(run.all(Path(folder)))
    figures = list(run.figures.values())
    page = report(figures, len(cores), given.repeats, given.seconds)
    Path(given.output).parent.mkdir(parents=True, exist_ok=True)
    Path(given.output).write_text(page)
    print(page)


if __name__ == "__main__":
    main()
