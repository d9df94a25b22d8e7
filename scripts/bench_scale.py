"""What routing costs at 10, 100 and 1,000 workers, and what N frontends x M workers send.

Measured in this process: time per decision, memory of the index, time per block told and
per Load. Computed from constants of the code: connections, messages and bytes a second.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import sys
import time
import tracemalloc
from array import array
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import cast

from routing_policies import SimLink
from table import write

from tokenwire.frontend.chooser import Chooser
from tokenwire.frontend.disaggregation import RemotePrefill
from tokenwire.frontend.errors import ApiError
from tokenwire.frontend.kv_index import KvIndex
from tokenwire.frontend.link import Link
from tokenwire.frontend.pool import MAX_WORKERS
from tokenwire.frontend.prefixes import Chain
from tokenwire.frontend.router import Needs, Router
from tokenwire.frontend.weights import Weights
from tokenwire.protocol.codec import decode_from_worker, encode
from tokenwire.protocol.limits import HEARTBEAT_INTERVAL_S
from tokenwire.protocol.messages import KVBlocks, Load, Role
from tokenwire.worker.kv_watch import PERIOD_S

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = 16
NUM_BLOCKS = 1_000_000
PROMPT_TOKENS = (512, 8_192)
SHARED_SHARE = 4
"""One block in so many is at several workers: system prompts."""

SOCKETS_PER_LINK = 3
"""A DEALER and its pair of monitor sockets."""

PREFILL_TOKENS_PER_S = 20_000
"""Of a busy worker; each block of them is told once as stored and once as removed."""


DECISION = """### A decision

