"""KV blocks that hold nothing: counted, bounded, shared by prefix, evicted by age.

Laws:
- A block is free, or used by at least one sequence; its hash stays while it is free,
  so that it can be found again until it is needed for something else.
- Free blocks go in the order in which they became free (LRU), the tail of a sequence
  before its head, as in vLLM's ``BlockPool``.
- What can be found, and nothing else, is in the ``CachedBlocks``.
Hashes are those of ``protocol.blocks``: frontends know them, too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from tokenwire.worker.kv_blocks import CachedBlocks

__all__ = ["BlockPool"]


class BlockPool:
    """All blocks of an engine.

    Args:
        num_blocks: How many.
        caching: Whether they are found again.
        told: Is told which can be found.
    """

    __slots__ = (
        "_cached",
        "_free",
        "_hash_of",
        "_lora_of",
        "_num_users",
        "_told",
        "caching",
        "num_blocks",
    )

    def __init__(
        self,
        num_blocks: int,
        *,
        caching: bool = True,
        told: CachedBlocks | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.caching = caching
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._num_users = [0] * num_blocks
        self._cached: dict[int, int] = {}  # hash -> block
        self._hash_of: list[int | None] = [None] * num_blocks
        self._lora_of: dict[int, str] = {}  # block -> its adapter, if it has one
        self._told = CachedBlocks(num_blocks) if told is None else told

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

    def register(self, block: int, block_hash: int, lora: str = "") -> None:
        """Let *block*, full by now, be found by its hash."""
        if not self.caching or self._hash_of[block] is not None:
            return
        if block_hash in self._cached:  # an equal block is there already
            return
        self._cached[block_hash] = block
        self._hash_of[block] = block_hash
        if lora:
            self._lora_of[block] = lora
        self._told.stored((block_hash,))

    def forget(self, lora: str | None = None) -> None:
        """Find no block again that is there now; of an adapter's, if one is named."""
        blocks = [
            block
            for block in self._cached.values()
            if lora is None or self._lora_of.get(block, "") == lora
        ]
        for block in blocks:
            self._forget_block(block)

    def release(self, blocks: Sequence[int]) -> None:
        """Give back the *blocks* of one sequence."""
        for block in reversed(blocks):
            self._num_users[block] -= 1
            if not self._num_users[block]:
                self._free[block] = None

    def _new_block(self) -> int:
        block, _ = self._free.popitem(last=False)
        self._forget_block(block)
        self._num_users[block] = 1
        return block

    def _forget_block(self, block: int) -> None:
        old_hash = self._hash_of[block]
        if old_hash is not None:
            self._hash_of[block] = None
            self._lora_of.pop(block, None)
            del self._cached[old_hash]
            self._told.removed((old_hash,))
