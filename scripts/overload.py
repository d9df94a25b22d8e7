"""Measure what a deployment does when more is asked than it can do.

Two simulated workers with few slots and slow steps, so that their capacity and no CPU is
the limit; one frontend; an open loop of seeded Poisson arrivals. Each load is offered
twice: with the queue in the frontend, and with ``--queue-at worker``, where everything
waits in the engines. Then two tenants, one of which floods. Fails if the goodput at five
times the capacity is more than 10 % below its peak, or the quiet tenant is not served.

    python scripts/overload.py [--seconds 16] [--output docs/overload.md]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import sys
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path

from bench_processes import MODEL_NAME, is_ready, running, wait_for
from overload_load import OUTPUT_TOKENS, Outcome, Tenant, load, percentile
from ports import free_port
from table import write as write_table

NUM_WORKERS = 2
SLOTS = 8
STEP_S = 0.04
SLO_S = 2.0
MAX_WAIT_S = 1.0
"""Half of the SLO: the rest is for the engine's queue, the prefill, and a busy machine."""

LOADS = (0.5, 1.0, 2.0, 5.0, 10.0)
FLOOD, QUIET = 5.0, 0.3
KEPT = 0.9
"""Of the peak goodput at five times the capacity, and of the quiet tenant's requests in
time beside the flood."""
SEED = 4

CAPACITY = NUM_WORKERS * SLOTS / (STEP_S * (sum(OUTPUT_TOKENS) / 2))
"""Requests per second: each holds a slot for a step per token."""

HEADER = """| load | queue | offered/s | goodput/s | good tokens/s | in time | shed | Retry-After | \
TTFT p50 | p99 | RSS |
|---|---|---|---|---|---|---|---|---|---|---|"""


@contextlib.contextmanager
def deployment(model: str, folder: Path, *arguments: str) -> Generator[tuple[int, int]]:
    """Run workers and a frontend; yield its port and pid."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    with contextlib.ExitStack() as stack:
        endpoints: list[str] = []
        for number in range(NUM_WORKERS):
            announce = folder / f"worker-{number}.json"
            announce.unlink(missing_ok=True)
            command = [
                *("-m", "tokenwire.worker", "--engine", "sim", "--role", "aggregated"),
                *("--model", model, "--served-model-name", MODEL_NAME),
                *("--announce", str(announce), "--worker-id", f"worker-{number}"),
                *("--", "--step-ms", f"{1e3 * STEP_S:g}"),
                *("--max-num-seqs", str(SLOTS)),
            ]
            process = stack.enter_context(
                running(command, cores, folder / "worker.log")
            )
            wait_for(announce.exists, process)
            endpoints.append(json.loads(announce.read_text())["endpoint"])
        port = free_port()
        command = [
            *("-m", "tokenwire.frontend", "--model", model, "--port", str(port)),
            *("--served-model-name", MODEL_NAME, "--log-level", "warning"),
            *(part for endpoint in endpoints for part in ("--worker", endpoint)),
            *arguments,
        ]
        process = stack.enter_context(running(command, cores, folder / "frontend.log"))
        wait_for(lambda: is_ready(port), process)
        yield port, process.pid


ARMS = {
    "frontend": ("--max-queue-wait-s", str(MAX_WAIT_S)),
    "worker": ("--queue-at", "worker"),
}


class Run:
    """All loads on all arms."""

    def __init__(self, model: str, folder: Path, seconds: float) -> None:
        self._model = model
        self._folder = folder
        self._seconds = seconds
        self.loads: dict[tuple[float, str], Outcome] = {}
        self.tenants: dict[str, Outcome] = {}

    async def all(self) -> None:
        """Offer every load."""
        for times in LOADS:
            for arm in ARMS:
                tenant = Tenant("all", times * CAPACITY)
                self.loads[times, arm] = outcome = await self._one(arm, [tenant])
                print(f"overload: {row(f'{times:g}x', arm, outcome)}", flush=True)
        flood = FLOOD * CAPACITY
        quiet = QUIET * CAPACITY / 2
        for arm in ARMS:
            tenants = [Tenant("flood", flood), Tenant("quiet", quiet)]
            self.tenants[arm] = outcome = await self._one(arm, tenants)
            for key in ("flood", "quiet"):
                print(f"overload: {row(key, arm, outcome.of(key))}", flush=True)

    async def _one(self, arm: str, tenants: list[Tenant]) -> Outcome:
        """Offer one load to a fresh deployment: what was left over is in nobody's way."""
        log = self._folder / "frontend.log"
        log.unlink(missing_ok=True)
        with deployment(self._model, self._folder, *ARMS[arm]) as (port, pid):
            outcome = await load(
                port,
                pid,
                tenants,
                seed=SEED,
                warm_up_s=4 * SLO_S,
                seconds=self._seconds,
                slo_s=SLO_S,
            )
        if lines := log.read_text().splitlines():
            print(f"overload: the frontend warned {len(lines)} times: {lines[0]}")
        return outcome

    @property
    def kept(self) -> float:
        """The goodput at five times the capacity, as a part of the peak."""
        goodput = {times: self.loads[times, "frontend"].goodput for times in LOADS}
        return goodput[5.0] / max(goodput.values())

    @property
    def quiet(self) -> float:
        """The part of the quiet tenant's requests that was served in time."""
        outcome = self.tenants["frontend"].of("quiet")
        return len(outcome.good) / len(outcome.sent)


