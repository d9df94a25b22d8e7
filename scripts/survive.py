"""Kill, freeze and restart the workers of a stack under load; say what its clients saw.

``python scripts/survive.py --stack tokenwire`` (or ``vllm-router``, ``dynamo``, which
``scripts/survive_peers.sh`` installs) prints one row a scenario, for docs/faults-peers.md.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from survive_scenarios import Outcome, Scenarios, Stack
from survive_stacks import STACKS, running

MAX_TOKENS = 60
HEAD = (
    "| stack | scenario | requests | failed | wrong | usage wrong | longest pause | "
    "KV held after 2 s | empty after | remark |\n|---|---|---|---|---|---|---|---|---|---|"
)

Scenario = Callable[[Scenarios], Awaitable[Outcome]]
SCENARIOS: dict[str, Scenario] = {
    "leave-between": lambda run: run.leave_between(),
    "leave-prefill": lambda run: run.leave_in_prefill(6, 1_900),
    "freeze": lambda run: run.freeze("decode-1"),
    "roll": lambda run: run.roll(["prefill-0", "decode-0", "decode-1"]),
    "kill": lambda run: run.kill("decode-1"),
}
"""In this order: a killed worker need not be waited for at the end."""

NEEDS_COUNTS = {"leave-between", "leave-prefill"}


def row(kind: str, outcome: Outcome) -> str:
    """Return a line of the table."""
    empty = "not" if math.isinf(outcome.took_s) else f"{outcome.took_s:.1f} s"
    measured = not math.isnan(outcome.took_s)
    cells = [
        kind,
        outcome.name,
        str(outcome.num_requests),
        str(outcome.num_failed),
        str(outcome.num_wrong),
        str(outcome.num_wrong_usage),
        f"{outcome.longest_pause_s:.1f} s",
        f"{outcome.kv_held:.1%}" if measured else "not shown",
        empty if measured else "not shown",
        f"{outcome.kv_peak:.0%} held when they left"
        if outcome.kv_peak
        else outcome.remark,
    ]
    return f"| {' | '.join(cells)} |"


async def survive(kind: str, stack: Stack, names: list[str]) -> bool:
    """Run scenarios and print their rows; return whether nothing was lost."""
    scenarios = Scenarios(stack, MAX_TOKENS)
    lossless = True
    try:
        print(row(kind, await scenarios.run_calm()), flush=True)
        for name in names:
            if name in NEEDS_COUNTS and not stack.shows_counts:
                continue  # nobody can say what is held
            await stack.whole()
            outcome = await SCENARIOS[name](scenarios)
            print(row(kind, outcome), flush=True)
            for error in sorted(set(outcome.errors))[:3]:
                print(f"  {error}", file=sys.stderr)
            lossless &= not (outcome.num_failed or outcome.num_wrong or outcome.kv_held)
    finally:
        await scenarios.client.close()
    return lossless


async def main() -> int:
    """Return 0 if nothing was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stack", choices=STACKS, default=STACKS[0])
    parser.add_argument("--scenario", action="append", choices=SCENARIOS)
    parser.add_argument("--model", default=os.environ.get("TOKENWIRE_DEMO_MODEL"))
    parser.add_argument("--logs", type=Path, help="a folder for logs (a new one)")
    given = parser.parse_args()
    if given.model is None:
        parser.error("give --model or TOKENWIRE_DEMO_MODEL")
    folder = given.logs or Path(tempfile.mkdtemp(prefix="survive-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"logs in {folder}", file=sys.stderr)
    print(HEAD)
    async with running(given.stack, given.model, folder) as stack:
        names = given.scenario or list(SCENARIOS)
        return 0 if await survive(given.stack, stack, names) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
