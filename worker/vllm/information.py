"""What a started engine serves, read from vLLM's configuration."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

from tokenwire.worker.engine import EngineInfo

from .binding import Vllm

__all__ = ["engine_information"]


def engine_information(
    vllm: Vllm, config: Any, served_name: str
) -> EngineInfo:  # vLLM's VllmConfig
    """Return what *config* says once the engine core has completed it."""
    connector = _connector(config.kv_transfer_config)
    return EngineInfo(
        engine="vllm",
        version=vllm.version,
        max_model_len=config.model_config.max_model_len,
        vocab_size=config.model_config.get_vocab_size(),
        block_size=config.cache_config.block_size,
        num_kv_blocks=config.cache_config.num_gpu_blocks or 0,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        connector=connector,
        connector_compatibility=_compatibility(vllm, config, served_name, connector)
        if connector
        else "",
        world_size=config.parallel_config.world_size_across_dp,
    )


def _connector(transfer: Any) -> str:  # vLLM's KVTransferConfig or None
    """Return the connector that moves KV; inside a MultiConnector, NIXL's."""
    if transfer is None or not transfer.kv_connector:
        return ""
    extra: dict[str, Any] = transfer.kv_connector_extra_config or {}
    parts: list[dict[str, str]] = extra.get("connectors", [])
    names = [part.get("kv_connector", "") for part in parts]
    own: str = transfer.kv_connector
    return next((name for name in names if name.startswith("Nixl")), own)


def _compatibility(
    vllm: Vllm, config: Any, served_name: str, connector: str
) -> str:  # vLLM's VllmConfig
    """Return a short hash over what must be equal on both sides of a hand-over.

    vLLM's own check (``compute_nixl_compatibility_hash``, which has its version in
    it) comes with the first transfer and fails that request; this one comes when the
    workers register. Paths are left out: machines keep a model in different places.
    """
    model = config.model_config
    speculative = config.speculative_config
    factors = {
        "vllm": vllm.version,
        "model": served_name,
        "architectures": list(model.architectures or []),
        "layers": model.get_total_num_hidden_layers(),
        "kv_heads": model.get_total_num_kv_heads(),
        "head_size": model.get_head_size(),
        "dtype": str(model.dtype),
        "cache_dtype": str(config.cache_config.cache_dtype),
        "block_size": config.cache_config.block_size,
        "layout": os.environ.get("VLLM_KV_CACHE_LAYOUT", ""),
        "connector": connector,
        # A speculative layer of one side only: "Number of KV layers must match".
        "speculative": str(speculative.method) if speculative is not None else "",
        # Whose states such a layer holds.
        "layers_kept": _layers_kept(speculative),
    }
    text = json.dumps(factors, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _layers_kept(speculative: Any) -> list[int]:  # vLLM's SpeculativeConfig or None
    draft = getattr(speculative, "draft_model_config", None)
    hf_config = getattr(draft, "hf_config", None)
    return list(getattr(hf_config, "eagle_aux_hidden_state_layer_ids", None) or [])
