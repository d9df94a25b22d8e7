"""vLLM's KV events: both forms, their order, gaps, and what they make of our hashes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from tokenwire.protocol.blocks import block_hashes, root_hash
from tokenwire.protocol.tokens import pack_ids
from tokenwire.worker.kv_blocks import BlockUsage, CachedBlocks
from tokenwire.worker.vllm import kv_stream
from tokenwire.worker.vllm.kv_events import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    EventError,
    KVEvent,
    decode_events,
)
from tokenwire.worker.vllm.kv_index import RankBlocks
from tokenwire.worker.vllm.kv_stream import Stream

SIZE = 4
IDS = list(range(12))

# Recorded from vLLM 0.32: a salted prompt's block, stored and removed, and a reset.
MAPS = bytes.fromhex(
    "93cb41da4b2188200000938ba474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573"
    "91cf9a3c5d1e7f00112bb1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473940102"
    "0304aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e61"
    "6d65c0aa65787472615f6b6579739191a7303a3a73616c74a967726f75705f69647800b26b765f636163"
    "68655f737065635f6b696e64ae66756c6c5f617474656e74696f6e84a474797065ac426c6f636b52656d"
    "6f766564ac626c6f636b5f68617368657391cf9a3c5d1e7f00112ba66d656469756da3475055a967726f"
    "75705f6964780081a474797065b0416c6c426c6f636b73436c656172656400"
)


def hashes(token_ids: list[int], salt: str | None = None, lora: str = "") -> list[int]:
    """Return our hashes of the blocks of *token_ids*."""
    return block_hashes(pack_ids(token_ids), SIZE, root_hash(salt, lora))


def stored(
    names: list[BlockHash],
    token_ids: list[int],
    parent: BlockHash | None = None,
    **more: Any,
) -> BlockStored:
    """Return the event for blocks that vLLM calls *names*."""
    return BlockStored(names, parent, token_ids, SIZE, **more)


# -- the two forms ----------------------------------------------------------------------


def test_maps_as_vllm_0_32_sends_them() -> None:
    """Recorded bytes; fields that are not known are no matter."""
    first, second, third = decode_events(MAPS)
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockRemoved)
    assert first.block_hashes == second.block_hashes == [0x9A3C5D1E7F00112B]
    assert (first.parent_block_hash, first.token_ids, first.block_size) == (
        None,
        [1, 2, 3, 4],
        4,
    )
    assert first.extra_keys == [["0::salt"]]
    assert (first.medium, first.group_idx) == ("GPU", 0)
    assert first.kv_cache_spec_kind == "full_attention"
    assert third == AllBlocksCleared()


@pytest.mark.parametrize("num_fields", [6, 7, 8, 9, 10, 13])
def test_rows_as_earlier_releases_sent_them(num_fields: int) -> None:
    """Each release has appended fields: those that are missing have no value."""
    row = [
        "BlockStored",
        [1, b"2"],
        b"0",
        IDS[:8],
        4,
        7,
        "GPU",
        "lora",
        [None, ["lora"]],
        0,
    ]
    row = [*row, "full_attention", None, None][:num_fields]
    events = [
        row,
        ["BlockRemoved", [1]],
        ["BlockRemoved", [1], "GPU"],
        ["AllBlocksCleared"],
    ]
    whole, removed, with_medium, cleared = decode_events(
        msgspec.msgpack.encode([1.0, events])
    )
    assert isinstance(whole, BlockStored)
    assert whole.block_hashes == [1, b"2"]
    assert whole.parent_block_hash == b"0"
    assert whole.medium == ("GPU" if num_fields > 6 else None)
    assert whole.lora_name == ("lora" if num_fields > 7 else None)
    assert whole.extra_keys == ([None, ["lora"]] if num_fields > 8 else None)
    assert isinstance(removed, BlockRemoved)
    assert isinstance(with_medium, BlockRemoved)
    assert isinstance(cleared, AllBlocksCleared)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        MAPS[:-8],
        msgspec.msgpack.encode([1.0, [{"type": "BlockMoved"}]]),
        msgspec.msgpack.encode([1.0, [["BlockStored", "x", None, [], 4]]]),
        msgspec.msgpack.encode({"ts": 1.0}),
    ],
)
def test_other_bytes_are_an_error(payload: bytes) -> None:
    """One kind of it, whatever is wrong."""
    with pytest.raises(EventError):
        decode_events(payload)


# -- what is cached ---------------------------------------------------------------------


class Bench:
    """One engine core's blocks; salts are a client's behind "0:"."""

    def __init__(self, num_blocks: int = 16) -> None:
        self.blocks = CachedBlocks(num_blocks)
        self.rank = self.another(num_blocks)

    def another(self, num_blocks: int = 16) -> RankBlocks:
        """Return one more rank of the engine."""
        return RankBlocks(self.blocks, SIZE, num_blocks, self.salt_of)

    def salt_of(self, lora: str, salt: str | None) -> str | None:
        """Return the client's salt, of the current epoch 0."""
        if salt is None:
            return None
        if not salt.startswith("0:"):
            raise LookupError(lora)
        return salt[2:] or None

    def take(self, *events: KVEvent) -> set[int]:
        """Take events; return what is cached then."""
        self.rank.take(events)
        return set(self.blocks)


