"""Run a frontend under every kind of request for minutes; fail if its memory grows.

`make soak` (or ``python scripts/soak.py --minutes 10``). The first third warms up: caches
fill to their bounds; the index of what the worker has cached must grow no more after it.
Then the resident memory may grow by the share given, no more.

With ``--streams 5000`` so many streams are open beside all that, at two tokens a second
each; the resident memory must then stay under the limit given, too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from bench_load import Counter, connections
from bench_processes import MODEL_NAME, Stack, rss_mib, stack
from prometheus_client.parser import text_string_to_metric_families

from tokenwire.protocol.process import raise_file_limit

NUM_CLIENTS = 16
TOKENS, SLOW_TOKENS = 50, 4  # of most requests; beside streams, whose steps are slow
LOOK_S = 5.0
LOOKS_PER_LINE = 6
STREAM_STEP_MS = "500"  # of many streams: their events are not what is looked at
OPEN_EVERY_S = 0.002  # one stream: a worker that stands back must keep its heartbeat
LEAST_TOKENS = 60  # of a stream
BLOCKS_PER_SEQ = 16  # of 16 tokens: more than a stream has, and full in the first third
STEADY = 0.95  # of the most that the index ever has, which it must have when warm

_random = random.Random(5)


def a_request(number: int, max_tokens: int) -> tuple[str, dict[str, Any], bool]:
    """Return path, body and whether its client leaves early; no two are alike."""
    tag = f"request {number} {_random.random()}"
    stream = number % 2 == 0
    fields: dict[str, Any] = {"max_tokens": max_tokens, "stream": stream, "user": tag}
    chat = {**fields, "messages": [{"role": "user", "content": tag}]}
    match number % 8:
        case 0 | 1:
            return "/v1/completions", {**fields, "prompt": tag}, False
        case 2 | 3:
            return "/v1/chat/completions", {**chat, "return_token_ids": True}, False
        case 4:
            return "/v1/completions", {**fields, "prompt": tag * 3000}, False
        case 5:
            return "/v1/completions", {**fields, "prompt": tag, tag: 1}, False
        case 6:
            return f"/v1/{tag}", chat, False
        case _:
            fields["max_tokens"] = 10 * max_tokens
            return "/v1/completions", {**fields, "prompt": tag}, True


async def client(
    session: aiohttp.ClientSession, url: str, until: float, max_tokens: int
) -> int:
    """Send requests until then; return how many."""
    number = 0
    while time.monotonic() < until:
        number += 1
        path, body, leaves = a_request(_random.randrange(10**9), max_tokens)
        async with session.post(url + path, json=body) as answer:
            text = ""
            if leaves:
                answer.close()
            else:
                text = await answer.text()
            if answer.status >= 500:
                sys.exit(f"soak: {path} answered {answer.status}: {text:.300}")
    return number


@contextlib.asynccontextmanager
async def open_streams(running: Stack, number: int) -> AsyncGenerator[None]:
    """Hold so many streams open: each client asks again when its stream has ended."""
    num_posts = 0

    async def client(one: Counter) -> None:
        nonlocal num_posts
        while True:
            max_tokens = _random.randint(LEAST_TOKENS, 3 * LEAST_TOKENS)
            request = {"prompt": f"stream {num_posts}", "max_tokens": max_tokens}
            body = json.dumps({"model": MODEL_NAME, "stream": True, **request}).encode()
            await one.post(body, "/v1/completions")
            num_posts += 1

    async with connections(running.port, number) as made:
        clients: list[asyncio.Task[None]] = []
        for one in made:
            clients.append(asyncio.create_task(client(one)))
            await asyncio.sleep(OPEN_EVERY_S)
        yield
        num_open = sum(not task.done() for task in clients)
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    num_events = sum(one.num_events for one in made)
    print(f"{num_open} streams open, {num_posts} ended before, {num_events} events")
    if num_open < number or num_events < LEAST_TOKENS * num_posts:
        sys.exit("soak: streams have ended early")


class Look(NamedTuple):
    """What a frontend held at one time."""

    mib: float  # resident
    num_blocks: float  # in the index of what its worker has cached


async def soak(running: Stack, minutes: float, num_streams: int) -> list[Look]:
    """Return what the frontend held, looked at every few seconds."""
    async with open_streams(running, num_streams):
        max_tokens = SLOW_TOKENS if num_streams else TOKENS
        return await all_kinds(running, minutes, max_tokens)


async def all_kinds(running: Stack, minutes: float, max_tokens: int) -> list[Look]:
    """Send every kind of request; return what the frontend held, every few seconds."""
    until = time.monotonic() + minutes * 60
    looks: list[Look] = []
    url = f"http://127.0.0.1:{running.port}"

    async def look() -> None:
        while time.monotonic() < until:
            async with session.get(f"{url}/metrics") as answer:
                num_blocks = index_blocks(await answer.text())
            looks.append(Look(rss_mib(running.frontend_pid), num_blocks))
            if len(looks) % LOOKS_PER_LINE == 1:
                print(f"{looks[-1].mib:.1f} MiB, {num_blocks:.0f} blocks", flush=True)
            await asyncio.sleep(LOOK_S)

    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
        tasks.create_task(look())
        clients = [
            tasks.create_task(client(session, url, until, max_tokens))
            for _ in range(NUM_CLIENTS)
        ]
    print(f"{sum(task.result() for task in clients)} requests")
    return looks


def index_blocks(page: str) -> float:
    """Return how many blocks the index of a frontend with this metrics page has."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "tokenwire_kv_index_blocks"
    )


def main() -> int:
    """Return 0 if memory is flat."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--model", default=os.environ.get("TOKENWIRE_DEMO_MODEL"))
    parser.add_argument("--growth", type=float, default=0.03, help="share (0.03)")
    parser.add_argument("--streams", type=int, default=0, help="open beside (0)")
    parser.add_argument("--limit-mib", type=float, default=1_536.0, help="(1536)")
    given = parser.parse_args()
    if given.model is None:
        parser.error("give --model or TOKENWIRE_DEMO_MODEL")
    raise_file_limit()
    cores = sorted(os.sched_getaffinity(0))
    step_ms = STREAM_STEP_MS if given.streams else "1"
    seqs = max(1_024, given.streams + given.streams // 8)
    with (
        tempfile.TemporaryDirectory() as folder,
        stack(
            *(given.model, step_ms, cores, Path(folder)),
            max_num_seqs=seqs,
            blocks_per_seq=BLOCKS_PER_SEQ,
        ) as running,
    ):
        looks = asyncio.run(soak(running, given.minutes, given.streams))
    warm = looks[len(looks) // 3 :]
    quarter = max(1, len(warm) // 4)
    before, after = (max(part).mib for part in (warm[:quarter], warm[-quarter:]))
    print(
        f"{MODEL_NAME}: {before:.1f} MiB after warming up, {after:.1f} MiB at the end"
    )
    if warm[0].num_blocks < STEADY * max(look.num_blocks for look in looks):
        sys.exit("soak: the index still grew after a third of the time: give it more")
    is_small = max(looks).mib <= given.limit_mib
    return 0 if is_small and after <= before * (1 + given.growth) else 1


if __name__ == "__main__":
    sys.exit(main())
