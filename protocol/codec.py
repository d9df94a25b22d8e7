"""Bytes to messages and back, typed and bounded; no I/O."""

from __future__ import annotations

import math
from typing import TypeVar

import msgspec

from .blocks import HASH_BYTES
from .errors import LocalProtocolError, MalformedMessage, MessageTooLarge
from .limits import (
    MAX_ADAPTERS,
    MAX_BATCH_ITEMS,
    MAX_CONTROL_BYTES,
    MAX_KV_HASHES,
    MAX_MESSAGE_BYTES,
    MAX_METRICS_BYTES,
    MAX_OWNER_BYTES,
    MAX_REQUEST_ID_CHARS,
)
from .messages import (
    Admin,
    AdminDone,
    Batch,
    Cancel,
    Card,
    Finished,
    FromFrontend,
    FromWorker,
    Keep,
    KVBlocks,
    LetGo,
    Load,
    Logprobs,
    MetricsText,
    OrphanedKV,
    Recall,
    Recalled,
    ReleaseKV,
    Settled,
    Status,
    Submit,
    Tokens,
)
from .tokens import TOKEN_BYTES

__all__ = ["decode_from_frontend", "decode_from_worker", "encode"]

T = TypeVar("T")


def _no_extensions(code: int, _data: memoryview) -> object:
    """Refuse msgpack extension types: JSON, which objects end up in, has no such."""
    msg = f"extension type {code}"
    raise MalformedMessage(msg)


_encoder = msgspec.msgpack.Encoder()
_from_frontend = msgspec.msgpack.Decoder(FromFrontend, ext_hook=_no_extensions)
_from_worker = msgspec.msgpack.Decoder(FromWorker, ext_hook=_no_extensions)


def encode(message: FromFrontend | FromWorker) -> bytes:
    """Return the bytes of *message*.

    Raises:
        MessageTooLarge: It is above ``MAX_MESSAGE_BYTES``, or above
            ``MAX_CONTROL_BYTES`` and carries neither tokens nor a hand-over, or is a
            MetricsText above ``MAX_METRICS_BYTES``.
        LocalProtocolError: It holds something msgpack has no form for, or is a Batch
            of more than ``MAX_BATCH_ITEMS``.
    """
    if isinstance(message, Batch):
        num_items = len(message.tokens) + len(message.finished)
        if num_items > MAX_BATCH_ITEMS:
            msg = f"a Batch of {num_items} items, the limit is {MAX_BATCH_ITEMS}"
            raise LocalProtocolError(msg)
    try:
        data = _encoder.encode(message)
    except (TypeError, OverflowError, ValueError, RecursionError) as error:
        msg = f"{type(message).__name__} cannot be encoded: {error}"
        raise LocalProtocolError(msg) from error
    _check_size(message, len(data))
    return data


def decode_from_frontend(data: bytes | memoryview) -> FromFrontend:
    """Return the message that a frontend sent.

    Raises:
        MessageTooLarge: *data* is above the limit of its message.
        MalformedMessage: *data* is not such a message; the text names the field.
    """
    message = _decode(_from_frontend, data)
    _check_size(message, len(data))
    if isinstance(message, Submit):
        _check_id(message.request_id)
        _check_ids(message.token_ids, "$.token_ids")
        _check_counts(message, ("capture_tokens",), "$")
        if message.keep is not None:
            _check_keep(message.keep)
    elif isinstance(message, Cancel | ReleaseKV | Settled | LetGo):
        _check_id(message.request_id)
    elif isinstance(message, Recall):
        _check_id(message.request_id)
        _check_id(message.generation_id, "$.generation_id")
        _check_owner(message.owner, "$.owner")
    elif isinstance(message, Admin):
        _check_id(message.request_id)
        if not 0 <= message.timeout_s < math.inf:
            msg = f"$.timeout_s: {message.timeout_s}"
            raise MalformedMessage(msg)
    return message


def decode_from_worker(data: bytes | memoryview) -> FromWorker:
    """Return the message that a worker sent.

    Raises:
        MessageTooLarge: *data* is above the limit of its message.
        MalformedMessage: *data* is not such a message; the text names the field.
    """
    message = _decode(_from_worker, data)
    if type(message) is Batch:  # once per engine step: its size may be any message's
        _check_batch(message)
        return message
    _check_size(message, len(data))
    if isinstance(message, OrphanedKV | AdminDone):
        _check_id(message.request_id)
    elif isinstance(message, Recalled):
        _check_recalled(message)
    elif isinstance(message, KVBlocks):
        _check_hashes(message)
    elif isinstance(message, Status):
        _check_counts(message, ("update", "sleep_level", "cache_epoch"), "$")
        if len(message.adapters) > MAX_ADAPTERS:
            msg = f"$.adapters: {len(message.adapters)}, the limit is {MAX_ADAPTERS}"
            raise MalformedMessage(msg)
    elif isinstance(message, Card):
        _check_counts(message, _CARD_COUNTS, "$")
    elif isinstance(message, Load):
        _check_counts(message, _LOAD_COUNTS, "$")
        if not math.isfinite(message.kv_usage):
            msg = f"$.kv_usage: {message.kv_usage}"
            raise MalformedMessage(msg)
    return message


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes | memoryview) -> T:
    if len(data) > MAX_MESSAGE_BYTES:
        msg = f"{len(data)} bytes, the limit is {MAX_MESSAGE_BYTES}"
        raise MessageTooLarge(msg)
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(str(error)) from error


