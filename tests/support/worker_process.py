"""A worker's process with the simulated engine, and a frontend's socket to it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import pytest
import zmq

from support.awake import STANDSTILL_S, within
from tokenwire.protocol.codec import decode_from_worker, encode
from tokenwire.protocol.messages import (
    PROTOCOL_VERSION,
    Batch,
    Card,
    EngineDead,
    Finished,
    FromFrontend,
    FromWorker,
    Hello,
    Leg,
    Role,
    Sampling,
    Submit,
)
from tokenwire.protocol.tokens import pack_ids

__all__ = ["PATHS", "WAIT_S", "Client", "Process", "worker"]

WAIT_S = 60.0  # a start takes a second; traced, on busy cores, several
PATHS = os.pathsep.join(path for path in sys.path if path)


@dataclass
class Process:
    """A running ``tokenwire-worker``."""

    process: asyncio.subprocess.Process
    announce: Path
    lines: list[str] = field(default_factory=list[str])

    async def until_line(self, part: str) -> None:
        """Read stderr until a line has *part* in it."""
        assert self.process.stderr is not None
        async with within(WAIT_S):
            while line := (await self.process.stderr.readline()).decode():
                self.lines.append(line.rstrip())
                if part in line:
                    return
        pytest.fail(f"no line with {part!r} in {self.lines}")

    async def exit_code(self) -> int:
        """Read stderr to its end, and wait for the exit."""
        assert self.process.stderr is not None
        async with within(WAIT_S):
            rest = await self.process.stderr.read()
            self.lines += rest.decode().splitlines()
            return await self.process.wait()


@asynccontextmanager
async def worker(
    folder: Path,
    *options: str,
    role: Role = Role.AGGREGATED,
    engine_args: tuple[str, ...] = (),
) -> AsyncGenerator[Process]:
    """Run a worker with the simulated engine."""
    announce = folder / "announce.json"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tokenwire.worker", "--engine", "sim", "--role",
        role.value, "--model", "m", "--announce", str(announce),
        "--worker-id", "w", *options, "--", *engine_args,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": PATHS},
    )  # fmt: skip
    try:
        yield Process(process, announce)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


class Client:
    """A frontend's socket, used from a thread while the loop runs."""

    def __init__(self, endpoint: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RCVTIMEO, int((WAIT_S + STANDSTILL_S) * 1000))
        self._socket.connect(endpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._context.destroy(linger=0)

    def send(self, message: FromFrontend) -> None:
        """Send *message* as it is."""
        self._socket.send(encode(message))

    def hello(self, name: str = "f") -> Card:
        """Say hello, and return the card."""
        self.send(Hello(PROTOCOL_VERSION, name, "1"))
        card = self.receive()
        assert isinstance(card, Card)
        return card

    def submit(self, request_id: str, max_tokens: int, leg: Leg = Leg.FULL) -> None:
        """Submit a request."""
        sampling = Sampling(max_tokens=max_tokens)
        message = Submit(request_id, pack_ids([1, 2, 3]), sampling, leg)
        self.send(message)

    def until_tokens(self) -> None:
        """Wait for tokens."""
        while True:
            message = self.receive()
            if isinstance(message, Batch) and message.tokens:
                return

    def end(self) -> Finished:
        """Wait for the next end."""
        while True:
            message = self.receive()
            if isinstance(message, Batch) and message.finished:
                return message.finished[0]

    def until_dead(self) -> EngineDead:
        """Wait for the news that the engine is dead."""
        while True:
            message = self.receive()
            if isinstance(message, EngineDead):
                return message

    def receive(self) -> FromWorker:
        """Wait for the next message."""
        return decode_from_worker(self._socket.recv())
