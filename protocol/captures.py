"""Where hidden states were saved, as the ends of requests say it."""

from __future__ import annotations

from .messages import JsonObject

__all__ = ["saved_path"]


def saved_path(kv_transfer_params: JsonObject | None) -> str | None:
    """Return the file that a client is told of; None: there is none."""
    path = (kv_transfer_params or {}).get("hidden_states_path")
    return path if isinstance(path, str) else None
