"""The fault suite: hundreds of seeded cases on simulated workers, and one table.

`make faults` (SEED=1 CASES=300); docs/faults.md says what is injected and what is
promised. `make faults SEED=1 CASE=17` runs one case alone, with its log. It ends with 1
unless nothing was lost, repeated or left behind.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from faults_case import Result, run_case
from faults_parts import digest
from faults_plan import KINDS, plan
from faults_processes import SCENARIOS, run_scenario
from table import write as write_table

from support.tiny_model import write_tiny_model

__all__ = ["Table", "main", "rerun", "run_cases"]

DOCUMENT = Path(__file__).parents[1] / "docs" / "faults.md"
CASES = 300

TITLES = {
    "frames": "a message dropped, repeated, swapped, truncated, garbled or held",
    "greeting": "the same, to the handshake after a cut",
    "cut": "connection cut, or standing still",
    "kill": "worker killed for good",
    "restart": "worker killed and started again at its address",
    "freeze": "worker stopped, and going on",
    "engine": "engine dead, frozen, slow, or failing reads of KV",
    "handover": "around the hand-over of KV",
    "drain": "worker drained and replaced",
    "clients": "clients that leave, or read slowly",
    "queues": "full queues",
    "clocks": "clocks that leap",
    "frontends": "one of two frontends killed",
    "two": "two faults at once",
    "processes": "signals to processes, under tokenwire-up",
}


@dataclass
class Row:
    """The sums of one kind of cases."""

    results: list[Result] = field(default_factory=list[Result])

    def cells(self) -> list[str]:
        """Return the numbers for the table."""
        results = self.results
        sums = [
            sum(getattr(one, name) for one in results)
            for name in (
                "num_requests",
                "num_struck",
                "num_lost",
                "num_lost_tokens",
                "num_repeated_tokens",
                "num_leaked",
            )
        ]
        worst = max((one.worst_pause_s for one in results), default=0.0)
        failed = sum(not one.passed for one in results)
        return [str(len(results)), *map(str, sums), str(failed), f"{worst:.2f}"]


HEAD = (
    "kind", "cases", "requests", "faults", "lost requests", "lost tokens",
    "repeated tokens", "leaked", "failed cases", "worst pause, s",
)  # fmt: skip


@dataclass
class Table:
    """What a run came to."""

    seed: int
    results: list[Result]

    @property
    def passed(self) -> bool:
        """Whether no case failed."""
        return all(one.passed for one in self.results)

    @property
    def digests(self) -> tuple[str, str]:
        """Return the digests of all plans and of all outcomes, times left out."""
        ordered = sorted(self.results, key=lambda one: one.number)
        plans = [one.plan_digest for one in ordered]
        return digest(plans), digest([one.outcome_digest for one in ordered])

    def markdown(self) -> str:
        """Return the table."""
        rows = {kind: Row() for kind in TITLES}
        for one in self.results:
            rows[one.kind].results.append(one)
        lines = [" | ".join(HEAD), " | ".join(["---"] + ["---:"] * (len(HEAD) - 1))]
        lines += [
            " | ".join([TITLES[kind], *row.cells()])
            for kind, row in rows.items()
            if row.results
        ]
        lines.append(" | ".join(["**all**", *Row(self.results).cells()]))
        return "\n".join(f"| {line} |" for line in lines)


def rerun(seed: int, number: int) -> str:
    """Return the command that runs one case alone; scenarios have numbers below 0."""
    if number < 0:
        name = list(SCENARIOS)[-1 - number]
        return f"make faults SEED={seed} FAULTS='--scenario {name}'"
    return f"make faults SEED={seed} CASE={number}"


def _one(given: tuple[int, int, Path, Path | None]) -> Result:
    logging.getLogger().addHandler(logging.NullHandler())  # what goes wrong is meant to
    return run_case(*given)


def run_cases(
    seed: int, numbers: Iterable[int], model: Path, *, jobs: int = 1
) -> Iterator[Result]:
    """Run cases, in this process or in several, and return what each came to."""
    work = [(seed, number, model, None) for number in numbers]
    if jobs == 1:
        yield from map(_one, work)
        return
    fresh = multiprocessing.get_context("spawn")  # ZeroMQ does not survive a fork
    with ProcessPoolExecutor(jobs, mp_context=fresh) as pool:
        yield from pool.map(_one, work)


def write_document(table: Table, command: str, seconds: float) -> None:
    """Put the table between the markers of docs/faults.md."""
    plans, outcomes = table.digests
    told = f"`{command}`, {seconds:.0f} s; plans `{plans}`, outcomes `{outcomes}`."
    write_table(DOCUMENT, "table", f"{told}\n\n{table.markdown()}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=CASES)
    parser.add_argument("--case", type=int, help="run this one alone")
    parser.add_argument("--kind", choices=sorted(set(KINDS)), help="only these")
    parser.add_argument(
        "--scenario", choices=("all", "none", *SCENARIOS), help="of processes, alone"
    )
    parser.add_argument("--engine", choices=("sim", "vllm"), default="sim")
    parser.add_argument("--model", help="with --engine vllm: its folder")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--write", action="store_true", help="into docs/faults.md")
    return parser


def _alone(seed: int, number: int, model: Path) -> int:
    log = Path(tempfile.gettempdir()) / f"tokenwire-fault-{seed}-{number}.log"
    print(plan(seed, number))
    result = run_case(seed, number, model, log)
    print(result)
    print(f"log: {log}")
    return int(not result.passed)


def _scenarios(given: argparse.Namespace, model: Path) -> Iterator[Result]:
    """Run what needs processes, one after the other."""
    names = list(SCENARIOS)
    if given.scenario not in {None, "all"}:
        names = [name for name in names if name == given.scenario]
    for name in names:
        print(f"{name}: {SCENARIOS[name].__doc__}", flush=True)
        yield run_scenario(given.seed, name, given.engine, model)


def _results(given: argparse.Namespace, model: Path) -> Iterator[Result]:
    with_cases = given.scenario in {None, "none"} and given.engine == "sim"
    if with_cases:
        numbers = [
            number
            for number in range(given.cases)
            if given.kind in {None, plan(given.seed, number).kind}
        ]
        yield from run_cases(given.seed, numbers, model, jobs=given.jobs)
    if given.kind is None:
        real = Path(given.model) if given.engine == "vllm" else model
        yield from _scenarios(given, real)


def main() -> int:
    """Return 0 if every case passed."""
    parser = _parser()
    given = parser.parse_args()
    if given.engine == "vllm" and not given.model:
        parser.error("--engine vllm needs --model")
    began = time.monotonic()
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "tiny")
        if given.case is not None:
            return _alone(given.seed, given.case, model)
        for one in _results(given, model):
            results.append(one)
            for fault in one.faults:
                print(f"FAILED case {one.number} ({one.kind}): {fault}")
                print(f"  {rerun(given.seed, one.number)}", flush=True)
    table = Table(given.seed, results)
    print(table.markdown())
    plans, outcomes = table.digests
    seconds = time.monotonic() - began
    print(f"seed {given.seed}, {seconds:.0f} s; plans {plans}, outcomes {outcomes}")
    if given.write:
        command = f"make faults SEED={given.seed} CASES={given.cases}"
        write_document(table, command, seconds)
    return int(not table.passed)


if __name__ == "__main__":
    sys.exit(main())