_MAX_BYTES: dict[type, int] = {
    **dict.fromkeys(
        (Submit, ReleaseKV, OrphanedKV, Batch, Recalled), MAX_MESSAGE_BYTES
    ),
    MetricsText: MAX_METRICS_BYTES,
}
"""Of those that carry tokens, a hand-over or a page; the others have less to say."""


def _check_size(message: FromFrontend | FromWorker, size: int) -> None:
    limit = _MAX_BYTES.get(type(message), MAX_CONTROL_BYTES)
    if size > limit:
        msg = f"{type(message).__name__} has {size} bytes, the limit is {limit}"
        raise MessageTooLarge(msg)


def _check_id(request_id: str, path: str = "$.request_id") -> None:
    if not 0 < len(request_id) <= MAX_REQUEST_ID_CHARS:
        msg = f"{path}: {len(request_id)} characters, 1..{MAX_REQUEST_ID_CHARS}"
        raise MalformedMessage(msg)


def _check_owner(owner: bytes, path: str) -> None:
    if len(owner) > MAX_OWNER_BYTES:
        msg = f"{path}: {len(owner)} bytes, the limit is {MAX_OWNER_BYTES}"
        raise MalformedMessage(msg)


def _check_keep(keep: Keep) -> None:
    _check_id(keep.generation_id, "$.keep.generation_id")
    _check_owner(keep.owner, "$.keep.owner")
    if not 0 < keep.ttl_s < math.inf or keep.epoch < 0:
        msg = f"$.keep: ttl_s {keep.ttl_s}, epoch {keep.epoch}"
        raise MalformedMessage(msg)
    if keep.logprobs is not None:
        _check_rows(keep.logprobs, "$.keep.logprobs")


def _check_recalled(message: Recalled) -> None:
    _check_id(message.request_id)
    _check_ids(message.token_ids, "$.token_ids")
    _check_counts(message, ("epoch", "num_new_tokens", "num_cached_tokens"), "$")
    if message.logprobs is not None:
        _check_rows(message.logprobs, "$.logprobs")
    if message.finished is not None:
        _check_finished(message.finished, "$.finished")


def _check_ids(packed: bytes, path: str) -> None:
    if len(packed) % TOKEN_BYTES:
        msg = f"{path}: {len(packed)} bytes are not a whole number of ids"
        raise MalformedMessage(msg)


def _check_hashes(message: KVBlocks) -> None:
    sizes = (len(message.stored), len(message.removed))
    is_whole = not any(size % HASH_BYTES for size in sizes)
    if not is_whole or sum(sizes) > MAX_KV_HASHES * HASH_BYTES:
        msg = (
            f"$: {sizes[0]} bytes stored, {sizes[1]} removed, of at most {MAX_KV_HASHES} "
            f"hashes of {HASH_BYTES}"
        )
        raise MalformedMessage(msg)


def _check_batch(batch: Batch) -> None:
    tokens, ends = batch.tokens, batch.finished
    num_items = len(tokens) + len(ends)
    if num_items > MAX_BATCH_ITEMS:
        msg = f"$: a Batch of {num_items} items, the limit is {MAX_BATCH_ITEMS}"
        raise MalformedMessage(msg)
    for position, item in enumerate(tokens):
        # One id, as most have: once per request and engine step.
        if (
            len(item.token_ids) != TOKEN_BYTES
            or item.index < 0
            or item.logprobs is not None
        ):
            _check_tokens(item, position)
    for position, end in enumerate(ends):
        _check_finished(end, f"$.finished[{position}]")


def _check_tokens(item: Tokens, position: int) -> None:
    size = len(item.token_ids)
    if item.index < 0 or size % TOKEN_BYTES or not size:
        msg = f"$.tokens[{position}]: index {item.index} with {size} bytes of ids"
        raise MalformedMessage(msg)
    if item.logprobs is not None:
        path = f"$.tokens[{position}].logprobs"
        _check_logprobs(item.logprobs, size // TOKEN_BYTES, path)


def _check_logprobs(item: Logprobs, num_rows: int, path: str) -> None:
    want = num_rows * item.width * TOKEN_BYTES
    parts = (item.token_ids, item.logprobs, item.ranks)
    if item.width < 1 or any(len(part) != want for part in parts):
        sizes = ", ".join(str(len(part)) for part in parts)
        msg = f"{path}: {num_rows} rows of width {item.width} in {sizes} bytes"
        raise MalformedMessage(msg)


def _check_rows(item: Logprobs, path: str) -> None:
    """Refuse records that are no whole number of rows."""
    num_rows = len(item.token_ids) // (TOKEN_BYTES * max(1, item.width))
    _check_logprobs(item, num_rows, path)


_END_COUNTS = ("num_output_tokens", "num_prompt_tokens", "num_cached_tokens")
_CARD_COUNTS = (
    "max_model_len",
    "vocab_size",
    "block_size",
    "max_num_seqs",
    "num_kv_blocks",
    "world_size",
)
_LOAD_COUNTS = (
    "num_running",
    "num_waiting",
    "kv_usage",
    "num_waiting_tokens",
    "num_requests",
    "num_frontends",
)


def _check_counts(
    item: Submit | Card | Load | Status | Finished | Recalled,
    fields: tuple[str, ...],
    path: str,
) -> None:
    for field in fields:
        if getattr(item, field) < 0:
            msg = f"{path}.{field}: {getattr(item, field)}"
            raise MalformedMessage(msg)


def _check_finished(item: Finished, path: str) -> None:
    _check_counts(item, _END_COUNTS, path)
    if item.prompt_token_ids is not None:
        _check_ids(item.prompt_token_ids, f"{path}.prompt_token_ids")
    if item.prompt_logprobs is not None:
        _check_rows(item.prompt_logprobs, f"{path}.prompt_logprobs")
