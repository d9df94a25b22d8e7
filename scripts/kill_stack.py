"""Two frontends, a prefill and two decode workers of ``kill_demo``: start, kill, restart.

``tokenwire-up`` gives its frontends one port; here each has its own, so that a client can
leave a dead one for the other.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from ports import free_port
from survive_processes import below, read
from survive_scenarios import until

from tokenwire.deploy import guard
from tokenwire.deploy.plan import (
    FrontendSpec,
    TokenwireCommands,
    WorkerSpec,
    child_environment,
    worker_environment,
)
from tokenwire.deploy.up import this_machine
from tokenwire.deploy.workers_file import render_workers
from tokenwire.protocol.announce import Announce, read_announce
from tokenwire.protocol.files import replace_file

__all__ = ["NAME", "KillStack"]

NAME = "demo"
WORKERS = {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}
FRONTENDS = ("frontend-0", "frontend-1")
START_S = 300.0
"""Frontends load vLLM's parsers, 10 s of a core each; engines take half a minute or, on a
machine that is busy, several."""

STOP_S, ANSWER_S = 20.0, 10.0


class KillStack:
    """The processes, each under a guard that leaves nothing behind.

    Args:
        engine: ``sim`` or ``vllm``.
        model: A model's folder.
        folder: Where logs go.
        engine_arguments: For the workers.
    """

    def __init__(
        self,
        engine: str,
        model: str,
        folder: Path,
        engine_arguments: Sequence[str],
    ) -> None:
        self._ports = {name: free_port() for name in FRONTENDS}
        self._engine = engine
        self._folder = folder
        # The prompt is short, and the hand-over belongs to what may go wrong.
        self._environ = {"TOKENWIRE_REMOTE_PREFILL_MIN_TOKENS": "0", **os.environ}
        self._commands = {
            name: TokenwireCommands(
                engine, model, NAME, "127.0.0.1", port, 1, engine_arguments, "hermes"
            )
            for name, port in self._ports.items()
        }
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def urls(self) -> list[str]:
        """Of the frontends."""
        return [f"http://127.0.0.1:{port}" for port in self._ports.values()]

    async def __aenter__(self) -> Self:
        """Start everything."""
        try:
            await self.whole()
        except BaseException:
            await asyncio.to_thread(self._stop)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """End everything."""
        await asyncio.to_thread(self._stop)

    async def whole(self) -> None:
        """Start what does not run, and wait until both frontends have all workers."""
        for name in WORKERS:
            self._start(name)
        await until(lambda: len(self._announced()) == len(WORKERS), "workers", START_S)
        replace_file(self._workers_file, render_workers(self._announced()))
        for name in FRONTENDS:
            self._start(name)
        await until(self._is_ready, "both frontends have all workers", START_S)

    def frontend_at(self, url: str) -> str:
        """Return the name of a frontend."""
        return FRONTENDS[self.urls.index(url)]

    async def decoding(self, url: str) -> str:
        """Return the decode worker that has this frontend's one request.

        Raises:
            TimeoutError: None has.
        """
        found: list[str] = []

        def look() -> bool:
            health: Any = json.loads(read(url + "/health"))
            found[:] = [
                str(one["worker_id"])
                for one in health["instances"]
                if one["role"] == "decode" and one.get("num_open")
            ]
            return bool(found)

        await until(look, "a decode worker has the request", ANSWER_S)
        return found[0]

    async def kill(self, *names: str) -> None:
        """SIGKILL processes and all below them, so at once that none says a word."""
        for pid in [pid for name in names for pid in below(self._running[name].pid)]:
            os.kill(pid, signal.SIGKILL)
        for name in names:
            guarded = self._running.pop(name)
            self._announce(name).unlink(missing_ok=True)
            await asyncio.to_thread(guarded.wait, STOP_S)

    def _announce(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    @property
    def _workers_file(self) -> Path:
        return self._folder / "workers.json"

    def _announced(self) -> list[Announce]:
        found = [read_announce(self._announce(name)) for name in WORKERS]
        for name, process in self._running.items():
            if process.poll() is not None:
                log = (self._folder / f"{name}.log").read_text(errors="replace")
                sys.exit(f"{name} has ended:\n{log[-2000:]}")
        return [one for one in found if one is not None]

    def _is_ready(self) -> bool:
        self._announced()  # nothing has ended
        wanted = {"prefill": 1, "decode": 2}
        try:
            answers: list[Any] = [json.loads(read(f"{url}/ready")) for url in self.urls]
        except OSError:
            return False
        return all(wanted.items() <= one["workers"].items() for one in answers)

    def _start(self, name: str) -> None:
        if name in self._running:
            return
        environment: Mapping[str, str] = {}
        if name in WORKERS:
            commands = self._commands[FRONTENDS[0]]
            spec = WorkerSpec(name, WORKERS[name])
            command = commands.worker(spec, self._announce(name))
            environment = worker_environment(
                list(WORKERS).index(name),
                len(WORKERS),
                engine=self._engine,
                gpus_per_worker=1,
                machine=this_machine(),
                environ=self._environ,
            )
        else:
            commands = self._commands[name]
            command = commands.frontend(FrontendSpec(name), self._workers_file)
        with (self._folder / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                [sys.executable, "-I", "-S", str(guard.__file__), *command],
                stdin=subprocess.PIPE,  # a lifeline: they end when we do
                stdout=log,
                stderr=log,
                env=child_environment(self._environ, environment),
            )

    def _stop(self) -> None:
        for process in self._running.values():
            process.send_signal(signal.SIGTERM)
        for process in self._running.values():
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGQUIT)
                process.wait(STOP_S)
