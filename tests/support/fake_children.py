"""Fake workers and frontends for the supervisor, and a look at what it does with them.

Run as a module, it is ``tokenwire-up`` with fakes: ``-m support.fake_children FOLDER``.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from ports import free_port

from support.awake import STANDSTILL_S, within
from tokenwire.deploy import up
from tokenwire.deploy.plan import FrontendSpec, Plan, WorkerSpec
from tokenwire.deploy.supervisor import Supervisor, Timing
from tokenwire.protocol.restart import RestartPolicy

LIMIT_S = 60.0
"""For what takes a second: a machine under load must not fail a test."""

FAKE = """
import http.server, json, os, signal, subprocess, sys, threading
kind, folder, target, name, *behaviour = sys.argv[1:]
def note(what, text):
    path = os.path.join(folder, f"{name}.{what}")
    with open(path + ".draft", "w") as file:
        file.write(text)
    os.replace(path + ".draft", path)
if "deaf" in behaviour:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "family" in behaviour:  # as an engine that neither hears nor notices anything
    code = ("import os, signal, time; os.setsid(); "
            "signal.signal(signal.SIGTERM, signal.SIG_IGN); "
            "print('ready', flush=True); time.sleep(600)")
    family = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)
    family.stdout.readline()
    note("family", str(family.pid))
if "tracker" in behaviour:  # as Python's resource tracker: it shares our output
    tracker = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    note("family", str(tracker.pid))
print(f"tokenwire-{kind}: loading", file=sys.stderr, flush=True)
print("INFO 01-01 chatter", flush=True)
print("WARNING 01-01 take care", flush=True)
if "fail" in behaviour:
    sys.exit("no such model")
if "misuse" in behaviour:
    sys.exit(2)
note("pid", str(os.getpid()))
if kind == "worker":
    if "once" in behaviour:  # up the first time only
        mark = os.path.join(folder, "was-up")
        if os.path.exists(mark):
            sys.exit(7)
        open(mark, "w").close()
    if "garbage" in behaviour:
        text = "[]"
    else:
        text = json.dumps({"endpoint": f"tcp://127.0.0.1:{os.getpid()}",
                           "worker_id": name, "role": "prefill", "pid": os.getpid(),
                           "model": "m", "metrics": "http://127.0.0.1:9/metrics"})
    if "mute" not in behaviour:
        with open(target + ".draft", "w") as file:
            file.write(text)
        os.replace(target + ".draft", target)
    while True:
        signal.pause()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        with open(target) as file:
            workers = json.load(file)["workers"]
        wanted = 1 if "eager" in behaviour else int(behaviour[1])
        ok = self.path == "/live" or len(workers) >= wanted
        self.send_response(200 if ok else 503)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(behaviour[0])), Handler).serve_forever()
"""


@dataclass
class FakeCommands:
    """Commands of fake children, each behaving as its name is told to."""

    folder: Path
    port: int
    num_workers: int
    behaviours: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    def worker(self, spec: WorkerSpec, announce: Path) -> list[str]:
        """Return the command of a fake worker."""
        more = self.behaviours.get(spec.name, [])
        return self._command("worker", announce, spec.name, *more)

    def frontend(self, spec: FrontendSpec, workers_file: Path) -> list[str]:
        """Return the command of a fake frontend."""
        more = [str(self.port), str(self.num_workers)]
        more += self.behaviours.get(spec.name, [])
        return self._command("frontend", workers_file, spec.name, *more)

    def _command(self, kind: str, target: Path, name: str, *more: str) -> list[str]:
        fixed = [sys.executable, "-I", "-S", "-c", FAKE, kind]
        return [*fixed, str(self.folder), str(target), name, *more]


class Lines:
    """What the supervisor said; a test waits for a line instead of sleeping."""

    def __init__(self) -> None:
        self.text = ""
        self._news = asyncio.Event()

    def say(self, line: str) -> None:
        """Take a line."""
        self.text += line + "\n"
        self._news.set()

    async def until(self, *words: str, times: int = 1) -> None:
        """Wait until a line has all *words*, for the time number *times*."""
        try:
            async with within(LIMIT_S):
                while self.count(*words) < times:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            pytest.fail(f"never said {words} {times} times:\n{self.text}")

    def count(self, *words: str) -> int:
        """Return how many lines have all *words*."""
        lines = self.text.splitlines()
        return sum(all(word in line for word in words) for line in lines)


@dataclass
class Setup:
    """A supervisor at work, and what a test looks at."""

    supervisor: Supervisor
    lines: Lines
    folder: Path
    result: asyncio.Task[int]

    async def end(self) -> int:
        """Wait for the supervisor to end; return its exit code."""
        async with within(LIMIT_S):
            return await self.result

    def workers(self) -> dict[str, str]:
        """Return the workers file: endpoints by worker id."""
        data = json.loads((self.folder / "workers.json").read_text())
        return {w["worker_id"]: w["endpoint"] for w in data["workers"]}

    def pid(self, name: str, what: str = "pid") -> int:
        """Return the process id that a fake noted."""
        return int((self.folder / f"{name}.{what}").read_text())


Start = Callable[..., Setup]


@asynccontextmanager
async def starting(folder: Path) -> AsyncGenerator[Start]:
    """Give a function that starts a supervisor; nothing of it is left afterwards."""
    setups: list[Setup] = []

    def start(
        *workers: str,
        frontends: int = 1,
        policy: RestartPolicy | None = None,
        timing: Timing | None = None,
        **behaviours: list[str],
    ) -> Setup:
        named = {name.replace("_", "-"): value for name, value in behaviours.items()}
        port = free_port()
        lines = Lines()
        supervisor = Supervisor(
            Plan(
                workers=[WorkerSpec(name, "prefill") for name in workers],
                frontends=[FrontendSpec(f"frontend-{i}") for i in range(frontends)],
                host="127.0.0.1",
                port=port,
                served_model_name="m",
            ),
            FakeCommands(folder, port, len(workers), named),
            run_folder=folder,
            log_folder=folder,
            say=lines.say,
            environ={"PATH": os.environ["PATH"]},
            policy=policy or RestartPolicy(first_delay_s=0.01),
            timing=timing or Timing(poll_s=0.01),
        )
        result = asyncio.create_task(supervisor.run())
        setups.append(Setup(supervisor, lines, folder, result))
        return setups[-1]

    try:
        yield start
    finally:
        for setup in setups:
            setup.supervisor.stop()
            setup.supervisor.stop()
            async with within(LIMIT_S):
                await asyncio.wait([setup.result])


def gone(pid: int) -> bool:
    """Return whether a process, not a child of this one, ends within the limit."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], LIMIT_S + STANDSTILL_S)[0])
    finally:
        os.close(process)


def main() -> None:
    """Serve as ``tokenwire-up`` does, with fakes, until a signal."""
    folder = Path(sys.argv[1])
    port = free_port()
    plan = Plan(
        workers=[WorkerSpec("prefill-0", "prefill")],
        frontends=[FrontendSpec("frontend-0")],
        host="127.0.0.1",
        port=port,
        served_model_name="m",
    )
    commands = FakeCommands(folder, port, 1, {"prefill-0": ["family"]})
    sys.exit(up.run(plan, commands, None, Timing(poll_s=0.01)))


if __name__ == "__main__":
    main()
