"""The supervisor over real processes: start, restart, giving up, and a clean end.

Its children are small scripts; ``FAKE`` does what a worker or a frontend does for it.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tokenwire.deploy import up
from tokenwire.deploy.plan import FrontendSpec, Plan, WorkerSpec
from tokenwire.deploy.probe import usable_port
from tokenwire.deploy.restart import RestartPolicy
from tokenwire.deploy.supervisor import Supervisor, Timing

LIMIT_S = 20.0
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
        ok = self.path == "/live" or len(workers) >= int(behaviour[1])
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
            async with asyncio.timeout(LIMIT_S):
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
        async with asyncio.timeout(LIMIT_S):
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
        port = usable_port("127.0.0.1", 0)
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
            await asyncio.wait([setup.result], timeout=LIMIT_S)


def gone(pid: int) -> bool:
    """Return whether a process, not a child of this one, ends within the limit."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], LIMIT_S)[0])
    finally:
        os.close(process)


async def test_starts_announces_and_says_how_to_try(tmp_path: Path) -> None:
    """Workers that are up are in the workers file, and readiness is said with a URL."""
    async with starting(tmp_path) as start:
        setup = start("prefill-0", "decode-0")
        await setup.lines.until("tokenwire serves m at http://127.0.0.1:")
        await setup.lines.until("return_token_ids")
        await setup.lines.until("frontend-0", "up")
        assert setup.workers() == {
            name: f"tcp://127.0.0.1:{setup.pid(name)}"
            for name in ("decode-0", "prefill-0")
        }
        setup.supervisor.stop()
        assert await setup.end() == 0


async def test_shows_phases_and_warnings_but_not_chatter(tmp_path: Path) -> None:
    """Phases and warnings are shown under the process's name; INFO is only logged."""
    async with starting(tmp_path) as start:
        setup = start("prefill-0")
        await setup.lines.until("prefill-0", "loading")
        await setup.lines.until("prefill-0", "WARNING 01-01 take care")
        await setup.lines.until("prefill-0", "up at tcp://")
    assert "chatter" not in setup.lines.text
    assert "INFO 01-01 chatter" in (tmp_path / "prefill-0.log").read_text()


async def test_restarts_a_killed_worker_under_its_new_endpoint(tmp_path: Path) -> None:
    """A worker killed by a signal is named with it, restarted and listed anew."""
    async with starting(tmp_path) as start:
        setup = start("prefill-0", "decode-0")
        await setup.lines.until("tokenwire serves")
        old = setup.pid("decode-0")
        os.kill(old, signal.SIGKILL)
        await setup.lines.until("decode-0", "SIGKILL", "starts again")
        await setup.lines.until("decode-0", "up at", times=2)
        new = setup.pid("decode-0")
        assert new != old
        assert setup.workers()["decode-0"] == f"tcp://127.0.0.1:{new}"


async def test_a_dead_worker_leaves_the_workers_file(tmp_path: Path) -> None:
    """While a worker is down, the workers file does not send frontends to it."""
    policy = RestartPolicy(first_delay_s=3600, max_delay_s=3600)
    async with starting(tmp_path) as start:
        setup = start("prefill-0", "decode-0", policy=policy)
        await setup.lines.until("tokenwire serves")
        os.kill(setup.pid("decode-0"), signal.SIGKILL)
        await setup.lines.until("decode-0", "starts again in 3600 s")
        assert list(setup.workers()) == ["prefill-0"]
        setup.supervisor.stop()
        assert await setup.end() == 0


async def test_restarts_a_killed_frontend(tmp_path: Path) -> None:
    """A frontend that dies is started again and answers again."""
    async with starting(tmp_path) as start:
        setup = start("prefill-0")
        await setup.lines.until("tokenwire serves")
        await setup.lines.until("frontend-0", "up")
        os.kill(setup.pid("frontend-0"), signal.SIGKILL)
        await setup.lines.until("frontend-0", "SIGKILL", "starts again")
        await setup.lines.until("frontend-0  up", times=2)


async def test_gives_up_a_worker_that_never_came_up(tmp_path: Path) -> None:
    """Three failed starts end everything with exit code 1 and the last lines shown."""
    async with starting(tmp_path) as start:
        setup = start("prefill-0", "decode-0", decode_0=["fail"])
        assert await setup.end() == 1
    assert "> no such model" in setup.lines.text
    assert "did not come up, 3 times in a row (exit code 1)" in setup.lines.text
    assert setup.lines.count("decode-0", "starting") == 3


async def test_gives_up_a_bad_setting_at_once(tmp_path: Path) -> None:
    """A child that exits with 2 at its start is not tried again."""
    async with starting(tmp_path) as start:
        setup = start("prefill-0", prefill_0=["misuse"])
        assert await setup.end() == 1
    assert "was started with a bad setting (exit code 2)" in setup.lines.text
    assert setup.lines.count("prefill-0", "starting") == 1


async def test_keeps_trying_a_worker_that_was_up_once(tmp_path: Path) -> None:
    """A worker that has served is restarted more often than one that never did."""
    async with starting(tmp_path) as start:
        policy = RestartPolicy(first_delay_s=0.01, max_failed_starts=1)
        setup = start("prefill-0", policy=policy, prefill_0=["once"])
        await setup.lines.until("prefill-0", "up at")
        os.kill(setup.pid("prefill-0"), signal.SIGKILL)
        await setup.lines.until("prefill-0", "exit code 7", "starts again", times=2)
        setup.supervisor.stop()
        assert await setup.end() == 0