def test_blocks_are_called_by_their_ids_through_their_parents() -> None:
    """In one event or in several, whatever vLLM calls them."""
    at_once, one_by_one = Bench(), Bench()
    whole = at_once.take(stored([1, 2, 3], IDS))
    one_by_one.take(stored([b"a"], IDS[:4]), stored([b"b"], IDS[4:8], b"a"))
    assert one_by_one.take(stored([b"c"], IDS[8:], b"b")) == whole == set(hashes(IDS))


def test_a_salt_and_an_adapter_are_in_the_name() -> None:
    """The salt as the client gave it; both with the first block alone."""
    bench = Bench()
    keys = [["a", "0:s"], ["a"], ["a"]]
    bench.take(
        stored([1, 2, 3], IDS, extra_keys=[["0:s"], None, None]),
        stored([4, 5, 6], IDS, lora_name="a", extra_keys=keys),
        stored([7, 8, 9], IDS, lora_name="0:s", extra_keys=[["0:s"]] * 3),
        stored([10], IDS[:4], extra_keys=[["0:"]]),
    )
    assert set(bench.blocks) == {
        *hashes(IDS, "s"),
        *hashes(IDS, "s", "a"),
        *hashes(IDS, None, "0:s"),
        *hashes(IDS[:4]),
    }


def test_what_was_forgotten_does_not_come_back() -> None:
    """An older salt is of old KV, and so is what follows a block that is unknown."""
    bench = Bench()
    bench.take(stored([1], IDS[:4]))
    bench.rank.forget()
    assert not len(bench.blocks)
    old = stored([3], IDS[:4], extra_keys=[["-1:s"]])
    assert bench.take(stored([2], IDS[4:8], 1), old) == set()
    assert bench.blocks.usage.num_unplaced == 1
    assert bench.take(BlockRemoved([1, 2, 3]), stored([4], IDS[:4])) == set(
        hashes(IDS[:4])
    )


def test_an_adapter_is_forgotten_alone() -> None:
    """Its blocks, and those that its requests still fill."""
    bench = Bench()
    bench.take(
        stored([1], IDS[:4]),
        stored([2], IDS[:4], lora_name="a", extra_keys=[["a"]]),
        stored([3], IDS[:4], lora_name="b", extra_keys=[["b"]]),
    )
    bench.rank.forget("a")
    kept = {*hashes(IDS[:4]), *hashes(IDS[:4], None, "b")}
    assert set(bench.blocks) == kept
    more = stored([4], IDS[4:8], 2, lora_name="a", extra_keys=[["a"]])
    assert bench.take(more, BlockRemoved([2])) == kept


def test_of_two_equal_blocks_one_may_go() -> None:
    """The engine tells of each, and has the prefix until the last is gone."""
    bench = Bench()
    for _ in range(3):
        bench.take(stored([1], IDS[:4]))
    for _ in range(2):
        assert bench.take(BlockRemoved([1])) == set(hashes(IDS[:4]))
    assert bench.take(BlockRemoved([1])) == set()
    assert bench.take(BlockRemoved([1])) == set()


def test_ranks_have_caches_of_their_own() -> None:
    """Together they have what one of them has; a reset of one is its own."""
    bench = Bench()
    other = bench.another()
    bench.take(stored([1, 2], IDS[:8]))
    other.take([stored([1], IDS[:4])])
    assert bench.take(AllBlocksCleared()) == set(hashes(IDS[:4]))
    other.take([BlockRemoved([1])])
    assert not len(bench.blocks)


@pytest.mark.parametrize(
    "event",
    [
        stored([1], IDS[:4], medium="CPU"),
        stored([1], IDS[:4], kv_cache_spec_kind="sliding_window"),
        stored([1], IDS[:4], group_idx=1),
        stored([1], IDS),  # a mask has left out blocks
        BlockStored([1], None, IDS[:2], 2),
        stored([1], IDS[:4], extra_keys=[[["image", 0]]]),
        stored([1], IDS[:4], extra_keys=[["0:s", b"embeddings"]]),
    ],
    ids=["medium", "kind", "group", "masked", "size", "image", "embeddings"],
)
def test_what_no_prefix_of_ids_is_found_by_is_left_out(event: BlockStored) -> None:
    """Other layers' blocks, other places, other sizes, and more than ids."""
    bench = Bench()
    first = stored([9], IDS[4:8], group_idx=0, kv_cache_spec_kind="full_attention")
    if event.group_idx is None and event.medium is None:
        first = stored([9], IDS[4:8])
    before = bench.take(first)
    assert len(before) == 1
    assert bench.take(event) == before
    other = BlockRemoved([9], medium="CPU")
    assert bench.take(other) == before


def test_blocks_before_an_image_count() -> None:
    """What is of ids alone is known, what follows is not."""
    bench = Bench()
    event = stored([1, 2, 3], IDS, extra_keys=[None, [["image", 0]], None])
    assert bench.take(event) == set(hashes(IDS[:4]))
    assert bench.take(stored([4], IDS[:4], 3)) == set(hashes(IDS[:4]))


