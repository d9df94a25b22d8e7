"""Work-around: on a CPU, requests of the model itself get the last adapter's weights.

vLLM 0.32 marks a token without an adapter by the index -1, and its operators for CPUs
take that for the last slot of the adapters: with an adapter in that slot (the only one,
by default), a token of the model itself is computed with it in every step that also has
one of the adapter's. Here what such tokens get of an
adapter's first matrix is zero, so that nothing is left for the second to add.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["keep_adapters_apart"]


def keep_adapters_apart() -> None:
    """Give tokens without an adapter nothing of any; may be called again."""
    operators: Any = import_module("vllm.lora.ops.torch_ops.lora_ops")
    shrink = operators.bgmv_shrink
    if getattr(shrink, "keeps_apart", False):
        return

    def shrink_or_zero(
        inputs: Any,  # torch.Tensor, (num_tokens, input_size)
        weights: Any,  # (num_slots, rank, input_size)
        output: Any,  # (num_tokens, rank or more)
        indices: Any,  # (num_tokens,); -1: no adapter
        scaling: float = 1.0,
    ) -> None:
        shrink(inputs, weights, output, indices, scaling)
        output[indices < 0] = 0

    shrink_or_zero.keeps_apart = True  # type: ignore[attr-defined]  # a mark on a function
    operators.bgmv_shrink = shrink_or_zero
    wrapper: Any = import_module("vllm.lora.punica_wrapper.punica_cpu")
    wrapper.bgmv_shrink = shrink_or_zero  # it holds the name itself, too
