"""The simulated engine's KV blocks: counting, sharing, eviction."""

from __future__ import annotations

from tokenwire.protocol.blocks import block_hashes, root_hash
from tokenwire.protocol.tokens import pack_ids
from tokenwire.worker.kv_blocks import CachedBlocks
from tokenwire.worker.sim.blocks import BlockPool


def hashes(ids: list[int], salt: str | None = None) -> list[int]:
    """Return the hashes of full blocks of four ids."""
    return block_hashes(pack_ids(ids), 4, root_hash(salt))


def fill(pool: BlockPool, ids: list[int]) -> list[int]:
    """Return blocks that hold *ids* and can be found."""
    chain = hashes(ids)
    got = pool.acquire(chain, len(chain))
    assert got is not None
    for block, block_hash in zip(got[0], chain, strict=True):
        pool.register(block, block_hash)
    return got[0]


def test_a_prefix_is_found_after_its_sequence_has_ended() -> None:
    """Blocks keep their hash while they are free."""
    pool = BlockPool(8)
    blocks = fill(pool, list(range(8)))
    pool.release(blocks)
    assert pool.usage == 0.0
    got = pool.acquire(hashes([*range(8), 9, 9, 9, 9]), 3)
    assert got is not None
    assert got[0][:2] == blocks
    assert got[1] == 2


def test_a_shared_block_is_free_when_its_last_user_leaves() -> None:
    """Blocks are counted once, however many sequences use them."""
    pool = BlockPool(8)
    first = fill(pool, list(range(8)))
    got = pool.acquire(hashes(list(range(8))), 2)
    assert got is not None
    assert pool.num_free == 6
    pool.release(first)
    assert pool.num_free == 6
    pool.release(got[0])
    assert pool.num_free == 8


def test_the_oldest_free_block_is_taken_first_and_a_tail_before_its_head() -> None:
    """Eviction is LRU, and a prefix loses its end first."""
    pool = BlockPool(4)
    old, new = fill(pool, list(range(8))), fill(pool, list(range(50, 58)))
    pool.release(old)
    pool.release(new)
    assert pool.grow() == old[1]
    assert pool.grow() == old[0]
    got = pool.acquire(hashes(list(range(50, 58))), 2)
    assert got is not None
    assert got[1] == 2


def test_nothing_is_taken_if_not_all_can_be() -> None:
    """A refused acquisition leaves the pool as it was, hits included."""
    pool = BlockPool(3)
    blocks = fill(pool, list(range(8)))
    pool.release(blocks)
    assert pool.acquire(hashes(list(range(8))), 4) is None
    assert pool.num_free == 3


def test_without_caching_nothing_is_found() -> None:
    """The pool then only counts."""
    pool = BlockPool(4, caching=False)
    pool.release(fill(pool, list(range(8))))
    got = pool.acquire(hashes(list(range(8))), 2)
    assert got is not None
    assert got[1] == 0


def test_an_empty_pool_grows_no_further() -> None:
    """``grow`` says so instead of failing."""
    pool = BlockPool(1)
    assert pool.grow() == 0
    assert pool.grow() is None
    assert pool.usage == 1.0


def test_what_can_be_found_is_told() -> None:
    """A block is told of with its hash, kept while it is free, and gone when it is used."""
    told = CachedBlocks(2)
    pool = BlockPool(2, told=told)
    blocks = fill(pool, list(range(8)))
    pool.release(blocks)
    chain = hashes(list(range(8)))
    assert set(told) == set(chain)
    pool.grow()
    assert set(told) == {chain[0]}


def test_a_pool_that_caches_nothing_tells_nothing() -> None:
    """Nothing of it would be found."""
    told = CachedBlocks(2)
    fill(BlockPool(2, caching=False, told=told), list(range(8)))
    assert not len(told)


def test_blocks_of_one_adapter_are_forgotten_alone() -> None:
    """A new version of it does not concern the model's own blocks, nor others'."""
    told = CachedBlocks(4)
    pool = BlockPool(4, told=told)
    for block, lora in enumerate(("", "a", "b", "a")):
        pool.register(block, block, lora)
    pool.forget("a")
    assert set(told) == {0, 2}
    pool.forget("")
    assert set(told) == {2}
    pool.forget()
    assert not len(told)
    pool.register(1, 1)  # it can hold something else now
    assert set(told) == {1}
