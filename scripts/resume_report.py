"""Breaks generations in every way, and says how exactly they went on: docs/resume-report.md.

`resume_report.py [--engine sim|vllm|all] [--write]` starts stacks of its own, and speaks
HTTP with them. Exit code 1: a case that went on by raw ids was not as if nothing had
happened. TOKENWIRE_DEMO_MODEL is the model's folder.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import table
from report_cases import Outcome
from report_real import run_real
from report_sim import run_simulated
from report_table import COLUMNS, cells, failures, tables

DOCS = Path(__file__).parent.parent / "docs"
PAGE, NUMBERS = DOCS / "resume-report.md", DOCS / "resume-report.json"
SHOWN = 20  # of the failures; more are rather one and the same


class _Progress:
    """Says what is done now, with the seconds since the start."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._began

    def __call__(self, text: str) -> None:
        """Print *text*."""
        print(f"{self._engine}: {self.seconds:5.1f} s  {text}", flush=True)


def environment() -> dict[str, Any]:
    """Return what the numbers depend on."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
    }


def run(engine: str, model: Path, *, write: bool) -> list[str]:
    """Run one engine's part; return what failed."""
    report = _Progress(engine)
    report("starting")
    parts: list[str] = []
    if engine == "sim":
        outcomes = asyncio.run(run_simulated(model, report))
        failed = failures(outcomes)
    else:
        outcomes, reuse = asyncio.run(run_real(model, report))
        failed = failures(outcomes)
        parts.append(str(reuse))
        if not reuse.is_bounded:
            failed.append(f"more than a block was computed again: {reuse}")
    took_s = report.seconds
    report(f"{len(outcomes)} cases, {len(failed)} failed")
    text = "\n\n".join([_summary(outcomes, took_s), *parts, tables(outcomes)])
    print(f"\n{text}\n", flush=True)
    if write:
        table.write(PAGE, engine, text)
        _write_numbers(engine, outcomes, took_s, parts)
    return failed


def _summary(outcomes: Sequence[Outcome], took_s: float) -> str:
    raw = sum(one.method == "raw ids" for one in outcomes)
    where = environment()
    return (
        f"{len(outcomes)} cases, {raw} of them by raw ids, in {took_s:.0f} s; "
        f"{where['date']}, {where['cores']} cores ({where['machine']}), "
        f"Python {where['python']}."
    )


def _write_numbers(
    engine: str, outcomes: Sequence[Outcome], took_s: float, remarks: Sequence[str]
) -> None:
    numbers: dict[str, Any] = {}
    if NUMBERS.exists():
        numbers = json.loads(NUMBERS.read_text())
    numbers[engine] = {
        "environment": environment(),
        "cases": len(outcomes),
        "took_s": round(took_s),
        "remarks": remarks,
        "columns": COLUMNS,
        "cells": cells(outcomes),
    }
    # A line for each cell, in the order of ``columns``: what changes is seen in a diff.
    parts: list[str] = []
    for name, part in sorted(numbers.items()):
        lines = ",\n   ".join(json.dumps(cell) for cell in part["cells"])
        head = json.dumps({key: part[key] for key in part if key != "cells"})
        parts.append(f' "{name}": {head[:-1]},\n  "cells": [\n   {lines}\n  ]}}')
    NUMBERS.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def main() -> None:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("sim", "vllm", "all"), default="all")
    parser.add_argument(
        "--write", action="store_true", help="put the tables into docs/"
    )
    arguments = parser.parse_args()
    model = Path(os.environ["TOKENWIRE_DEMO_MODEL"])
    engines = ("sim", "vllm") if arguments.engine == "all" else (arguments.engine,)
    failed = [
        one for engine in engines for one in run(engine, model, write=arguments.write)
    ]
    for one in failed[:SHOWN]:
        print(f"not as if nothing had happened: {one}", file=sys.stderr)
    if failed:
        sys.exit(f"{len(failed)} cases failed")


if __name__ == "__main__":
    main()
