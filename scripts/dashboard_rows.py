"""What the Grafana dashboard shows: a row of panels for each question.

tests/contract/test_observability.py runs a stack and fails for a query that names nothing
which the processes export.
"""

from __future__ import annotations

from dashboard_forms import (
    Panel,
    by_process,
    by_worker,
    counted,
    largest,
    latency,
    number,
    quantile,
    rate,
    share,
    stacked,
    total,
)

__all__ = ["ROWS"]

GENERATES = ',route=~"/v1/.*|/inference/.*"'
FAILED = ',status=~"5.."'
MET = ',outcome="met"'

RESPONSES = "tokenwire_http_responses_total"
GOODPUT = "tokenwire_goodput_total"
COMPUTED = "tokenwire_worker_prompt_tokens_total"
CACHED = "tokenwire_worker_prompt_tokens_cached_total"
PREFILL = "tokenwire_worker_request_prefill_time_seconds"

ROWS: dict[str, list[Panel]] = {
    "At a glance": [
        number(
            "Requests",
            "Responses a second on the routes that generate.",
            "reqps",
            rate(RESPONSES, where=GENERATES),
        ),
        number(
            "Answered with 5xx",
            "Share of responses. What fails in the middle of a stream is under Failures.",
            "percentunit",
            f"({rate(RESPONSES, where=GENERATES + FAILED)} or vector(0))"
            f" / {rate(RESPONSES, where=GENERATES)}",
            worry_above=0.01,
        ),
        number(
            "Goodput",
            "Share of outputs that met both objectives: --goodput-ttft-s, --goodput-tpot-s.",
            "percentunit",
            f"{rate(GOODPUT, where=MET)} / {rate(GOODPUT)}",
            worry_below=0.95,
        ),
        number(
            "First token, p95",
            "From a request's arrival at the frontend; its wait in the queue is in it.",
            "s",
            quantile("tokenwire_time_to_first_token_seconds", "p95"),
            "p95",
        ),
        number(
            "Between tokens, p95",
            "Between two deliveries of tokens of one output.",
            "s",
            quantile("tokenwire_inter_token_latency_seconds", "p95"),
            "p95",
        ),
        number(
            "In flight",
            "Requests being served, those that wait included.",
            "short",
            total("tokenwire_requests_inflight"),
        ),
        number(
            "Waiting here",
            "Sequences that wait in the frontends for room: what an autoscaler looks at.",
            "short",
            total("tokenwire_queue_requests"),
            worry_above=1,
        ),
        number(
            "Workers ready",
            "As the frontend sees them that sees the fewest.",
            "short",
            "min by (role) (tokenwire_workers_ready{@})",
            "{{role}}",
        ),
    ],
    "Requests": [
        stacked(
            "Responses by status",
            "All routes; 429 and 503 are requests turned away.",
            RESPONSES,
            "status",
        ),
        stacked(
            "Outputs by their end",
            "stop: the model ended; length: its limit did; abort: a trainer's pause.",
            "tokenwire_request_success_total",
            "finished_reason",
        ),
        stacked(
            "Turned away, by reason",
            "docs/overload.md has the reasons. A lasting rate: too few workers.",
            "tokenwire_requests_shed_total",
            "reason",
        ),
        Panel(
            "Tokens a second",
            "Computed prompts and generated tokens, as the workers count them.",
            "short",
            {
                "generated": rate("tokenwire_worker_generation_tokens_total"),
                "prompt, computed": f"{rate(COMPUTED)} - {rate(CACHED)}",
                "prompt, not computed": rate(CACHED),
            },
        ),
        Panel(
            "Sequences: in flight, at the workers, waiting",
            "Waiting in a frontend is ordered and fair; waiting in an engine is not.",
            "short",
            {
                "in flight": total("tokenwire_requests_inflight"),
                "at the workers": total("tokenwire_requests_admitted"),
                "waiting in frontends": total("tokenwire_queue_requests"),
            },
        ),
        counted(
            "Clients that left",
            "Their requests are cancelled at once, at every stage.",
            "tokenwire_requests_cancelled_total",
        ),
    ],
    "Latency": [
        latency(
            "Time to first token",
            "From arrival: queue, tokenizer, prefill, hand-over and one step.",
            "tokenwire_time_to_first_token_seconds",
        ),
        latency(
            "Inter-token latency",
            "p50 is the engine's step; p99 shows prompts that hold decode up.",
            "tokenwire_inter_token_latency_seconds",
        ),
        latency(
            "Whole request",
            "From arrival to the last token.",
            "tokenwire_e2e_request_latency_seconds",
        ),
        stacked(
            "Goodput",
            "met: both objectives. ttft: the first token was late. tpot: it was not, the "
            "tokens behind it were. failed: an error that is not the client's.",
            GOODPUT,
            "outcome",
        ),
        latency(
            "Wait in the frontend's queue",
            "0 while there is room at the workers.",
            "tokenwire_request_queue_time_seconds",
        ),
        latency(
            "Choice of a worker",
            "What routing takes of the frontend's time.",
            "tokenwire_routing_seconds",
        ),
    ],
    "Prefill and decode": [
        stacked(
            "Where prompts are computed",
            "remote: by a prefill worker. Much local_queue or local_no_worker: too few of "
            "them. local_short, local_cached: a hand-over would not have paid.",
            "tokenwire_prompts_placed_total",
            "place",
        ),
        latency(
            "Hand-over of KV",
            "From the end of prefill to the first token of the decode worker.",
            "tokenwire_kv_handover_seconds",
        ),
        Panel(
            "Hand-overs: done, failed, released",
            "failed: computed again, which the client sees as a later first token. "
            "released: nobody read the KV, because its client had left.",
            "reqps",
            {
                "done": rate("tokenwire_kv_handover_seconds_count"),
                "failed": rate(
                    "tokenwire_leg_failures_total", where=',kind="handover"'
                ),
                "released": rate("tokenwire_kv_releases_total"),
            },
        ),
        largest(
            "Running, by role",
            "In the engines' batches.",
            "short",
            "tokenwire_num_requests_running",
        ),
        largest(
            "Waiting in engines, by role",
            "Stands at decode: their KV is full. Stands at prefill: too few of them.",
            "short",
            "tokenwire_num_requests_waiting",
        ),
        Panel(
            "Prefill time in the engine, by worker",
            "Mean, without what waits before it.",
            "s",
            by_worker(f"(rate({PREFILL}_sum{{@}}[w]) / rate({PREFILL}_count{{@}}[w]))"),
        ),
    ],
    "KV and prefix cache": [
        largest(
            "KV usage, fullest worker of each role",
            "Above 0.9 engines preempt, and requests wait.",
            "percentunit",
            "tokenwire_kv_cache_usage_perc",
        ),
        Panel(
            "KV usage by worker",
            "Cached blocks that nothing uses do not count.",
            "percentunit",
            by_worker("tokenwire_worker_kv_cache_usage_perc{@}"),
        ),
        Panel(
            "Prompt tokens found in a cache",
            "Share of all prompt tokens that no engine had to compute.",
            "percentunit",
            {
                "found": share(
                    "tokenwire_prefix_tokens_found_total",
                    "tokenwire_prompt_tokens_total",
                )
            },
        ),
        Panel(
            "Expected in the cache, and not there",
            "Above a few per cent: evictions between choice and prefill, or restarts.",
            "percentunit",
            {
                "missed": share(
                    "tokenwire_prefix_tokens_missed_total",
                    "tokenwire_prefix_tokens_predicted_total",
                )
            },
        ),
        largest(
            "Blocks known, by worker",
            "What the frontends know to be cached. Far below the workers' own: raise "
            "--kv-index-blocks.",
            "short",
            "tokenwire_kv_index_blocks",
            "worker_id",
        ),
        counted(
            "Preemptions",
            "A sequence that loses its KV and is computed again. vLLM only.",
            "vllm:num_preemptions_total",
            unit="ops",
        ),
    ],
    "Failures": [
        counted(
            "Errors by code",
            "docs/api.md has the codes; the client's own faults are among them.",
            "tokenwire_request_errors_total",
            "code",
        ),
        counted(
            "Failures at workers, by kind",
            "What a worker failed, whether it was made good elsewhere or not.",
            "tokenwire_leg_failures_total",
            "kind",
        ),
        counted(
            "Migrations",
            "Outputs that went on at another worker. drift: not to the token.",
            "tokenwire_migrations_total",
            "kind",
            "exactness",
        ),
        latency(
            "Pause of a migration",
            "From when a failure was noticed to the next token.",
            "tokenwire_migration_pause_seconds",
        ),
        Panel(
            "Restarts",
            "Of processes, over an hour.",
            "short",
            {
                **by_worker("changes(process_start_time_seconds{@}[1h])"),
                "frontend processes": "sum(increase("
                "tokenwire_frontend_process_restarts_total{@}[1h]))",
            },
        ),
        Panel(
            "Broken messages, late workers, failed parsers",
            "Each of them is to be 0.",
            "ops",
            {
                "messages that were none": rate(
                    "tokenwire_worker_protocol_errors_total"
                ),
                "workers that did not answer a scrape": rate(
                    "tokenwire_engine_scrapes_total", where=',outcome="late"'
                ),
                "parsers": rate("tokenwire_parser_failures_total"),
            },
        ),
    ],
    "Leaks": [
        Panel(
            "KV held by workers with nothing to do",
            "To be 0 but for the seconds of a hand-over.",
            "percentunit",
            by_worker(
                "(tokenwire_worker_kv_cache_usage_perc{@} and "
                "tokenwire_worker_num_requests_open{@} == 0)"
            ),
        ),
        Panel(
            "Open at workers, and known to frontends",
            "Apart for more than seconds: requests that nobody waits for. A pair has two "
            "legs, one after the other; generations that outlive their clients are "
            "among the first alone.",
            "short",
            {
                "open at workers": total("tokenwire_worker_num_requests_open"),
                "known to frontends": total("tokenwire_requests_admitted"),
            },
        ),
        Panel(
            "KV that nobody came for",
            "orphans: their frontend was lost. expired: left to the engine's lease.",
            "ops",
            {
                "orphans": rate("tokenwire_worker_kv_orphans_total"),
                "expired": rate("vllm:nixl_num_kv_expired_reqs_total"),
            },
        ),
        Panel(
            "Memory of processes",
            "Flat under a steady load.",
            "bytes",
            by_process("process_resident_memory_bytes"),
        ),
        Panel(
            "Open files of processes",
            "A connection is one.",
            "short",
            by_process("process_open_fds"),
        ),
        Panel(
            "Kept for clients to come back",
            "Bounded by --journal-bytes, and by --capture-max-bytes.",
            "bytes",
            {
                "generations": total("tokenwire_worker_journal_bytes"),
                "hidden states": total("tokenwire_worker_capture_bytes"),
            },
        ),
    ],
}
