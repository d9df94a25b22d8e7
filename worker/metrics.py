"""The worker's Prometheus metrics; the only ``prometheus_client`` of this package.

Names are vLLM's with ``tokenwire_worker_`` in the place of ``vllm:``, where vLLM has
one. Counts are of what crossed the wire, whichever engine is behind it; vLLM's own
families are on the same page, from the same default registry. For a simulated engine
the same counts are there under vLLM's names, so that its dashboards work.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING

from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tokenwire.protocol.messages import Card, ErrorKind, Finished
from tokenwire.worker.captures import Usage
from tokenwire.worker.engine import EngineLoad
from tokenwire.worker.kv_blocks import BlockUsage

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

__all__ = ["Metrics", "engine_families", "metrics_application"]

PREFIX = "tokenwire_worker_"
ENGINE_PREFIX = "vllm:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST_CORE = "0"
"""vLLM's label ``engine`` counts an engine's cores; a simulated one has one."""

_LATENCY_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip
"""vLLM's range for queue and prefill times, with finer steps below 0.3 s, where a
healthy hand-over is."""


_VLLM_HAS = {
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
    "prompt_tokens", "prompt_tokens_cached", "generation_tokens", "request_success",
    "request_queue_time_seconds", "request_prefill_time_seconds",
    "time_to_first_token_seconds", "e2e_request_latency_seconds",
}  # fmt: skip
"""What has the same name and meaning there."""


class _Families:
    """Metrics with the label of one model; those without more labels begin at 0.

    Of a series that begins at 1, Prometheus does not see the first increase.
    """

    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        self._model_name = model_name
        self._registry = registry
        self.vllm_has: list[Collector] = []

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """Return a counter: the model's, or with *labels* to be given behind its name."""
        names = ("model_name", *labels)
        whole = Counter(PREFIX + name, text, names, registry=self._registry)
        self._known(whole, name)
        return whole if labels else whole.labels(self._model_name)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        """Return a gauge, as ``counter`` does."""
        names = ("model_name", *labels)
        whole = Gauge(PREFIX + name, text, names, registry=self._registry)
        self._known(whole, name)
        return whole if labels else whole.labels(self._model_name)

    def seconds(self, name: str, text: str) -> Histogram:
        """Return the model's histogram of a latency."""
        whole = Histogram(
            PREFIX + name,
            text,
            ("model_name",),
            registry=self._registry,
            buckets=_LATENCY_BUCKETS_S,
        )
        self._known(whole, name)
        return whole.labels(self._model_name)

    def _known(self, metric: Collector, name: str) -> None:
        if name in _VLLM_HAS:
            self.vllm_has.append(metric)


