"""``tokenwire-up`` as a process of the test's own, and ways to hurt what it runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ports import free_port

from support.awake import Awake, within
from support.tracing import untraced

__all__ = ["Up", "alive", "children", "until", "up"]

LOOK_S = 0.05

SETTINGS = {"TOKENWIRE_REMOTE_PREFILL_MIN_TOKENS": "0"}
"""Prompts of tests are short, and hand-overs are what they are about."""


async def until(condition: Any, timeout_s: float, what: str) -> float:
    """Return how long it took until *condition* held; fail after *timeout_s* awake."""
    began, awake = time.monotonic(), Awake()
    while not await asyncio.to_thread(condition):
        if awake.seconds > timeout_s:
            msg = f"not within {timeout_s} s: {what}"
            raise AssertionError(msg)
        await asyncio.sleep(LOOK_S)
    return time.monotonic() - began


def alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def children(pid: int) -> list[int]:
    """Return every process below *pid*, at any depth."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, IndexError, ValueError):
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(stat[1])
    below = [pid]
    for one in below:
        below += [child for child, parent in parents.items() if parent == one]
    return below[1:]


@dataclass
class Up:
    """A running ``tokenwire-up``."""

    process: asyncio.subprocess.Process
    port: int
    log: Path

    @property
    def url(self) -> str:
        """Where the frontend is."""
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> tuple[int, Any]:
        """GET a path of the frontend: status and JSON; status 0 if it is not there."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=5) as answer:  # noqa: S310 - our own URL
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"null")
        except OSError:
            return 0, None

    def ready(self, **workers: int) -> bool:
        """Return whether the frontend has exactly so many usable workers by role."""
        _, body = self.get("/ready")
        counts = {"prefill": 0, "decode": 0, "aggregated": 0, **workers}
        return body is not None and body["workers"] == counts

    def pid(self, name: str) -> int:
        """Return the process of a worker by its id, or of ``frontend``."""
        for pid in children(self.process.pid):
            with contextlib.suppress(OSError):
                arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                words = [word.decode(errors="replace") for word in arguments]
                if any(word.endswith("guard.py") for word in words):
                    continue
                is_worker = "tokenwire.worker" in words and name in words
                if is_worker or (name == "frontend" and "tokenwire.frontend" in words):
                    return pid
        msg = f"no process {name} below {self.process.pid}"
        raise AssertionError(msg)

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal to a worker or ``frontend``; returns its pid."""
        pid = self.pid(name)
        os.kill(pid, number)
        return pid


@contextlib.asynccontextmanager
async def up(
    model: Path,
    folder: Path,
    *,
    engine: str,
    workers: dict[str, int],
    timeout_s: float,
    engine_arguments: Sequence[str] = (),
    name: str = "tiny",
    frontends: int = 1,
    settings: Mapping[str, str] | None = None,
) -> AsyncGenerator[Up]:
    """Run ``tokenwire-up`` until all workers are usable; stop it by SIGINT.

    A real engine's processes are not traced.
    """
    port = free_port()
    log = folder / "up.log"
    counts = [
        f"--{role}={workers.get(role, 0)}"
        for role in ("prefill", "decode", "aggregated")
    ]
    environment = {**os.environ, **SETTINGS, **(settings or {})}
    with log.open("ab") as file:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tokenwire.deploy.up", "--engine", engine),
            *("--model", str(model), "--served-model-name", name),
            *("--port", str(port), "--frontends", str(frontends), *counts),
            *("--log-dir", str(folder / "logs"), "--", *engine_arguments),
            stdout=file,
            stderr=file,
            env=untraced(environment) if engine == "vllm" else environment,
        )
    running = Up(process, port, log)

    def serves() -> bool:
        if process.returncode is not None:
            msg = f"tokenwire-up ended with {process.returncode}: {log.read_text()[-3000:]}"
            raise AssertionError(msg)
        return running.ready(**workers)

    try:
        await until(serves, timeout_s, f"ready; {log}")
        yield running
    finally:
        everything = children(process.pid)
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        async with within(60):
            await process.wait()
        left = [pid for pid in everything if alive(pid)]
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        assert not left, f"processes left behind: {left}"
