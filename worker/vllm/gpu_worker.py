"""vLLM's GPU worker, for requests that go on behind output; see ``resume``.

Not run: there was no GPU. It is used with model runner V1 alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .resume_runner import begin_with_output

__all__ = ["GpuWorker"]

_base: Any = import_module("vllm.v1.worker.gpu_worker").Worker


class GpuWorker(_base):
    """vLLM's GPU worker with model runner V1."""

    def init_device(self) -> None:
        """Prepare the device and the model runner."""
        super().init_device()  # pyright: ignore[reportUnknownMemberType] - of vLLM's
        begin_with_output(self.model_runner)
