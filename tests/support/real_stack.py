"""What the tests on the real pair of engines share; the pair itself is a fixture."""

from __future__ import annotations

import asyncio
import re
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

from .awake import within
from .up import Up, until
from .vllm_engine import MODEL

__all__ = ["LOAD_S", "NAME", "PAIR", "another_frontend", "gauge_pages", "prompt_of"]

NAME = "smollm2"
PAIR = {"prefill": 1, "decode": 1}
LOAD_S = 300.0
"""Two engines on two cores: 60-90 s, on a busy machine several times that."""


def prompt_of(length: int) -> list[int]:
    """Return a prompt of *length* ids, unlike those of other lengths."""
    return [1_000 + (length * 7_919 + n * 104_729) % 40_000 for n in range(length)]


def gauge_pages(running: Up, worker: str) -> list[str]:
    """Return where a worker shows its gauges, once for each time it was started."""
    return re.findall(rf"{worker} +(http://\S+/metrics)", running.log.read_text())


@asynccontextmanager
async def another_frontend(
    pair: Up, *arguments: str
) -> AsyncGenerator[tuple[str, Process]]:
    """A frontend with *arguments* at the same workers, ready; yields its URL, too."""
    workers = set(re.findall(r"up at (tcp://\S+?),", pair.log.read_text()))
    given = [word for worker in workers for word in ("--worker", worker)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tokenwire.frontend", "--model", MODEL),
        *("--served-model-name", NAME, "--port", "0", *given, *arguments),
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        url = ""
        async with within(60):
            while not url:
                line = (await process.stderr.readline()).decode()
                assert line, "the frontend ended"
                url = line.partition("listening on ")[2].strip()
        draining = asyncio.create_task(process.stderr.read())
        # It listens before it knows of a worker.
        other = replace(pair, port=int(url.rpartition(":")[2]))
        await until(lambda: other.ready(**PAIR), LOAD_S, "ready")
        yield url, process
        draining.cancel()
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
