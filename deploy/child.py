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
from typing import cast

from . import guard
from .output import LineSplitter

__all__ = ["Child"]

MAX_LOG_BYTES = 64 * 1024 * 1024
"""Per log file; a full one moves to ``.1``, so a process keeps at most twice this.
vLLM writes about 1 MB an hour at INFO, a day and a half at least."""

NUM_LAST_LINES = 15
"""What is shown of a process that died: a Python traceback's end."""

_STDOUT = 1
_OUTPUT_END_S = 2.0
"""For output that is still in the pipe when the process has ended. Longer only if
something unknown to the guard holds the pipe, and that must not keep us."""


class Child:
    """A running command. ``wait`` for it exactly once, also after ``stop`` or ``kill``."""

    def __init__(
        self,
        guarded: _Guarded,
        log: _Log,
        on_line: Callable[[str], None],
        on_end: Callable[[], None],
    ) -> None:
        self.last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._guarded = guarded
        self._log = log
        self._on_line = on_line
        self._on_end = on_end
        self._lines = LineSplitter()
        guarded.on_output = lambda data: self._take(self._lines.feed(data))

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
        guarded = _Guarded()
        child = cls(guarded, log, on_line, on_end)
        try:
            await asyncio.get_running_loop().subprocess_exec(
                lambda: guarded,
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
        return child

    def stop(self) -> None:
        """Ask the command to end (SIGTERM)."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the command and all that it started."""
        self._signal(signal.SIGQUIT)

    def kill_group(self) -> None:
        """Kill the guard with its group: for a guard that does not obey."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._guarded.process.get_pid(), signal.SIGKILL)

    async def wait(self) -> int:
        """Return the exit status (``-N`` for signal N) once all of it has ended."""
        status = await self._guarded.exited
        if status == -signal.SIGKILL:
            # Perhaps the guard itself was killed: its group is still there.
            self.kill_group()
        await asyncio.wait([self._guarded.output_ended], timeout=_OUTPUT_END_S)
        self._guarded.process.close()
        self._take(self._lines.end())
        self._log.close()
        return status

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._guarded.process.send_signal(number)

    def _take(self, lines: list[str]) -> None:
        for line in lines:
            if line == guard.ENDED:
                self._on_end()
                continue
            self._log.write(line)
            self.last_lines.append(line)
            self._on_line(line)


class _Guarded(asyncio.SubprocessProtocol):
    """A guard as the event loop tells of it.

    ``asyncio.subprocess.Process.wait`` waits for the pipes as well (in Python 3.11), so
    it does not return where a guard was killed and what it guarded holds them.
    """

    process: asyncio.SubprocessTransport
    on_output: Callable[[bytes], None]

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[int] = loop.create_future()
        self.output_ended: asyncio.Future[None] = loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.process = cast("asyncio.SubprocessTransport", transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        del fd  # it has one for both outputs
        self.on_output(data)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        del exc
        if fd == _STDOUT and not self.output_ended.done():
            self.output_ended.set_result(None)

    def process_exited(self) -> None:
        status = self.process.get_returncode()
        if status is not None and not self.exited.done():
            self.exited.set_result(status)


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
