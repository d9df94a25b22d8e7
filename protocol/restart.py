"""When to start a dead process again, or to give it up; the clock is the caller's.

Laws:
- A process that has been up once is always started again.
- One that never was is given up after ``max_failed_starts``, or at once if it says
  that its settings are wrong: neither is mended by waiting.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "BAD_SETTINGS",
    "Again",
    "GiveUp",
    "RestartPolicy",
    "Restarts",
    "status_text",
]

BAD_SETTINGS = 2
"""Exit code of our commands (and of argparse) for a bad setting."""


@dataclass(slots=True, frozen=True)
class RestartPolicy:
    """The numbers of the restarts."""

    first_delay_s: float = 1.0
    max_delay_s: float = 30.0  # a lost worker is missed for no longer than this
    stable_after_s: float = 60.0  # up for this long: the next delay is the first again
    max_failed_starts: int = 3  # in a row, while it has never been up


@dataclass(slots=True, frozen=True)
class Again:
    """Start it again after *delay_s*."""

    delay_s: float


@dataclass(slots=True, frozen=True)
class GiveUp:
    """Do not start it again; *why* completes "NAME ..."."""

    why: str


class Restarts:
    """The history of one process. *now* is any monotonic clock, in seconds."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._up_at: float | None = None
        self._was_up = False
        self._num_failures = 0

    def up(self, now: float) -> None:
        """Note that the process is ready for work."""
        self._up_at = now
        self._was_up = True

    def ended(self, now: float, status: int) -> Again | GiveUp:
        """Say what follows the end of the process with exit *status*."""
        up_for_s = 0.0 if self._up_at is None else now - self._up_at
        self._up_at = None
        if up_for_s >= self._policy.stable_after_s:
            self._num_failures = 0
        self._num_failures += 1
        if not self._was_up:
            if status == BAD_SETTINGS:
                return GiveUp("was started with a bad setting")
            if self._num_failures >= self._policy.max_failed_starts:
                return GiveUp(f"did not come up, {self._num_failures} times in a row")
        # The exponent is bounded: 2.0**2000 would overflow after a day of failures.
        exponent = min(self._num_failures - 1, 32)
        delay_s = self._policy.first_delay_s * 2.0**exponent
        return Again(min(delay_s, self._policy.max_delay_s))


def status_text(status: int) -> str:
    """Return how a process ended, from its exit status (``-N`` for signal N)."""
    if status >= 0:
        return f"exit code {status}"
    # Names by number: signal.Signals raises for real-time signals.
    names = {1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 6: "SIGABRT"}
    names |= {7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}
    return f"signal {-status}" + (f" ({names[-status]})" if -status in names else "")
