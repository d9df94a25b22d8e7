"""vLLM's KV events as bytes: which blocks came and went in one engine step.

vLLM 0.32 sends each event as a map with its ``type``; releases before sent rows, with
the type first and later fields missing. Both are read, and what newer ones add is not.
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = [
    "AllBlocksCleared",
    "BlockHash",
    "BlockRemoved",
    "BlockStored",
    "EventError",
    "KVEvent",
    "decode_events",
]

BlockHash = int | bytes
"""vLLM's own, of whatever algorithm; ``VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES`` says which."""


class EventError(ValueError):
    """These bytes are no events of vLLM."""


class BlockStored(msgspec.Struct, tag="BlockStored", frozen=True):
    """Full blocks of one sequence, in order."""

    block_hashes: list[BlockHash]
    parent_block_hash: (
        BlockHash | None
    )  # of the block before them; None: it is the first
    token_ids: list[int]  # (len(block_hashes) * block_size,)
    block_size: int
    lora_id: int | None = None
    medium: str | None = None  # "GPU" for the cache itself, on CPUs too
    lora_name: str | None = None
    # For each block what else its hash is of, untagged and in this order: the adapter's
    # name, pairs for multimodal inputs, the cache salt of a first block, embeddings.
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None  # of layers with one kind of cache
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, tag="BlockRemoved", frozen=True):
    """Blocks that are found no more: one each, where several have the same hash."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared", frozen=True):
    """The prefix cache was reset."""


class _StoredRow(BlockStored, array_like=True, tag="BlockStored", frozen=True):
    pass


class _RemovedRow(BlockRemoved, array_like=True, tag="BlockRemoved", frozen=True):
    pass


class _ClearedRow(
    AllBlocksCleared, array_like=True, tag="AllBlocksCleared", frozen=True
):
    pass


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class _Maps(msgspec.Struct, array_like=True, frozen=True):
    ts: float
    events: list[KVEvent]
    data_parallel_rank: int | None = None


class _Rows(msgspec.Struct, array_like=True, frozen=True):
    ts: float
    events: list[_StoredRow | _RemovedRow | _ClearedRow]
    data_parallel_rank: int | None = None


_maps = msgspec.msgpack.Decoder(_Maps)
_rows = msgspec.msgpack.Decoder(_Rows)


def decode_events(payload: bytes) -> list[KVEvent]:
    """Return the events of one step, in order.

    Raises:
        EventError: *payload* is in neither form.
    """
    try:
        return _maps.decode(payload).events
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as as_maps:
        try:
            return list(_rows.decode(payload).events)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise EventError(str(as_maps)) from as_maps
