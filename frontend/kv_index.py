"""Which blocks of KV the workers have cached: one index over all of them.

Blocks are known by the hashes of the chain that ends in them (``protocol.blocks``), so a
sequence's cached prefix is found by a walk along its own chain. For each block the index
has one integer, a bit for each worker, so that the walk costs the same for one worker and
for a thousand.

Laws:
- What is known comes from the workers' events. What this frontend has just sent is taken
  as promised: it counts until the worker's events say otherwise, or for
  ``PROMISE_S`` at most.
- A worker that was lost, restarted or emptied counts nothing from that moment on, however
  many blocks it had: its bit is not looked at any more, and is given to another worker
  only after it was taken out of every block (``sweep``).
- There are at most ``max_blocks`` blocks, and ``MAX_PROMISES``. When it is full, what has
  not been stored or found for longest goes first, roughly.
- It is a hint about where a prompt is cheapest, never about what comes out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["MAX_BLOCKS", "PROMISE_S", "KvIndex", "Member"]

MAX_BLOCKS = 1_048_576
"""Of the index: 16 Mi tokens with blocks of 16, in some 90 MB (docs/scale.md). Eight
workers with 2 Mi tokens of KV each fill it."""

PROMISE_S = 20.0
"""From a Submit to the event that its blocks are stored: a wait in the worker's queue, and
the prefill. A promise that nothing came of costs a wrong guess for so long."""

MAX_PROMISES = 262_144
"""Blocks that are promised at once: 4 Mi prompt tokens, as many as may wait here."""

SWEEP_BLOCKS = 16_384
"""Looked at in one ``sweep``: some 2 ms."""

_MAX_INTERNED = 65_536
"""Different sets of workers that are kept as one object each; more begin anew."""


class Member:
    """One worker in the index, from its card to its loss; made by ``KvIndex.join``."""

    __slots__ = ("_index", "bit", "num_blocks")

    def __init__(self, index: KvIndex, bit: int) -> None:
        self._index = index
        self.bit = bit
        self.num_blocks = 0  # that it is known to have

    def stored(self, hashes: Sequence[int]) -> None:
        """Take note that it has blocks, given in the order of their sequence."""
        self._index.add(self, hashes)

    def removed(self, hashes: Iterable[int]) -> None:
        """Take note that blocks were evicted; unknown ones are ignored."""
        self._index.remove(self, hashes)

    def promised(self, hashes: Sequence[int], now: float) -> None:
        """Take note that it was sent a sequence, which it is about to have.

        Args:
            hashes: Of the sequence's blocks, from the first on.
            now: This process's clock, in s.
        """
        self._index.promise(self, hashes, now)

    def cleared(self) -> None:
        """Take note that it has no block any more."""
        self._index.clear(self)

    def leave(self) -> None:
        """Count nothing of it any more; harmless if repeated."""
        self._index.leave(self)


class KvIndex:
    """The blocks of all workers.

    Args:
        max_blocks: How many at most; the memory follows from it.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        # A block is in one of the two. While there is room, all are in the first.
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._order: list[int] = []  # of the second, the next to go last
        self._promised: dict[int, int] = {}
        self._promised_before: dict[int, int] = {}
        self._rotated_at = 0.0
        self._members: dict[int, Member] = {}  # by their bits
        self._alive = 0  # bits of the members
        self._free: list[int] = []  # bits that no block has
        self._dead = 0  # bits of who has left that blocks may have
        self._sweeping = 0  # those of the sweep under way
        self._to_sweep: list[int] = []
        self._interned: dict[int, int] = {}
        self.num_forgotten = 0  # blocks that went because the index was full

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    @property
    def num_promised(self) -> int:
        """How many blocks are promised, and not yet over."""
        return len(self._promised) + len(self._promised_before)

    def join(self) -> Member:
        """Return a new worker, which has nothing yet."""
        if self._free:
            bit = self._free.pop()
        else:
            used = self._alive | self._dead | self._sweeping
            bit = 1 << used.bit_length()
        member = Member(self, bit)
        self._members[bit] = member
        self._alive |= bit
        return member

    def leave(self, member: Member) -> None:
        """Count nothing of *member* any more."""
        if self._members.get(member.bit) is not member:
            return
        del self._members[member.bit]
        self._alive &= ~member.bit
        self._dead |= member.bit
        member.num_blocks = 0

    def clear(self, member: Member) -> None:
        """Forget what *member* has: it goes on under another bit."""
        if self._members.get(member.bit) is not member:
            return
        self.leave(member)
        again = self.join()
        member.bit = again.bit
        self._members[again.bit] = member

    # --- what the workers tell ---------------------------------------------------------

    def add(self, member: Member, hashes: Sequence[int]) -> None:
        """See ``Member.stored``."""
        bit = member.bit
        if not bit & self._alive:
            return
        young, old = self._young, self._old
        for block in reversed(hashes):  # without its head, a tail is of no use
            mask = young.get(block)
            if mask is None:
                mask = old.pop(block, 0) if old else 0
                if not mask and len(young) + len(old) >= self._max_blocks:
                    self._make_room()
                    young, old = self._young, self._old
            if mask & bit:
                young[block] = mask
                continue
            member.num_blocks += 1
            young[block] = self._intern(mask | bit) if mask else bit

    def remove(self, member: Member, hashes: Iterable[int]) -> None:
        """See ``Member.removed``."""
        bit = member.bit
        if not bit & self._alive:
            return
        for blocks in (self._promised, self._promised_before):
            if blocks:
                hashes = list(hashes)
                for block in hashes:
                    _take(blocks, block, bit)
        young, old = self._young, self._old
        for block in hashes:
            if _take(young, block, bit) or (old and _take(old, block, bit)):
                member.num_blocks -= 1

    def promise(self, member: Member, hashes: Sequence[int], now: float) -> None:
        """See ``Member.promised``."""
        bit = member.bit
        if not bit & self._alive:
            return
        self.expire(now)
        young, old, promised = self._young, self._old, self._promised
        for block in hashes:
            if (young.get(block) or old.get(block, 0)) & bit:
                continue
            if len(promised) >= MAX_PROMISES // 2:
                self._rotate(now)
                promised = self._promised
            mask = promised.get(block, 0)
            promised[block] = self._intern(mask | bit) if mask else bit

    def expire(self, now: float) -> None:
        """Forget the promises that are over."""
        age_s = now - self._rotated_at
        if age_s >= PROMISE_S:
            self._promised = {}
        if age_s >= PROMISE_S / 2:
            self._rotate(now)

    def _rotate(self, now: float) -> None:
        self._promised_before, self._promised = self._promised, {}
        self._rotated_at = now

    # --- what is asked -----------------------------------------------------------------

    def matches(self, hashes: Sequence[int]) -> dict[int, int]:
        """Return how many of the first blocks each worker has; who has none is left out.

        Args:
            hashes: Of a sequence's blocks, from the first on.

        Returns:
            By the members' bits.
        """
        young, old = self._young, self._old
        promised, before = self._promised, self._promised_before
        counts: dict[int, int] = {}
        mask = self._alive
        found: list[int] = []
        index = 0
        for index, block in enumerate(hashes):
            here = young.get(block, 0)
            if mask & ~here:  # somebody drops out, unless it is elsewhere
                if old and not here:
                    here = old.get(block, 0)
                    if here:
                        found.append(block)
                here |= promised.get(block, 0) | before.get(block, 0)
                left = mask & ~here
                if left:
                    if index:
                        _count(counts, left, index)
                    mask &= here
                    if not mask:
                        break
        if mask and hashes:
            _count(counts, mask, index + 1)
        for block in reversed(found):  # they are not the next to go
            young[block] = old.pop(block, 0)
        return counts

    # --- bounds ------------------------------------------------------------------------

    def sweep(self, num_blocks: int = SWEEP_BLOCKS) -> bool:
        """Take who has left out of some blocks; return whether more is to be done.

        To be called now and then. Only then bits are used again, so that masks stay short.
        """
        if not self._sweeping:
            if not self._dead:
                return False
            self._sweeping, self._dead = self._dead, 0
            # A copy of the keys: 8 bytes each, for as long as the sweep lasts.
            self._to_sweep = [*self._young, *self._old]
            keep = ~self._sweeping
            for blocks in (self._promised, self._promised_before):
                for block in [b for b, mask in blocks.items() if mask & ~keep]:
                    _take(blocks, block, self._sweeping)
        gone = self._sweeping
        todo = self._to_sweep[-num_blocks:]
        del self._to_sweep[-num_blocks:]
        for block in todo:
            if not _take(self._young, block, gone):
                _take(self._old, block, gone)
        if self._to_sweep:
            return True
        self._sweeping = 0
        self._interned = {}
        while gone:
            bit = gone & -gone
            gone ^= bit
            self._free.append(bit)
        self._free.sort(reverse=True)  # the lowest first: masks stay short
        return bool(self._dead)

    def _make_room(self) -> None:
        """Drop the block that goes first."""
        mask = 0
        while not mask:
            if not self._order:
                self._old, self._young = self._young, {}
                self._order = list(self._old)
                self._order.reverse()
            mask = self._old.pop(self._order.pop(), 0)
        self.num_forgotten += 1
        mask &= self._alive
        while mask:
            bit = mask & -mask
            mask ^= bit
            self._members[bit].num_blocks -= 1

    def _intern(self, mask: int) -> int:
        """Return the one object for *mask*: many blocks are in the same caches."""
        interned = self._interned
        known = interned.get(mask)
        if known is None:
            if len(interned) >= _MAX_INTERNED:
                interned.clear()
            known = interned[mask] = mask
        return known


def _take(blocks: dict[int, int], block: int, bits: int) -> bool:
    """Take *bits* out of a block; return whether it had one of them."""
    mask = blocks.get(block, 0)
    if not mask & bits:
        return False
    mask &= ~bits
    if mask:
        blocks[block] = mask
    else:
        del blocks[block]
    return True


def _count(counts: dict[int, int], mask: int, num_blocks: int) -> None:
    while mask:
        bit = mask & -mask
        mask ^= bit
        counts[bit] = num_blocks