| Workers | Blocks known | Index, MiB | Bytes a block | 512 tokens: hash, walk, all | 8,192 tokens: hash, walk, all |
|---|---|---|---|---|---|"""


def decisions(num_workers: int, num_blocks: int) -> dict[str, float]:
    """Return what routing takes with so many workers and blocks, in us and MiB."""
    rng = Random(1)
    gc.collect()
    tracemalloc.start()
    index = KvIndex(2 * num_blocks)
    links = [SimLink(n, index, num_blocks) for n in range(num_workers)]
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    told = [array("Q", [rng.getrandbits(64) for _ in range(64)]) for _ in range(500)]
    shared = [one.tolist() for one in told]
    prompts = {
        length: [
            array("I", rng.choices(range(32_000), k=length)).tobytes()
            for _ in range(20)
        ]
        for length in PROMPT_TOKENS
    }
    for link in links:  # what they have: their own, system prompts, some of the prompts
        blocks = link.blocks
        if blocks is None:
            raise AssertionError
        room = num_blocks // num_workers
        for _ in range(room // SHARED_SHARE // 64):
            blocks.stored(rng.choice(shared))
        while blocks.num_blocks < room:
            blocks.stored([rng.getrandbits(64) for _ in range(100)])
    num_known = len(index)
    index_mib = (tracemalloc.get_traced_memory()[0] - before) / 2**20
    tracemalloc.stop()
    for some in prompts.values():
        for packed in some:
            hashes = Chain().blocks(BLOCK, packed)
            for link in rng.sample(links, max(4, num_workers // 25)):
                if link.blocks is not None:
                    link.blocks.stored(hashes[: rng.randint(0, len(hashes))])
    for link in links:
        link.told_load(Load("1", num_requests=rng.randint(0, 9)), 0, 0)
    usable = cast("list[Link]", links)
    router = Router(
        usable=lambda role: usable if role is Role.AGGREGATED else [],
        check_adapter=lambda _: None,
        no_worker=lambda: ApiError(503, "no worker"),
        weights=Weights(),
        index=index,
        chooser=Chooser(),
        remote_prefill=RemotePrefill(),
    )
    result = {"blocks": float(num_known), "index_mib": index_mib}
    for length, some in prompts.items():

        def walk(some: list[bytes] = some) -> None:
            for packed in some:
                index.matches(Chain().blocks(BLOCK, packed))

        def choose(some: list[bytes] = some) -> None:
            for packed in some:
                router.route(packed, Chain(), frozenset(), Needs())

        def hashed(some: list[bytes] = some) -> None:
            for packed in some:
                Chain().blocks(BLOCK, packed)

        result[f"hash_us_{length}"] = timed(hashed) / len(some)
        result[f"walk_us_{length}"] = (
            timed(walk) / len(some) - result[f"hash_us_{length}"]
        )
        result[f"route_us_{length}"] = timed(choose) / len(some)
    return result


def messages() -> dict[str, float]:
    """Return what a frontend needs for one block told, and for one Load, in us."""
    rng = Random(2)
    index = KvIndex()
    link = SimLink(0, index, 1)
    batches = [
        encode(
            KVBlocks(
                stored=array("Q", [rng.getrandbits(64) for _ in range(64)]).tobytes()
            )
        )
        for _ in range(200)
    ]
    load = encode(
        Load("w-1", num_running=9, num_waiting=1, kv_usage=0.5, num_requests=9)
    )

    def take() -> None:
        for data in batches:
            message = decode_from_worker(data)
            if isinstance(message, KVBlocks):
                link.told_blocks(message)

    def beat() -> None:
        for _ in range(200):
            message = decode_from_worker(load)
            if isinstance(message, Load):
                link.told_load(message, 0, 0)

    return {
        "block_us": timed(take) / len(batches) / 64,
        "load_us": timed(beat) / 200,
        "load_bytes": float(len(load)),
    }


def timed(work: Callable[[], None], repeats: int = 5) -> float:
    """Return the median CPU time of *work*, in us."""
    times: list[float] = []
    for _ in range(repeats):
        begun = time.process_time()
        work()
        times.append(time.process_time() - begun)
    return statistics.median(times) * 1e6


def page() -> str:
    """Return the tables."""
    costs = messages()
    parts = [
        (
            f"Written by `make bench-scale`: {platform.machine()}, Python "
            f"{platform.python_version()}, one process, medians of 5."
        ),
        DECISION,
    ]
    for num_workers in (10, 100, 1_000):
        one = decisions(num_workers, NUM_BLOCKS)
        cells = [
            ", ".join(
                f"{one[f'{what}_us_{length}']:.0f}"
                for what in ("hash", "walk", "route")
            )
            for length in PROMPT_TOKENS
        ]
        size = one["index_mib"] * 2**20 / one["blocks"]
        parts[-1] += (
            f"\n| {num_workers:,} | {one['blocks']:,.0f} | {one['index_mib']:.0f} | {size:.0f} "
            f"| {cells[0]} | {cells[1]} |"
        )
        sys.stderr.write(f"{num_workers} workers: {one}\n")
    blocks_per_s = 2 * PREFILL_TOKENS_PER_S / BLOCK
    parts.append(
        f"### Messages\n\nOne block told costs a frontend {costs['block_us']:.2f} us, one Load "
        f"{costs['load_us']:.1f} us (decoded and taken, without the socket). A busy worker that computes "
        f"{PREFILL_TOKENS_PER_S:,} prompt tokens a second, none of them cached, tells "
        f"{blocks_per_s:,.0f} blocks a second to each frontend (stored, and later removed), in at most "
        f"{1 / PERIOD_S:.0f} messages; each link has {1 / HEARTBEAT_INTERVAL_S:.0f} Ping and "
        f"{1 / HEARTBEAT_INTERVAL_S:.0f} Load a second.\n\n"
        "| Frontends x workers | Links | Sockets a frontend | Heartbeats/s, all | Heartbeats, CPU of a frontend "
        "| KVBlocks/s, a frontend | Blocks/s, a frontend | Their CPU there | Bytes/s of a worker for it |\n"
        "|---|---|---|---|---|---|---|---|---|"
    )
    for frontends, workers in ((2, 10), (4, 100), (16, 100), (4, 1_000), (16, 1_000)):
        links = frontends * workers
        beats = 2 * links / HEARTBEAT_INTERVAL_S
        beat_cpu = workers / HEARTBEAT_INTERVAL_S * costs["load_us"] * 1e-6
        told = workers * blocks_per_s
        parts[-1] += (
            f"\n| {frontends} x {workers:,} | {links:,} | {SOCKETS_PER_LINK * workers:,} | {beats:,.0f} "
            f"| {beat_cpu:.1%} | {workers / PERIOD_S:,.0f} | {told:,.0f} "
            f"| {told * costs['block_us'] * 1e-6:.0%} | {frontends * blocks_per_s * 8:,.0f} |"
        )
    parts.append(f"A frontend uses {MAX_WORKERS:,} workers at most.")
    return "\n\n".join(parts)


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="into docs/scale.md")
    given = parser.parse_args()
    text = page()
    sys.stdout.write(text + "\n")
    if given.write:
        write(DOCS / "scale.md", "scale", text)


if __name__ == "__main__":
    main()
