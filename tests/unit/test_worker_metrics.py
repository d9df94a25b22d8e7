"""The worker's metrics: names, and the page that shows them."""

from __future__ import annotations

import asyncio
from importlib.metadata import version

from prometheus_client import CollectorRegistry

from support.awake import within
from tokenwire.protocol.messages import Card, ErrorKind, Finished, FinishReason, Role
from tokenwire.worker.engine import EngineLoad
from tokenwire.worker.health import Health
from tokenwire.worker.listener import serve_metrics
from tokenwire.worker.metrics import Metrics, engine_families


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


def test_a_page_says_whose_it_is_and_what_has_not_happened() -> None:
    """Alerts ask for increases, and a series that begins at 1 has none."""
    registry = CollectorRegistry()
    metrics = Metrics("m", registry)
    card = Card(
        1, worker_id="w", incarnation="i", role=Role.DECODE, model="m",
        max_model_len=64, vocab_size=8, block_size=16, engine="sim", engine_version="1",
        tokenizer_sha256="",
    )  # fmt: skip
    metrics.serves(card)
    known = {
        "worker_id": "w", "role": "decode", "engine": "sim", "engine_version": "1",
        "version": version("tokenwire"),
    }  # fmt: skip
    assert value(registry, "info", **known) == 1
    for name in ("kv_orphans", "protocol_errors", "capture_failures"):
        assert value(registry, f"{name}_total") == 0


def test_a_simulated_engine_has_vllms_families() -> None:
    """The same counts under vLLM's names and labels; and nothing else of the page."""
    registry = CollectorRegistry()
    metrics = Metrics("m", registry, as_vllm=True)
    for num_kv_expired in (3, 5):
        load = EngineLoad(2, 3, 0.25, num_kv_expired=num_kv_expired)
        metrics.engine_load(load, 6, 1)
    metrics.finished(Finished("r", FinishReason.STOP, 4, num_prompt_tokens=10), 2.0)
    metrics.generated(4)
    text = engine_families(registry)
    labels = '{engine="0",model_name="m"}'
    for line in (
        f"vllm:num_requests_running{labels} 2.0",
        f"vllm:num_requests_waiting{labels} 3.0",
        f"vllm:kv_cache_usage_perc{labels} 0.25",
        f"vllm:nixl_num_kv_expired_reqs_total{labels} 5.0",
        f"vllm:prompt_tokens_total{labels} 10.0",
        f"vllm:generation_tokens_total{labels} 4.0",
        f"vllm:e2e_request_latency_seconds_count{labels} 1.0",
        "# TYPE vllm:time_to_first_token_seconds histogram",
    ):
        assert line in text.splitlines()
    assert "tokenwire" not in text


def test_another_engine_brings_its_own_families() -> None:
    """Twice the same name would be refused by the registry."""
    registry = CollectorRegistry()
    Metrics("m", registry)
    assert engine_families(registry) == ""


async def asked(host: str, port: int, path: str) -> bytes:
    """Return the whole answer to a GET of *path*."""
    reader, writer = await asyncio.open_connection(host, port)
    accept = b"application/openmetrics-text;version=1.0.0,text/plain;q=0.5,*/*;q=0.1"
    writer.write(b"GET %s HTTP/1.0\r\nAccept: %s\r\n\r\n" % (path.encode(), accept))
    async with within(60):
        answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


async def test_the_page_is_on_the_given_host_at_a_free_port() -> None:
    """Port 0 becomes a real one, told in the URL."""
    server = serve_metrics("127.0.0.1", 0, Health())
    try:
        assert server.url == f"http://127.0.0.1:{server.port}/metrics"
        answer = await asked(server.host, server.port, "/metrics")
        assert b"200 OK" in answer.splitlines()[0]
        assert b"python_info" in answer
        # What Prometheus prefers would rename vLLM's families.
        assert b"text/plain; version=0.0.4" in answer
    finally:
        server.close()


async def test_probes_are_answered_beside_the_metrics() -> None:
    """A worker that loads is live, and not ready."""
    health = Health()
    server = serve_metrics("127.0.0.1", 0, health)
    try:
        assert b" 200 OK" in await asked(server.host, server.port, "/live")
        assert b" 503 " in await asked(server.host, server.port, "/ready")
        health.serving()
        answer = await asked(server.host, server.port, "/ready")
        assert b" 200 OK" in answer
        assert answer.endswith(b"serving\n")
    finally:
        server.close()
