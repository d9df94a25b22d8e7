"""From vLLM's KV events to our hashes of the blocks that are cached.

vLLM's own hashes are names alone: what a block is called in frontends' words is computed
from its ids, and from what the block before it is called. Laws:
- A name is kept as long as vLLM has a block of it; there are no more than blocks.
- A block whose place is not known (the one before it was missed) is not told of.
- What was forgotten by an update or with its adapter does not come back by events of
  requests that still run on it: their cache salt is an older one, or what is before
  their next block is unknown.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import assert_never

from tokenwire.protocol.blocks import block_hashes, root_hash
from tokenwire.protocol.tokens import pack_ids
from tokenwire.worker.kv_blocks import CachedBlocks

from .kv_events import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    KVEvent,
)

__all__ = ["RankBlocks", "SaltOf"]

logger = logging.getLogger(__name__)

_DEVICE = (None, "GPU")
"""Where blocks are that count: not what an offloading connector has put elsewhere."""

_PREFIX_KINDS = (None, "full_attention", "mla_attention")
"""Of layers, in which every block of a prefix is kept. Where a model has others beside
them (a sliding window, a state), a hit may be shorter; it is a hint."""

SaltOf = Callable[[str, str | None], str | None]
"""Called with an adapter's name and the salt that vLLM had; returns the client's.

Raises:
    LookupError: Such blocks are not found any more.
"""


class RankBlocks:
    """The blocks of one engine core.

    Args:
        blocks: Is told of them.
        block_size: Ids in a block, as frontends know it.
        num_blocks: How many there can be.
        salt_of: See ``SaltOf``.
    """

    def __init__(
        self, blocks: CachedBlocks, block_size: int, num_blocks: int, salt_of: SaltOf
    ) -> None:
        self._blocks = blocks
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._salt_of = salt_of
        self._names: dict[BlockHash, int] = {}
        self._more: dict[
            BlockHash, int
        ] = {}  # blocks with the same ids, beyond the first
        self._lora_of: dict[BlockHash, str] = {}  # where there is one
        self._group: int | None = None  # of layers whose blocks count
        self._is_odd = False  # it has said that some do not

    def take(self, events: Iterable[KVEvent]) -> None:
        """Take what one step brought."""
        for event in events:
            match event:
                case BlockStored():
                    self._stored(event)
                case BlockRemoved():
                    self._removed(event)
                case AllBlocksCleared():
                    self.forget()
                case _:
                    assert_never(event)

    def forget(self, lora: str | None = None) -> None:
        """Know no block any more; none of an adapter, if one is named."""
        if lora is None:
            gone = list(self._names)
        else:
            gone = [one for one, of in self._lora_of.items() if of == lora]
        names: list[int] = []
        for block_hash in gone:
            names.append(self._names.pop(block_hash))
            self._more.pop(block_hash, None)
            self._lora_of.pop(block_hash, None)
        self._blocks.removed(names)

    def _stored(self, event: BlockStored) -> None:
        if not self._counts(event):
            return
        lora = event.lora_name or ""
        start = self._before(event, lora)
        if start is None:
            return
        num_plain = _num_plain(event, lora)
        packed = pack_ids(event.token_ids[: num_plain * self._block_size])
        names = block_hashes(packed, self._block_size, start)
        new: list[int] = []
        for block_hash, name in zip(event.block_hashes, names, strict=False):
            if block_hash in self._names:
                self._more[block_hash] = self._more.get(block_hash, 0) + 1
            elif len(self._names) < self._num_blocks:
                self._names[block_hash] = name
                if lora:
                    self._lora_of[block_hash] = lora
                new.append(name)
        self._blocks.stored(new)

    def _counts(self, event: BlockStored) -> bool:
        """Return whether these blocks are what a prefix is found by."""
        if event.medium not in _DEVICE or event.kv_cache_spec_kind not in _PREFIX_KINDS:
            return False
        if self._group is None:
            self._group = event.group_idx
        if event.group_idx != self._group:
            return False
        size = self._block_size
        num_tokens = len(event.token_ids)
        if event.block_size == size and num_tokens == len(event.block_hashes) * size:
            return True
        if not self._is_odd:
            self._is_odd = True
            logger.warning(
                "KV blocks of %d ids where %d were due are not told to frontends",
                event.block_size,
                size,
            )
        return False

    def _before(self, event: BlockStored, lora: str) -> int | None:
        """Return what the first of these blocks follows; None: it is not known."""
        parent = event.parent_block_hash
        if parent is not None:
            name = self._names.get(parent)
            if name is None:
                self._blocks.usage.num_unplaced += len(event.block_hashes)
            return name
        salt, *others = _keys(event, 0, lora) or [None]
        if others or not isinstance(salt, str | None):
            return None  # it is of more than ids
        try:
            return root_hash(self._salt_of(lora, salt), lora)
        except LookupError:
            return None

    def _removed(self, event: BlockRemoved) -> None:
        if event.medium not in _DEVICE or event.group_idx not in (None, self._group):
            return
        names: list[int] = []
        for block_hash in event.block_hashes:
            more = self._more.pop(block_hash, 0)
            if more > 1:
                self._more[block_hash] = more - 1
            if more:
                continue
            name = self._names.pop(block_hash, None)
            if name is not None:
                self._lora_of.pop(block_hash, None)
                names.append(name)
        self._blocks.removed(names)


def _keys(event: BlockStored, index: int, lora: str) -> list[object]:
    """Return what else than ids and its adapter the hash of a block is of."""
    keys = (event.extra_keys or [])[index : index + 1]
    found = list(keys[0] or []) if keys else []
    return found[1:] if lora and found[:1] == [lora] else found


def _num_plain(event: BlockStored, lora: str) -> int:
    """Return how many blocks are of ids alone, with what the first one follows."""
    num_blocks = len(event.block_hashes)
    if not any(event.extra_keys or ()):
        return num_blocks
    begins = event.parent_block_hash is None
    for index in range(int(begins), num_blocks):
        if _keys(event, index, lora):
            return index
    return num_blocks
