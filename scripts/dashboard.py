"""Write the Grafana dashboard from its panels as they stand here.

A panel is a title, what it says, a unit and its queries. In queries ``@`` stands for the
selection of the dashboard (``job=~"$job"``), and ``[w]`` for a window that Grafana makes
long enough for the scrape interval. tests/contract/test_observability.py runs a stack and
fails for a query that names nothing which the processes export.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TARGET = "deploy/helm/tokenwire/files/dashboards/tokenwire.json"

UID = "tokenwire"  # links to it stay right when it is loaded again

WIDTH = 24  # Grafana's grid

Queries = list[tuple[str, str]]  # the query, and what each of its series is called


@dataclass(slots=True, frozen=True)
class Panel:
    """One picture, or one number."""

    title: str
    text: str  # what it shows, and when to worry
    unit: str
    queries: Queries
    kind: str = "timeseries"
    width: int = 8
    stack: bool = False
    worry_above: float | None = None  # of a number: from here on it is red
    worry_below: float | None = None


def quantiles(name: str) -> Queries:
    """Return the median and the slow end of a histogram."""
    return [
        (f"histogram_quantile({q}, sum by (le) (rate({name}_bucket{{@}}[w])))", label)
        for q, label in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
    ]


def rate(name: str, *labels: str, where: str = "") -> tuple[str, str]:
    """Return how often a counter counts in a second, by *labels*."""
    legend = " ".join(f"{{{{{label}}}}}" for label in labels)
    by = f" by ({', '.join(labels)})" if labels else ""
    return f"sum{by} (rate({name}{{@{where}}}[w]))", legend


def by_worker(query: str) -> str:
    """Return *query*, a series for each worker process, under the workers' names."""
    return (
        f"sum by (worker_id, role) ({query} * on (job, instance) "
        "group_left (worker_id, role) tokenwire_worker_info{@})"
    )


def share(part: str, whole: str) -> str:
    """Return how much of one counter another is."""
    return f"sum(rate({part}{{@}}[w])) / sum(rate({whole}{{@}}[w]))"


NAMED = "{{worker_id}} ({{role}})"

GENERATES = ',route=~"/v1/.*|/inference/.*"'

GOODPUT = (
    'sum(rate(tokenwire_goodput_total{@,outcome="met"}[w]))'
    " / sum(rate(tokenwire_goodput_total{@}[w]))"
)

COMPUTED = (
    "sum(rate(tokenwire_worker_prompt_tokens_total{@}[w]))"
    " - sum(rate(tokenwire_worker_prompt_tokens_cached_total{@}[w]))"
)

FAILING = (
    f'(sum(rate(tokenwire_http_responses_total{{@{GENERATES},status=~"5.."}}[w]))'
    " or vector(0))"
    f" / sum(rate(tokenwire_http_responses_total{{@{GENERATES}}}[w]))"
)

