"""How often a sequence may be tried: who has failed under it, and what that says of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tokenwire.protocol.messages import ErrorKind

from .legs import Leg
from .link import Link
from .router import Route

__all__ = ["Attempts"]

MAX_ATTEMPTS = 3
"""Workers that may fail without a new token: two may at once (a crash of their host), a
third failure is more likely the request's own doing. A token ends the series. What no
request can cause does not count: KV that did not arrive, a drain, a full worker. These
end when no worker is left to try, and then with the wait for one."""

MAX_FAILED_READS = 2
"""Hand-overs that may fail without a new token: the source may have been at fault once,
then it is the reader. It computes the prompt itself, and costs no prefill worker more."""

MAX_FAILED_CAPTURES = 2
"""Workers that may fail to save hidden states: one's disk may be full. Where two are, it
is rather the disk that all of them write to."""


class Attempts:
    """Counts failures, and excludes who has failed."""

    __slots__ = ("_failed_captures", "_failed_reads", "_failures", "excluded")

    def __init__(self) -> None:
        self.excluded: frozenset[Link] = frozenset()
        """Who is not asked next."""
        self._failures = 0  # without a token since
        self._failed_reads = 0  # the same
        self._failed_captures = 0

    def failed(self, kind: ErrorKind) -> bool:
        """Count a failure; return whether there may be another attempt."""
        if kind is ErrorKind.ENGINE:
            self._failures += 1
        elif kind is ErrorKind.CAPTURE:
            self._failed_captures += 1
        return (
            kind is not ErrorKind.INVALID
            and self._failures < MAX_ATTEMPTS
            and self._failed_captures < MAX_FAILED_CAPTURES
        )

    def exclude(
        self,
        leg: Leg,
        kind: ErrorKind,
        route: Route | None,
        prefillers: Callable[[], Iterable[Link]],
    ) -> None:
        """Have others tried than those that failed.

        Args:
            leg: What failed.
            kind: How.
            route: Where it was.
            prefillers: Returns all workers that compute prompts.
        """
        if leg.again:
            return
        if kind is not ErrorKind.HANDOVER or route is None or route.prefill is None:
            self.excluded |= {leg.link}
            return
        self.excluded |= {route.prefill}  # the decode worker can still prefill
        self._failed_reads += 1
        if self._failed_reads >= MAX_FAILED_READS:
            self.excluded |= {*prefillers()}

    def unreachable(self, link: Link) -> None:
        """Have others tried than who could not be sent it."""
        self.excluded |= {link}

    def brought_a_token(self) -> None:
        """Begin anew: who failed may be well when the worker of now fails."""
        self._failures = self._failed_reads = 0
        self.excluded = frozenset()

    def waited(self) -> None:
        """Let those be tried again that failed: one may have come back."""
        self.excluded = frozenset()
