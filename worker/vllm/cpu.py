"""Work-around: NIXL pins a CPU engine's process to the machine's last core.

vLLM 0.32 moves the process that holds the connector to the last core of every NUMA
node ("reserve different cores for start_load_kv() from model_forward()"), threads of
the model included: two engines then share one core and a decode takes a minute, and
in a container whose cpuset lacks that core the engine dies with EINVAL. With no
topology to read it pins nothing, and OpenMP's threads stay where the kernel puts them.

``install`` is a ``vllm.general_plugins`` entry point: vLLM calls it in every process.
"""

from __future__ import annotations

from importlib import import_module

__all__ = ["install"]


def install() -> None:
    """Switch the pinning off on a CPU; do nothing on a GPU. May be called again."""
    platforms = import_module("vllm.platforms")
    if not platforms.current_platform.is_cpu():
        return
    cpu_platform = import_module("vllm.platforms.cpu").CpuPlatform
    cpu_platform.discover_numa_topology = staticmethod(_no_topology)


def _no_topology() -> list[list[int]]:
    return []
