"""Run a frontend under every kind of request for minutes; fail if its memory grows.

`make soak` (or ``python scripts/soak.py --minutes 10``). The first third warms up: caches
fill to their bounds. Then the resident memory may grow by the share given, no more.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
from bench_processes import MODEL_NAME, Stack, rss_mib, stack

NUM_CLIENTS = 16
LOOK_S = 5.0

_random = random.Random(5)


def a_request(number: int) -> tuple[str, dict[str, Any], bool]:
    """Return path, body and whether its client leaves early; no two are alike."""
    tag = f"request {number} {_random.random()}"
    stream = number % 2 == 0
    fields: dict[str, Any] = {"max_tokens": 50, "stream": stream, "user": tag}
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
            return "/v1/completions", {**fields, "prompt": tag, "max_tokens": 500}, True


async def client(session: aiohttp.ClientSession, url: str, until: float) -> int:
    """Send requests until then; return how many."""
    number = 0
    while time.monotonic() < until:
        number += 1
        path, body, leaves = a_request(_random.randrange(10**9))
        async with session.post(url + path, json=body) as answer:
            text = ""
            if leaves:
                answer.close()
            else:
                text = await answer.text()
            if answer.status >= 500:
                sys.exit(f"soak: {path} answered {answer.status}: {text:.300}")
    return number


async def soak(running: Stack, minutes: float) -> list[float]:
    """Return the resident memory in MiB, looked at every few seconds."""
    until = time.monotonic() + minutes * 60
    sizes: list[float] = []

    async def look() -> None:
        while time.monotonic() < until:
            sizes.append(rss_mib(running.frontend_pid))
            await asyncio.sleep(LOOK_S)

    url = f"http://127.0.0.1:{running.port}"
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
        tasks.create_task(look())
        clients = [
            tasks.create_task(client(session, url, until)) for _ in range(NUM_CLIENTS)
        ]
    print(f"{sum(task.result() for task in clients)} requests")
    return sizes


def main() -> int:
    """Return 0 if memory is flat."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--model", default=os.environ.get("TOKENWIRE_DEMO_MODEL"))
    parser.add_argument("--growth", type=float, default=0.03, help="share (0.03)")
    given = parser.parse_args()
    if given.model is None:
        parser.error("give --model or TOKENWIRE_DEMO_MODEL")
    cores = sorted(os.sched_getaffinity(0))
    with (
        tempfile.TemporaryDirectory() as folder,
        stack(given.model, "1", cores, Path(folder)) as running,
    ):
        sizes = asyncio.run(soak(running, given.minutes))
    warm = sizes[len(sizes) // 3 :]
    quarter = max(1, len(warm) // 4)
    before, after = (max(part) for part in (warm[:quarter], warm[-quarter:]))
    print(
        f"{MODEL_NAME}: {before:.1f} MiB after warming up, {after:.1f} MiB at the end"
    )
    return 0 if after <= before * (1 + given.growth) else 1


if __name__ == "__main__":
    sys.exit(main())
