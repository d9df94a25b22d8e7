"""Measure a frontend of one and of several processes: what it serves, and at which cost.

The worker and this client are pinned to the last core, as in bench.py. Each arm says where
the frontend runs: on the first core, where a second process can add nothing but its cost,
or on all of them, where it takes what the client and the worker leave of the last one. How
busy that core is with these two is told beside it: near 100 % they are the limit.

    python scripts/bench_cores.py [--processes 1 2] [--repeats 3] [--seconds 3]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import uvloop
from bench_load import requests_per_s, streamed
from bench_processes import Stack, cpu_s, stack
from table import write as write_table

STREAMS = 48


@dataclass
class Arm:
    """A frontend, and what was measured of it."""

    processes: int
    cores: str  # as taskset writes them
    values: dict[str, list[float]] = field(default_factory=dict[str, list[float]])

    def add(self, name: str, value: float) -> None:
        """Keep a value."""
        self.values.setdefault(name, []).append(value)

    def row(self) -> str:
        """Return a row of the table: medians."""
        middle = {name: statistics.median(v) for name, v in self.values.items()}
        return (
            f"| {self.processes} | {self.cores} | {middle['requests/s']:.0f} "
            f"| {middle['us/request']:.0f} | {middle['requests: others']:.0f} % "
            f"| {middle['tokens/s']:.0f} | {middle['us/token']:.2f} "
            f"| {middle['tokens: others']:.0f} % |"
        )


async def others_busy(
    stack: Stack, measure: Callable[[], Awaitable[tuple[float, float]]]
) -> tuple[float, float, float]:
    """Return what *measure* does, and how much of a core client and worker took, in %."""
    pids = [os.getpid(), stack.worker_pid]
    began, cpu = time.perf_counter(), sum(map(cpu_s, pids))
    rate, cost = await measure()
    cpu = sum(map(cpu_s, pids)) - cpu
    return rate, cost, 100 * cpu / (time.perf_counter() - began)


async def measured(arm: Arm, model: str, cores: list[int], seconds: float) -> None:
    """Measure an arm once."""
    with (
        tempfile.TemporaryDirectory(prefix="tokenwire-bench-") as folder,
        stack(
            *(model, "0", cores, Path(folder)),
            processes=arm.processes,
            frontend_cores=arm.cores,
        ) as running,
    ):
        loads = {
            "request": lambda: requests_per_s(running, seconds),
            "token": lambda: streamed(
                running, streams=STREAMS, ids=False, seconds=seconds
            ),
        }
        for unit, load in loads.items():
            rate, cost, others = await others_busy(running, load)
            arm.add(f"{unit}s/s", rate)
            arm.add(f"us/{unit}", cost)
            arm.add(f"{unit}s: others", others)
            print(
                f"bench: {arm.processes} on {arm.cores}: {rate:.0f} {unit}s/s, ", end=""
            )
            print(f"{cost:.2f} us each, others {others:.0f} %", flush=True)


def main() -> None:
    """Run the benchmark and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=os.environ.get("TOKENWIRE_DEMO_MODEL"))
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--output", type=Path, default=Path("docs/benchmarks.md"))
    given = parser.parse_args()
    if not given.model:
        parser.error("--model is required")
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1]})
    every = ",".join(map(str, cores))
    arms = [Arm(n, on) for on in (str(cores[0]), every) for n in given.processes]
    for repeat in range(given.repeats):
        shift = repeat % len(arms)
        for arm in arms[shift:] + arms[:shift]:
            uvloop.run(measured(arm, given.model, cores, given.seconds))
    rows = "\n".join(arm.row() for arm in arms)
    page = f"""
Written by `make bench-cores`: {len(cores)} cores, {given.repeats} repeats of
{given.seconds:g} s an arm, arms rotated; medians. Client and worker on core {cores[-1]}.

| Processes | On cores | Requests/s | us each | Others | Tokens/s | us each | Others |
|---|---|---|---|---|---|---|---|
{rows}
"""
    write_table(given.output, "scale", page)
    print(page)


if __name__ == "__main__":
    main()
