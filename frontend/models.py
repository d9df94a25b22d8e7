"""``/v1/models``: the model that is served, and its adapters."""

from __future__ import annotations

import msgspec

from .errors import no_such_model
from .pool import Pool

__all__ = ["ModelList"]

_PERMISSIONS = {
    "allow_create_engine": False,
    "allow_sampling": True,
    "allow_logprobs": True,
    "allow_search_indices": False,
    "allow_view": True,
    "allow_fine_tuning": False,
    "organization": "*",
    "group": None,
    "is_blocking": False,
}
"""What vLLM says of every model; OpenAI itself has left the list off."""


class ModelList:
    """The models, in OpenAI's shape with vLLM's fields.

    Args:
        pool: The workers.
        started: Unix seconds.
    """

    def __init__(self, pool: Pool, started: int) -> None:
        self._pool = pool
        self._started = started

    def all(self) -> bytes:
        """Return the list: the model first, then the adapters."""
        names = [self._pool.model, *self._pool.weights.adapters]
        data = [self._model(name) for name in names]
        return msgspec.json.encode({"object": "list", "data": data})

    def one(self, name: str) -> bytes:
        """Return one of them.

        Raises:
            ApiError: 404.
        """
        names = [self._pool.model, *self._pool.weights.adapters]
        if name not in names:
            raise no_such_model(name, names)
        return msgspec.json.encode(self._model(name))

    def _model(self, name: str) -> dict[str, object]:
        is_base = name == self._pool.model
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "tokenwire",
            "root": name,
            "parent": None if is_base else self._pool.model,
            "max_model_len": self._pool.max_model_len,
            "permission": [
                {
                    "id": f"modelperm-{self._pool.incarnation}",
                    "object": "model_permission",
                    "created": self._started,
                    **_PERMISSIONS,
                }
            ],
        }
