"""The demo model as transformers runs it: what hidden states are measured against."""

from __future__ import annotations

import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["PlainModel"]


class PlainModel:
    """The model in fp32, without any engine."""

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # of libraries that we do not call ourselves
            self._torch: Any = import_module("torch")
            transformers: Any = import_module("transformers")
            self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                str(folder), dtype=self._torch.float32
            )

    def hidden_states(self, token_ids: list[int], layers: list[int]) -> Any:
        """Return a numpy array (num_tokens, num_layers, hidden_size).

        Layer N is the Nth block's output. transformers lists these, but the last one
        behind the final norm: it is taken before, at the norm's door.
        """
        before_norm: list[Any] = []

        def keep(module: object, inputs: tuple[Any, ...]) -> None:
            del module
            before_norm.append(inputs[0])

        hook = self._model.model.norm.register_forward_pre_hook(keep)
        try:
            with self._torch.no_grad():
                out = self._model(
                    self._torch.tensor([token_ids]), output_hidden_states=True
                )
        finally:
            hook.remove()
        states = [*out.hidden_states[:-1], before_norm[0]]
        return self._torch.stack([states[n][0] for n in layers], dim=1).numpy()
