"""Cached blocks: the set, its changes, and how frontends are told of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from support.worker_desk import A, B, Desk
from tokenwire.protocol.blocks import unpack_hashes
from tokenwire.protocol.limits import MAX_KV_HASHES
from tokenwire.protocol.messages import Bye, KVBlocks, WatchKV
from tokenwire.worker import kv_watch
from tokenwire.worker.kv_blocks import CachedBlocks
from tokenwire.worker.kv_watch import PERIOD_S


class Known:
    """What a frontend knows, by the messages alone."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()
        self.num_resets = 0

    def take(self, messages: list[KVBlocks]) -> None:
        """Apply them."""
        for message in messages:
            if message.reset:
                self.blocks.clear()
                self.num_resets += 1
            stored = set(unpack_hashes(message.stored))
            removed = set(unpack_hashes(message.removed))
            assert not stored & removed
            assert len(stored) + len(removed) <= MAX_KV_HASHES
            self.blocks -= removed
            self.blocks |= stored


class Watched:
    """A desk with cached blocks, and what its frontends have been told."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = CachedBlocks(num_blocks)
        self.desk = Desk(A, B, blocks=self.blocks)
        self.known = {A: Known(), B: Known()}

    def told(self, peer: bytes = A) -> list[KVBlocks]:
        """Return what *peer* was told since the last call, applied to what it knows."""
        messages = self.desk.sender.take(peer)
        told = [message for message in messages if isinstance(message, KVBlocks)]
        self.known[peer].take(told)
        return told

    def period(self) -> list[KVBlocks]:
        """Let a period pass; return what A was told."""
        self.desk.timers.advance(PERIOD_S)
        return self.told()


# -- the set ----------------------------------------------------------------------------


def test_a_block_is_there_until_the_last_rank_lacks_it() -> None:
    """Engines of several ranks have a cache each."""
    blocks = CachedBlocks(8)
    for _ in range(3):
        blocks.stored([1])
    assert blocks.usage.num_stored == len(blocks) == 1
    blocks.removed([1, 1])
    assert 1 in blocks
    blocks.removed([1, 1, 7])
    assert 1 not in blocks
    assert (len(blocks), blocks.usage.num_removed) == (0, 1)


def test_more_than_the_engine_has_is_refused() -> None:
    """A miscount somewhere does not fill this process's memory."""
    blocks = CachedBlocks(2)
    blocks.stored([1, 2, 3])
    assert set(blocks) == {1, 2}
    assert blocks.usage.num_refused == 1
    blocks.removed([1])
    blocks.stored([4])
    assert set(blocks) == {2, 4}


def test_all_slices_together_are_the_set() -> None:
    """None is beyond a message, and a new size keeps what is there."""
    blocks = CachedBlocks(10)
    blocks.stored(range(10))
    blocks.resize(3 * MAX_KV_HASHES)
    assert blocks.num_slices > 3
    assert set(blocks) == set(range(10))
    assert sum(len(blocks.slice_of(i)) for i in range(blocks.num_slices)) == 10


# -- telling ----------------------------------------------------------------------------


def test_who_asks_is_told_all_and_then_what_changes() -> None:
    """And who has not asked is told nothing."""
    bench = Watched(8)
    bench.blocks.stored([1, 2])
    assert bench.period() == []
    bench.desk.say(A, WatchKV())
    (first,) = bench.period()
    assert first.reset
    bench.blocks.stored([3])
    bench.blocks.removed([1])
    (change,) = bench.period()
    assert not change.reset
    assert bench.known[A].blocks == {2, 3}
    assert bench.period() == []
    assert bench.told(B) == []


def test_an_empty_cache_is_told_too() -> None:
    """What was known of an earlier link counts no more."""
    bench = Watched(8)
    bench.desk.say(A, WatchKV())
    (first,) = bench.period()
    assert (first.reset, first.stored, first.removed) == (True, b"", b"")


def test_what_came_and_went_within_a_period_is_not_told() -> None:
    """However often: changes are net, and one message a period."""
    bench = Watched(8)
    bench.blocks.stored([1])
    bench.desk.say(A, WatchKV())
    bench.period()
    for _ in range(3):
        bench.blocks.stored([2])
        bench.blocks.removed([1, 2])
        bench.blocks.stored([1])
    assert bench.period() == []
    bench.blocks.stored([2])
    bench.blocks.stored([3])
    assert len(bench.period()) == 1


def test_asking_again_begins_anew() -> None:
    """A frontend that is in doubt gets all of it."""
    bench = Watched(8)
    bench.blocks.stored([1])
    for _ in range(2):
        bench.desk.say(A, WatchKV())
        (first,) = bench.period()
        assert first.reset
    assert bench.known[A].blocks == {1}


