"""A sequence's prefixes as hashes; and what a worker that does not tell has cached.

Workers that tell of their blocks are in ``kv_index``. For others there is an estimate,
from what this frontend had them compute: evictions and other frontends' requests are not
seen. It decides where a prompt is cheapest to compute, never what comes out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from tokenwire.protocol.blocks import block_hashes, root_hash
from tokenwire.protocol.tokens import TOKEN_BYTES, pack_ids

__all__ = ["CHUNK_TOKENS", "MAX_CHUNKS", "Ahead", "Chain", "Prefixes"]

CHUNK_TOKENS = 64
"""Tokens per entry: a few of an engine's blocks. Fewer would cost more memory than the
difference in prefill is worth."""

MAX_CHUNKS = 16_384
"""Per worker: 1 Mi tokens in some 2 MB, or as many as its engine has room for."""

_CHUNK_BYTES = CHUNK_TOKENS * TOKEN_BYTES


class Chain:
    """A sequence's prefixes as hashes; grows with it.

    Two sequences share a hash if they share all tokens up to it, the salt and the
    adapter. There is one list for the estimate, a hash for each whole chunk, this
    process's own; and one for each block size of workers that tell of their blocks, with
    the hashes that these have in common with all frontends.
    """

    __slots__ = ("_blocks", "_salt", "hashes")

    def __init__(self, salt: str | None = None, lora: str = "") -> None:
        self._salt = (salt, lora)
        self._blocks: dict[int, list[int]] = {}  # by block size
        self.hashes: list[int] = []

    def copy(self) -> Chain:
        """Return one that grows by itself."""
        other = Chain(*self._salt)
        other._blocks = {size: list(hashes) for size, hashes in self._blocks.items()}
        other.hashes = list(self.hashes)
        return other

    def blocks(self, block_size: int, packed: bytes) -> list[int]:
        """Return the hashes of the full blocks of a sequence.

        Args:
            block_size: Tokens in a block.
            packed: The whole sequence so far; what was hashed before is skipped.
        """
        hashes = self._blocks.setdefault(block_size, [])
        begin = len(hashes) * block_size * TOKEN_BYTES
        if len(packed) - begin >= block_size * TOKEN_BYTES:
            parent = hashes[-1] if hashes else root_hash(*self._salt)
            hashes += block_hashes(packed[begin:], block_size, parent)
        return hashes

    def extend(self, packed: bytes) -> None:
        """Take the whole sequence so far, packed; what was hashed before is skipped."""
        hashes = self.hashes
        parent = hashes[-1] if hashes else hash(self._salt)
        begin = len(hashes) * _CHUNK_BYTES
        for at in range(begin, len(packed) - _CHUNK_BYTES + 1, _CHUNK_BYTES):
            parent = hash((parent, packed[at : at + _CHUNK_BYTES]))
            hashes.append(parent)


class Ahead(msgspec.Struct, frozen=True):
    """What a long prompt's way to its worker takes, made before.

    For 100,000 ids packing is 1 ms and hashing 4: beside the event loop, nobody waits.
    """

    packed: bytes  # the prompt
    chain: Chain  # of its blocks

    @classmethod
    def of(
        cls,
        token_ids: Sequence[int],
        salt: str | None,
        lora: str,
        block_sizes: Collection[int],
    ) -> Ahead:
        """Return it for a prompt; any thread may.

        Args:
            token_ids: The prompt.
            salt: Its cache salt.
            lora: Its adapter.
            block_sizes: Of workers that tell of their blocks.
        """
        packed, chain = pack_ids(token_ids), Chain(salt, lora)
        for block_size in block_sizes:
            chain.blocks(block_size, packed)
        return cls(packed, chain)


class Prefixes:
    """The prefixes that one worker has computed lately; the oldest are forgotten."""

    __slots__ = ("_chunks", "_max_chunks")

    def __init__(self, max_chunks: int = MAX_CHUNKS) -> None:
        self._chunks: dict[int, None] = {}  # the oldest first
        self._max_chunks = max_chunks

    def __len__(self) -> int:
        return len(self._chunks)

    def forget(self) -> None:
        """Take note that the worker has emptied its cache."""
        self._chunks.clear()

    def num_cached_tokens(self, chain: Chain) -> int:
        """Return how many of the first tokens of *chain* the worker should have."""
        for index, chunk in enumerate(chain.hashes):
            if chunk not in self._chunks:
                return index * CHUNK_TOKENS
        return len(chain.hashes) * CHUNK_TOKENS

    def add(self, chain: Chain) -> None:
        """Take note that the worker has computed *chain*."""
        # The last chunk is the first to go, as in an engine: without its head, a tail
        # is of no use.
        chunks = self._chunks
        for one in reversed(chain.hashes):
            chunks.pop(one, None)
            chunks[one] = None
        while len(chunks) > self._max_chunks:
            del chunks[next(iter(chunks))]
