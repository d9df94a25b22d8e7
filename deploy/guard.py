"""Run one command so that nothing of it outlives this process or its starter.

Started by path (``python -I -S guard.py COMMAND ...``): standard library only, up in
milliseconds, single-threaded. Laws:
- Standard input is a lifeline: at its end (the starter was killed) everything ends.
- Descendants whose parent dies come to the guard (it is a subreaper), so it finds
  them all, whatever session they moved to: vLLM's EngineCore does not notice that its
  parent is gone, and holds gigabytes.
- When the command ends, what it left behind is ended; only then the guard ends, the
  way the command did (same exit code, same signal).

SIGTERM, SIGINT and SIGHUP go to the command. SIGQUIT kills everything at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["ENDED"]

ENDED = "tokenwire-guard: the command ended"
"""Line on standard output when the command has ended and the clearing up begins: that
may take seconds, in which nobody should be sent to the command any more."""

GRACE_S = 3.0
"""From SIGTERM to SIGKILL for what is left behind: an EngineCore frees its shared
memory in under a second, and the starter waits 10 s for the whole."""

KILL_WAIT_S = 5.0
"""For the kernel to take down killed processes; only one in uninterruptible sleep
(a hung device) takes longer, and nothing can be done about that."""

_POLL_S = 0.1  # between looks at what is left; also bounds a missed SIGCHLD
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class _Guard:
    def __init__(self) -> None:
        self.status: int | None = None  # the command's exit code, -N for signal N
        self._command = 0
        self._lifeline = True
        self._at_once = False
        self._prctl = _prctl()
        self._wakeup, wakeup_end = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(wakeup_end, False)
        signal.set_wakeup_fd(wakeup_end, warn_on_full_buffer=False)
        for number in (*_FORWARDED, signal.SIGCHLD, signal.SIGQUIT):
            signal.signal(number, lambda _number, _frame: None)

    def run(self, command: list[str]) -> int:
        """Run *command* to its end and clear up after it; return its exit status."""
        if self._prctl:
            self._prctl(_PR_SET_CHILD_SUBREAPER, 1)
        # One thread, so a preexec_fn is safe here. It covers a guard killed by -9.
        process = subprocess.Popen(  # noqa: S603 - the starter's own command
            command,
            stdin=subprocess.DEVNULL,
            preexec_fn=self._die_with_guard,
        )
        self._command = process.pid
        while self.status is None and self._lifeline and not self._at_once:
            self._wait(None)
        if self.status is not None:
            with contextlib.suppress(OSError):  # the starter may be gone
                os.write(1, f"\n{ENDED}\n".encode())
        self._clear_up()
        process.returncode = self.status  # reaped here, not by subprocess
        return -signal.SIGKILL if self.status is None else self.status

    def _die_with_guard(self) -> None:
        if self._prctl:
            self._prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))

    def _wait(self, timeout_s: float | None) -> None:
        """Sleep until a signal, the lifeline's end or the timeout; handle what came."""
        sources = [self._wakeup, 0] if self._lifeline else [self._wakeup]
        readable, _, _ = select.select(sources, [], [], timeout_s)
        if 0 in readable and not os.read(0, 4096):
            self._lifeline = False
        if self._wakeup in readable:
            for number in os.read(self._wakeup, 4096):
                self._handle(number)

    def _handle(self, number: int) -> None:
        if number == signal.SIGCHLD:
            self._reap()
        elif number == signal.SIGQUIT:
            self._at_once = True
        elif self.status is None and self._command:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._command, number)

    def _reap(self) -> bool:
        """Collect whoever has ended; return whether any child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._command:
                self.status = os.waitstatus_to_exitcode(status)

    def _clear_up(self) -> None:
        now = time.monotonic()
        kill_at, give_up_at = now + GRACE_S, now + GRACE_S + KILL_WAIT_S
        told: set[int] = set()
        while self._reap() and now < give_up_at:
            if self._at_once or now >= kill_at:
                _signal(_descendants(), signal.SIGKILL)
            else:
                new = set(_descendants()) - told
                _signal(new, signal.SIGTERM)
                told |= new
            self._wait(_POLL_S)
            now = time.monotonic()


def _prctl() -> Callable[[int, int], int] | None:
    """Return the C function, or None where there is none (not Linux)."""
    try:
        return ctypes.CDLL(None).prctl
    except (AttributeError, OSError):
        return None


def _signal(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _descendants() -> set[int]:
    """Return the ids of all processes below this one."""
    children: dict[int, list[int]] = {}
    for pid, parent in _processes():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    pending = [os.getpid()]
    while pending:
        below = children.get(pending.pop(), [])
        found.update(below)
        pending += below
    return found


def _processes() -> Iterator[tuple[int, int]]:
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # "pid (name) state ppid ...": the name may hold spaces and parentheses.
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2]
            yield int(entry.name), int(fields.split()[1])


def main() -> None:
    """Run the command in ``sys.argv`` and end as it ended."""
    try:
        status = _Guard().run(sys.argv[1:])
    except OSError as error:
        sys.exit(f"cannot start {sys.argv[1]}: {error}")
    if status >= 0:
        sys.exit(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command dumped its own
    signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
    os.kill(os.getpid(), -status)
    sys.exit(128 - status)


if __name__ == "__main__":
    main()
