"""One child process: its guard, its output, its log file."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from . import guard
from .output import LineSplitter

__all__ = ["Child"]

MAX_LOG_BYTES = 64 * 1024 * 1024
"""Per log file; a full one moves to ``.1``, so a process keeps at most twice this.
vLLM writes about 1 MB an hour at INFO, a day and a half at least."""

NUM_LAST_LINES = 15
"""What is shown of a process that died: a Python traceback's end."""

_READ_BYTES = 64 * 1024
_OUTPUT_END_S = 2.0
"""For output that is still in the pipe when the process has ended. Longer only if
something unknown to the guard holds the pipe, and that must not keep us."""


class Child:
    """A running command. ``wait`` for it exactly once, also after ``stop`` or ``kill``."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        log: _Log,
        on_line: Callable[[str], None],
        on_end: Callable[[], None],
    ) -> None:
        self.last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._process = process
        self._log = log
        self._on_line = on_line
        self._on_end = on_end
        self._output = asyncio.create_task(self._read_output())

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        log_path: Path,
        on_line: Callable[[str], None],
        on_end: Callable[[], None],
    ) -> Child:
        """Start *command* under a guard, in a session of its own.

        Every line of its output goes to the file at *log_path* and to *on_line*.
        *on_end* is called when the command itself has ended; ``wait`` returns later,
        when all that it left behind has ended too.

        Raises:
            OSError: The log file cannot be written, or no process can be made.
        """
        log = _Log(log_path)
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", guard.__file__, *command),
                stdin=asyncio.subprocess.PIPE,  # the guard's lifeline
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=env,
                start_new_session=True,  # a Ctrl-C reaches it only through us
            )
        except BaseException:
            log.close()
            raise
        return cls(process, log, on_line, on_end)

    def stop(self) -> None:
        """Ask the command to end (SIGTERM)."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the command and all that it started."""
        self._signal(signal.SIGQUIT)

    def kill_group(self) -> None:
        """Kill the guard with its group: for a guard that does not obey."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def wait(self) -> int:
        """Return the exit status (``-N`` for signal N) once all of it has ended."""
        status = await self._process.wait()
        if status == -signal.SIGKILL:
            # Perhaps the guard itself was killed: its group is still there.
            self.kill_group()
        await asyncio.wait([self._output], timeout=_OUTPUT_END_S)
        self._output.cancel()
        await asyncio.wait([self._output])
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._log.close()
        return status

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def _read_output(self) -> None:
        stdout = self._process.stdout
        if stdout is None:
            return
        splitter = LineSplitter()
        while data := await stdout.read(_READ_BYTES):
            self._take(splitter.feed(data))
        self._take(splitter.end())

    def _take(self, lines: list[str]) -> None:
        for line in lines:
            if line == guard.ENDED:
                self._on_end()
                continue
            self._log.write(line)
            self.last_lines.append(line)
            self._on_line(line)


class _Log:
    """A log file of bounded size. A full disk costs log lines, not the service."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab")

    def write(self, line: str) -> None:
        with contextlib.suppress(OSError):
            self._file.write(line.encode(errors="replace") + b"\n")
            self._file.flush()
            if self._file.tell() > MAX_LOG_BYTES:
                self._file.close()
                self._path.replace(self._path.with_suffix(".log.1"))
                self._file = self._path.open("ab")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
