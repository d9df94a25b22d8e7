"""The real engine through tokenwire beside ``vllm serve``, and KV-aware beside round robin.

``bench_engine.py [--repeats 4] [--output docs/benchmarks.md]``. The client is vLLM's own
(``vllm bench serve``, in this process), the engine arguments are the same for all, and the
arms take turns within each repeat, so that what else the machine does hits all of them.

1. ``vllm serve``, an aggregated tokenwire, and one prefill and one decode worker of
   tokenwire, all loaded at once; and an aggregated one whose engine has the two processes
   that vLLM gives each engine on a CPU, where tokenwire gives it one: output tokens/s, time
   to first token, inter-token latency, and CPU per output token of all of a server's
   processes, at 1, 8 and 32 streams.
   ``vllm serve`` takes two turns in each repeat: how far it is from itself is the noise.
   A ratio is the median of each repeat's own.
2. Two aggregated workers behind two frontends, one with ``--routing kv``, one with
   ``--routing round-robin``: prompts that share long prefixes.

Needs the real engine; TOKENWIRE_DEMO_MODEL is the model's folder.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import re
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from bench_capture import Server, running
from peers_proc import cpu_s, family
from ports import free_port
from table import write as write_table

NAME = "bench"
STREAMS = {1: 3, 8: 16, 32: 64}
"""Requests of a round, by how many are under way: some ten seconds each."""

INPUT_TOKENS, OUTPUT_TOKENS = 128, 48

PREFIXES, PREFIX_TOKENS, SUFFIX_TOKENS, SHORT_OUTPUT_TOKENS = 6, 1_024, 64, 16
PREFIX_PROMPTS, PREFIX_STREAMS = 48, 8
"""Eight prompts to a prefix. Each worker has room for all prefixes of a round."""

AS_VLLM = ["--distributed-executor-backend", "mp"]
"""vLLM's own on a CPU, and it cannot be told another: the frontends alone are compared."""

READY_S = 300.0

ENGINE_ARGUMENTS = [
    *("--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "64"),
    *("--max-num-batched-tokens", "2048", "--enforce-eager"),
    *("--kv-cache-memory-bytes", str(1 << 30)),
]

MEASURED = {
    "output_throughput": "output tokens/s",
    "median_ttft_ms": "TTFT, median, ms",
    "median_itl_ms": "inter-token, median, ms",
    "p99_itl_ms": "inter-token, p99, ms",
    "cpu_ms": "CPU per output token, ms",
}
FOUND = "tokenwire_prefix_tokens_found_total"


@dataclass
class Arm:
    """One server, and what was measured of it, by load and figure."""

    name: str
    url: str
    pid: int  # of the server's first process
    values: dict[tuple[str, str], list[float]] = field(
        default_factory=dict[tuple[str, str], list[float]]
    )

    def add(self, load: str, figure: str, value: float) -> None:
        """Keep a value."""
        print(f"bench: {self.name}, {load}: {figure} {value:.2f}", flush=True)
        self.values.setdefault((load, figure), []).append(value)

    def median(self, load: str, figure: str) -> float:
        """Return the median of what was measured."""
        return statistics.median(self.values[load, figure])

    def ratios(self, base: Arm, load: str, figure: str) -> list[float]:
        """Return how it compares with *base*, repeat by repeat, in ascending order."""
        pairs = zip(self.values[load, figure], base.values[load, figure], strict=True)
        return sorted(one / other for one, other in pairs)


class Client:
    """vLLM's own benchmark, loaded once."""

    def __init__(self, model: str) -> None:
        serve = import_module("vllm.benchmarks.serve")
        self._main: Callable[[Any], Any] = serve.main_async
        self._parser = import_module(
            "vllm.utils.argparse_utils"
        ).FlexibleArgumentParser()
        serve.add_cli_args(self._parser)
        self._model = model

    async def run(self, url: str, streams: int, *workload: str) -> dict[str, float]:
        """Return the results of one round; all of its requests must succeed."""
        arguments = self._parser.parse_args(
            [
                *("--backend", "openai", "--base-url", url, "--model", NAME),
                *("--tokenizer", self._model, "--ignore-eos", "--disable-tqdm"),
                *("--max-concurrency", str(streams), "--temperature", "0", *workload),
            ]
        )
        with contextlib.redirect_stdout(sys.stderr):
            result: dict[str, float] = await self._main(arguments)
        wanted = arguments.num_prompts
        if result["completed"] != wanted:
            sys.exit(f"{url}: {result['completed']} of {wanted} requests succeeded")
        return result


def vllm_serve(model: str, port: int) -> list[str]:
    """Return the command of vLLM's own server."""
    return [
        # As ``vllm serve``, which asks for the version of a package named vllm.
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", model, "--served-model-name", NAME),
        *("--host", "127.0.0.1", "--port", str(port), "--disable-log-stats"),
        *ENGINE_ARGUMENTS,
    ]


def tokenwire(
    model: str, port: int, *workers: str, engine: Sequence[str] = ()
) -> list[str]:
    """Return the command of a whole tokenwire; *engine*: more arguments of vLLM."""
    return [
        *(sys.executable, "-m", "tokenwire.deploy.up", *workers),
        *("--model", model, "--served-model-name", NAME, "--port", str(port)),
        *("--", *ENGINE_ARGUMENTS, *engine),
    ]


@contextlib.asynccontextmanager
async def frontend(
    model: str, workers: set[str], routing: str
) -> AsyncGenerator[Server]:
    """Run one more frontend at *workers*; yield it."""
    given = [word for worker in workers for word in ("--worker", worker)]
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tokenwire.frontend", "--model", model),
        *("--served-model-name", NAME, "--port", str(port), *given),
        *("--routing", routing),
    )
    url = f"http://127.0.0.1:{port}"
    try:
        await have(url, len(workers))
        yield Server(url, process.pid)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def have(url: str, num_workers: int) -> None:
    """Wait until a frontend has so many workers.

    Raises:
        TimeoutError: It has not within ``READY_S``.
    """
    async with asyncio.timeout(READY_S):
        while True:
            if await asyncio.to_thread(num_ready, url) == num_workers:
                return
            await asyncio.sleep(0.5)


