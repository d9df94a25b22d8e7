"""Names of KV blocks: the same everywhere, and different where KV is not shared."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings, strategies as st

from tokenwire.protocol.blocks import (
    block_hashes,
    next_hash,
    pack_hashes,
    root_hash,
    unpack_hashes,
)
from tokenwire.protocol.codec import decode_from_worker, encode
from tokenwire.protocol.errors import MalformedMessage
from tokenwire.protocol.limits import MAX_KV_HASHES
from tokenwire.protocol.messages import KVBlocks
from tokenwire.protocol.tokens import pack_ids

IDS = pack_ids(range(40))


def test_hashes_are_these_numbers() -> None:
    """A change of them would have new frontends and old workers share no block."""
    root = root_hash()
    assert root == 0x9E08_CC50_2F2F_844E
    assert block_hashes(IDS, 16, root) == [
        0x838F_D2F3_4ACB_778F,
        0x1595_B8AF_ECF6_50E0,
    ]


def test_hashes_do_not_depend_on_the_process() -> None:
    """Another process, with another seed of ``hash``, computes the same."""
    code = (
        "from tokenwire.protocol.blocks import *\n"
        "from tokenwire.protocol.tokens import pack_ids\n"
        "print(block_hashes(pack_ids(range(40)), 16, root_hash('salt', 'lora')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(block_hashes(IDS, 16, root_hash("salt", "lora")))


def test_a_rest_that_fills_no_block_has_no_hash() -> None:
    """Only full blocks are cached."""
    root = root_hash()
    assert block_hashes(IDS[:-4], 20, root) == block_hashes(IDS, 20, root)[:1]
    assert block_hashes(b"", 16, root) == []


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 9))
def test_a_sequence_s_hashes_are_those_of_its_blocks(
    token_ids: list[int], block_size: int
) -> None:
    """Hashing at once and block by block, or from a block on, is the same."""
    packed = pack_ids(token_ids)
    parent = root_hash("s")
    hashes = block_hashes(packed, block_size, parent)
    for index, one in enumerate(hashes):
        block = packed[4 * block_size * index : 4 * block_size * (index + 1)]
        assert next_hash(parent, block) == one
        rest = packed[4 * block_size * (index + 1) :]
        assert block_hashes(rest, block_size, one) == hashes[index + 1 :]
        parent = one


def test_an_early_id_changes_all_later_hashes() -> None:
    """A block is found only behind the very ids that it was computed behind."""
    root = root_hash()
    changed = pack_ids([1, *range(1, 40)])
    assert not set(block_hashes(IDS, 8, root)) & set(block_hashes(changed, 8, root))


def test_salts_and_adapters_share_no_block() -> None:
    """The pairs are told apart, not what they read like in a row."""
    pairs: list[tuple[str | None, str]] = [
        (None, ""),
        ("a", ""),
        (None, "a"),
        ("ab", ""),
        ("b", "a"),
        ("a", "b"),
        (None, "ab"),
        ("", "b"),
    ]
    roots = {root_hash(salt, lora) for salt, lora in pairs}
    assert len(roots) == len(pairs)
    assert root_hash("") == root_hash(None)


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 2**64 - 1)))
def test_hashes_round_trip(hashes: list[int]) -> None:
    """Every list of u64 comes back as it was."""
    assert unpack_hashes(pack_hashes(hashes)) == hashes


def test_hashes_are_little_endian_u64() -> None:
    """The byte order is fixed, whatever the machine."""
    assert pack_hashes([1, 2**63]) == bytes.fromhex("0100000000000000 0000000000000080")


def test_half_hashes_are_malformed() -> None:
    """Bytes that are no whole hashes are refused, not cut, also in a message."""
    with pytest.raises(MalformedMessage, match="whole number"):
        unpack_hashes(b"x" * 9)
    for message in (KVBlocks(stored=b"x" * 4), KVBlocks(removed=b"x" * 12)):
        with pytest.raises(MalformedMessage, match="bytes stored"):
            decode_from_worker(encode(message))


def test_the_largest_message_is_a_control_message() -> None:
    """As many hashes as one may have fit, and one more does not."""
    largest = KVBlocks(True, bytes(8 * (MAX_KV_HASHES - 1)), bytes(8), seq=2**62)
    assert decode_from_worker(encode(largest)) == largest
    above = KVBlocks(stored=bytes(8 * MAX_KV_HASHES), removed=bytes(8))
    with pytest.raises(MalformedMessage, match="of at most 8000"):
        decode_from_worker(encode(above))
