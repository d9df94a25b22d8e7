"""The worker's metrics: names, and the page that shows them."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry

from tokenwire.protocol.messages import ErrorKind, Finished, FinishReason
from tokenwire.worker.engine import EngineLoad
from tokenwire.worker.metrics import Metrics, serve_metrics


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    """Return a sample, or None if there is none."""
    labels["model_name"] = "m"
    return registry.get_sample_value(f"tokenwire_worker_{name}", labels)


def test_names_are_vllm_s_behind_our_prefix() -> None:
    """A dashboard for vLLM needs another prefix and nothing else."""
    registry = CollectorRegistry()
    metrics = Metrics("m", registry)
    metrics.engine_load(EngineLoad(2, 3, 0.25), 6, 1)
    assert value(registry, "num_requests_running") == 2
    assert value(registry, "num_requests_waiting") == 3
    assert value(registry, "kv_cache_usage_perc") == 0.25
    assert value(registry, "num_requests_open") == 6
    assert value(registry, "num_frontends") == 1


def test_a_good_end_counts_its_tokens_and_times() -> None:
    """Prompt, cached, queue, prefill, the whole."""
    registry = CollectorRegistry()
    metrics = Metrics("m", registry)
    end = Finished(
        "r", FinishReason.STOP, 4, num_prompt_tokens=10, num_cached_tokens=6,
        queue_s=0.5, prefill_s=0.25,
    )  # fmt: skip
    metrics.finished(end, 2.0)
    metrics.generated(4)
    assert value(registry, "request_success_total", finished_reason="stop") == 1
    assert value(registry, "prompt_tokens_total") == 10
    assert value(registry, "prompt_tokens_cached_total") == 6
    assert value(registry, "generation_tokens_total") == 4
    assert value(registry, "request_queue_time_seconds_sum") == 0.5
    assert value(registry, "request_prefill_time_seconds_sum") == 0.25
    assert value(registry, "e2e_request_latency_seconds_sum") == 2.0


def test_an_error_counts_by_kind_and_not_in_the_times() -> None:
    """It would pull the averages down."""
    registry = CollectorRegistry()
    metrics = Metrics("m", registry)
    end = Finished("r", FinishReason.ERROR, 0, error_kind=ErrorKind.HANDOVER)
    metrics.finished(end, 2.0)
    assert value(registry, "request_errors_total", kind="handover") == 1
    assert value(registry, "request_queue_time_seconds_count") == 0


async def test_the_page_is_on_the_given_host_at_a_free_port() -> None:
    """Port 0 becomes a real one, told in the URL."""
    server = serve_metrics("127.0.0.1", 0)
    try:
        assert server.url == f"http://127.0.0.1:{server.port}/metrics"
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
        async with asyncio.timeout(10):
            answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        assert b"200 OK" in answer.splitlines()[0]
    finally:
        server.close()
