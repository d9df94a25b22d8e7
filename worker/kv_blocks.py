"""Which blocks of KV the engine has cached: a set of hashes, and what changed in it.

Laws:
- It has no more blocks than the engine.
- What came and went between two looks at the changes is none of them.
Hashes are those of ``protocol.blocks``. Engines tell it, on the event loop; no clock and
no I/O in here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from tokenwire.protocol.limits import MAX_KV_HASHES

__all__ = ["BlockUsage", "CachedBlocks", "Changes"]

_MEAN_SLICE = MAX_KV_HASHES // 2
"""Blocks of a full engine in one slice. Hashes are even, so the largest of a thousand
slices has some 4,250; more than a message can carry are told in two."""


@dataclass(slots=True)
class BlockUsage:
    """What has happened to the set, for metrics; the engine's side counts the rest."""

    num_blocks: int = 0
    num_stored: int = 0  # since the start
    num_removed: int = 0
    num_refused: int = 0  # beyond the bound: more than the engine says it has
    num_events: int = 0  # messages of the engine
    num_gaps: int = 0  # in them, filled or not
    num_resets: int = 0  # everything forgotten, since a gap could not be filled
    num_unplaced: int = 0  # blocks behind unknown ones


@dataclass(slots=True)
class Changes:
    """What differs from the last look; no hash is in both sets."""

    stored: set[int] = field(default_factory=set[int])
    removed: set[int] = field(default_factory=set[int])

    def __len__(self) -> int:
        return len(self.stored) + len(self.removed)


class CachedBlocks:
    """The union over an engine's ranks: a block counts until the last one lacks it."""

    def __init__(self, num_blocks: int = 0) -> None:
        self.usage = BlockUsage()
        self.on_change: Callable[[], None] | None = None
        """Called with each change, while somebody takes them; None: nobody does."""
        self._num_blocks = 0
        self._slices: list[set[int]] = [set()]
        self._more: dict[int, int] = {}  # in how many further ranks
        self._changes = Changes()
        self.resize(num_blocks)

    def __len__(self) -> int:
        return self.usage.num_blocks

    def __contains__(self, block_hash: int) -> bool:
        return block_hash in self._slices[block_hash % len(self._slices)]

    def __iter__(self) -> Iterator[int]:
        for part in self._slices:
            yield from part

    def resize(self, num_blocks: int) -> None:
        """Take at most *num_blocks* from now on; before anybody looks at slices."""
        self._num_blocks = num_blocks
        there = list(self)
        self._slices = [set() for _ in range(1 + num_blocks // _MEAN_SLICE)]
        for block_hash in there:
            self._slices[block_hash % len(self._slices)].add(block_hash)

    # -- by the engine --------------------------------------------------------------

    def stored(self, hashes: Iterable[int]) -> None:
        """Take note that a rank has these blocks, which it had not."""
        slices, usage, notify = self._slices, self.usage, self.on_change
        num_slices = len(slices)
        for block_hash in hashes:
            part = slices[block_hash % num_slices]
            if block_hash in part:
                self._more[block_hash] = self._more.get(block_hash, 0) + 1
                continue
            if usage.num_blocks >= self._num_blocks:
                usage.num_refused += 1
                continue
            part.add(block_hash)
            usage.num_blocks += 1
            usage.num_stored += 1
            if notify is not None:
                self._note(block_hash, self._changes.stored, self._changes.removed)
        self._tell()

    def removed(self, hashes: Iterable[int]) -> None:
        """Take note that a rank has them no more; unknown ones are ignored."""
        slices, usage, notify = self._slices, self.usage, self.on_change
        num_slices = len(slices)
        for block_hash in hashes:
            part = slices[block_hash % num_slices]
            if block_hash not in part:
                continue
            more = self._more.pop(block_hash, 0)
            if more:
                if more > 1:
                    self._more[block_hash] = more - 1
                continue
            part.discard(block_hash)
            usage.num_blocks -= 1
            usage.num_removed += 1
            if notify is not None:
                self._note(block_hash, self._changes.removed, self._changes.stored)
        self._tell()

    def _note(self, block_hash: int, to: set[int], undone: set[int]) -> None:
        if block_hash in undone:
            undone.discard(block_hash)
        else:
            to.add(block_hash)

    def _tell(self) -> None:
        if self.on_change is not None and len(self._changes):
            self.on_change()

    # -- by who tells frontends -------------------------------------------------------

    @property
    def num_slices(self) -> int:
        """In how many slices all that is there can be told."""
        return len(self._slices)

    def slice_of(self, index: int) -> set[int]:
        """Return what is in a slice now; not to be changed."""
        return self._slices[index]

    def take_changes(self) -> Changes:
        """Return what has changed since the last call."""
        changes, self._changes = self._changes, Changes()
        return changes
