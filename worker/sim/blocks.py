"""KV blocks that hold nothing: counted, bounded, shared by prefix, evicted by age.

Laws:
- A block is free, or used by at least one sequence; its hash stays while it is free,
  so that it can be found again until it is needed for something else.
- Free blocks go in the order in which they became free (LRU), the tail of a sequence
  before its head, as in vLLM's ``BlockPool``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

__all__ = ["BlockPool", "block_hashes", "next_hash"]


def next_hash(parent: int, token_ids: Sequence[int]) -> int:
    """Return the hash of the block with *token_ids* behind the block *parent*."""
    return hash((parent, *token_ids))


def block_hashes(
    token_ids: Sequence[int], block_size: int, salt: Hashable
) -> list[int]:
    """Return the hashes of the full blocks of *token_ids*, each chained to the last."""
    hashes: list[int] = []
    parent = hash(salt)
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = next_hash(parent, token_ids[start : start + block_size])
        hashes.append(parent)
    return hashes


class BlockPool:
    """All blocks of an engine."""

    __slots__ = ("_cached", "_free", "_hash_of", "_num_users", "caching", "num_blocks")

    def __init__(self, num_blocks: int, *, caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.caching = caching
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._num_users = [0] * num_blocks
        self._cached: dict[int, int] = {}  # hash -> block
        self._hash_of: list[int | None] = [None] * num_blocks

    @property
    def num_free(self) -> int:
        """How many blocks no sequence uses."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """The used share, 0..1."""
        return 1.0 - len(self._free) / self.num_blocks

    def acquire(
        self, hashes: Sequence[int], num_blocks: int
    ) -> tuple[list[int], int] | None:
        """Return *num_blocks* blocks and how many of them are hits, or None if too few.

        Args:
            hashes: Of the blocks that may be hits, from the first on.
            num_blocks: How many in all.
        """
        hits: list[int] = []
        if self.caching:
            for block_hash in hashes:
                block = self._cached.get(block_hash)
                if block is None:
                    break
                hits.append(block)
        num_idle_hits = sum(not self._num_users[block] for block in hits)
        num_new = num_blocks - len(hits)
        if num_new > len(self._free) - num_idle_hits:
            return None
        for block in hits:
            if not self._num_users[block]:
                del self._free[block]
            self._num_users[block] += 1
        return hits + [self._new_block() for _ in range(num_new)], len(hits)

    def grow(self) -> int | None:
        """Return one more block, or None if none is free."""
        return self._new_block() if self._free else None

    def register(self, block: int, block_hash: int) -> None:
        """Let *block*, full by now, be found by its hash."""
        if not self.caching or self._hash_of[block] is not None:
            return
        if block_hash in self._cached:  # an equal block is there already
            return
        self._cached[block_hash] = block
        self._hash_of[block] = block_hash

    def release(self, blocks: Sequence[int]) -> None:
        """Give back the *blocks* of one sequence."""
        for block in reversed(blocks):
            self._num_users[block] -= 1
            if not self._num_users[block]:
                self._free[block] = None

    def _new_block(self) -> int:
        block, _ = self._free.popitem(last=False)
        old_hash = self._hash_of[block]
        if old_hash is not None:
            self._hash_of[block] = None
            del self._cached[old_hash]
        self._num_users[block] = 1
        return block