class Metrics:
    """What a worker counts, for one served model.

    Args:
        model_name: The served name, a label.
        registry: Where it is shown.
        as_vllm: Show it under vLLM's names, too: nobody else does.
    """

    def __init__(
        self,
        model_name: str,
        registry: CollectorRegistry = REGISTRY,
        *,
        as_vllm: bool = False,
    ) -> None:
        families = _Families(model_name, registry)
        counter, gauge, seconds = families.counter, families.gauge, families.seconds
        self._model_name = model_name
        self._running = gauge("num_requests_running", "Requests in the running batch.")
        self._waiting = gauge("num_requests_waiting", "Requests the engine has queued.")
        self._kv_usage = gauge(
            "kv_cache_usage_perc", "Used share of the KV blocks, 0..1."
        )
        self._open = gauge("num_requests_open", "Submits without a Finished.")
        self._frontends = gauge("num_frontends", "Frontends that have said hello.")
        self._prompt = counter("prompt_tokens", "Prompt tokens of ended requests.")
        self._cached = counter(
            "prompt_tokens_cached", "Those of them that the engine did not compute."
        )
        self._generated = counter("generation_tokens", "Tokens sent or kept.")
        self._ended = counter("request_success", "Ends, by reason.", "finished_reason")
        self._errors = counter("request_errors", "Ends with an error.", "kind")
        self._cancels = counter("request_cancels", "Cancelled by or with a frontend.")
        self._orphaned = counter(
            "kv_orphans",
            "Hand-overs whose frontend was lost before it had passed them on.",
        )
        self._released = counter("kv_releases", "Hand-overs released without a read.")
        self._broken = counter("protocol_errors", "Messages that were none.")
        self._batches = counter("batches", "Batch messages sent.")
        self._info = Gauge(
            PREFIX + "info",
            "Which worker this is; always 1.",
            ("model_name", "worker_id", "role", "engine", "engine_version", "version"),
            registry=registry,
        )
        self._captures = _CaptureMetrics(model_name, families)
        self._journal = _JournalMetrics(model_name, families)
        self._blocks = _BlockMetrics(families)
        self._queue_s = seconds("request_queue_time_seconds", "Waiting in the engine.")
        self._prefill_s = seconds(
            "request_prefill_time_seconds", "Prefill in the engine."
        )
        self._ttft_s = seconds("time_to_first_token_seconds", "Submit to first token.")
        self._e2e_s = seconds("e2e_request_latency_seconds", "Submit to Finished.")
        self._handover_s = seconds(
            "kv_handover_seconds", "Of decode legs: Submit to first token."
        )
        self._expired: Counter | None = None
        self._num_expired = 0
        if as_vllm:
            registry.register(_AsVllm(families.vllm_has))
            self._expired = Counter(
                ENGINE_PREFIX + "nixl_num_kv_expired_reqs",
                "Hand-overs whose KV nobody read until its lease ended.",
                ("model_name", "engine"),
                registry=registry,
            )
            self._expired.labels(model_name, FIRST_CORE)

    def serves(self, card: Card) -> None:
        """Tell which worker this is."""
        labels = (card.worker_id, card.role.value, card.engine, card.engine_version)
        self._info.labels(self._model_name, *labels, version("tokenwire")).set(1)

    def captured(self, usage: Usage, num_untold: int) -> None:
        """Show what is in the folder of hidden states."""
        self._captures.show(usage, num_untold)

    def kept(
        self, num_by_state: Mapping[str, int], num_bytes: int, lost: Mapping[str, int]
    ) -> None:
        """Show what is kept of generations, and how many were lost, by reason."""
        self._journal.show(num_by_state, num_bytes, lost)

    def recalled(self, action: str, state: str) -> None:
        """Count a Recall, and what it was told."""
        self._journal.recalled(action, state)

    def blocks(self, usage: BlockUsage) -> None:
        """Show what is known of cached blocks."""
        self._blocks.show(usage)

    def engine_load(self, load: EngineLoad, num_open: int, num_frontends: int) -> None:
        """Show how busy the worker is now."""
        self._running.set(load.num_running)
        self._waiting.set(load.num_waiting)
        self._kv_usage.set(load.kv_usage)
        self._open.set(num_open)
        self._frontends.set(num_frontends)
        if self._expired is not None:
            new = load.num_kv_expired - self._num_expired
            self._expired.labels(self._model_name, FIRST_CORE).inc(new)
            self._num_expired = load.num_kv_expired

    def generated(self, num_tokens: int) -> None:
        """Count the tokens of one step."""
        self._generated.inc(num_tokens)

    def batch_sent(self) -> None:
        """Count a Batch."""
        self._batches.inc()

    def first_token(self, seconds: float, *, of_handover: bool) -> None:
        """Record the time to a first token, of a decode leg if *of_handover*."""
        self._ttft_s.observe(seconds)
        if of_handover:
            self._handover_s.observe(seconds)

    def finished(self, end: Finished, seconds: float) -> None:
        """Record the end of a request, *seconds* after its Submit."""
        self._ended.labels(self._model_name, end.reason.value).inc()
        self._e2e_s.observe(seconds)
        self._prompt.inc(end.num_prompt_tokens)
        self._cached.inc(end.num_cached_tokens)
        if end.error_kind is not None:
            self.failed(end.error_kind)
            return
        self._queue_s.observe(end.queue_s)
        self._prefill_s.observe(end.prefill_s)

    def failed(self, kind: ErrorKind) -> None:
        """Count an error."""
        self._errors.labels(self._model_name, kind.value).inc()

    def cancelled(self, num_requests: int = 1) -> None:
        """Count requests that were cancelled."""
        self._cancels.inc(num_requests)

    def orphaned(self, number: int) -> None:
        """Count hand-overs that nobody is known to see to."""
        self._orphaned.inc(number)

    def kv_released(self) -> None:
        """Count a hand-over that was released."""
        self._released.inc()

    def protocol_broken(self) -> None:
        """Count a peer that broke the protocol."""
        self._broken.inc()


