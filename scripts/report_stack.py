"""The stack of the resume report: workers and frontends as processes, killed at will.

Each runs below a guard, so that nothing outlives the report, and nothing of an engine
its killed worker. Frontends watch a file with the workers' endpoints: which of them gets
what comes next is decided there.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import aiohttp
from ports import free_port

__all__ = ["MODEL_NAME", "Stack", "Worker", "until"]

MODEL_NAME = "report"
LOOK_S = 0.05
STOP_S = 60.0  # an engine frees its memory; the guard takes 10 s at most behind it

WORKERS_LOST = ("--stall-timeout-s", "60")
"""A busy machine must not move outputs of its own accord: that would be another case."""


async def until(
    condition: Callable[[], bool], timeout_s: float, what: str, look_s: float = LOOK_S
) -> None:
    """Return when *condition* holds.

    Raises:
        TimeoutError: It does not within *timeout_s*; the message says what.
    """
    try:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(look_s)
    except TimeoutError as error:
        raise TimeoutError(f"not within {timeout_s:.0f} s: {what}") from error


class _Process:
    """A command below a guard."""

    def __init__(self, guard: asyncio.subprocess.Process, log: Path) -> None:
        self._guard = guard
        self.log = log

    @classmethod
    async def start(
        cls,
        name: str,
        command: Sequence[str],
        folder: Path,
        settings: Mapping[str, str],
    ) -> _Process:
        """Start ``python -m`` *command*; its output goes to *folder*."""
        spec = importlib.util.find_spec("tokenwire.deploy.guard")
        assert spec is not None
        assert spec.origin is not None
        log = folder / f"{name}.log"
        with log.open("ab") as file:
            guard = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", spec.origin),
                *(sys.executable, "-m", *command),
                stdin=asyncio.subprocess.PIPE,
                stdout=file,
                stderr=file,
                env={**os.environ, **settings},
            )
        return cls(guard, log)

    @property
    def ended(self) -> bool:
        """Whether it runs no more."""
        return self._guard.returncode is not None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the command itself, not to its guard."""
        pid = self._guard.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(children[0]), number)

    async def stop(self) -> None:
        """End it, and what it left behind; harmless if it has ended."""
        if not self.ended:
            self._guard.send_signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await self._guard.wait()
                return
        self._guard.send_signal(signal.SIGQUIT)  # everything, at once
        await self._guard.wait()

    def check(self) -> None:
        """Fail if it has ended by itself.

        Raises:
            RuntimeError: With the end of what it said.
        """
        if self.ended:
            said = self.log.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"{self.log.stem} ended by itself:\n{said}")


class Worker:
    """A worker that serves."""

    def __init__(self, name: str, process: _Process, announced: dict[str, Any]) -> None:
        self.name = name
        self.endpoint = str(announced["endpoint"])
        self._process = process

    def kill(self) -> None:
        """SIGKILL: it says nothing more."""
        self._process.send(signal.SIGKILL)

    def drain(self) -> None:
        """SIGTERM: what runs goes on elsewhere when its time is over."""
        self._process.send(signal.SIGTERM)

    async def stop(self) -> None:
        """End it."""
        await self._process.stop()


