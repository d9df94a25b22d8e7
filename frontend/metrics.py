"""The frontend's Prometheus metrics: vLLM's names behind ``tokenwire_``.

Histograms that are fed per token are plain lists of counts: the client library's own
``observe`` takes a lock and about 1 us, a tenth of what a token may cost in all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from itertools import product

from prometheus_client import (
    CollectorRegistry,
    Gauge,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

from tokenwire.protocol.messages import ErrorKind

from .admission import Reason
from .disaggregation import PrefillPlace
from .goodput import Objectives, Outcome
from .tallies import Tally

__all__ = ["CONTENT_TYPE", "Counters", "Metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

MAX_KEY_NAMES = 2_048
"""Of API keys, as labels: twice what a file may hold; those behind them are one."""

OTHER_KEY = "(others)"

# vLLM's buckets, so that one dashboard serves both.
_TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0,
    7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_ITL_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_ROUTING_S = (
    0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05,
)  # fmt: skip
_E2E_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip


class FastHistogram:
    """A histogram for the event loop's thread alone: one bisect an observation."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = list(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count *value*, in the unit of the bounds."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return the cumulative counts, as Prometheus has them."""
        result: list[tuple[str, float]] = []
        running = 0
        labels = [*map(str, self.bounds), "+Inf"]
        for label, count in zip(labels, self.counts, strict=True):
            running += count
            result.append((label, running))
        return result


class _Histograms(Collector):
    def __init__(self) -> None:
        self.families: list[tuple[str, str, FastHistogram]] = []

    def add(self, name: str, text: str, bounds: Iterable[float]) -> FastHistogram:
        histogram = FastHistogram(bounds)
        self.families.append((name, text, histogram))
        return histogram

    def collect(self) -> Iterator[HistogramMetricFamily]:
        for name, text, histogram in self.families:
            family = HistogramMetricFamily(name, text)
            family.add_metric([], histogram.buckets(), sum_value=histogram.total)
            yield family


class Counters(Collector):
    """A tally as Prometheus' library shows its own counters."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Return the family; called by the registry."""
        tally = self._tally
        family = CounterMetricFamily(tally.name, tally.text, labels=tally.label_names)
        for values, count in tally.counts.items():
            family.add_metric(values, count.value)
        yield family


