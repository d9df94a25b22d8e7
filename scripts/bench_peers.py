"""Measure our frontend beside its peers, on one machine and in one run.

The server under test is pinned to the first core; its engine and this client share the
last. In each repeat every arm is started alone, measured and ended, in a rotated order;
a figure is the median of the repeats, with its spread. At a paced step each load has
several windows a start, with and without token ids in turn, and each is a value of its own:
one window sees one state of a shared machine. CPU time is the kernel's, for all processes
and threads of the server under test.

    PEERS_SECONDS=2.5 PEERS_REPEATS=3 PEERS_ARMS=tokenwire,dynamo python scripts/bench_peers.py

Writes docs/bench-peers.json, the section "Beside the peers" of docs/benchmarks.md, and a
picture of each figure below docs/plots/. ``--report`` writes the last two from the first.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peers_arms import ARMS, MOCKERS_STEP_S, PACED_STEP_S, Arm, model_folder
from peers_figures import BRISK_STEP_S, SLOW_STEP_S, Figures, Measure
from peers_plot import bars
from peers_table import FIGURES, full_title, page, with_added
from table import write as write_table
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[1]
RAW = ROOT / "docs/bench-peers.json"
PAGE = ROOT / "docs/benchmarks.md"
PLOTS = ROOT / "docs/plots"
STOP_AFTER_S = 36 * 60
"""No arm is started after so long: the whole ends within 40 minutes."""

WINDOWS, WINDOW_SHARE = 3, 0.8
"""Windows of a paced load at each start, and how long one is beside another load: with
2.5 s a load, 2 s carry 9,600 tokens and more, and the whole takes 27 minutes."""

FAILURES = (OSError, RuntimeError, ArithmeticError, LookupError, ValueError)
"""What an arm that does not work can raise here; the others are measured regardless."""

Step = tuple[str, Callable[[], Figures]]


class Run:
    """All values, and what went wrong."""

    def __init__(self, model: Path, seconds: float, cores: tuple[int, int]) -> None:
        self._model = model
        self._seconds = seconds
        self._cores = cores
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._began = time.monotonic()
        self.values: dict[str, dict[str, list[float]]] = {}
        self.repeats: dict[str, dict[str, list[int]]] = {}  # in which each was taken
        self.errors: dict[str, list[str]] = {}

    def all(self, names: list[str], repeats: int, folder: Path) -> None:
        """Measure all arms."""
        for name in names:
            self.values[name], self.repeats[name], self.errors[name] = {}, {}, []
        for repeat in range(repeats):
            shift = repeat % len(names)
            for name in names[shift:] + names[:shift]:
                if time.monotonic() - self._began > STOP_AFTER_S:
                    self.errors[name].append(f"repeat {repeat + 1}: no time was left")
                    continue
                self._say(name)
                self._arm(name, repeat, folder)

    def _arm(self, name: str, repeat: int, folder: Path) -> None:
        arm = ARMS[name](self._model, folder, self._cores)
        measure = Measure(arm, self._seconds, self._num_tokens)
        fast: list[Step] = [
            ("idle", measure.idle),
            ("first token", measure.first_token),
            ("requests", measure.requests),
            ("saturated", lambda: measure.saturated(ids=False)),
            ("long prompts", measure.long_prompts),
        ]
        if arm.ids is not None:
            fast.insert(4, ("saturated, ids", lambda: measure.saturated(ids=True)))
        near = self._paced(arm, measure, "near", "6 ms step")
        paced = self._paced(arm, measure, "paced", "10 ms step")
        paced.append(("inter-token", measure.inter_token))
        slow: list[Step] = [
            ("1,000 streams", lambda: measure.open_streams(1_000)),
            ("5,000 streams", lambda: measure.open_streams(5_000)),
        ]
        stages = [
            (0.0, fast),
            (MOCKERS_STEP_S, near),
            (PACED_STEP_S, paced),
            (SLOW_STEP_S, slow),
        ]
        if arm.keeps_up:
            stages.insert(1, (BRISK_STEP_S, [("1 ms step", measure.brisk)]))
        running = False
        try:
            for step_s, figures in stages:
                try:
                    (arm.pace if running else arm.start)(step_s)
                    running = True
                    self._figures(arm, repeat, figures, step_s)
                except FAILURES as error:
                    self._failed(name, f"a step of {step_s:g} s", error)
                    arm.stop()
                    running = False
        finally:
            arm.stop()

    def _paced(self, arm: Arm, measure: Measure, name: str, what: str) -> list[Step]:
        """Return the windows of a paced load, with and without ids in turn."""
        seconds = WINDOW_SHARE * self._seconds
        one: list[Step] = [(what, lambda: measure.paced(name, seconds, ids=False))]
        if arm.ids is not None:
            one.append((f"{what}, ids", lambda: measure.paced(name, seconds, ids=True)))
        return one * WINDOWS

    def _num_tokens(self, text: str) -> int:
        return len(self._tokenizer.encode(text).ids)

    def _figures(
        self, arm: Arm, repeat: int, figures: list[Step], step_s: float
    ) -> None:
        for what, take in figures:
            try:
                taken = take()
            except FAILURES as error:
                self._failed(arm.name, what, error)
                arm.stop()
                arm.start(step_s)  # if it cannot, the rest of this stage is lost
                continue
            told = ", ".join(f"{key} {value:.4g}" for key, value in taken.items())
            self._say(f"  {arm.name}: {told}")
            for key, value in taken.items():
                self.values[arm.name].setdefault(key, []).append(value)
                self.repeats[arm.name].setdefault(key, []).append(repeat)

    def _say(self, told: str) -> None:
        print(
            f"bench-peers: {time.monotonic() - self._began:6.1f} s {told}", flush=True
        )

    def _failed(self, name: str, what: str, error: Exception) -> None:
        told = f"{what}: {str(error) or type(error).__name__}".replace("\n", " ")
        self._say(f"  {name}: FAILED {told}")
        self.errors[name].append(told[:300])


def report(raw: dict[str, Any]) -> None:
    """Write the page and the pictures."""
    results = raw["values"]
    text = page(
        results, raw["notes"], raw["errors"], raw["head"], raw.get("repeats", {})
    )
    write_table(PAGE, "peers", text)
    PLOTS.mkdir(exist_ok=True)
    whole = with_added(results)
    for figure in FIGURES:
        values = {
            arm: figures[figure.key]
            for arm, figures in whole.items()
            if figures.get(figure.key)
        }
        picture = bars(full_title(figure), figure.unit, figure.digits, values)
        (PLOTS / f"peers-{figure.key}.svg").write_text(picture)


def main() -> None:
    """Run the benchmark and write what it found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", action="store_true", help="only write it anew")
    if parser.parse_args().report:
        report(json.loads(RAW.read_text()))
        return
    model = os.environ.get("TOKENWIRE_DEMO_MODEL")
    if not model:
        parser.error("set TOKENWIRE_DEMO_MODEL to a model's folder")
    seconds = float(os.environ.get("PEERS_SECONDS") or 2.5)
    repeats = int(os.environ.get("PEERS_REPEATS") or 3)
    names = (os.environ.get("PEERS_ARMS") or ",".join(ARMS)).split(",")
    if unknown := [name for name in names if name not in ARMS]:
        parser.error(f"no such arms: {unknown}; there are {list(ARMS)}")
    available = sorted(os.sched_getaffinity(0))
    cores = available[0], available[-1]
    os.sched_setaffinity(0, {cores[1]})
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tokenwire-peers-") as made:
        folder = Path(made)
        run = Run(model_folder(Path(model), folder), seconds, cores)
        with contextlib.suppress(KeyboardInterrupt):  # what there is, is reported
            run.all(names, repeats, folder)
    minutes = (time.monotonic() - began) / 60
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    raw = {
        "head": f"Written by `make bench-peers` on {datetime.datetime.now(tz=datetime.UTC).date()}: "
        f"{len(available)} cores, {memory:.0f} GiB, {platform.machine()}, Python {platform.python_version()}. "
        f"{repeats} repeats of {seconds:g} s a load, arms rotated, {minutes:.0f} minutes in all. Median (least to most). "
        f"Steps of 6 and 10 ms: {WINDOWS} windows of {WINDOW_SHARE * seconds:g} s in each repeat, with and without "
        f"ids in turn, so a figure is the median of {WINDOWS * repeats} values.",
        "notes": {name: ARMS[name].note for name in names},
        "values": run.values,
        "repeats": run.repeats,
        "errors": run.errors,
    }
    RAW.write_text(json.dumps(raw, indent=1) + "\n")
    report(raw)


if __name__ == "__main__":
    main()