ROWS: dict[str, list[Panel]] = {
    "At a glance": [
        Panel(
            "Requests",
            "Responses a second on the routes that generate.",
            "reqps",
            [rate("tokenwire_http_responses_total", where=GENERATES)],
            kind="stat",
            width=3,
        ),
        Panel(
            "Answered with 5xx",
            "Share of responses. What fails in the middle of a stream is under Failures.",
            "percentunit",
            [(FAILING, "")],
            kind="stat",
            width=3,
            worry_above=0.01,
        ),
        Panel(
            "Goodput",
            "Share of outputs that met both objectives: --goodput-ttft-s, --goodput-tpot-s.",
            "percentunit",
            [(GOODPUT, "")],
            kind="stat",
            width=3,
            worry_below=0.95,
        ),
        Panel(
            "First token, p95",
            "From a request's arrival at the frontend; its wait in the queue is in it.",
            "s",
            [quantiles("tokenwire_time_to_first_token_seconds")[1]],
            kind="stat",
            width=3,
        ),
        Panel(
            "Between tokens, p95",
            "Between two deliveries of tokens of one output.",
            "s",
            [quantiles("tokenwire_inter_token_latency_seconds")[1]],
            kind="stat",
            width=3,
        ),
        Panel(
            "In flight",
            "Requests being served, those that wait included.",
            "short",
            [("sum(tokenwire_requests_inflight{@})", "")],
            kind="stat",
            width=3,
        ),
        Panel(
            "Waiting here",
            "Sequences that wait in the frontends for room: what an autoscaler looks at.",
            "short",
            [("sum(tokenwire_queue_requests{@})", "")],
            kind="stat",
            width=3,
            worry_above=1,
        ),
        Panel(
            "Workers ready",
            "As the frontend sees them that sees the fewest.",
            "short",
            [("min by (role) (tokenwire_workers_ready{@})", "{{role}}")],
            kind="stat",
            width=3,
        ),
    ],
    "Requests": [
        Panel(
            "Responses by status",
            "All routes; 429 and 503 are requests turned away.",
            "reqps",
            [rate("tokenwire_http_responses_total", "status")],
            stack=True,
        ),
        Panel(
            "Outputs by their end",
            "stop: the model ended; length: its limit did; abort: a trainer's pause.",
            "reqps",
            [rate("tokenwire_request_success_total", "finished_reason")],
            stack=True,
        ),
        Panel(
            "Turned away, by reason",
            "docs/overload.md has the reasons. A lasting rate: too few workers.",
            "reqps",
            [rate("tokenwire_requests_shed_total", "reason")],
            stack=True,
        ),
        Panel(
            "Tokens a second",
            "Computed prompts and generated tokens, as the workers count them.",
            "short",
            [
                (
                    "sum(rate(tokenwire_worker_generation_tokens_total{@}[w]))",
                    "generated",
                ),
                (COMPUTED, "prompt, computed"),
                (
                    "sum(rate(tokenwire_worker_prompt_tokens_cached_total{@}[w]))",
                    "prompt, not computed",
                ),
            ],
        ),
        Panel(
            "Sequences: in flight, at the workers, waiting",
            "Waiting in a frontend is ordered and fair; waiting in an engine is not.",
            "short",
            [
                ("sum(tokenwire_requests_inflight{@})", "in flight"),
                ("sum(tokenwire_requests_admitted{@})", "at the workers"),
                ("sum(tokenwire_queue_requests{@})", "waiting in frontends"),
            ],
        ),
        Panel(
            "Clients that left",
            "Their requests are cancelled at once, at every stage.",
            "reqps",
            [rate("tokenwire_requests_cancelled_total")],
        ),
    ],
    "Latency": [
        Panel(
            "Time to first token",
            "From arrival: queue, tokenizer, prefill, hand-over and one step.",
            "s",
            quantiles("tokenwire_time_to_first_token_seconds"),
        ),
        Panel(
            "Inter-token latency",
            "p50 is the engine's step; p99 shows prompts that hold decode up.",
            "s",
            quantiles("tokenwire_inter_token_latency_seconds"),
        ),
        Panel(
            "Whole request",
            "From arrival to the last token.",
            "s",
            quantiles("tokenwire_e2e_request_latency_seconds"),
        ),
        Panel(
            "Goodput",
            "met: both objectives. ttft: the first token was late. tpot: it was not, the "
            "tokens behind it were. failed: an error that is not the client's.",
            "reqps",
            [rate("tokenwire_goodput_total", "outcome")],
            stack=True,
        ),
        Panel(
            "Wait in the frontend's queue",
            "0 while there is room at the workers.",
            "s",
            quantiles("tokenwire_request_queue_time_seconds"),
        ),
        Panel(
            "Choice of a worker",
            "What routing takes of the frontend's time.",
            "s",
            quantiles("tokenwire_routing_seconds"),
        ),
    ],
    "Prefill and decode": [
        Panel(
            "Where prompts are computed",
            "remote: by a prefill worker. Much local_queue or local_no_worker: too few of "
            "them. local_short, local_cached: a hand-over would not have paid.",
            "reqps",
            [rate("tokenwire_prompts_placed_total", "place")],
            stack=True,
        ),
        Panel(
            "Hand-over of KV",
            "From the end of prefill to the first token of the decode worker.",
            "s",
            quantiles("tokenwire_kv_handover_seconds"),
        ),
        Panel(
            "Hand-overs: done, failed, released",
            "failed: computed again, which the client sees as a later first token. "
            "released: nobody read the KV, because its client had left.",
            "reqps",
            [
                ("sum(rate(tokenwire_kv_handover_seconds_count{@}[w]))", "done"),
                (
                    'sum(rate(tokenwire_leg_failures_total{@,kind="handover"}[w]))',
                    "failed",
                ),
                ("sum(rate(tokenwire_kv_releases_total{@}[w]))", "released"),
            ],
        ),
        Panel(
            "Running, by role",
            "In the engines' batches.",
            "short",
            [("max by (role) (tokenwire_num_requests_running{@})", "{{role}}")],
        ),
        Panel(
            "Waiting in engines, by role",
            "Stands at decode: their KV is full. Stands at prefill: too few of them.",
            "short",
            [("max by (role) (tokenwire_num_requests_waiting{@})", "{{role}}")],
        ),
        Panel(
            "Prefill time in the engine, by worker",
            "Mean, without what waits before it.",
            "s",
            [
                (
                    by_worker(
                        "(rate(tokenwire_worker_request_prefill_time_seconds_sum{@}[w]) / "
                        "rate(tokenwire_worker_request_prefill_time_seconds_count{@}[w]))"
                    ),
                    NAMED,
                )
            ],
        ),
    ],
    "KV and prefix cache": [
        Panel(
            "KV usage, fullest worker of each role",
            "Above 0.9 engines preempt, and requests wait.",
            "percentunit",
            [("max by (role) (tokenwire_kv_cache_usage_perc{@})", "{{role}}")],
        ),
        Panel(
            "KV usage by worker",
            "Cached blocks that nothing uses do not count.",
            "percentunit",
            [(by_worker("tokenwire_worker_kv_cache_usage_perc{@}"), NAMED)],
        ),
        Panel(
            "Prompt tokens found in a cache",
            "Share of all prompt tokens that no engine had to compute.",
            "percentunit",
            [
                (
                    share(
                        "tokenwire_prefix_tokens_found_total",
                        "tokenwire_prompt_tokens_total",
                    ),
                    "found",
                )
            ],
        ),
        Panel(
            "Expected in the cache, and not there",
            "Above a few per cent: evictions between choice and prefill, or restarts.",
            "percentunit",
            [
                (
                    share(
                        "tokenwire_prefix_tokens_missed_total",
                        "tokenwire_prefix_tokens_predicted_total",
                    ),
                    "missed",
                )
            ],
        ),
        Panel(
            "Blocks known, by worker",
            "What the frontends know to be cached. Far below the workers' own: raise "
            "--kv-index-blocks.",
            "short",
            [("max by (worker_id) (tokenwire_kv_index_blocks{@})", "{{worker_id}}")],
        ),
        Panel(
            "Preemptions",
            "A sequence that loses its KV and is computed again. vLLM only.",
            "ops",
            [rate("vllm:num_preemptions_total")],
        ),
    ],
    "Failures": [
        Panel(
            "Errors by code",
            "docs/api.md has the codes; the client's own faults are among them.",
            "reqps",
            [rate("tokenwire_request_errors_total", "code")],
        ),
        Panel(
            "Failures at workers, by kind",
            "What a worker failed, whether it was made good elsewhere or not.",
            "reqps",
            [rate("tokenwire_leg_failures_total", "kind")],
        ),
        Panel(
            "Migrations",
            "Outputs that went on at another worker. drift: not to the token.",
            "reqps",
            [rate("tokenwire_migrations_total", "kind", "exactness")],
        ),
        Panel(
            "Pause of a migration",
            "From when a failure was noticed to the next token.",
            "s",
            quantiles("tokenwire_migration_pause_seconds"),
        ),
        Panel(
            "Restarts",
            "Of processes, over an hour.",
            "short",
            [
                (
                    by_worker("changes(process_start_time_seconds{@}[1h])"),
                    NAMED,
                ),
                (
                    "sum(increase(tokenwire_frontend_process_restarts_total{@}[1h]))",
                    "frontend processes",
                ),
            ],
        ),
        Panel(
            "Broken messages, late workers, failed parsers",
            "Each of them is to be 0.",
            "ops",
            [
                (
                    "sum(rate(tokenwire_worker_protocol_errors_total{@}[w]))",
                    "messages that were none",
                ),
                (
                    'sum(rate(tokenwire_engine_scrapes_total{@,outcome="late"}[w]))',
                    "workers that did not answer a scrape",
                ),
                ("sum(rate(tokenwire_parser_failures_total{@}[w]))", "parsers"),
            ],
        ),
    ],
    "Leaks": [
        Panel(
            "KV held by workers with nothing to do",
            "To be 0 but for the seconds of a hand-over.",
            "percentunit",
            [
                (
                    by_worker(
                        "(tokenwire_worker_kv_cache_usage_perc{@} and "
                        "tokenwire_worker_num_requests_open{@} == 0)"
                    ),
                    NAMED,
                )
            ],
        ),
        Panel(
            "Open at workers, and known to frontends",
            "Apart for more than seconds: requests that nobody waits for. A pair has two "
            "legs, one after the other; generations that outlive their clients are "
            "among the first alone.",
            "short",
            [
                ("sum(tokenwire_worker_num_requests_open{@})", "open at workers"),
                ("sum(tokenwire_requests_admitted{@})", "known to frontends"),
            ],
        ),
        Panel(
            "KV that nobody came for",
            "orphans: their frontend was lost. expired: left to the engine's lease.",
            "ops",
            [
                ("sum(rate(tokenwire_worker_kv_orphans_total{@}[w]))", "orphans"),
                ("sum(rate(vllm:nixl_num_kv_expired_reqs_total{@}[w]))", "expired"),
            ],
        ),
        Panel(
            "Memory of processes",
            "Flat under a steady load.",
            "bytes",
            [
                (
                    "sum by (job, instance) (process_resident_memory_bytes{@})",
                    "{{job}} {{instance}}",
                )
            ],
        ),
        Panel(
            "Open files of processes",
            "A connection is one.",
            "short",
            [
                (
                    "sum by (job, instance) (process_open_fds{@})",
                    "{{job}} {{instance}}",
                )
            ],
        ),
        Panel(
            "Kept for clients to come back",
            "Bounded by --journal-bytes, and by --capture-max-bytes.",
            "bytes",
            [
                ("sum(tokenwire_worker_journal_bytes{@})", "generations"),
                ("sum(tokenwire_worker_capture_bytes{@})", "hidden states"),
            ],
        ),
    ],
}