class EachGauge(Collector):
    """A gauge with a value for each of what there is when Prometheus asks."""

    def __init__(self, name: str, text: str, label: str) -> None:
        self.read: Callable[[], dict[str, float]] = dict  # by the label's values
        self._head = name, text
        self._label = label

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Return the family; called by the registry."""
        name, text = self._head
        family = GaugeMetricFamily(name, text, labels=[self._label])
        for value, number in self.read().items():
            family.add_metric([value], number)
        yield family


class Metrics:
    """All that this frontend counts.

    Args:
        model_name: What it serves, for ``tokenwire_frontend_info``.
        objectives: What counts as goodput.
    """

    def __init__(
        self, model_name: str = "", objectives: Objectives | None = None
    ) -> None:
        self.registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        ProcessCollector(registry=self.registry)
        histograms = _Histograms()
        self.registry.register(histograms)
        add = histograms.add
        self.time_to_first_token = add(
            "tokenwire_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            _TTFT_S,
        )
        self.inter_token_latency = add(
            "tokenwire_inter_token_latency_seconds",
            "Between two deliveries of tokens of one output.",
            _ITL_S,
        )
        self.e2e_request_latency = add(
            "tokenwire_e2e_request_latency_seconds",
            "From a request's arrival to its end.",
            _E2E_S,
        )
        self._handover = add(
            "tokenwire_kv_handover_seconds",
            "From the end of the prefill leg to the first token of the decode leg.",
            _TTFT_S,
        )
        self.queue_time = add(
            "tokenwire_request_queue_time_seconds",
            "Waiting in this frontend for room at the workers; 0 for most.",
            _TTFT_S,
        )
        self.routing = add(
            "tokenwire_routing_seconds",
            "The choice of a request's workers, this frontend's time.",
            _ROUTING_S,
        )
        self.migration_pause = add(
            "tokenwire_migration_pause_seconds",
            "From when a worker's failure was noticed to the next token of another.",
            _TTFT_S,
        )
        self.prompt_tokens = self._counter("tokenwire_prompt_tokens", "Prompt tokens.")
        self.generation_tokens = self._counter(
            "tokenwire_generation_tokens", "Tokens delivered to clients."
        )
        self._success = self._counter(
            "tokenwire_request_success", "Outputs that ended well.", "finished_reason"
        )
        self._admin_calls = self._counter(
            "tokenwire_admin_calls", "Calls of the admin plane.", "action", "outcome"
        )
        self._responses = self._counter(
            "tokenwire_http_responses", "HTTP responses.", "route", "status"
        )
        self._errors = self._counter(
            "tokenwire_request_errors", "Failed requests, by error code.", "code"
        )
        self._goodput = self._counter(
            "tokenwire_goodput",
            "Outputs, by whether they met the objectives; else the first they missed.",
            "outcome",
        )
        self._objectives = objectives or Objectives()
        self._legs_failed = self._counter(
            "tokenwire_leg_failures", "Submits that a worker failed.", "kind"
        )
        self._migrations = self._counter(
            "tokenwire_migrations",
            "Outputs that went on at another worker; drift: not to the token, for "
            "penalties, seeds or bad words.",
            "kind",
            "exactness",
        )
        self._parser_failures = self._counter(
            "tokenwire_parser_failures", "Outputs whose parser failed."
        )
        self._prompts_placed = self._counter(
            "tokenwire_prompts_placed",
            "Prompts, by where they are computed and why there.",
            "place",
        )
        self._prefix_predicted = self._counter(
            "tokenwire_prefix_tokens_predicted",
            "Prompt tokens that were expected in the cache of their worker.",
        )
        self._prefix_found = self._counter(
            "tokenwire_prefix_tokens_found",
            "Prompt tokens that were there, as the workers have said.",
        )
        self._prefix_missed = self._counter(
            "tokenwire_prefix_tokens_missed",
            "Of those that were expected, what was not there.",
        )
        self._shed = self._counter(
            "tokenwire_requests_shed",
            "Requests turned away, by reason and priority (high: below 0, low: above).",
            "reason",
            "priority",
        )
        self._let_go = self._counter(
            "tokenwire_requests_let_go", "Requests that go on without their client."
        )
        self._replays = self._counter(
            "tokenwire_replays", "Generations told again, running or ended.", "state"
        )
        self._cancelled = self._counter(
            "tokenwire_requests_cancelled", "Requests whose client left."
        )
        self._released = self._counter(
            "tokenwire_kv_releases", "Hand-overs that were released unread."
        )
        self._scrapes = self._counter(
            "tokenwire_engine_scrapes",
            "Questions for the workers' metrics; late: no answer within a second.",
            "outcome",
        )
        self._key_requests = self._counter(
            "tokenwire_api_key_requests",
            "Requests, each once, by the name of their API key: ok (when it is over), the "
            "limit that it was above, or without a key that is known (no name).",
            "key",
            "outcome",
        )
        self._key_tokens = self._counter(
            "tokenwire_api_key_tokens", "Tokens by API key.", "key", "kind"
        )
        self._key_names = set[str]()
        self._connections_refused = self._counter(
            "tokenwire_connections_refused",
            "Connections turned away, or ended by a bound.",
            "reason",
        )
        self.num_connections = Gauge(
            "tokenwire_connections",
            "Connections of clients.",
            registry=self.registry,
        )
        self.num_inflight = Gauge(
            "tokenwire_requests_inflight",
            "Generation requests being served.",
            registry=self.registry,
        )
        self.queue_requests = Gauge(
            "tokenwire_queue_requests",
            "Sequences that wait in this frontend for room at the workers.",
            registry=self.registry,
        )
        self.queue_tokens = Gauge(
            "tokenwire_queue_tokens",
            "Prompt tokens of these.",
            registry=self.registry,
        )
        self.num_admitted = Gauge(
            "tokenwire_requests_admitted",
            "Sequences of this frontend that the workers have.",
            registry=self.registry,
        )
        self.index_blocks = EachGauge(
            "tokenwire_kv_index_blocks",
            "KV blocks that a worker has cached, as far as this frontend knows.",
            "worker_id",
        )
        self.registry.register(self.index_blocks)
        self.limit = Gauge(
            "tokenwire_requests_limit",
            "Sequences of this frontend that the workers have room for, as last read.",
            registry=self.registry,
        )

        self._tell_info(model_name)
        self._processes()
        self._begin_at_zero()

    def _tell_info(self, model_name: str) -> None:
        info = Gauge(
            "tokenwire_frontend_info",
            "What runs here; always 1.",
            ["model_name", "version"],
            registry=self.registry,
        )
        info.labels(model_name, version("tokenwire")).set(1)

    def _begin_at_zero(self) -> None:
        """Show what has not happened yet, too.

        Of a series that begins at 1, Prometheus does not see the first increase, which
        an alert may be about.
        """
        for outcome in Outcome:
            self._goodput.labels(outcome.value)
        for place in PrefillPlace:
            self._prompts_placed.labels(place.value)
        for kind in ErrorKind:
            self._legs_failed.labels(kind.value)
        for kind, exactness in product(ErrorKind, ("exact", "drift")):
            self._migrations.labels(kind.value, exactness)
        for reason in ("inflight", "body_bytes", *(one.value for one in Reason)):
            self._shed.labels(reason, "normal")

    def _processes(self) -> None:
        """Tell of the processes as one that is alone; several are told of by ``pages``."""
        prefix = "tokenwire_frontend_process"
        processes = {
            f"{prefix}es": "Processes of this frontend, as configured.",
            f"{prefix}es_answering": "Those whose gauges are on this page.",
        }
        for name, text in processes.items():
            Gauge(name, text, registry=self.registry).set(1)
        self._counter(
            f"{prefix}_restarts",
            "Processes of this frontend that have ended and were started again.",
        )

    def watch(self, name: str, text: str, role: str, read: Callable[[], float]) -> None:
        """Serve a number that is read when Prometheus asks."""
        gauge = self._gauges.get(name)
        if gauge is None:
            gauge = Gauge(name, text, ["role"], registry=self.registry)
            self._gauges[name] = gauge
        gauge.labels(role).set_function(read)

    def succeeded(self, finish_reason: str) -> None:
        """Count an output that ended well."""
        self._success.labels(finish_reason).inc()

    def admin_called(self, action: str, outcome: str) -> None:
        """Count an admin call: ``ok``, ``partial``, ``failed`` or ``unauthorized``."""
        self._admin_calls.labels(action, outcome).inc()

    def responded(self, route: str, status: int) -> None:
        """Count a response; *route* is a pattern, never a client's path."""
        self._responses.labels(route, str(status)).inc()

    def failed(self, code: str) -> None:
        """Count a failed request."""
        self._errors.labels(code).inc()

    def ended_well(self, ttft_s: float, decode_s: float, num_tokens: int) -> None:
        """Count whether an output met the objectives.

        Args:
            ttft_s: From the request's arrival to the first token.
            decode_s: From there to the last one.
            num_tokens: All of them.
        """
        outcome = self._objectives.outcome(ttft_s, decode_s, num_tokens)
        self._goodput.labels(outcome.value).inc()

    def ended_badly(self) -> None:
        """Count an output that failed by no fault of its client."""
        self._goodput.labels(Outcome.FAILED.value).inc()

    def leg_failed(self, kind: ErrorKind) -> None:
        """Count a failure at a worker, retried or not."""
        self._legs_failed.labels(kind.value).inc()

    def migrated(self, kind: ErrorKind, *, exact: bool) -> None:
        """Count an output that goes on at another worker."""
        self._migrations.labels(kind.value, "exact" if exact else "drift").inc()

    def prompt_placed(self, place: PrefillPlace) -> None:
        """Count where a prompt is computed, and why there."""
        self._prompts_placed.labels(place.value).inc()

    def prefix_found(self, num_predicted: int, num_found: int) -> None:
        """Count what a worker had cached of a prompt, beside what was expected."""
        if num_predicted:
            self._prefix_predicted.inc(num_predicted)
            if num_found < num_predicted:
                self._prefix_missed.inc(num_predicted - num_found)
        if num_found:
            self._prefix_found.inc(num_found)

    def parser_failed(self) -> None:
        """Count an output whose parser failed: its text became content."""
        self._parser_failures.inc()

    def key_used(self, name: str, outcome: str) -> None:
        """Count a request of an API key; *name* is empty where it has none of ours."""
        self._key_requests.labels(self._key_label(name), outcome).inc()

    def key_tokens(self, name: str, kind: str, num_tokens: int) -> None:
        """Count tokens of an API key: ``prompt`` or ``generation``."""
        self._key_tokens.labels(self._key_label(name), kind).inc(num_tokens)

    def _key_label(self, name: str) -> str:
        names = self._key_names
        if name not in names:
            if len(names) >= MAX_KEY_NAMES:
                return OTHER_KEY
            names.add(name)
        return name

    def connection_refused(self, reason: str) -> None:
        """Count a connection that was turned away, or ended by a bound."""
        self._connections_refused.labels(reason).inc()

    def shed(self, reason: str, priority: int) -> None:
        """Count a request that was turned away."""
        name = "normal" if not priority else "low" if priority > 0 else "high"
        self._shed.labels(reason, name).inc()

    def cancelled(self) -> None:
        """Count an output that nobody waits for any more."""
        self._cancelled.inc()

    def let_go(self) -> None:
        """Count an output that goes on at its worker without its client."""
        self._let_go.inc()

    def replayed(self, state: str) -> None:
        """Count a generation that is told again: running or ended."""
        self._replays.labels(state).inc()

    def released(self) -> None:
        """Count a hand-over that no decode leg will read."""
        self._released.inc()

    def engines_scraped(self, num_answered: int, num_late: int) -> None:
        """Count the questions of one page."""
        self._scrapes.labels("ok").inc(num_answered)
        self._scrapes.labels("late").inc(num_late)

    def handed_over(self, seconds: float) -> None:
        """Count a hand-over that worked."""
        self._handover.observe(seconds)

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Tally:
        tally = Tally(name, text, labels)
        self.registry.register(Counters(tally))
        return tally