def row(name: str, arm: str, outcome: Outcome) -> str:
    """Return a row of the table."""
    sent = len(outcome.sent)
    ttft = [one.ttft_s for one in outcome.served]
    tokens = sum(one.num_tokens for one in outcome.good) / outcome.seconds
    retry = [one.retry_after_s for one in outcome.sent if one.retry_after_s]
    return (
        f"| {name} | {arm} | {sent / outcome.seconds:.1f} | {outcome.goodput:.1f} "
        f"| {tokens:.0f} | {len(outcome.good) / max(1, sent):.0%} "
        f"| {outcome.num_shed / max(1, sent):.0%} "
        f"| {_median(retry, 0)} | {_median(ttft, 2)} "
        f"| {_median(ttft, 2, 0.99)} | {outcome.rss_mib:.0f} MiB |"
    )


def _median(values: Sequence[float], digits: int, share: float = 0.5) -> str:
    return f"{percentile(values, share):.{digits}f} s" if values else "none"


def page(run: Run) -> str:
    """Return what goes between the markers."""
    date = datetime.datetime.now(tz=datetime.UTC).date()
    outcomes = [*run.loads.values(), *run.tenants.values()]
    num_failed = sum(outcome.num_failed for outcome in outcomes)
    low, high = OUTPUT_TOKENS
    loads = [
        row(f"{times:g}x", arm, outcome) for (times, arm), outcome in run.loads.items()
    ]
    tenants = [
        row(key, arm, outcome.of(key))
        for arm, outcome in run.tenants.items()
        for key in ("flood", "quiet")
    ]
    return f"""
Written by `make overload` on {date}: {NUM_WORKERS} simulated workers of {SLOTS} slots with steps of
{1e3 * STEP_S:g} ms, outputs of {low} to {high} tokens: a capacity of {CAPACITY:.1f} requests/s. Good is a request
whose first token came within {SLO_S:g} s and that ended. `--max-queue-wait-s {MAX_WAIT_S:g}`; seed {SEED};
{outcomes[0].seconds:g} s each, after {4 * SLO_S:g} s to warm up; {num_failed} answers other than tokens, 429 and 503.

{HEADER}
{chr(10).join(loads)}

At 5x the goodput is {run.kept:.0%} of its peak.

Two tenants: one sends {FLOOD:g}x the capacity, the other {QUIET:g}x its half of it.

{HEADER}
{chr(10).join(tenants)}

"""


def main() -> int:
    """Return 0 if the goodput holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=os.environ.get("TOKENWIRE_DEMO_MODEL"))
    parser.add_argument("--seconds", type=float, default=16.0)
    parser.add_argument("--output", type=Path, default=Path("docs/overload.md"))
    given = parser.parse_args()
    if given.model is None:
        parser.error("give --model or TOKENWIRE_DEMO_MODEL")
    with tempfile.TemporaryDirectory(prefix="tokenwire-overload-") as folder:
        run = Run(given.model, Path(folder), given.seconds)
        asyncio.run(run.all())
    write_table(given.output, "overload", page(run))
    print(f"overload: at 5x the goodput is {run.kept:.0%} of its peak")
    print(
        f"overload: beside the flood {run.quiet:.0%} of the quiet tenant's are in time"
    )
    return 0 if min(run.kept, run.quiet) >= KEPT else 1


if __name__ == "__main__":
    sys.exit(main())
