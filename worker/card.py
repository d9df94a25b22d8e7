"""What a worker says of itself to each frontend: its Card."""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path

from tokenwire.protocol.messages import (
    ADMIN,
    CAPTURE,
    CAPTURE_TOLD,
    JOURNAL,
    KV_EVENTS,
    METRICS,
    ORPHANED_KV,
    PROTOCOL_VERSION,
    STATUS,
    Card,
)
from tokenwire.worker.engine import EngineInfo

from .config import WorkerConfig

__all__ = ["make_card"]


def make_card(config: WorkerConfig, info: EngineInfo, *, captures: bool) -> Card:
    """Return the card of a worker that starts now.

    Args:
        config: Its settings.
        info: What its engine says.
        captures: Whether it saves hidden states.
    """
    return Card(
        protocol_version=PROTOCOL_VERSION,
        worker_id=config.worker_id,
        incarnation=secrets.token_hex(4),
        role=config.role,
        model=config.served_model_name,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        block_size=info.block_size,
        engine=info.engine,
        engine_version=info.version,
        tokenizer_sha256=_tokenizer_sha256(config.model),
        dtype=info.dtype,
        connector=info.connector,
        connector_compatibility=info.connector_compatibility,
        max_num_seqs=info.max_num_seqs,
        num_kv_blocks=info.num_kv_blocks,
        capabilities=[
            ORPHANED_KV,
            METRICS,
            ADMIN,
            STATUS,
            *([CAPTURE, CAPTURE_TOLD] if captures else []),
            *([JOURNAL] if config.journal_bytes else []),
            *([KV_EVENTS] if info.tells_blocks else []),
        ],
        weight_version=config.weight_version,
        hidden_state_layers=list(config.capture.layers) if config.capture else [],
        world_size=info.world_size,
        exactness=info.exactness,
    )


def _tokenizer_sha256(model: str) -> str:
    """Return the digest of the model's tokenizer, or nothing if it is not at hand."""
    path = Path(model) / "tokenizer.json"
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""
