"""Prefix hits and balance of routing policies on workloads of recorded shapes.

In virtual time (``routing_sim``) with the product's own router, index and cost; then a
small part of the first workload over real processes, HTTP and ZeroMQ, beside its
simulation. Writes docs/routing.json and the tables of docs/routing.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
from array import array
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import aiohttp
from bench_processes import MODEL_NAME, is_ready, running, wait_for
from ports import free_port
from routing_policies import CacheAware, Oracle, Ours, Overlap
from routing_sim import BLOCK, Policy as SimPolicy, Result, SimWorker, balance, run
from routing_workloads import WORKLOADS, Turn, Workload, chat
from table import write

from tokenwire.frontend.prefixes import Chain
from tokenwire.frontend.routing import Policy

DOCS = Path(__file__).parent.parent / "docs"
NUM_WORKERS = 8
NUM_BLOCKS = 4_096
"""64 Ki tokens a worker: what an 8B model leaves on a card of 24 GB, in round numbers."""

CASES = {
    "chat": ("chat", NUM_BLOCKS),
    "chat, small caches": ("chat", NUM_BLOCKS // 4),
    "system": ("system", NUM_BLOCKS),
    "agents": ("agents", NUM_BLOCKS),
}
LABELS = {
    "ours": "ours, 1 frontend",
    "ours4": "ours, 4 frontends",
    "oracle": "perfect knowledge",
    "cache-aware": "cache-aware (SGLang's, vLLM's routers)",
    "overlap": "overlap (Dynamo's)",
    "load": "least load",
    "round-robin": "round-robin",
}
BAR_HITS = 0.95
BAR_LOAD = 1.5


class Figures(NamedTuple):
    """One run."""

    hit_rate: float
    requests: float  # the largest share of a worker, in mean shares
    open: float  # the same of open requests over time
    busy: float  # and of the time that it works
    ttft_p50_ms: float
    ttft_p95_ms: float
    utilization: float
    predicted: float  # of prompt tokens, expected in a cache; ours alone


def arm(name: str, workers: list[SimWorker]) -> SimPolicy:
    """Return a policy by its name."""
    match name:
        case "ours":
            return Ours(workers)
        case "ours4":
            return Ours(workers, num_frontends=4)
        case "load":
            return Ours(workers, Policy.LOAD)
        case "round-robin":
            return Ours(workers, Policy.ROUND_ROBIN)
        case "oracle":
            return Oracle(workers)
        case "cache-aware":
            return CacheAware(workers)
        case _:
            return Overlap(workers)


def simulated(case: str, name: str, seed: int, size: float) -> Figures:
    """Return the figures of one arm in one case."""
    shape, num_blocks = CASES[case]
    workload = WORKLOADS[shape](seed, size)
    made: list[SimPolicy] = []

    def make(workers: list[SimWorker]) -> SimPolicy:
        made.append(arm(name, workers))
        return made[0]

    result = run(
        workload,
        make,
        num_workers=NUM_WORKERS,
        num_blocks=num_blocks,
        num_frontends=4 if name == "ours4" else 1,
    )
    policy = made[0]
    predicted = policy.num_predicted if isinstance(policy, Ours) else 0
    return figures(result, predicted)


def figures(result: Result, num_predicted: int = 0) -> Figures:
    """Return what is told of a run."""
    return Figures(
        result.hit_rate,
        balance(result.requests),
        balance(result.area),
        balance(result.busy_s),
        result.ttft(0.5) * 1_000,
        result.ttft(0.95) * 1_000,
        sum(result.busy_s) / len(result.busy_s) / result.took_s,
        num_predicted / result.num_prompt_tokens,
    )


def bound(workload: Workload) -> float:
    """Return the hit rate of one cache without end that all requests share.

    A prefix counts if any request that can have ended before has had it: the order is
    that of the conversations, and unrelated ones go one after the other.
    """
    seen: set[int] = set()
    num_hit = num_tokens = 0
    todo = sorted(workload.roots, key=lambda turn: turn.after_s, reverse=True)
    while todo:
        turn = todo.pop()
        chain = Chain()
        hashes = chain.blocks(BLOCK, turn.packed)
        length = len(turn.packed) // 4
        most = (length - 1) // BLOCK
        hit = next((n for n in range(most) if hashes[n] not in seen), most)
        num_hit += hit * BLOCK
        num_tokens += length
        seen.update(chain.blocks(BLOCK, turn.packed + turn.answer))
        todo += turn.children
    return num_hit / num_tokens


# --- real processes ----------------------------------------------------------------------


def small_chat() -> Workload:
    """Return chats that four real processes serve in half a minute."""
    return chat(11, 0.08, rate=8.0, num_turns=4, num_output=30, pause_s=2.0)


async def real(workload: Workload, port: int) -> tuple[float, int]:
    """Return the hit rate of real processes, and how many requests they had."""
    num_prompt = num_cached = num_requests = 0
    url = f"http://127.0.0.1:{port}/v1/completions"

    async def talk(
        client: aiohttp.ClientSession, turn: Turn, before: list[int]
    ) -> None:
        nonlocal num_prompt, num_cached, num_requests
        await asyncio.sleep(turn.after_s)
        body = {
            "model": MODEL_NAME,
            "prompt": before,
            "max_tokens": turn.num_output,
            "ignore_eos": True,
            "nvext": {"extra_fields": ["completion_token_ids"]},
        }
        async with client.post(url, json=body) as answer:
            said = await answer.json()
            if answer.status != 200:
                sys.exit(f"bench: {said}")
        usage = said["usage"]
        num_prompt += usage["prompt_tokens"]
        num_cached += usage["prompt_tokens_details"]["cached_tokens"]
        num_requests += 1
        history = before + said["nvext"]["completion_token_ids"]
        skipped = len(turn.packed) + len(turn.answer)
        for child in turn.children:
            more = list(array("I", child.packed[skipped:]))
            tasks.create_task(talk(client, child, history + more))

    connector = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(connector=connector) as client,
        asyncio.TaskGroup() as tasks,
    ):
        for root in workload.roots:
            tasks.create_task(talk(client, root, list(array("I", root.packed))))
    return num_cached / num_prompt, num_requests


def over_processes(model: str) -> dict[str, float]:
    """Return hit rates of a small workload: real processes, and their simulation."""
    workload = small_chat()
    found: dict[str, float] = {}
    for policy in (Policy.KV, Policy.ROUND_ROBIN):
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            endpoints: list[str] = []
            for number in range(4):
                announce = folder / f"worker-{number}.json"
                command = [
                    *("-m", "tokenwire.worker", "--engine", "sim"),
                    *("--role", "aggregated", "--model", model),
                    *("--served-model-name", MODEL_NAME, "--worker-id", f"w{number}"),
                    *("--listen", "tcp://127.0.0.1:0", "--announce", str(announce)),
                    *("--", "--step-ms", "10", "--num-blocks", "4096"),
                    *("--max-num-seqs", "64"),
                ]
                worker = running(command, "0-1", folder / f"worker-{number}.log")
                wait_for(announce.exists, stack.enter_context(worker))
                endpoints.append(json.loads(announce.read_text())["endpoint"])
            port = free_port()
            command = [
                *("-m", "tokenwire.frontend", "--model", model),
                *("--served-model-name", MODEL_NAME, "--port", str(port)),
                *("--routing", policy.value, "--log-level", "warning"),
                *(word for one in endpoints for word in ("--worker", one)),
            ]
            process = stack.enter_context(
                running(command, "0-1", folder / "frontend.log")
            )
            wait_for(partial(is_ready, port), process)
            rate, num_requests = asyncio.run(real(workload, port))
        found[f"{policy.value}, processes"] = rate
        make: Callable[[list[SimWorker]], SimPolicy] = partial(Ours, policy=policy)
        result = run(workload, make, num_workers=4, num_blocks=NUM_BLOCKS)
        found[f"{policy.value}, simulated"] = result.hit_rate
        found["requests"] = num_requests
    return found


# --- tables ------------------------------------------------------------------------------


def median(runs: list[Figures]) -> Figures:
    """Return the median of each figure."""
    return Figures(*(statistics.median(column) for column in zip(*runs, strict=True)))


def page(
    found: dict[str, dict[str, list[Figures]]],
    bounds: dict[str, float],
    processes: dict[str, float],
    seeds: int,
) -> str:
    """Return the tables."""
    parts = [
        f"Written by `make bench-routing`: {NUM_WORKERS} workers, medians of {seeds} seeds."
    ]
    for case, arms in found.items():
        shape, num_blocks = CASES[case]
        text = WORKLOADS[shape](0, 0.01).text
        best = median(arms["oracle"]).hit_rate
        parts.append(
            f"### {case}\n\n{text}; caches of {num_blocks * BLOCK:,} tokens. One cache "
            f"without end would hit {bounds[case]:.1%}.\n\n"
            "| Policy | Hit rate | Of perfect | Requests, max/mean | Open, max/mean | "
            "Work, max/mean | TTFT p50, p95, ms | Busy |\n"
            "|---|---|---|---|---|---|---|---|"
        )
        for name in LABELS:
            one = median(arms[name])
            parts[-1] += (
                f"\n| {LABELS[name]} | {one.hit_rate:.1%} | {one.hit_rate / best:.1%} | "
                f"{one.requests:.2f} | {one.open:.2f} | {one.busy:.2f} | "
                f"{one.ttft_p50_ms:.0f}, {one.ttft_p95_ms:.0f} | {one.utilization:.0%} |"
            )
    if processes:
        rows = "\n".join(
            f"| {policy} | {processes[f'{policy}, processes']:.1%} | "
            f"{processes[f'{policy}, simulated']:.1%} |"
            for policy in ("kv", "round-robin")
        )
        parts.append(
            "### Over real processes\n\nA frontend and 4 simulated workers over HTTP and "
            f"ZeroMQ, {processes['requests']:.0f} requests of shorter and quicker chats; "
            "beside the same in virtual time.\n\n"
            f"| `--routing` | Hit rate, processes | Hit rate, simulated |\n|---|---|---|\n{rows}"
        )
    return "\n\n".join(parts)


def main() -> None:
    """Run all arms, write the page; fail if the bar for chats is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="workloads of each shape")
    parser.add_argument("--size", type=float, default=1.0, help="of the workloads")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    parser.add_argument("--no-processes", action="store_true", help="simulate only")
    parser.add_argument("--write", action="store_true", help="into docs/")
    given = parser.parse_args()
    found: dict[str, dict[str, list[Figures]]] = {}
    with ProcessPoolExecutor(given.jobs) as pool:
        futures = {
            (case, name, seed): pool.submit(simulated, case, name, seed, given.size)
            for case in CASES
            for name in LABELS
            for seed in range(1, given.seeds + 1)
        }
        limits = {
            case: [
                pool.submit(_bound_of, shape, seed, given.size)
                for seed in range(1, given.seeds + 1)
            ]
            for case, (shape, _) in CASES.items()
        }
        for (case, name, seed), future in futures.items():
            figure = future.result()
            found.setdefault(case, {}).setdefault(name, []).append(figure)
            sys.stderr.write(f"{case}, {name}, seed {seed}: {figure.hit_rate:.4f}\n")
        bounds = {
            case: statistics.median(one.result() for one in some)
            for case, some in limits.items()
        }
    processes = (
        {} if given.no_processes else over_processes(os.environ["TOKENWIRE_DEMO_MODEL"])
    )
    text = page(found, bounds, processes, given.seeds)
    sys.stdout.write(text + "\n")
    if given.write:
        write(DOCS / "routing.md", "routing", text)
        raw = {
            "cases": {
                case: {
                    name: [figure._asdict() for figure in runs]
                    for name, runs in arms.items()
                }
                for case, arms in found.items()
            },
            "bounds": bounds,
            "processes": processes,
        }
        (DOCS / "routing.json").write_text(json.dumps(raw, indent=1) + "\n")
    for name in ("ours", "ours4"):
        one, best = median(found["chat"][name]), median(found["chat"]["oracle"])
        if one.hit_rate < BAR_HITS * best.hit_rate or one.open > BAR_LOAD:
            sys.exit(f"bench: {name} misses the bar on chats")


def _bound_of(shape: str, seed: int, size: float) -> float:
    return bound(WORKLOADS[shape](seed, size))


if __name__ == "__main__":
    main()
