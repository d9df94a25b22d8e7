"""vLLM's model runner V1, for requests that go on behind output; see ``resume``.

The runner keeps each request's prompt and output apart for penalties, bad words and
``min_tokens``, and a generator for its seed, from which every token takes one draw. Both
begin here as they were behind the output. The scheduler says what it is: it fills
``prefill_token_ids``, which vLLM leaves empty for this runner.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

__all__ = ["advance", "begin_with_output"]

MAX_SEED = 2**31
"""Exclusive; of what the CPU's sampler draws for a token (``TopKTopPSampler``)."""


def begin_with_output(runner: Any) -> None:  # vLLM's GPUModelRunner, or CPUModelRunner
    """Have *runner* give requests the output that the scheduler says they have."""
    module: Any = import_module("vllm.v1.worker.gpu_model_runner")
    stock: Any = module.CachedRequestState
    update = runner._update_states
    outputs: dict[str, list[int]] = {}  # of the step that is being prepared

    class State(stock):
        def __post_init__(self) -> None:
            output = outputs.get(self.req_id)
            if output is not None:
                self.output_token_ids = output
                if self.generator is not None:
                    advance(self.generator, len(output), runner)
            super().__post_init__()  # pyright: ignore[reportUnknownMemberType] - vLLM's

    def update_states(planned: Any) -> Any:  # vLLM's SchedulerOutput
        for new in planned.scheduled_new_reqs:
            if new.prefill_token_ids is not None:
                num_prompt = len(new.prompt_token_ids)
                outputs[new.req_id] = new.prefill_token_ids[num_prompt:]
        try:
            return update(planned)
        finally:
            outputs.clear()

    module.CachedRequestState = State
    runner._update_states = update_states


def advance(generator: Any, num_tokens: int, runner: Any) -> None:
    """Take the draws of *num_tokens* tokens out of *generator*, as the sampler would.

    Args:
        generator: A torch.Generator, new.
        num_tokens: Of output that is there.
        runner: Whose sampler is meant.
    """
    sampler = runner.sampler.topk_topp_sampler
    dtype = torch.float64 if sampler.use_fp64_gumbel else torch.float32
    device = generator.device

    def draw() -> None:  # noise for each token of the vocabulary
        noise = torch.empty(runner.input_batch.vocab_size, dtype=dtype, device=device)
        noise.exponential_(generator=generator)

    if device.type != "cpu":
        # Not run. Philox: a draw moves the offset, always as far.
        before = generator.get_offset()
        draw()
        step = generator.get_offset() - before
        generator.set_offset(before + step * num_tokens)
    elif sampler.forward == sampler.forward_cpu and not sampler.use_fp64_gumbel:
        # It draws a seed for a token's noise.
        torch.randint(0, MAX_SEED, (num_tokens,), generator=generator)
    else:
        for _ in range(num_tokens):
            draw()