async def test_a_malformed_announce_is_a_failed_start(tmp_path: Path) -> None:
    """A worker that announces something else is killed, in a sentence, and given up."""
    policy = RestartPolicy(max_failed_starts=1)
    async with starting(tmp_path) as start:
        setup = start("prefill-0", policy=policy, prefill_0=["garbage"])
        assert await setup.end() == 1
    assert "its announce file is malformed" in setup.lines.text


async def test_a_worker_that_loads_for_ever_is_a_failed_start(tmp_path: Path) -> None:
    """A worker that does not announce itself within the limit is killed."""
    policy = RestartPolicy(max_failed_starts=1)
    timing = Timing(poll_s=0.01, start_timeout_s=0.3)
    async with starting(tmp_path) as start:
        setup = start("prefill-0", policy=policy, timing=timing, prefill_0=["mute"])
        assert await setup.end() == 1
    assert "killing it" in setup.lines.text


async def test_stop_leaves_no_process_behind(tmp_path: Path) -> None:
    """After a stop, children and what they started in other sessions are gone."""
    async with starting(tmp_path) as start:
        setup = start("prefill-0", prefill_0=["family"])
        await setup.lines.until("tokenwire serves")
        pids = [setup.pid(n) for n in ("prefill-0", "frontend-0")]
        pids.append(setup.pid("prefill-0", "family"))
        setup.supervisor.stop()
        assert await setup.end() == 0
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_frontends_stop_before_workers(tmp_path: Path) -> None:
    """No worker is stopped while a frontend still runs."""
    async with starting(tmp_path) as start:
        setup = start("prefill-0", "decode-0", frontends=1)
        await setup.lines.until("tokenwire serves")
        setup.supervisor.stop()
        assert await setup.end() == 0
    stopped = [line for line in setup.lines.text.splitlines() if "stopped" in line]
    assert len(stopped) == 3
    assert "frontend-0" in stopped[0]


async def test_a_deaf_worker_is_killed_after_the_bound(tmp_path: Path) -> None:
    """A worker that ignores SIGTERM is killed when its time to stop is over."""
    timing = Timing(poll_s=0.01, stop_timeout_s=0.2)
    async with starting(tmp_path) as start:
        setup = start("prefill-0", timing=timing, prefill_0=["deaf"])
        await setup.lines.until("prefill-0", "up at")
        setup.supervisor.stop()
        assert await setup.end() == 0
    assert "does not stop: killing it" in setup.lines.text


async def test_a_second_stop_kills_at_once(tmp_path: Path) -> None:
    """A second Ctrl-C does not wait for a worker that ignores the first."""
    timing = Timing(poll_s=0.01, stop_timeout_s=3600)
    async with starting(tmp_path) as start:
        setup = start("prefill-0", timing=timing, prefill_0=["deaf", "family"])
        await setup.lines.until("prefill-0", "up at")
        family = setup.pid("prefill-0", "family")
        setup.supervisor.stop()
        await setup.lines.until("frontend-0", "stopped")
        setup.supervisor.stop()
        assert await setup.end() == 0
    with pytest.raises(ProcessLookupError):
        os.kill(family, 0)


async def test_says_whom_it_waits_for(tmp_path: Path) -> None:
    """While nothing changes, a line names who is awaited, in which phase."""
    async with starting(tmp_path) as start:
        timing = Timing(poll_s=0.01, silence_s=0.1)
        setup = start("prefill-0", timing=timing, prefill_0=["mute"])
        await setup.lines.until("waiting for prefill-0 (loading,")


def parent(pid: int) -> int:
    """Return the process that started *pid*."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


async def test_a_killed_guard_takes_its_worker_along(tmp_path: Path) -> None:
    """SIGKILL to the process between supervisor and worker ends the worker too."""
    async with starting(tmp_path) as start:
        setup = start("prefill-0")
        await setup.lines.until("prefill-0", "up at")
        worker = setup.pid("prefill-0")
        os.kill(parent(worker), signal.SIGKILL)
        assert gone(worker)
        await setup.lines.until("prefill-0", "up at", times=2)


@pytest.fixture
def command_up(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Give ``tokenwire-up`` as a process of its own, serving with fake children."""
    command = [sys.executable, __file__, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process: subprocess.Popen[str], words: str) -> str:
    """Return what *process* printed up to the line with *words*."""
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if words in line:
            return text
    pytest.fail(f"ended without {words!r}:\n{text}")


def noted_pids(folder: Path) -> list[int]:
    """Return the ids of all fakes, and of what they started."""
    notes = [*folder.glob("*.pid"), *folder.glob("*.family")]
    return [int(note.read_text()) for note in notes]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_ends_everything_with_0(
    command_up: subprocess.Popen[str], tmp_path: Path, number: signal.Signals
) -> None:
    """One Ctrl-C or SIGTERM stops all, exits with 0 and removes its folders."""
    text = read_until(command_up, "Ctrl-C stops everything")
    logs = Path(text.split("logs in ")[1].splitlines()[0])
    assert logs.stat().st_mode & 0o777 == 0o700
    command_up.send_signal(number)
    assert command_up.wait(LIMIT_S) == 0
    assert not logs.exists()
    pids = noted_pids(tmp_path)
    assert len(pids) == 3
    assert all(gone(pid) for pid in pids)


def test_children_die_with_a_killed_supervisor(
    command_up: subprocess.Popen[str], tmp_path: Path
) -> None:
    """SIGKILL to ``tokenwire-up`` leaves neither children nor their children."""
    read_until(command_up, "Ctrl-C stops everything")
    command_up.kill()
    pids = noted_pids(tmp_path)
    assert len(pids) == 3
    assert all(gone(pid) for pid in pids)


def main() -> None:
    """Serve as ``tokenwire-up`` does, with fakes, until a signal."""
    folder = Path(sys.argv[1])
    port = usable_port("127.0.0.1", 0)
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
