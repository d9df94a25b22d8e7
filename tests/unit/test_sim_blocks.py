"""The simulated engine's KV blocks: counting, sharing, eviction."""

from __future__ import annotations

from tokenwire.worker.sim.blocks import BlockPool, block_hashes


def hashes(ids: list[int], salt: str | None = None) -> list[int]:
    """Return the hashes of full blocks of four ids."""
    return block_hashes(ids, 4, salt)


def fill(pool: BlockPool, ids: list[int]) -> list[int]:
    """Return blocks that hold *ids* and can be found."""
    chain = hashes(ids)
    got = pool.acquire(chain, len(chain))
    assert got is not None
    for block, block_hash in zip(got[0], chain, strict=True):
        pool.register(block, block_hash)
    return got[0]


def test_only_full_blocks_have_a_hash() -> None:
    """Ids behind the last full block have none."""
    assert len(hashes(list(range(11)))) == 2


def test_a_hash_depends_on_all_ids_before_and_on_the_salt() -> None:
    """Equal blocks behind other ids, or under another salt, are other blocks."""
    same = hashes([1, 2, 3, 4, 5, 6, 7, 8])
    assert same == hashes([1, 2, 3, 4, 5, 6, 7, 8])
    assert same[1] != hashes([0, 2, 3, 4, 5, 6, 7, 8])[1]
    assert not set(same) & set(hashes([1, 2, 3, 4, 5, 6, 7, 8], "salt"))


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
