"""Every bound of the wire, each with the reason for its number."""

from __future__ import annotations

__all__ = [
    "HEARTBEAT_INTERVAL_S",
    "HEARTBEAT_TIMEOUT_S",
    "MAX_ADAPTERS",
    "MAX_ADAPTER_NAME_CHARS",
    "MAX_BATCH_ITEMS",
    "MAX_CONTROL_BYTES",
    "MAX_ERROR_CHARS",
    "MAX_KV_HASHES",
    "MAX_MESSAGE_BYTES",
    "MAX_METRICS_BYTES",
    "MAX_OWNER_BYTES",
    "MAX_REQUEST_ID_CHARS",
    "MAX_VERSION_CHARS",
    "SEND_QUEUE_MESSAGES",
    "SLEPT_S",
]

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""One message. 16 Mi token ids, 16 times the longest context length in use (1 Mi)."""

MAX_CONTROL_BYTES = 64 * 1024
"""One message that carries neither tokens nor a hand-over (Hello, Card, Load, ...):
the largest, a Card, has about 500 bytes. A peer that has not been accepted yet can
make this process hold no more than this."""

MAX_METRICS_BYTES = 1024 * 1024
"""One MetricsText. vLLM's families take about 55 KB for each data-parallel rank."""

MAX_BATCH_ITEMS = 65_536
"""Items in one Batch: 16 engine steps of the largest ``max_num_seqs`` in use (4096)."""

MAX_ADAPTERS = 256
"""LoRA adapters of a worker; their names fit into one Status, a control message."""

MAX_ADAPTER_NAME_CHARS = 128
"""A hub id has at most 96, and a trainer's run has its step in the name."""

MAX_KV_HASHES = 8_000
"""Hashes in one KVBlocks, which is a control message: 64,000 bytes of them."""

MAX_OWNER_BYTES = 64
"""Of whom a kept generation is: a hash."""

MAX_VERSION_CHARS = 256
"""Of a weight version: a folder's name has at most 255 bytes."""

MAX_REQUEST_ID_CHARS = 64
"""Ids are ours (at most 36 characters today); twice that leaves room to grow."""

MAX_ERROR_CHARS = 2_000
"""Error texts are cut to this: a traceback's last lines, never a whole prompt."""

SEND_QUEUE_MESSAGES = 10_000
"""ZeroMQ high-water mark per peer. One message an engine step: 100 s at a 10 ms step,
far beyond the heartbeat timeout that closes a link whose peer stopped reading."""

HEARTBEAT_INTERVAL_S = 1.0
"""Load and Ping period. Load also feeds the router, which wants it fresh."""

HEARTBEAT_TIMEOUT_S = 4.0
"""Silence after which a peer counts as lost: three missed beats and their jitter, and
inside the 5 s in which a client must hear of a dead worker."""

SLEPT_S = 2.0
"""Between two looks at the clock, which are due several times per heartbeat: this
process did not run. Half the heartbeat timeout, so that a peer is not judged by what
could not be heard."""