class _AsVllm(Collector):
    """Metrics of ours under vLLM's names, with the label of its first engine core."""

    def __init__(self, metrics: Iterable[Collector]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        for metric in self._metrics:
            for family in metric.collect():
                name = ENGINE_PREFIX + family.name.removeprefix(PREFIX)
                renamed = Metric(name, family.documentation, family.type)
                for sample in family.samples:
                    renamed.add_sample(
                        ENGINE_PREFIX + sample.name.removeprefix(PREFIX),
                        {**sample.labels, "engine": FIRST_CORE},
                        sample.value,
                    )
                yield renamed


class _Only(Collector):
    """The families of *registry* whose names begin with *prefix*."""

    def __init__(self, registry: Collector, prefix: str) -> None:
        self._registry = registry
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            if family.name.startswith(self._prefix):
                yield family


def engine_families(registry: CollectorRegistry = REGISTRY) -> str:
    """Return vLLM's families in Prometheus' text format; they take milliseconds."""
    return generate_latest(_Only(registry, ENGINE_PREFIX)).decode()


class _CaptureMetrics:
    """Of saved hidden states; the counts are kept where the files are."""

    def __init__(self, model_name: str, families: _Families) -> None:
        self._model_name = model_name
        self._shown = Usage()
        counter, gauge = families.counter, families.gauge
        self._files = gauge("capture_files", "Files of hidden states in the folder.")
        self._bytes = gauge("capture_bytes", "Their size, with their locks.")
        self._untold = gauge(
            "capture_untold", "Files kept until their clients are told of them."
        )
        self._written = counter("capture_writes", "Files written by this worker.")
        self._failed = counter("capture_failures", "Files that could not be written.")
        self._discarded = counter(
            "capture_discards", "Files deleted because their clients had left."
        )
        self._swept = counter(
            "capture_swept", "Files deleted because nobody took them.", "reason"
        )

    def show(self, usage: Usage, num_untold: int) -> None:
        """Take the newest counts."""
        shown, self._shown = self._shown, usage
        self._files.set(usage.num_files)
        self._bytes.set(usage.num_bytes)
        self._untold.set(num_untold)
        self._written.inc(usage.num_written - shown.num_written)
        self._failed.inc(usage.num_failed - shown.num_failed)
        self._discarded.inc(usage.num_discarded - shown.num_discarded)
        for reason, number in usage.num_swept.items():
            new = number - shown.num_swept.get(reason, 0)
            self._swept.labels(self._model_name, reason).inc(new)


class _JournalMetrics:
    """Of generations that are kept; the counts are kept where they are."""

    def __init__(self, model_name: str, families: _Families) -> None:
        self._model_name = model_name
        self._shown: dict[str, int] = {}
        self._generations = families.gauge(
            "journal_generations", "Generations that are kept, by state.", "state"
        )
        self._bytes = families.gauge("journal_bytes", "What they take.")
        self._lost = families.counter(
            "journal_lost", "Generations that are kept no more, by reason.", "reason"
        )
        self._recalls = families.counter(
            "recalls",
            "Questions about kept generations, by action and answer.",
            "action",
            "state",
        )

    def show(
        self, num_by_state: Mapping[str, int], num_bytes: int, lost: Mapping[str, int]
    ) -> None:
        """Take the newest counts."""
        for state, number in num_by_state.items():
            self._generations.labels(self._model_name, state).set(number)
        self._bytes.set(num_bytes)
        for reason, number in lost.items():
            new = number - self._shown.get(reason, 0)
            self._lost.labels(self._model_name, str(reason)).inc(new)
        self._shown = dict(lost)

    def recalled(self, action: str, state: str) -> None:
        """Count an answer."""
        self._recalls.labels(self._model_name, action, state).inc()


class _BlockMetrics:
    """Of cached KV blocks as frontends are told of them; counted where they are."""

    def __init__(self, families: _Families) -> None:
        self._shown = BlockUsage()
        self._known = families.gauge(
            "kv_blocks_known", "Cached KV blocks that frontends are told of."
        )
        self._counters = {
            field: families.counter(name, text)
            for field, name, text in (
                ("num_stored", "kv_blocks_stored", "Blocks that came to be cached."),
                ("num_removed", "kv_blocks_removed", "Blocks that are no more."),
                ("num_refused", "kv_blocks_refused", "Blocks beyond the engine's."),
                ("num_unplaced", "kv_blocks_unplaced", "Blocks behind unknown ones."),
                ("num_events", "kv_event_batches", "KV event messages of the engine."),
                ("num_gaps", "kv_event_gaps", "Gaps in them, filled or not."),
                ("num_resets", "kv_event_resets", "Gaps that could not be filled."),
            )
        }

    def show(self, usage: BlockUsage) -> None:
        """Take the newest counts."""
        shown, self._shown = self._shown, replace(usage)
        self._known.set(usage.num_blocks)
        for field, counter in self._counters.items():
            new: int = getattr(usage, field) - getattr(shown, field)
            counter.inc(new)


def metrics_application() -> WSGIApplication:
    """Return the page of the default registry, whatever path is asked for.

    However many ask at once, one thread makes it: the event loop has to share the GIL.
    """
    making = threading.Lock()

    def application(_: WSGIEnvironment, start_response: StartResponse) -> list[bytes]:
        # Whatever is asked for: as OpenMetrics, the client library (0.26) would call
        # vLLM's families `vllm_`, where every dashboard says `vllm:`.
        start_response("200 OK", [("Content-Type", CONTENT_TYPE)])
        with making:
            return [generate_latest(REGISTRY)]

    return application