def test_names_are_bounded_by_the_engine_s_blocks() -> None:
    """Whatever it says."""
    bench = Bench(2)
    assert bench.take(stored([1, 2, 3], IDS)) == set(hashes(IDS[:8]))
    assert bench.take(BlockRemoved([3, 2])) == set(hashes(IDS[:4]))


# -- order ------------------------------------------------------------------------------


def step(number: int) -> bytes:
    """Return the message of a step that has removed block *number*."""
    event = {"type": "BlockRemoved", "block_hashes": [number], "medium": None}
    return msgspec.msgpack.encode([1.0, [event], 0])


class Wire:
    """A stream, what it has passed on, and what it has asked for."""

    def __init__(self, *, has_replay: bool = True) -> None:
        self.passed: list[int | str] = []
        self.asked: list[int] = []
        self.usage = BlockUsage()
        self._has_replay = has_replay
        self.stream = Stream(
            self._take,
            self._replay,
            lambda: self.passed.append("forgotten"),
            self.usage,
        )
        self.stream.begin()

    def _take(self, events: Iterable[KVEvent]) -> None:
        for event in events:
            assert isinstance(event, BlockRemoved)
            self.passed += [int(one) for one in event.block_hashes]

    def _replay(self, number: int) -> bool:
        if self._has_replay:
            self.asked.append(number)
        return self._has_replay

    def live(self, *numbers: int) -> None:
        """Send steps."""
        for number in numbers:
            self.stream.live(number, step(number))

    def replay(self, *numbers: int) -> None:
        """Answer a question with these steps."""
        for number in numbers:
            self.stream.replayed(number, step(number))
        self.stream.replay_ended()


def test_what_was_sent_before_anybody_listened_is_asked_for() -> None:
    """And what comes meanwhile follows it, once."""
    wire = Wire()
    wire.live(2, 3)
    wire.replay(0, 1, 2)
    wire.live(4)
    assert wire.asked == [0]
    assert wire.passed == [0, 1, 2, 3, 4]
    assert (wire.usage.num_gaps, wire.usage.num_events) == (0, 5)


def test_a_gap_is_filled() -> None:
    """In its place, and what a replay has brought is not taken again."""
    wire = Wire()
    wire.replay()
    wire.live(0, 3)
    wire.replay(1, 2, 3, 4)
    wire.live(4, 5)
    assert wire.asked == [0, 1]
    assert wire.passed == [0, 1, 2, 3, 4, 5]
    assert (wire.usage.num_gaps, wire.usage.num_resets) == (1, 0)


def test_a_gap_that_is_too_old_forgets_all(caplog: pytest.LogCaptureFixture) -> None:
    """What follows counts, and the log says so."""
    wire = Wire()
    wire.replay()
    wire.live(0, 5)
    wire.replay(3, 4, 5)
    assert wire.passed == [0, "forgotten", 3, 4, 5]
    assert "from 1 on are lost (the engine keeps no older ones)" in caplog.text
    assert wire.usage.num_resets == 1


def test_a_replay_that_does_not_come_forgets_all() -> None:
    """Once, and the stream goes on with what was held."""
    wire = Wire()
    wire.replay()
    wire.live(0, 2, 3)
    wire.replay()
    wire.live(4)
    assert wire.passed == [0, "forgotten", 2, 3, 4]


def test_without_a_replay_endpoint_a_gap_forgets_all() -> None:
    """An operator's own configuration may have none."""
    wire = Wire(has_replay=False)
    wire.live(0, 2)
    assert wire.passed == [0, "forgotten", 2]
    assert (wire.usage.num_gaps, wire.usage.num_resets) == (1, 1)


def test_an_engine_core_that_begins_anew_has_an_empty_cache() -> None:
    """Its numbers begin at 0 again, also in the middle of a replay."""
    wire = Wire()
    wire.replay()
    wire.live(0, 1, 0, 1)
    assert wire.passed == [0, 1, "forgotten", 0, 1]
    wire.live(5, 0)
    wire.stream.replayed(4, step(4))
    assert wire.passed[5:] == ["forgotten", 0]
    wire.live(3)
    wire.replay(1, 2, 3)
    assert wire.passed[7:] == [1, 2, 3]


def test_what_is_held_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than that is a gap again, which is asked for at the next message."""
    monkeypatch.setattr(kv_stream, "MAX_HELD", 2)
    wire = Wire()
    wire.live(0, 1, 2, 3)
    wire.replay()
    assert wire.passed == [0, 1]
    wire.live(4)
    assert wire.asked == [0, 2]
    wire.replay(2, 3)
    assert wire.passed == [0, 1, 2, 3, 4]


def test_what_is_not_understood_forgets_all() -> None:
    """It may have been anything; the next step counts."""
    wire = Wire()
    wire.replay()
    wire.live(0)
    wire.stream.live(1, b"\xc1")
    wire.live(2)
    assert wire.passed == [0, "forgotten", 2]