def test_a_large_cache_is_told_in_slices_mixed_with_changes() -> None:
    """A slice a period; who is told all of it already gets the changes alone."""
    bench = Watched(4 * MAX_KV_HASHES)
    bench.desk.say(B, WatchKV())
    bench.desk.timers.advance(PERIOD_S * (1 + bench.blocks.num_slices))
    bench.told(B)
    bench.blocks.stored(range(3 * MAX_KV_HASHES))
    bench.desk.timers.advance(PERIOD_S)
    bench.desk.say(A, WatchKV())
    for index in range(bench.blocks.num_slices):
        assert len(bench.period()) == 1 + bool(index)
        # One that is told, or will be, each: gone, and gone and back.
        bench.blocks.removed([2 * index, 2 * index + 1])
        bench.blocks.stored([2 * index + 1, 10**9 + index])
    assert len(bench.period()) == 1
    assert bench.period() == []
    bench.told(B)
    assert bench.known[A].blocks == bench.known[B].blocks == set(bench.blocks)
    assert bench.known[A].num_resets == bench.known[B].num_resets == 1


def test_an_emptied_cache_is_one_message() -> None:
    """Not the list of what is no more."""
    bench = Watched(2 * MAX_KV_HASHES)
    bench.blocks.stored(range(2 * MAX_KV_HASHES))
    bench.desk.say(A, WatchKV())
    for _ in range(bench.blocks.num_slices):
        bench.period()
    assert len(bench.known[A].blocks) == 2 * MAX_KV_HASHES
    bench.blocks.removed(range(2 * MAX_KV_HASHES))
    (only,) = bench.period()
    assert (only.reset, only.stored, only.removed) == (True, b"", b"")


def test_more_changes_than_a_period_may_have_are_told_by_slices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is sent at once stays bounded."""
    monkeypatch.setattr(kv_watch, "MAX_CHANGES", 3)
    bench = Watched(8)
    bench.desk.say(A, WatchKV())
    bench.period()
    bench.blocks.stored(range(3))
    assert not bench.period()[0].reset
    bench.blocks.stored(range(3, 7))
    assert bench.period()[0].reset
    assert bench.known[A].blocks == set(range(7))


def test_a_frontend_that_is_gone_costs_nothing() -> None:
    """No message, no timer, and no change is kept for it."""
    bench = Watched(8)
    bench.desk.say(A, WatchKV())
    bench.desk.say(A, Bye("done"))
    bench.blocks.stored([1])
    assert bench.period() == []
    assert bench.blocks.on_change is None
    assert not len(bench.blocks.take_changes())


def test_a_frontend_that_does_not_read_is_lost_like_any() -> None:
    """A full queue is not written to without end; others are told on."""
    bench = Watched(8)
    for peer in (A, B):
        bench.desk.say(peer, WatchKV())
    bench.period()
    bench.told(B)
    bench.desk.sender.unreachable.add(A)
    bench.blocks.stored([1])
    bench.period()
    assert len(bench.told(B)) == 1
    bench.blocks.stored([2])
    bench.desk.sender.unreachable.clear()
    assert bench.period() == []
    assert bench.desk.metric("num_frontends") == 0.0  # not ticked yet
    bench.desk.service.tick()
    assert bench.desk.metric("num_frontends") == 1.0


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("stored"), st.integers(0, 9)),
            st.tuples(st.just("removed"), st.integers(0, 9)),
            st.tuples(st.just("watch"), st.sampled_from([0, 1])),
            st.tuples(st.just("period"), st.just(0)),
        )
    )
)
def test_a_frontend_knows_what_is_there_a_period_ago(
    steps: list[tuple[str, int]],
) -> None:
    """In any order of changes and questions, once as many periods have passed as slices."""
    bench = Watched(8 * MAX_KV_HASHES)
    watching: set[bytes] = set()
    for what, number in steps:
        if what == "watch":
            peer = (A, B)[number]
            bench.desk.say(peer, WatchKV())
            watching.add(peer)
        elif what == "period":
            bench.desk.timers.advance(PERIOD_S)
        else:
            getattr(bench.blocks, what)([number])
    bench.desk.timers.advance(PERIOD_S * (2 + bench.blocks.num_slices))
    for peer in (A, B):
        bench.told(peer)
        assert bench.known[peer].blocks == (
            set(bench.blocks) if peer in watching else set()
        )


def test_what_is_known_is_measured() -> None:
    """Blocks, and what came and went."""
    bench = Watched(2)
    bench.blocks.stored([1, 2, 3])
    bench.blocks.removed([2])
    bench.desk.service.tick()
    names = ("known", "stored_total", "removed_total", "refused_total")
    found = [bench.desk.metric(f"kv_blocks_{name}") for name in names]
    assert found == [1, 2, 1, 1]
