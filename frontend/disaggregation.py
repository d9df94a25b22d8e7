"""Whether a prompt is computed by a prefill worker, or where its output is decoded."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = [
    "MAX_QUEUED_TOKENS",
    "MIN_UNCACHED_TOKENS",
    "PrefillPlace",
    "RemotePrefill",
]

MIN_UNCACHED_TOKENS = 16
"""Fewer are computed on the decode worker. The default is one KV block, below which
there is nothing to hand over. Where decode steps are bound by memory, as on GPUs, some
hundred tokens cost a step next to nothing: raise it there, and measure."""

MAX_QUEUED_TOKENS = 65_536
"""More tokens in the shortest prefill queue: seconds of work for one GPU, in which the
decode worker has long computed the prompt between its steps."""


class PrefillPlace(StrEnum):
    """Where the prompt is computed, and why: the label of a metric."""

    REMOTE = "remote"
    """By a prefill worker."""
    SHORT = "local_short"
    """On the decode worker: the prompt is below the threshold."""
    CACHED = "local_cached"
    """The same for what the decode worker has not in its cache."""
    QUEUE = "local_queue"
    """On the decode worker: the prefill workers have too much to do."""
    NO_WORKER = "local_no_worker"
    """On the decode worker: no prefill worker that fits is left."""
    AGGREGATED = "aggregated"
    """On a worker that does both."""


@dataclass(frozen=True, slots=True)
class RemotePrefill:
    """When a prefill worker is worth its hand-over."""

    min_uncached_tokens: int = MIN_UNCACHED_TOKENS
    max_queued_tokens: int = MAX_QUEUED_TOKENS

    def place(
        self, *, num_tokens: int, num_cached_tokens: int, num_queued_tokens: int | None
    ) -> PrefillPlace:
        """Return where a prompt of *num_tokens* is computed.

        Args:
            num_tokens: Of the prompt.
            num_cached_tokens: Of these, what the decode worker should have.
            num_queued_tokens: In front of it at the prefill worker; None: there is
                no such worker.
        """
        if num_queued_tokens is None:
            return PrefillPlace.NO_WORKER
        if num_tokens < self.min_uncached_tokens:
            return PrefillPlace.SHORT
        if num_tokens - num_cached_tokens < self.min_uncached_tokens:
            return PrefillPlace.CACHED
        if num_queued_tokens > self.max_queued_tokens:
            return PrefillPlace.QUEUE
        return PrefillPlace.REMOTE