def written(query: str) -> str:
    """Return *query* as Grafana wants it."""
    return query.replace("@", 'job=~"$job"').replace("[w]", "[$__rate_interval]")


def dashboard() -> dict[str, object]:
    """Return the dashboard as Grafana's JSON model."""
    return {
        "uid": UID,
        "title": "tokenwire",
        "description": "Written by `make docs` from scripts/dashboard.py.",
        "tags": ["tokenwire", "vllm"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _variables()},
        "panels": list(_panels()),
    }


def _variables() -> list[dict[str, object]]:
    name = 'label_values({__name__=~"tokenwire_(frontend|worker)_info"}, job)'
    return [
        {"name": "datasource", "type": "datasource", "query": "prometheus"},
        {
            "name": "job",
            "label": "scrape job",
            "type": "query",
            "datasource": _DATASOURCE,
            "definition": name,
            "query": {"query": name, "refId": "job"},
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": ["All"], "value": ["$__all"]},
        },
    ]


_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def _panels() -> Iterator[dict[str, object]]:
    number, top = 1, 0
    for title, panels in ROWS.items():
        at = {"h": 1, "w": WIDTH, "x": 0, "y": top}
        yield {"id": number, "type": "row", "title": title, "gridPos": at}
        number, top, left = number + 1, top + 1, 0
        height = 4 if panels[0].kind == "stat" else 8
        for panel in panels:
            if left + panel.width > WIDTH:
                top, left = top + height, 0
            at = {"h": height, "w": panel.width, "x": left, "y": top}
            yield {"id": number, **_panel(panel), "gridPos": at}
            number, left = number + 1, left + panel.width
        top += height


