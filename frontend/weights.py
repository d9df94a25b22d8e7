"""Which weights count, where workers differ: the newest that any of them has shown.

Each update and each load of an adapter has a number (``updates``), larger than those
before it, and workers say the number of what they have. So every frontend comes to the same judgement
without asking another: a worker that missed an update, or was restarted since, is kept
out until it has the newest weights, and an adapter is served by those that have its
newest version.

The newest number is remembered while this frontend lives: weights do not go back because
the workers that had them are gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from tokenwire.protocol.messages import Status

__all__ = ["Holder", "Weights"]


class Holder(Protocol):
    """A worker, as far as its weights matter; a ``Link``."""

    status: Status
    is_outdated: bool

    @property
    def is_ready(self) -> bool:
        """Whether it is connected."""
        ...


class Weights:
    """The newest weights and adapters."""

    def __init__(self) -> None:
        self.newest = 0
        """The update that the served weights are of."""
        self.adapters: dict[str, int] = {}
        """By name: the update that loaded the served version."""
        self.highest = 0
        """The largest number that any worker has shown, whoever is there now."""

    def look(self, holders: Iterable[Holder]) -> None:
        """Judge all workers anew."""
        ready = [one for one in holders if one.is_ready]
        self.newest = max([self.newest, *(one.status.update for one in ready)])
        known: dict[str, int] = {}
        for one in ready:
            one.is_outdated = (
                one.status.update < self.newest and one.status.busy != "update_weights"
            )
            for adapter in one.status.adapters:
                update = max(adapter.update, known.get(adapter.name, 0))
                known[adapter.name] = max(update, self.adapters.get(adapter.name, 0))
        self.adapters = known
        self.highest = max([self.highest, self.newest, *known.values()])

    def has(self, holder: Holder, lora: str) -> bool:
        """Return whether a worker has the served version of an adapter."""
        if not lora:
            return True
        served = self.adapters.get(lora)
        return any(
            one.name == lora and one.update == served for one in holder.status.adapters
        )
