"""Which workers a session prefers: those that should have its KV cached.

Laws:
- It is a hint, worth some tokens in the cost of a worker (see ``routing``): a worker that
  is notably busier than others, or that takes nothing, is passed by.
- Frontends remember no session. Each ranks the workers for it by a hash of both names
  (rendezvous hashing), so all frontends agree, also after a restart; a worker that comes
  or goes moves only the sessions whose first choice it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol, TypeVar

__all__ = ["hints", "ranked"]


class Named(Protocol):
    """What the ranking looks at."""

    @property
    def worker_id(self) -> str:
        """Its name, which all frontends know it by and which it keeps over restarts."""
        ...


C = TypeVar("C", bound=Named)


def ranked(session_id: str, candidates: Sequence[C]) -> list[C]:
    """Return *candidates*, the one that the session prefers first."""
    head = session_id.encode(errors="surrogateescape") + b"\0"
    return sorted(
        candidates,
        key=lambda one: blake2b(head + one.worker_id.encode(), digest_size=8).digest(),
    )


def hints(
    session_id: str | None, candidates: Sequence[C], num_tokens: int
) -> dict[C, int]:
    """Return by how much a session's workers may cost more than others.

    Args:
        session_id: Of the request; None: it has none.
        candidates: Who can take it; hashable.
        num_tokens: What its first choice gets. Its second, where it goes when the first
            is busy, gets an eighth: enough to go before those that cost the same.
    """
    if session_id is None or len(candidates) < 2 or not num_tokens:
        return {}
    first, second, *_ = ranked(session_id, candidates)
    return {first: num_tokens, second: num_tokens // 8}
