"""How much of one sequence each worker has cached, as far as this frontend knows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol
from zlib import crc32

from tokenwire.protocol.messages import Card
from tokenwire.protocol.tokens import TOKEN_BYTES

from .job import Cached
from .kv_index import KvIndex, Member
from .prefixes import CHUNK_TOKENS, Chain, Prefixes

__all__ = ["Holdings"]


class Candidate(Protocol):
    """What is looked at in a worker."""

    @property
    def card(self) -> Card | None:
        """Who it is."""
        ...

    @property
    def blocks(self) -> Member | None:
        """What it has told of its blocks; None: it tells nothing."""
        ...

    @property
    def prefixes(self) -> Prefixes | None:
        """What it should have, where it tells nothing; None: that does not matter."""
        ...


class Holdings:
    """What workers have of the sequence in *packed*.

    Args:
        index: What they have told.
        packed: The sequence, (num_tokens,) packed.
        chain: The same as hashes; extended here, as far as somebody is asked about.
        named: Who is said to have the beginning of it.
        has_output: Whether somebody has computed all of it.
    """

    __slots__ = (
        "_chain",
        "_counts",
        "_has_output",
        "_index",
        "_is_extended",
        "_named",
        "_packed",
        "num_tokens",
    )

    def __init__(
        self,
        index: KvIndex,
        packed: bytes,
        chain: Chain,
        named: Iterable[Cached] = (),
        *,
        has_output: bool = False,
    ) -> None:
        self._index = index
        self._packed = packed
        self._chain = chain
        self._named = {(one.worker_id, one.incarnation): one for one in named}
        self._has_output = has_output
        self._counts: dict[int, dict[int, int]] = {}  # by block size, then by bit
        self._is_extended = False
        self.num_tokens = len(packed) // TOKEN_BYTES

    def seed(self) -> int:
        """Return a number of the sequence's own, the same at every frontend."""
        return crc32(self._packed[-_SEED_BYTES:], self.num_tokens)

    def is_named(self, link: Candidate) -> bool:
        """Return whether a worker is said to have it."""
        card = link.card
        if not self._named or card is None:
            return False
        return (card.worker_id, card.incarnation) in self._named

    def num_cached(self, link: Candidate) -> int:
        """Return how many of the first tokens a worker has, of at most all but one."""
        num_cached = 0
        card, member = link.card, link.blocks
        if self._named and card is not None:
            named = self._named.get((card.worker_id, card.incarnation))
            if named is not None:
                num_cached = named.num_tokens
        if member is not None and card is not None:
            # The last id is always computed, and a block is there or not.
            most = (self.num_tokens - 1) // card.block_size * card.block_size
            num_cached = max(num_cached, min(self.num_told(link), most))
        elif link.prefixes is not None:
            num_cached = max(num_cached, self._estimate(link.prefixes))
        return min(num_cached, self.num_tokens)

    def num_told(self, link: Candidate) -> int:
        """Return how many of the first tokens a worker has told of; cheap."""
        card, member = link.card, link.blocks
        if member is None or card is None:
            return 0
        counts = self._counts.get(card.block_size)
        if counts is None:
            counts = self._look_up(card.block_size)
        return counts.get(member.bit, 0) * card.block_size if counts else 0

    def _look_up(self, block_size: int) -> dict[int, int]:
        hashes = self._chain.blocks(block_size, self._packed)
        counts = self._counts[block_size] = self._index.matches(hashes)
        return counts

    def _estimate(self, prefixes: Prefixes) -> int:
        if not self._is_extended:
            self._is_extended = True
            self._chain.extend(self._packed)
        num_cached = prefixes.num_cached_tokens(self._chain)
        # It is known by whole chunks: who has all of these of a sequence that it or
        # another has computed has the rest, too, or nearly.
        is_all = num_cached and self.num_tokens - num_cached < CHUNK_TOKENS
        return self.num_tokens if is_all and self._has_output else num_cached


_SEED_BYTES = 4_096
"""The end of a sequence, in which those that begin alike differ: a thousand ids in 1 us."""
