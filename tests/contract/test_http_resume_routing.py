"""What is resumed goes to the worker that has it cached, through any frontend."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.resumable import PATHS, Stream, cut, laws, resumed
from support.stack import SimWorker, Stack, eventually, frontend
from tokenwire.frontend import resume
from tokenwire.frontend.affinity import ranked
from tokenwire.protocol.messages import Role

BLOCK = 16
PROMPT = list(range(3, 203))
AGGREGATED = (Role.AGGREGATED,) * 2
PAIRS = (Role.PREFILL, Role.DECODE, Role.DECODE)
BODY: dict[str, Any] = {
    "prompt": PROMPT,
    "max_tokens": 120,
    "seed": 7,
    "frequency_penalty": 0.5,
    "ignore_eos": True,
    "nvext": {"resumable": True, "extra_fields": ["worker_id"]},
}
CUT = 90
TOPOLOGIES = pytest.mark.parametrize(
    "roles", [AGGREGATED, PAIRS], ids=["aggregated", "pairs"]
)


@dataclass
class Two:
    """Two frontends of the same workers, and what the last of these has generated."""

    one: Stack
    two: Stack
    workers: list[SimWorker]
    calm: Stream

    @property
    def checkpoint(self) -> dict[str, Any]:
        """Of the output, cut."""
        return cut(self.calm.last["checkpoint"], CUT)

    @property
    def holder(self) -> SimWorker:
        """Who has it."""
        return self.workers[-1]


@contextlib.asynccontextmanager
async def two_frontends(
    model: Path, roles: tuple[Role, ...], step_ms: int = 0
) -> AsyncGenerator[Two]:
    """Have the last worker generate: a session of its own prefers it."""
    options = ("--step-ms", str(step_ms), "--output-draws")
    workers = [SimWorker(model, role, f"w{n}", options) for n, role in enumerate(roles)]
    arguments = ("--remote-prefill-min-tokens", str(BLOCK))
    async with (
        frontend(model, arguments) as one,
        frontend(model, arguments) as two,
    ):
        try:
            for worker in workers:
                await worker.start()
            await one.know(workers)
            await two.know(workers)
            calm = await Stream(PATHS["completions"], BODY, session(one)).run(one)
            laws(calm)
            assert worker_of(calm) == workers[-1].name
            yield Two(one, two, workers, calm)
            await one.idle()
        finally:
            for worker in workers:
                await worker.stop()


def session(served: Stack, place: int = -1) -> dict[str, str]:
    """Return the header of a session that prefers a worker of outputs, the last one."""
    links = [*served.pool.usable(Role.AGGREGATED), *served.pool.usable(Role.DECODE)]
    names = map(str, itertools.count())
    name = next(name for name in names if ranked(name, links)[0] is links[place])
    return {"X-Session-ID": name}


def worker_of(made: Stream) -> str:
    """Return who brought the output."""
    return str(made.last["worker_id"]["decode_worker_id"])


async def goes_on(
    served: Stack, of: Stream, headers: dict[str, str] | None = None, **resume_from: Any
) -> Stream:
    """Return the rest of an output, which is what it was."""
    body = resumed(of, **resume_from).body
    made = await Stream(of.path, body, headers or {}).run(served)
    laws(made, CUT)
    assert made.token_ids == of.token_ids[CUT:]
    told = made.first["resume"]
    assert told["cached_tokens"] + told["recomputed_tokens"] == len(PROMPT) + CUT
    return made


@TOPOLOGIES
async def test_a_checkpoint_says_where_it_is(
    tiny_model: Path, roles: tuple[Role, ...]
) -> None:
    """All but a last part of a block is there, also for a frontend that never saw it."""
    async with two_frontends(tiny_model, roles) as served:
        last = served.holder
        assert served.checkpoint["holder"] == {
            "worker_id": last.name,
            "incarnation": f"{last.name}-1",
        }
        for through in (served.two, served.one):
            made = await goes_on(through, served.calm, checkpoint=served.checkpoint)
            assert worker_of(made) == last.name
            assert "prefill_worker_id" not in made.last["worker_id"]
            assert made.first["resume"]["recomputed_tokens"] <= BLOCK


@TOPOLOGIES
async def test_a_frontend_knows_what_it_had_computed(
    tiny_model: Path, roles: tuple[Role, ...]
) -> None:
    """Ids alone say nothing of a worker: another frontend has it computed anew."""
    async with two_frontends(tiny_model, roles) as served:
        ids = served.calm.token_ids[:CUT]
        same = await goes_on(served.one, served.calm, output_token_ids=ids)
        away = session(served.two, 0)
        other = await goes_on(served.two, served.calm, away, output_token_ids=ids)

    assert worker_of(other) != served.holder.name
    assert worker_of(same) == served.holder.name
    assert same.first["resume"]["recomputed_tokens"] <= BLOCK
    assert other.first["resume"]["recomputed_tokens"] > BLOCK


@TOPOLOGIES
async def test_a_client_that_left_comes_back_to_its_worker(
    tiny_model: Path, roles: tuple[Role, ...]
) -> None:
    """With the ids that it has read; what it does not know was computed, too."""
    async with two_frontends(tiny_model, roles, step_ms=2) as served:
        one = served.one
        body = {**BODY, "prompt": PROMPT[::-1], "max_tokens": 1_500}
        left = Stream(PATHS["completions"], body, session(one))
        reading = left.start(one)
        await left.has(CUT)
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
        await one.idle()
        ids = left.token_ids[:CUT]
        body = {**body, "max_tokens": CUT + 1}
        again = Stream(PATHS["completions"], body)
        made = await resumed(again, output_token_ids=ids).run(one)

        assert worker_of(made) == served.holder.name
        assert made.first["resume"]["recomputed_tokens"] <= BLOCK


async def _dies(worker: SimWorker) -> None:
    await worker.die()


async def _drains(worker: SimWorker) -> None:
    worker.service.drain()


@TOPOLOGIES
@pytest.mark.parametrize("goes", [_dies, _drains])
async def test_without_it_another_worker_goes_on(
    tiny_model: Path, roles: tuple[Role, ...], goes: Callable[[SimWorker], Any]
) -> None:
    """Computing all of it, and the same comes."""
    async with two_frontends(tiny_model, roles) as served:
        await goes(served.holder)
        role = served.holder.role
        await eventually(lambda: len(served.two.pool.usable(role)) == 1, "one is left")
        made = await goes_on(served.two, served.calm, checkpoint=served.checkpoint)
        served.one.workers = served.workers[:-1]

    assert worker_of(made) == served.workers[-2].name
    assert made.first["resume"]["recomputed_tokens"] > BLOCK


async def test_an_old_checkpoint_s_worker_is_not_looked_for(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others' KV has taken the place of it since, probably."""
    async with two_frontends(tiny_model, PAIRS) as served:
        monkeypatch.setattr(resume, "HELD_S", -1)
        away = session(served.two, 0)
        made = await goes_on(
            served.two, served.calm, away, checkpoint=served.checkpoint
        )

    assert worker_of(made) != served.holder.name


async def test_a_checkpoint_without_a_holder_is_good(tiny_model: Path) -> None:
    """As of an output that no worker was asked for."""
    async with two_frontends(tiny_model, AGGREGATED) as served:
        unknown = {"worker_id": "x", "incarnation": "y"}
        without = {k: v for k, v in served.checkpoint.items() if k != "holder"}
        for more in ({}, {"holder": None}, {"holder": unknown}):
            checkpoint = {**without, **more}
            await goes_on(served.two, served.calm, checkpoint=checkpoint)