def num_ready(url: str) -> int:
    """Return how many workers a frontend can use."""
    try:
        with urllib.request.urlopen(url + "/ready", timeout=5) as reply:
            return sum(json.loads(reply.read())["workers"].values())
    except OSError:  # not yet there, or 503
        return 0


def found_tokens(url: str) -> float:
    """Return how many prompt tokens a frontend's workers have found cached."""
    with urllib.request.urlopen(url + "/metrics", timeout=5) as reply:
        page = reply.read().decode()
    return sum(
        float(one) for one in re.findall(rf"^{FOUND} (\S+)$", page, re.MULTILINE)
    )


async def beside_vllm(client: Client, model: str, repeats: int) -> list[Arm]:
    """Measure the three servers in turns."""
    async with contextlib.AsyncExitStack() as servers:
        folder = Path(servers.enter_context(tempfile.TemporaryDirectory()))
        arms: list[Arm] = []
        ports = [free_port() for _ in range(4)]
        one = ("--aggregated", "1")
        commands = {
            "vllm serve": vllm_serve(model, ports[0]),
            "aggregated, vLLM's processes": tokenwire(
                model, ports[1], *one, engine=AS_VLLM
            ),
            "aggregated": tokenwire(model, ports[2], *one),
            "1 prefill + 1 decode": tokenwire(model, ports[3]),
        }
        for port, (name, command) in zip(ports, commands.items(), strict=True):
            server = await servers.enter_async_context(
                running(command, port, folder / f"{port}.log")
            )
            arms.append(Arm(name, *server))
        for arm, num_workers in zip(arms[1:], (1, 1, 2), strict=True):
            await have(arm.url, num_workers)
        arms.append(replace(arms[0], name="itself", values={}))
        for repeat in range(-1, repeats):  # the first does not count
            order = arms[repeat % len(arms) :] + arms[: repeat % len(arms)]
            for streams, num_prompts in STREAMS.items():
                for arm in order:
                    pids = family(arm.pid)
                    before_s = cpu_s(pids)
                    result = await client.run(
                        arm.url,
                        streams,
                        *("--dataset-name", "random", "--seed", str(repeat + 1_000)),
                        *("--random-input-len", str(INPUT_TOKENS)),
                        *("--random-output-len", str(OUTPUT_TOKENS)),
                        *("--num-prompts", str(num_prompts)),
                    )
                    num_tokens = num_prompts * OUTPUT_TOKENS
                    result["cpu_ms"] = 1_000 * (cpu_s(pids) - before_s) / num_tokens
                    for figure in MEASURED if repeat >= 0 else ():
                        arm.add(load_of(streams), figure, result[figure])
        return arms


