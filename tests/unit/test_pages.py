"""The metrics of several processes as those of one frontend."""

from __future__ import annotations

import re

from prometheus_client.parser import text_string_to_metric_families

from support.no_workers import no_workers
from tokenwire.frontend.gauges import watch_workers
from tokenwire.frontend.metrics import Metrics
from tokenwire.frontend.pages import LARGEST, OWN, SUMMED, Books


def samples(page: str) -> dict[str, float]:
    """Return a page's samples as a strict reader finds them: each once."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sample.labels.items())
            key = f"{sample.name}{{{labels}}}"
            assert key not in found
            found[key] = sample.value
    return found


def process(num_requests: int, seconds: float) -> Metrics:
    """Return the metrics of a process that has answered so many requests."""
    metrics = Metrics()
    for _ in range(num_requests):
        metrics.responded('/v1/a "quoted" path', 200)
        metrics.time_to_first_token.observe(seconds)
    metrics.num_inflight.set(num_requests)
    metrics.watch("tokenwire_workers_ready", "W.", "decode", lambda: num_requests)
    return metrics


RESPONSES = 'tokenwire_http_responses_total{route=/v1/a "quoted" path,status=200}'
RESTARTS = "tokenwire_frontend_process_restarts_total"
TTFT = "tokenwire_time_to_first_token_seconds"


def text(metrics: Metrics) -> str:
    """Return its page."""
    return metrics.exposition().decode()


def test_counters_and_histograms_are_summed() -> None:
    """As if one process had counted."""
    books = Books(2)
    books.told(0, text(process(3, 0.003)))
    books.told(1, text(process(4, 0.03)))
    page = samples(books.page({0, 1}))

    assert page[RESPONSES] == 7
    assert page[f"{TTFT}_bucket{{le=0.005}}"] == 3
    assert page[f"{TTFT}_bucket{{le=+Inf}}"] == 7
    assert page[f"{TTFT}_count{{}}"] == 7
    assert abs(page[f"{TTFT}_sum{{}}"] - 0.129) < 1e-9


def test_gauges_are_what_fits_each() -> None:
    """What each has is summed; of what all see, the largest is told."""
    books = Books(3)
    books.told(0, text(process(3, 1.0)))
    books.told(1, text(process(4, 1.0)))
    page = samples(books.page({0, 1}))

    assert page["tokenwire_requests_inflight{}"] == 7
    assert page["tokenwire_workers_ready{role=decode}"] == 4
    assert page["tokenwire_frontend_processes{}"] == 3
    assert page["tokenwire_frontend_processes_answering{}"] == 2
    cpu = [key for key in page if key.startswith("process_cpu_seconds_total")]
    assert [re.sub(".*process=", "", key) for key in cpu] == ["0}", "1}"]


def test_a_name_with_ends_of_lines_is_one_label() -> None:
    """A worker says what it is called; whatever that is, the parent can read the page."""
    name = "w\u2028 1\x0b\x85\r\n# TYPE x gauge"
    metrics = process(1, 0.003)
    metrics.index_blocks.read = lambda: {name: 2.0}
    books = Books(1)
    books.told(0, text(metrics))

    page = books.page({0})

    assert page.count("tokenwire_kv_index_blocks{") == 1
    assert page.count("\n# TYPE") == text(metrics).count("\n# TYPE")


def test_no_sum_falls() -> None:
    """Neither while a process does not answer, nor when it has ended and another begins."""
    books = Books(2)
    books.told(0, text(process(3, 1.0)))
    books.told(1, text(process(4, 1.0)))
    late = samples(books.page({0}))
    assert late[RESPONSES] == late[f"{TTFT}_count{{}}"] == 7
    assert late["tokenwire_requests_inflight{}"] == 3  # a gauge is of now
    assert late["tokenwire_frontend_processes_answering{}"] == 1

    books.ended(1)
    assert samples(books.page({0}))[RESPONSES] == 7
    books.told(1, text(process(1, 1.0)))
    again = samples(books.page({0, 1}))
    assert again[RESPONSES] == again[f"{TTFT}_count{{}}"] == 8
    assert again[f"{RESTARTS}{{}}"] == 1
    assert not [
        key for key in samples(books.page({0})) if 'process="1"' in key
    ]  # of its memory nothing is left


def test_who_ends_unheard_adds_nothing() -> None:
    """Nobody has seen its counts, so that none falls."""
    books = Books(1)
    books.ended(0)
    books.told(0, text(process(1, 1.0)))
    assert samples(books.page({0}))[RESPONSES] == 1


def test_a_gauge_without_a_rule_is_each_processs_own() -> None:
    """It has a label then; every gauge of ours has a rule."""
    books = Books(2)
    for number in range(2):
        books.told(number, "# HELP g G.\n# TYPE g gauge\ng 5.0\n")
    assert samples(books.page({0, 1})) == {"g{process=0}": 5, "g{process=1}": 5}

    metrics = Metrics()
    watch_workers(metrics, no_workers())
    gauges = set(re.findall(r"# TYPE (tokenwire_\S+) gauge", text(metrics)))
    assert gauges == SUMMED | LARGEST | OWN - {RESTARTS}
