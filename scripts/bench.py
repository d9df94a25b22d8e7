"""Measure the frontend: CPU per streamed token, latency, requests/s, memory.

The engine is simulated. One frontend is pinned to the first core, the worker and this
client to the last; the client only counts events, so that it is not the limit. Arms
are rotated and repeated; every figure is a median with its spread. CPU time is the
kernel's own for all threads of the process, so a busy machine stretches the run and
not the figures, apart from cold caches.

    python scripts/bench.py [--repeats 5] [--seconds 4] [--output docs/benchmarks.md]
                            [--baseline CHECKOUT]

With a baseline, the frontend of another checkout is measured in the same run, by the same
client and in front of the same worker, and the table says how the two compare.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import platform
import statistics
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import uvloop
from bench_load import direct_ttft_ms, http_ttft_ms, requests_per_s, streamed_cpu
from bench_processes import Stack, floor, rss_mib, stack
from table import write as write_table

STEP_10_MS, STEP_0 = "10", "0"
BEFORE = "baseline, "


@dataclass
class Figure:
    """A figure's name, unit and values."""

    name: str
    unit: str
    values: list[float] = field(default_factory=list[float])

    def row(self) -> str:
        """Return a row of the table."""
        median = statistics.median(self.values)
        return (
            f"| {self.name} | {median:.2f} | {min(self.values):.2f} to "
            f"{max(self.values):.2f} | {self.unit} |"
        )


class Run:
    """All figures of one run."""

    def __init__(
        self,
        model: str,
        cores: list[int],
        repeats: int,
        seconds: float,
        baseline: Path | None = None,
    ) -> None:
        self._model = model
        self._cores = cores
        self._repeats = repeats
        self._seconds = seconds
        self._baseline = baseline
        self.figures: dict[str, Figure] = {}

    def add(self, name: str, unit: str, value: float) -> None:
        """Keep a value."""
        print(f"bench: {name}: {value:.2f} {unit}", flush=True)
        self.figures.setdefault(name, Figure(name, unit)).values.append(value)

    async def all(self, folder: Path) -> None:
        """Measure everything, arms rotated within each repeat."""
        with contextlib.ExitStack() as others:
            before: list[Callable[[], Awaitable[None]]] = []
            if self._baseline is not None:
                before = self._before(others, folder, self._baseline)
            await self._all(folder, before)

    def _before(
        self, others: contextlib.ExitStack, folder: Path, checkout: Path
    ) -> list[Callable[[], Awaitable[None]]]:
        """Return the arms of the baseline, its processes running."""
        paced, fast = (
            others.enter_context(
                stack(self._model, step, self._cores, folder, checkout)
            )
            for step in (STEP_10_MS, STEP_0)
        )
        return [
            self._cpu(one, f"{BEFORE}48 streams, {load}", ids)
            for one, load in ((paced, "10 ms step"), (fast, "saturated"))
            for ids in (False, True)
        ]

    async def _all(
        self, folder: Path, before: list[Callable[[], Awaitable[None]]]
    ) -> None:
        with (
            stack(self._model, STEP_10_MS, self._cores, folder) as paced,
            stack(self._model, STEP_0, self._cores, folder) as fast,
            floor(STEP_10_MS, self._cores, folder) as paced_floor,
            floor(STEP_0, self._cores, folder) as fast_floor,
        ):
            self.add("RSS, idle", "MiB", rss_mib(fast.frontend_pid))
            arms = [
                *(
                    self._cpu(paced, "48 streams, 10 ms step", ids)
                    for ids in (False, True)
                ),
                *(
                    self._cpu(fast, "48 streams, saturated", ids)
                    for ids in (False, True)
                ),
                self._cpu(paced_floor, "floor, 48 streams, 10 ms step", False),
                self._cpu(fast_floor, "floor, 48 streams, saturated", False),
                self._requests(fast),
                self._latency(fast),
                *before,
            ]
            for repeat in range(self._repeats):
                shift = repeat % len(arms)
                for arm in arms[shift:] + arms[:shift]:
                    await arm()
            self.add("RSS, after the load", "MiB", rss_mib(fast.frontend_pid))

    def _cpu(self, stack: Stack, load: str, ids: bool) -> Callable[[], Awaitable[None]]:
        name = f"CPU per streamed token, {load}{', with token ids' if ids else ''}"

        async def arm() -> None:
            value = await streamed_cpu(
                stack, streams=48, ids=ids, seconds=self._seconds
            )
            self.add(name, "us", value)

        return arm

    def _requests(self, stack: Stack) -> Callable[[], Awaitable[None]]:
        async def arm() -> None:
            rate, cpu = await requests_per_s(stack, self._seconds)
            self.add("Requests/s, max_tokens=1, 32 at once", "1/s", rate)
            self.add("CPU per request, max_tokens=1", "us", cpu)

        return arm

    def _latency(self, stack: Stack) -> Callable[[], Awaitable[None]]:
        async def arm() -> None:
            http = await http_ttft_ms(stack, 200)
            direct = direct_ttft_ms(stack, 200)
            self.add("TTFT over HTTP, one at a time", "ms", http)
            self.add("TTFT of the worker alone", "ms", direct)
            self.add("Added latency to the first token", "ms", http - direct)

        return arm


def comparison(figures: dict[str, Figure]) -> str:
    """Return how the figures compare with the baseline's, if there was one."""
    rows = [
        f"| {name} | {statistics.median(figure.values):.2f} "
        f"| {statistics.median(before.values):.2f} "
        f"| {statistics.median(figure.values) / statistics.median(before.values):.3f} |"
        for name, figure in figures.items()
        if (before := figures.get(name.replace(", ", f", {BEFORE}", 1))) is not None
        and before is not figure
    ]
    if not rows:
        return ""
    return "\n".join(
        [
            "\n## Against the baseline of the same run\n",
            "| Figure, us | Now | Baseline | Ratio |\n|---|---|---|---|",
            *rows,
            "",
        ]
    )


def report(figures: list[Figure], cores: int, repeats: int, seconds: float) -> str:
    """Return the table, with what it was measured on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    date = datetime.datetime.now(tz=datetime.UTC).date()
    rows = "\n".join(figure.row() for figure in figures)
    return f"""
Written by `make bench` on {date}: {cores} cores, {memory:.0f} GiB, {platform.machine()},
Python {platform.python_version()}. {repeats} repeats of {seconds:g} s an arm, arms rotated.

| Figure | Median | Spread | Unit |
|---|---|---|---|
{rows}
"""


def main() -> None:
    """Run the benchmark and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model",
        default=os.environ.get("TOKENWIRE_DEMO_MODEL"),
        help="model folder, for its tokenizer (default: $TOKENWIRE_DEMO_MODEL)",
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--output", type=Path, default=Path("docs/benchmarks.md"))
    parser.add_argument(
        "--baseline", type=Path, metavar="CHECKOUT", help="compare with its frontend"
    )
    given = parser.parse_args()
    if not given.model:
        parser.error("--model is required")
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1]})
    run = Run(given.model, cores, given.repeats, given.seconds, given.baseline)
    with tempfile.TemporaryDirectory(prefix="tokenwire-bench-") as folder:
        uvloop.run(run.all(Path(folder)))
    figures = list(run.figures.values())
    page = report(figures, len(cores), given.repeats, given.seconds)
    page += comparison(run.figures)
    write_table(given.output, "bench", page)
    print(page)


if __name__ == "__main__":
    main()
