"""One generation that a worker keeps, and what a Recall is told of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from tokenwire.protocol.messages import Finished, Keep, Logprobs, Recalled, Tokens

__all__ = ["ENTRY_BYTES", "VERSION_BYTES", "Entry", "State", "Tombstone"]

ENTRY_BYTES = 1_024
"""What an entry takes beside its bytes: its objects, and its places in tables."""

VERSION_BYTES = 128
"""What a change of weights takes beside its name."""


class State(StrEnum):
    """Where a generation stands."""

    RUNNING = "running"  # and followed
    UNFOLLOWED = "unfollowed"  # it runs, and nobody is sent anything
    ENDED = "ended"


class Entry:
    """A generation that is kept."""

    __slots__ = (
        "context",
        "epoch",
        "expires_at",
        "finished",
        "generation_id",
        "logprobs",
        "num_bytes",
        "num_cached_tokens",
        "num_new_tokens",
        "outlives",
        "owner",
        "state",
        "token_ids",
        "ttl_s",
        "weight_versions",
    )

    def __init__(self, keep: Keep, token_ids: bytes, ttl_s: float) -> None:
        self.generation_id = keep.generation_id
        self.owner = keep.owner
        self.context = keep.context
        self.ttl_s = ttl_s
        self.outlives = keep.outlives
        self.epoch = keep.epoch
        self.token_ids = bytearray(token_ids)  # Submit's, then the new ones
        self.num_new_tokens = 0
        self.logprobs = None if keep.logprobs is None else _Rows(keep.logprobs)
        self.num_cached_tokens = 0
        self.weight_versions: list[tuple[int, str]] = []
        self.finished: Finished | None = None
        self.state = State.RUNNING
        self.expires_at = math.inf
        parts = (keep.generation_id, keep.owner, keep.context, token_ids)
        rows = 0 if self.logprobs is None else self.logprobs.num_bytes
        self.num_bytes = ENTRY_BYTES + sum(map(len, parts)) + rows

    def add_rows(self, item: Tokens) -> int:
        """Keep logprobs of new tokens; return their bytes, 0 if no record can have them.

        It has one width, and a row for each of the last ids without a gap.
        """
        new = item.logprobs
        if new is None:
            return 0
        if self.logprobs is None:
            if item.index:
                return 0
            self.logprobs = _Rows(new)
            return self.logprobs.num_bytes
        return self.logprobs.add(new) if new.width == self.logprobs.width else 0

    def recalled(self, request_id: str, *, is_whole: bool) -> Recalled:
        """Return what a Recall is told, with all that is kept if *is_whole*."""
        brief = Recalled(
            request_id,
            "running" if self.finished is None else "ended",
            self.epoch,
            self.state is State.RUNNING,
            self.outlives,
        )
        if not is_whole:
            return brief
        return Recalled(
            brief.request_id,
            brief.state,
            brief.epoch,
            brief.is_followed,
            brief.outlives,
            self.context,
            bytes(self.token_ids),
            self.num_new_tokens,
            None if self.logprobs is None else self.logprobs.packed(),
            self.num_cached_tokens,
            list(self.weight_versions),
            self.finished,
        )


@dataclass(slots=True, frozen=True)
class Tombstone:
    """A generation that was kept, and is lost."""

    owner: bytes
    epoch: int


class _Rows:
    """Log probabilities that grow."""

    __slots__ = ("logprobs", "ranks", "token_ids", "width")

    def __init__(self, first: Logprobs) -> None:
        self.width = first.width
        self.token_ids = bytearray(first.token_ids)
        self.logprobs = bytearray(first.logprobs)
        self.ranks = bytearray(first.ranks)

    @property
    def num_bytes(self) -> int:
        """What they take."""
        return len(self.token_ids) + len(self.logprobs) + len(self.ranks)

    def add(self, item: Logprobs) -> int:
        """Add rows of the same width; return their bytes."""
        self.token_ids += item.token_ids
        self.logprobs += item.logprobs
        self.ranks += item.ranks
        return len(item.token_ids) + len(item.logprobs) + len(item.ranks)

    def packed(self) -> Logprobs:
        """Return them as one record."""
        parts = (bytes(self.token_ids), bytes(self.logprobs), bytes(self.ranks))
        return Logprobs(self.width, *parts)
