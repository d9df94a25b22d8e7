"""The processes of the benchmark, each on one core, and what they cost."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path

from ports import free_port
from waiting import comes_true, status

__all__ = ["MODEL_NAME", "Stack", "cpu_s", "floor", "rss_mib", "stack"]

MODEL_NAME = "bench"

WORKER_NICE = 10
"""The worker shares its core with the client, which must come first: where it reads too
slowly, a frontend makes one event of many tokens, and its cost per event says nothing."""

READY_S = 60.0
BLOCKS_PER_SEQ = 64  # of 16 tokens: 1,024 of prompt and output each


@dataclass
class Stack:
    """A worker and a frontend, running."""

    port: int
    frontend_pid: int
    worker_endpoint: str
    worker_pid: int = 0
    child_pids: list[int] = field(default_factory=list[int])  # of the frontend

    def cpu_s(self) -> float:
        """Return the CPU time of the frontend with all its processes, in s."""
        return sum(map(cpu_s, [self.frontend_pid, *self.child_pids]))


@contextlib.contextmanager
def running(
    command: list[str],
    core: int | str,
    log: Path,
    source: Path | None = None,
    nice: int = 0,
) -> Generator[subprocess.Popen[bytes]]:
    """Run a process of ours on a core, and end it.

    Args:
        command: Arguments of the interpreter.
        core: Where it runs; several as taskset writes them.
        log: Where its output goes.
        source: A folder to import ``tokenwire`` from, in place of the installed one.
        nice: How far it stands back behind others on its core.
    """
    environment = os.environ | ({"PYTHONPATH": str(source)} if source else {})
    with log.open("ab") as file:
        process = subprocess.Popen(
            [
                *("nice", "-n", str(nice), "taskset", "-c", str(core)),
                *(sys.executable, *command),
            ],
            stdout=file,
            stderr=file,
            env=environment,
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
def stack(
    model: str,
    step_ms: str,
    cores: list[int],
    folder: Path,
    checkout: Path | None = None,
    processes: int = 1,
    frontend_cores: str = "",
    max_num_seqs: int = 1_024,
    blocks_per_seq: int = BLOCKS_PER_SEQ,
) -> Generator[Stack]:
    """Run a worker with the given step and a frontend, and wait until it serves.

    The frontend is that of *checkout*, or the installed one. It runs on the first core,
    or on *frontend_cores*, as taskset writes them, and takes twice as many requests as
    the worker runs sequences, *max_num_seqs*.
    """
    name = "installed" if checkout is None else "checkout"
    announce = folder / f"worker-{step_ms}-{name}.json"
    source = None if checkout is None else importable(checkout, folder)
    port = free_port()
    worker = [
        *("-m", "tokenwire.worker", "--engine", "sim", "--role", "aggregated"),
        *("--model", model, "--served-model-name", MODEL_NAME),
        *("--listen", "tcp://127.0.0.1:0", "--announce", str(announce)),
        *("--", "--step-ms", step_ms, "--prefill-tokens-per-s", "0"),
        *("--num-blocks", str(blocks_per_seq * max_num_seqs)),
        *("--max-num-seqs", str(max_num_seqs)),
    ]
    if processes > 1 or frontend_cores:
        name = f"{name}-{processes}-{frontend_cores}"
        announce = folder / f"worker-{step_ms}-{name}.json"
        worker[worker.index("--announce") + 1] = str(announce)
    log = folder / "worker.log"
    with running(worker, cores[-1], log, nice=WORKER_NICE) as process:
        wait_for(announce.exists, process)
        worker_pid = process.pid
        endpoint = json.loads(announce.read_text())["endpoint"]
        frontend = [
            *(
                "-m",
                "tokenwire.frontend",
                "--model",
                model,
                "--served-model-name",
                MODEL_NAME,
            ),
            *("--port", str(port), "--worker", endpoint, "--log-level", "warning"),
            *("--max-inflight-requests", str(2 * max_num_seqs)),
        ]
        if processes > 1:
            frontend += ["--processes", str(processes)]
        log = folder / "frontend.log"
        on = frontend_cores or cores[0]
        with running(frontend, on, log, source) as process:
            wait_for(lambda: is_ready(port), process)
            pids: list[int] = []
            if processes > 1:
                wait_for(lambda: len(ready_pids(port)) == processes, process)
                pids = ready_pids(port)
            yield Stack(port, process.pid, endpoint, worker_pid, pids)


@contextlib.contextmanager
def floor(step_ms: str, cores: list[int], folder: Path) -> Generator[Stack]:
    """Run a process that only writes finished chunks, in place of a frontend."""
    port = free_port()
    script = str(Path(__file__).with_name("bench_floor.py"))
    command = [script, str(port), step_ms]
    with running(command, cores[0], folder / "floor.log") as process:
        wait_for(lambda: is_ready(port), process)
        yield Stack(port, process.pid, "")


def importable(checkout: Path, folder: Path) -> Path:
    """Return a folder from which ``tokenwire`` of *checkout* is imported."""
    source = folder / "source"
    package = source / "tokenwire"
    if not package.exists():
        package.mkdir(parents=True)
        for name in ("frontend", "protocol", "worker"):
            (package / name).symlink_to(checkout.resolve() / name)
    return source


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Return when *condition* holds; fail if the process ends or it takes too long."""
    if not comes_true(condition, READY_S, [process]):
        sys.exit(f"bench: {process.args!r} did not come up")


def is_ready(port: int) -> bool:
    """Return whether the frontend serves."""
    return status(f"http://127.0.0.1:{port}/ready", timeout_s=1.0) == 200


def ready_pids(port: int) -> list[int]:
    """Return the processes of a frontend that serve."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as answer:
        seats = json.load(answer)["processes"]
    return [seat["pid"] for seat in seats if seat["ready"]]


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