class Stack:
    """Frontends and workers of one model; ``async with`` ends them all.

    Args:
        model: Its folder.
        engine: ``sim`` or ``vllm``.
        folder: Where files of this run go.
        parsers: Of tool calls and of reasoning, by vLLM's names; None: none.
        ready_s: How long a worker may take to start.
    """

    def __init__(
        self,
        model: Path,
        engine: str,
        folder: Path,
        *,
        parsers: tuple[str, str] | None = None,
        ready_s: float,
    ) -> None:
        self.urls: list[str] = []
        self._model = ("--model", str(model), "--served-model-name", MODEL_NAME)
        self._engine = engine
        self._folder = folder
        self._parsers = parsers
        self._ready_s = ready_s
        self._endpoints = folder / "workers.json"
        self._endpoints.write_text(_workers_file(()))
        self._frontends: list[_Process] = []
        self._workers: dict[str, _Process] = {}

    async def __aenter__(self) -> Self:
        """Return the stack, which has no process yet."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop frontends, then workers."""
        await asyncio.gather(*(one.stop() for one in self._frontends))
        await asyncio.gather(*(one.stop() for one in self._workers.values()))

    async def start_worker(
        self,
        name: str,
        engine_arguments: Sequence[str],
        arguments: Sequence[str] = (),
        settings: Mapping[str, str] | None = None,
    ) -> Worker:
        """Start a worker, and return it when it serves."""
        announce = self._folder / f"{name}.json"
        command = [
            *("tokenwire.worker", "--engine", self._engine, "--role", "aggregated"),
            *(*self._model, "--worker-id", name, "--announce", str(announce)),
            *("--shutdown-timeout-s", "0.2", *arguments, "--", *engine_arguments),
        ]
        process = await _Process.start(name, command, self._folder, settings or {})
        self._workers[name] = process

        def serves() -> bool:
            process.check()
            return announce.exists()

        await until(serves, self._ready_s, f"{name} serves")
        return Worker(name, process, json.loads(announce.read_text()))

    async def start_frontends(self, count: int) -> None:
        """Start frontends; they know no worker yet."""
        for number in range(count):
            port = free_port()
            command = [
                *("tokenwire.frontend", *self._model, "--port", str(port)),
                *("--workers-file", str(self._endpoints), *WORKERS_LOST),
                *("--log-level", "warning"),
            ]
            if self._parsers is not None:
                tools, reasoning = self._parsers
                command += [
                    "--tool-call-parser",
                    tools,
                    "--reasoning-parser",
                    reasoning,
                ]
            name = f"frontend-{number}"
            process = await _Process.start(name, command, self._folder, {})
            self._frontends.append(process)
            self.urls.append(f"http://127.0.0.1:{port}")

    async def serve_by(
        self, http: aiohttp.ClientSession, workers: Sequence[Worker]
    ) -> None:
        """Have the frontends send what comes to *workers* alone; return when they do."""
        beside = self._endpoints.with_suffix(".new")
        beside.write_text(_workers_file(workers))
        beside.replace(self._endpoints)
        names = {worker.name for worker in workers}

        async def serve() -> bool:
            found = [await self._instances(http, url) for url in self.urls]
            return all(
                {one["worker_id"] for one in usable(seen)} == names for seen in found
            )

        def usable(instances: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [
                one
                for one in instances
                if one["state"] == "ready"
                and not (one.get("leaving") or one.get("draining"))
            ]

        await self._until(serve, f"the frontends serve by {sorted(names)}")

    async def has_open(
        self, http: aiohttp.ClientSession, worker: Worker, num_requests: int
    ) -> None:
        """Return when so many requests are at *worker*."""

        async def open_there() -> bool:
            found = [await self._instances(http, url) for url in self.urls]
            counts: list[int] = [
                one.get("num_open", 0)
                for one in itertools.chain(*found)
                if one["worker_id"] == worker.name
            ]
            return sum(counts) == num_requests

        await self._until(open_there, f"{num_requests} requests at {worker.name}")

    async def _until(self, holds: Callable[[], Awaitable[bool]], what: str) -> None:
        try:
            async with asyncio.timeout(self._ready_s):
                while not await holds():
                    await asyncio.sleep(LOOK_S)
        except TimeoutError as error:
            raise TimeoutError(f"not within {self._ready_s:.0f} s: {what}") from error

    async def _instances(
        self, http: aiohttp.ClientSession, url: str
    ) -> list[dict[str, Any]]:
        for process in self._frontends:
            process.check()
        try:
            async with http.get(f"{url}/health") as answer:
                health: dict[str, Any] = await answer.json()
        except (aiohttp.ClientError, OSError):
            return []
        instances: list[dict[str, Any]] = health.get("instances") or []
        return instances


def _workers_file(workers: Sequence[Worker]) -> str:
    return json.dumps({"workers": [{"endpoint": one.endpoint} for one in workers]})
