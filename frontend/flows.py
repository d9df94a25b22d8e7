"""How many requests went where, counted while somebody watches."""

from __future__ import annotations

__all__ = ["MAX_PAIRS", "Flows"]

MAX_PAIRS = 4_096
"""A page shows dozens; two pools of a thousand workers have a million."""


class Flows:
    """Counts of what was sent to each worker, and handed over between two."""

    def __init__(self) -> None:
        self.sent: dict[str, int] = {}  # by worker
        self.handovers: dict[tuple[str, str], int] = {}  # by prefill and decode worker

    def was_sent(self, worker_id: str) -> None:
        """Count a request that was sent to a worker."""
        if worker_id in self.sent or len(self.sent) < MAX_PAIRS:
            self.sent[worker_id] = self.sent.get(worker_id, 0) + 1

    def was_handed_over(self, prefill: str, decode: str) -> None:
        """Count a request whose KV a decode worker is to read from a prefill worker."""
        pair = prefill, decode
        if pair in self.handovers or len(self.handovers) < MAX_PAIRS:
            self.handovers[pair] = self.handovers.get(pair, 0) + 1
