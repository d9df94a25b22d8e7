"""What the processes under test cost: CPU time and memory, as the kernel counts them."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

__all__ = ["cpu_s", "end", "family", "parents", "rss_mib", "start"]

END_S = 1.0
"""From SIGTERM to SIGKILL: nothing that is measured happens in between."""


def start(
    command: list[str], core: int, log: Path, environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Start a process on a core; its threads and children inherit it."""
    with log.open("ab") as file:
        return subprocess.Popen(
            ["taskset", "-c", str(core), *command],
            stdout=file,
            stderr=file,
            stdin=subprocess.DEVNULL,
            env=os.environ | environment,
        )


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all below it."""
    pids = family(process.pid)
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def parents(lines: Iterable[str]) -> dict[int, int]:
    """Return each process's parent, from lines of ``/proc/PID/stat``."""
    found: dict[int, int] = {}
    for line in lines:
        # The name may hold spaces and brackets: what is after its last bracket does not.
        head, _, rest = line.rpartition(")")
        found[int(head.split()[0])] = int(rest.split()[1])
    return found


def family(pid: int) -> list[int]:
    """Return a process and every one below it."""
    lines: list[str] = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            lines.append(entry.read_text())
    parent_of = parents(lines)
    found = [pid]
    for one in found:
        found += [child for child, parent in parent_of.items() if parent == one]
    return found


def cpu_s(pids: Iterable[int]) -> float:
    """Return the CPU time of processes in s: all their threads, ended ones included.

    The kernel's clock of a process counts ns; ``/proc/PID/stat`` counts ticks of 10 ms.
    """
    total = 0.0
    for pid in pids:
        # CPUCLOCK_SCHED of another process, as clock_getcpuclockid(3) makes it.
        with contextlib.suppress(OSError):
            total += time.clock_gettime((~pid << 3) | 2)
    return total


def rss_mib(pids: Iterable[int]) -> float:
    """Return the resident memory of processes in MiB; what they share counts in each."""
    pages = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20