async def by_routing(client: Client, model: str, repeats: int) -> list[Arm]:
    """Measure two frontends at the same two workers in turns."""
    async with contextlib.AsyncExitStack() as servers:
        folder = Path(servers.enter_context(tempfile.TemporaryDirectory()))
        port, log = free_port(), folder / "up.log"
        command = tokenwire(model, port, "--aggregated", "2")
        url, _ = await servers.enter_async_context(running(command, port, log))
        await have(url, 2)
        workers = set(re.findall(r"up at (tcp://\S+?),", log.read_text()))
        arms = [
            Arm(
                name,
                *await servers.enter_async_context(frontend(model, workers, name)),
            )
            for name in ("kv", "round-robin")
        ]
        for repeat in range(-1, repeats):
            order = arms if repeat % 2 else arms[::-1]
            for arm in order:
                before = found_tokens(arm.url)
                # Prefixes that no other round has had.
                seed = 2 * (repeat + 2_000) + arms.index(arm)
                result = await client.run(
                    arm.url,
                    PREFIX_STREAMS,
                    *("--dataset-name", "prefix_repetition", "--seed", str(seed)),
                    *("--prefix-repetition-prefix-len", str(PREFIX_TOKENS)),
                    *("--prefix-repetition-suffix-len", str(SUFFIX_TOKENS)),
                    *("--prefix-repetition-num-prefixes", str(PREFIXES)),
                    *("--prefix-repetition-output-len", str(SHORT_OUTPUT_TOKENS)),
                    *("--num-prompts", str(PREFIX_PROMPTS)),
                )
                if repeat < 0:
                    continue
                load = load_of(PREFIX_STREAMS)
                for figure in ("output_throughput", "median_ttft_ms"):
                    arm.add(load, figure, result[figure])
                share = (found_tokens(arm.url) - before) / result["total_input_tokens"]
                arm.add(load, "cached", 100 * share)
        return arms


def tables(servers: list[Arm], routings: list[Arm], repeats: int) -> str:
    """Return both tables, with ratios."""
    first, *ours = servers
    lines = [
        (
            f"Written by `make bench-engine`: {len(os.sched_getaffinity(0))} cores, "
            f"{platform.machine()}, Python {platform.python_version()}, vLLM "
            f"{import_module('vllm').__version__}, bfloat16, {INPUT_TOKENS} tokens in, "
            f"{OUTPUT_TOKENS} out; medians of {repeats} repeats, arms in turns; a ratio is the "
            "median of each repeat's own, with the lowest and the highest. `vllm serve` takes two "
            'turns in each: the column "itself" is the noise.'
        ),
        "",
        f"| load | figure | {first.name} |"
        + "".join(f" {arm.name} | ratio |" for arm in ours),
        "|---|---|---:|" + "---:|---:|" * len(ours),
    ]
    for load, figure in first.values:
        base = first.median(load, figure)
        cells = "".join(
            f" {arm.median(load, figure):.1f} | {_spread(arm.ratios(first, load, figure))} |"
            for arm in ours
        )
        lines.append(f"| {load} | {MEASURED[figure]} | {base:.1f} |{cells}")
    kv, turns = routings
    lines += [
        "",
        (
            f"Two aggregated workers, {PREFIX_PROMPTS} prompts of {PREFIXES} prefixes of "
            f"{PREFIX_TOKENS} tokens, {SUFFIX_TOKENS} more each, {SHORT_OUTPUT_TOKENS} out:"
        ),
        "",
        "| figure | `--routing kv` | `--routing round-robin` | ratio |",
        "|---|---:|---:|---:|",
    ]
    names = MEASURED | {"cached": "prompt tokens found cached, %"}
    for load, figure in kv.values:
        one, other = kv.median(load, figure), turns.median(load, figure)
        ratio = f"{one / other:.2f}" if other else "-"
        lines.append(f"| {names[figure]} | {one:.1f} | {other:.1f} | {ratio} |")
    return "\n".join(lines)


def load_of(streams: int) -> str:
    """Return what a load is called."""
    return "1 stream" if streams == 1 else f"{streams} streams"


def _spread(ratios: list[float]) -> str:
    """Return a median with its lowest and highest, of values in ascending order."""
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"


async def measure(model: str, repeats: int) -> str:
    """Measure all; return the tables."""
    client = Client(model)
    servers = await beside_vllm(client, model, repeats)
    return tables(servers, await by_routing(client, model, repeats), repeats)


def main() -> None:
    """Measure, print, and write the tables into a document if one is given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    model = os.environ["TOKENWIRE_DEMO_MODEL"]
    text = asyncio.run(measure(model, given.repeats))
    print(text)
    if given.output is not None:
        write_table(given.output, "bench-engine", text)


if __name__ == "__main__":
    main()