def _panel(panel: Panel) -> dict[str, object]:
    defaults: dict[str, object] = {"unit": panel.unit, "thresholds": _thresholds(panel)}
    if panel.unit == "percentunit":
        defaults |= {"min": 0, "max": 1}
    options: dict[str, object]
    if panel.kind == "stat":
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value"}
    else:
        custom: dict[str, object] = {"fillOpacity": 10, "showPoints": "never"}
        if panel.stack:
            custom |= {"stacking": {"mode": "normal"}, "fillOpacity": 40}
        defaults |= {"custom": custom, "min": 0}
        options = {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": _DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + position),
                "datasource": _DATASOURCE,
                "expr": written(query),
                "legendFormat": legend,
            }
            for position, (query, legend) in enumerate(panel.queries)
        ],
    }


def _thresholds(panel: Panel) -> dict[str, object]:
    steps: list[dict[str, object]] = [{"color": "green", "value": None}]
    if panel.worry_above is not None:
        steps.append({"color": "red", "value": panel.worry_above})
    if panel.worry_below is not None:
        steps = [
            {"color": "red", "value": None},
            {"color": "green", "value": panel.worry_below},
        ]
    return {"mode": "absolute", "steps": steps}


def text() -> str:
    """Return the file."""
    return json.dumps(dashboard(), indent=2) + "\n"


def main() -> int:
    """Write the file; return the exit code."""
    path = Path(__file__).parents[1] / TARGET
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
