"""Work-around: on a CPU, a speculating engine draws with any temperature, top_k, top_p.

vLLM 0.32 spreads these parameters of a batch over its draft tokens by a kernel, and its
kernel for CPUs writes into a copy of the result unless that is of 64-bit integers: the
draws are made with whatever was in memory. Capture is such an engine (it keeps hidden
states by a speculation that drafts nothing), so every token but the first of an output
was drawn from no distribution that anybody asked for; greedy outputs were right.

And a step without draft tokens, all of whose requests have a ``top_k`` and no ``top_p``,
asks for the largest ``top_k`` of none: an error that ends the engine, by one client.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["draw_as_asked"]


def draw_as_asked() -> None:
    """Spread the parameters in PyTorch, where there are any; may be called again."""
    torch: Any = import_module("torch")
    sampler: Any = import_module("vllm.v1.sample.rejection_sampler")

    constrain = sampler.apply_sampling_constraints
    if getattr(constrain, "takes_none", False):
        return

    def constrain_any(logits: Any, *others: Any) -> Any:  # (num_tokens, vocab_size)
        return constrain(logits, *others) if logits.shape[0] else logits

    def expand_batch_to_tokens(
        x: Any,  # torch.Tensor, (num_requests,)
        cu_num_tokens: Any,  # (num_requests,), the running total of their tokens
        num_tokens: int,
        replace_from: float = 0,
        replace_to: float = 0,
    ) -> Any:  # (num_tokens,)
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        replaced = torch.where(x == replace_from, replace_to, x).to(x.dtype)
        return torch.repeat_interleave(replaced, counts, output_size=num_tokens)

    constrain_any.takes_none = True  # type: ignore[attr-defined]  # a mark on a function
    sampler.apply_sampling_constraints = constrain_any
    sampler.expand_batch_to_tokens = expand_batch_to_tokens
