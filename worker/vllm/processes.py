"""The engine's own processes: known by identity, ended when it stops.

vLLM ends them itself. This is for the cases where it cannot: an engine core that was
killed leaves its workers to another parent, and a stop has to be bounded.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["Descendants"]

KILL_WAIT_S = 5.0
"""From SIGKILL to gone: the kernel frees gigabytes of mapped memory meanwhile."""


class Descendants:
    """Processes that appear below this one, from now on."""

    def __init__(self) -> None:
        self._psutil: Any = import_module("psutil")  # a dependency of vLLM
        self._before = set(self._below())
        self._seen: set[Any] = set()

    def look(self) -> list[int]:
        """Note the processes there are now; return the ids of all that still live."""
        self._seen.update(set(self._below()) - self._before)
        return [process.pid for process in self._seen if self._lives(process)]

    def kill(self) -> int:
        """Kill those that still live, wait for their end; return how many there were.

        Blocks for up to ``KILL_WAIT_S``. A process whose id now belongs to another is
        left alone: psutil compares creation times.
        """
        self.look()
        alive = [process for process in self._seen if self._lives(process)]
        for process in alive:
            try:
                process.kill()
            except self._psutil.NoSuchProcess:
                continue
        self._psutil.wait_procs(self._seen, timeout=KILL_WAIT_S)  # reaps them, too
        return len(alive)

    def _below(self) -> list[Any]:
        # Python's resource tracker is everybody's in this process, and ends with it.
        return [
            process
            for process in self._psutil.Process().children(recursive=True)
            if not self._is_tracker(process)
        ]

    def _lives(self, process: Any) -> bool:
        try:
            running = process.is_running()
            return bool(running and process.status() != self._psutil.STATUS_ZOMBIE)
        except self._psutil.NoSuchProcess:
            return False

    def _is_tracker(self, process: Any) -> bool:  # psutil's Process
        try:
            return any("resource_tracker" in part for part in process.cmdline())
        except self._psutil.Error:
            return False  # gone already, or a zombie
