"""The index of cached blocks: what it says is what a plain model of sets says."""

from __future__ import annotations

from random import Random

import pytest

from tokenwire.frontend import kv_index
from tokenwire.frontend.kv_index import PROMISE_S, KvIndex, Member

CHAINS = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 14, 15], [1, 22, 23], [31, 32], [41]]


class Model:
    """What an index should say, by sets."""

    def __init__(self) -> None:
        self.blocks: dict[Member, set[int]] = {}

    def matches(self, hashes: list[int]) -> dict[int, int]:
        """Return how many of the first blocks each worker has, by its bit."""
        counts: dict[int, int] = {}
        for member, blocks in self.blocks.items():
            num = next(
                (n for n, block in enumerate(hashes) if block not in blocks),
                len(hashes),
            )
            if num:
                counts[member.bit] = num
        return counts


@pytest.mark.parametrize("seed", range(8))
def test_random_operations_agree_with_a_plain_model(seed: int) -> None:
    """Workers come, store, evict, are emptied, go; sweeps run in between, in parts."""
    rng = Random(seed)  # noqa: S311 - not cryptographic
    index, model = KvIndex(), Model()
    for _ in range(600):
        members = list(model.blocks)
        action = rng.randrange(7) if members else 0
        member = rng.choice(members) if members else None
        chain = rng.choice(CHAINS)[: rng.randint(1, 6)]
        if member is None or (action == 0 and len(members) < 9):
            model.blocks[index.join()] = set()
        elif action in (1, 2):
            member.stored(chain)
            model.blocks[member] |= set(chain)
        elif action == 3:
            gone = rng.sample(chain, rng.randint(1, len(chain)))
            member.removed(gone)
            model.blocks[member] -= set(gone)
        elif action == 4 and rng.random() < 0.3:
            member.cleared()
            model.blocks[member] = set()
        elif action == 5 and rng.random() < 0.3:
            member.leave()
            del model.blocks[member]
        else:
            index.sweep(rng.randint(1, 5))
        for hashes in CHAINS:
            assert index.matches(hashes) == model.matches(hashes)
        for one, blocks in model.blocks.items():
            assert one.num_blocks == len(blocks)
    while index.sweep():
        pass
    held: set[int] = set[int]().union(*model.blocks.values())
    assert len(index) == len(held)


def test_a_worker_that_left_counts_no_more_and_neither_do_its_events() -> None:
    """At once, though its blocks are taken out later; who comes next has none of them."""
    index = KvIndex()
    one = index.join()
    one.stored([1, 2])
    one.promised([3], 0.0)
    one.leave()
    one.stored([4])
    one.promised([4], 0.0)
    assert index.matches([1, 2, 3]) == {}
    two = index.join()
    assert index.matches([1, 2, 3, 4]) == {}
    assert two.bit != one.bit

    assert not index.sweep()
    assert (len(index), index.num_promised) == (0, 0)
    three = index.join()
    assert three.bit == one.bit  # used again, since nothing has it any more
    assert index.matches([1]) == {}
    one.leave()  # the old one: no concern of the new one's
    three.stored([1])
    assert index.matches([1]) == {three.bit: 1}


def test_bits_do_not_grow_with_restarts() -> None:
    """A worker that restarts a hundred times needs no hundred bits."""
    index = KvIndex()
    for _ in range(100):
        member = index.join()
        member.stored([1, 2, 3])
        member.leave()
        index.sweep()
    assert index.join().bit < 1 << 4


def test_no_more_blocks_than_its_bound() -> None:
    """The tail of what was not asked for goes first; the counts of workers follow."""
    index = KvIndex(max_blocks=8)
    one, two = index.join(), index.join()
    one.stored([1, 2, 3, 4])
    two.stored([1, 2, 13, 14])
    one.stored([5, 6])
    assert (len(index), index.num_forgotten) == (8, 0)
    one.stored([7])  # 4 goes
    assert index.matches([1, 2, 3, 4]) == {one.bit: 3, two.bit: 2}  # all of these stay
    one.stored([8, 9, 10])  # 14, 13, 6 go

    assert (len(index), index.num_forgotten) == (8, 4)
    assert index.matches([1, 2, 13, 14]) == {one.bit: 2, two.bit: 2}
    assert index.matches([5, 6]) == {one.bit: 1}
    assert index.matches([1, 2, 3, 4]) == {one.bit: 3, two.bit: 2}
    assert index.matches([7]) == index.matches([8]) == {one.bit: 1}
    assert (one.num_blocks, two.num_blocks) == (8, 2)


@pytest.mark.parametrize("seed", range(3))
def test_a_full_index_claims_nothing_that_is_not_so(seed: int) -> None:
    """Whatever it has forgotten, it says no more than the workers have."""
    rng = Random(seed)  # noqa: S311 - not cryptographic
    index, model = KvIndex(max_blocks=12), Model()
    members = [index.join() for _ in range(3)]
    model.blocks = {member: set() for member in members}
    for step in range(500):
        member = rng.choice(members)
        chain = [rng.randint(0, 3) * 100 + n for n in range(rng.randint(1, 6))]
        if rng.random() < 0.7:
            member.stored(chain)
            model.blocks[member] |= set(chain)
        else:
            member.removed(chain)
            model.blocks[member] -= set(chain)
        if not step % 40:
            member.cleared()
            model.blocks[member] = set()
            index.sweep(3)
        truth = model.matches(chain)
        for bit, num in index.matches(chain).items():
            assert num <= truth[bit]
        assert len(index) <= 12
        for one in members:
            assert 0 <= one.num_blocks <= len(model.blocks[one])


def test_what_was_just_sent_counts_before_the_worker_tells() -> None:
    """Behind what it has told, too; until that is confirmed, denied, or long ago."""
    index = KvIndex()
    one, two = index.join(), index.join()
    one.stored([1])
    one.promised([1, 2, 3], 0.0)
    assert index.matches([1, 2, 3, 4]) == {one.bit: 3}
    assert index.num_promised == 2  # what is known needs no promise

    one.stored([2])
    one.removed([3])
    assert index.matches([1, 2, 3]) == {one.bit: 2}
    two.promised([1], 1.0)
    index.expire(1.0 + PROMISE_S / 2)
    assert index.matches([1]) == {one.bit: 1, two.bit: 1}
    index.expire(1.0 + 2 * PROMISE_S)
    assert index.matches([1, 2]) == {one.bit: 2}
    assert index.num_promised == 0


def test_an_emptied_worker_has_nothing_promised_either() -> None:
    """A request that it got before is computed behind that, or not at all."""
    index = KvIndex()
    one = index.join()
    one.stored([1])
    one.promised([2], 0.0)
    one.cleared()
    assert index.matches([1, 2]) == {}
    one.stored([1])
    assert index.matches([1, 2]) == {one.bit: 1}


def test_promises_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest count."""
    monkeypatch.setattr(kv_index, "MAX_PROMISES", 8)
    index = KvIndex()
    one = index.join()
    for first in range(0, 100, 2):
        one.promised([first, first + 1], 0.0)
        assert index.num_promised <= 8
        assert index.matches([first, first + 1]) == {one.bit: 2}
