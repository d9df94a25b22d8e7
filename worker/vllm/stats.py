"""How busy the engine is, from the counts vLLM's scheduler sends with each step."""

from __future__ import annotations

from typing import Any

from tokenwire.worker.engine import EngineLoad

__all__ = ["LoadRecorder"]


class LoadRecorder:
    """A stat logger for ``AsyncLLM`` that keeps the last counts of each engine core.

    vLLM 0.32 sends counts with every step, and runs an empty step after an abort or a
    late release of blocks, so the last counts of an idle engine are zero. It calls
    the methods of ``StatLoggerBase`` on whatever the factory returns; there is one
    core per data-parallel rank.
    """

    def __init__(self) -> None:
        self._cores: dict[int, EngineLoad] = {}
        self._num_steps = 0

    def factory(self, vllm_config: object, engine_index: int = 0) -> LoadRecorder:
        """Return the logger of one core: all share this one."""
        del vllm_config
        self._cores[engine_index] = EngineLoad()
        return self

    def record(
        self,
        scheduler_stats: Any,  # vLLM's SchedulerStats or None
        iteration_stats: object,
        mm_cache_stats: object = None,
        engine_idx: int = 0,
    ) -> None:
        """Take the counts of one step."""
        del iteration_stats, mm_cache_stats
        if scheduler_stats is None:
            return
        self._num_steps += 1
        self._cores[engine_idx] = EngineLoad(
            num_running=scheduler_stats.num_running_reqs,
            # The second count is of requests that wait for their KV to arrive.
            num_waiting=scheduler_stats.num_waiting_reqs
            + scheduler_stats.num_skipped_waiting_reqs,
            kv_usage=scheduler_stats.kv_cache_usage,
        )

    def load(self) -> EngineLoad:
        """Return the counts over all cores; the usage is that of the fullest."""
        cores = self._cores.values()
        return EngineLoad(
            num_running=sum(core.num_running for core in cores),
            num_waiting=sum(core.num_waiting for core in cores),
            kv_usage=max((core.kv_usage for core in cores), default=0.0),
            num_steps=self._num_steps,
        )

    def log_engine_initialized(self) -> None:
        """Nothing to log."""

    def log(self) -> None:
        """Nothing to log."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Nothing to record."""
