"""What the workers last said of themselves, as gauges by role."""

from __future__ import annotations

from tokenwire.protocol.messages import Role

from .link import Link
from .metrics import Metrics
from .pool import Pool

__all__ = ["watch_workers"]


def watch_workers(metrics: Metrics, pool: Pool) -> None:
    """Serve the load of *pool*'s workers, read when Prometheus asks."""
    for role in Role:
        _watch_role(metrics, pool, role)

    def blocks() -> dict[str, float]:
        return {
            link.worker_id: link.blocks.num_blocks
            for link in pool.links
            if link.blocks is not None
        }

    metrics.index_blocks.read = blocks


def _watch_role(metrics: Metrics, pool: Pool, role: Role) -> None:
    def usable() -> list[Link]:
        return pool.usable(role)

    def running() -> float:
        return sum(link.load.num_running for link in usable())

    def waiting() -> float:
        return sum(link.load.num_waiting for link in usable())

    def kv_usage() -> float:
        return max((link.load.kv_usage for link in usable()), default=0.0)

    watch = metrics.watch
    watch(
        "tokenwire_workers_ready",
        "Workers that take requests.",
        role.value,
        lambda: len(usable()),
    )
    watch(
        "tokenwire_num_requests_running",
        "Requests in the workers' engines, as they last said.",
        role.value,
        running,
    )
    watch(
        "tokenwire_num_requests_waiting",
        "Requests that wait in the workers' engines, as they last said.",
        role.value,
        waiting,
    )
    watch(
        "tokenwire_kv_cache_usage_perc",
        "Largest used share of a worker's KV blocks, 0..1.",
        role.value,
        kv_usage,
    )
