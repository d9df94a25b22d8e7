"""Work-around: a seeded request whose prefill is chunked kills a CPU engine.

vLLM 0.32 samples at the end of every chunk and throws the token of all but the last
away. To take that draw back it moves the generator's offset, which a CPU generator
does not have: ``RuntimeError: CPU Generator does not use offset`` ends the engine, so
one client request (a seed and a prompt above ``max_num_batched_tokens``) would take a
worker down. Here the generator's whole state is put back instead, which gives the
tokens of an unchunked prefill.

vLLM takes this class by its ``--worker-cls`` option, on a CPU only.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .cpu import install
from .cpu_draws import draw_as_asked
from .cpu_lora import keep_adapters_apart
from .cpu_nixl import let_progress_thread_sleep
from .resume import is_resuming
from .resume_runner import begin_with_output

__all__ = ["CpuWorker"]

_base: Any = import_module("vllm.v1.worker.cpu_worker").CPUWorker


class CpuWorker(_base):
    """vLLM's CPU worker: survives seeds, keeps cores and adapters apart, goes on."""

    def init_device(self) -> None:
        """Prepare the device, then make the model runner safe."""
        # Again here: the entry point is not there when tokenwire is not installed,
        # and VLLM_PLUGINS may leave it out.
        install()
        if self.vllm_config.kv_transfer_config is not None:
            let_progress_thread_sleep()
        if self.vllm_config.speculative_config is not None:
            draw_as_asked()
        if self.vllm_config.lora_config is not None:
            keep_adapters_apart()
        super().init_device()  # pyright: ignore[reportUnknownMemberType] - of vLLM's
        if self.use_v2_model_runner:
            return  # it has neither generators nor books of its own
        rewind_by_state(self.model_runner)
        if is_resuming(self.vllm_config):
            begin_with_output(self.model_runner)


def rewind_by_state(runner: Any) -> None:  # vLLM's CPUModelRunner
    """Make *runner* take draws back by state, not by offset."""
    sample = runner._sample
    bookkeep = runner._bookkeeping_sync

    def sample_and_rewind(*args: Any, **kwargs: Any) -> Any:  # passed through
        batch = runner.input_batch
        discarded = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0]
        states = [
            (generator, generator.get_state())
            for index in discarded
            if (generator := batch.generators.get(int(index))) is not None
        ]
        output = sample(*args, **kwargs)
        for generator, state in states:
            generator.set_state(state)
        return output

    def bookkeep_without_generators(*args: Any, **kwargs: Any) -> Any:  # passed through
        # Its only use of them is the call that a CPU generator refuses.
        batch = runner.input_batch
        generators, batch.generators = batch.generators, {}
        try:
            return bookkeep(*args, **kwargs)
        finally:
            batch.generators = generators

    runner._sample = sample_and_rewind
    runner._bookkeeping_sync = bookkeep_without_generators
