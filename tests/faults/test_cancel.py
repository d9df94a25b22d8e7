"""A client that leaves costs nothing: its request is aborted, whatever stage it is in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.stack import SimWorker, Stack, eventually, stack
from tokenwire.protocol.messages import Role

STEP_MS = 50
STEPS = 10
"""Of an engine between a client's leaving and the abort: 0.5 s by its own clock."""

PAIR = (Role.PREFILL, Role.DECODE)
FAST = ("--step-ms", str(STEP_MS))


class Aborts:
    """The aborts that reach an engine, each with the engine's count of steps."""

    def __init__(self, worker: SimWorker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at: list[int] = []
        engine = worker.engine
        abort = engine.abort

        def recorded(request_id: str) -> None:
            self.at.append(engine.load().num_steps or 0)
            abort(request_id)

        monkeypatch.setattr(engine, "abort", recorded)


def waiting(worker: SimWorker) -> bool:
    """Return whether a request waits, for a place or for KV."""
    return worker.engine.load().num_waiting == 1


def running(worker: SimWorker) -> bool:
    """Return whether a request is being computed."""
    return worker.engine.load().num_running == 1


STAGES: dict[str, tuple[tuple[str, ...], int, Callable[[SimWorker], bool]]] = {
    "queued": (("--max-num-seqs", "1"), 1, waiting),
    "prefilling": (
        ("--prefill-tokens-per-s", "200", "--max-num-batched-tokens", "16"),
        0,
        running,
    ),
    "handing over": (("--transfer-ms", "2000"), 1, waiting),
    "decoding": ((), 1, running),
}
"""By stage: the engine's options, the worker that has the request, and the sign of it."""


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.pitfall(17)
@pytest.mark.pitfall(30)
async def test_a_cancel_reaches_the_engine_within_half_a_second(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, stage: str, *, stream: bool
) -> None:
    """Counted in steps of the engine; then nothing runs, waits or is held."""
    options, position, sign = STAGES[stage]
    async with stack(tiny_model, PAIR, options=(*FAST, *options)) as served:
        worker = served.workers[position]
        other: asyncio.Task[Any] | None = None
        if stage == "queued":
            other = asyncio.create_task(_ask(served, stream=False))
            await eventually(lambda: running(worker), "another one runs")
        aborts = Aborts(worker, monkeypatch)
        client = asyncio.create_task(_ask(served, stream=stream))
        await eventually(lambda: sign(worker), stage)
        before = worker.engine.load().num_steps or 0
        client.cancel()
        await eventually(lambda: bool(aborts.at), "the abort")
        assert aborts.at[0] - before <= STEPS
        if other is not None:
            other.cancel()
        await served.idle()


async def _ask(served: Stack, *, stream: bool) -> Any:
    return await served.complete(
        prompt=[5] * 400, max_tokens=600, stream=stream, cache_salt=str(stream)
    )
