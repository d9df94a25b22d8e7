"""Several frontends and several workers: all serve exactly, and the loss of one is seen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from support.stack import SimWorker, Stack, eventually, frontend
from tokenwire.frontend import legs
from tokenwire.frontend.pool import Pool
from tokenwire.protocol.codec import decode_from_worker
from tokenwire.protocol.messages import Batch, Finished, JsonObject, OrphanedKV, Role

PAIR = (Role.PREFILL, Role.DECODE)
PROMPT = [5] * 40


@asynccontextmanager
async def running(
    model: Path, num_frontends: int, roles: Sequence[Role], *options: str
) -> AsyncGenerator[tuple[list[Stack], list[SimWorker]]]:
    """Run frontends that all know all workers."""
    async with AsyncExitStack() as stack:
        workers: list[SimWorker] = []
        for number, role in enumerate(roles):
            worker = SimWorker(model, role, f"{role.value}-{number}", options)
            stack.push_async_callback(worker.stop)
            await worker.start()
            workers.append(worker)
        frontends = [
            await stack.enter_async_context(frontend(model))
            for _ in range(num_frontends)
        ]
        for one in frontends:
            await one.know(workers)
        yield frontends, workers


async def ids(of: Stack, max_tokens: int = 20) -> list[int]:
    """Return the ids of a completion."""
    reply = await of.complete(
        prompt=PROMPT, max_tokens=max_tokens, temperature=0, return_token_ids=True
    )
    assert reply.status == 200, reply.text
    return list(reply.json["nvext"]["completion_token_ids"])


async def idle(worker: SimWorker) -> None:
    """Return when a worker has nothing left."""
    await eventually(lambda: worker.idle, "idle")


def num_orphans(worker: SimWorker) -> int:
    """Return how many hand-overs a worker remembers."""
    return len(worker.service._orphans)  # pyright: ignore[reportPrivateUsage]


def num_frontends(worker: SimWorker) -> int:
    """Return how many frontends a worker knows."""
    return len(worker.service._frontends)  # pyright: ignore[reportPrivateUsage]


def cut(pool: Pool) -> None:
    """Take a frontend off the network, as SIGKILL does: nothing more is said."""
    for link in pool.links:
        link._channel.close()  # pyright: ignore[reportPrivateUsage]
        link.tick = lambda: None  # type: ignore[method-assign]


@pytest.mark.parametrize("roles", [(Role.AGGREGATED,), PAIR], ids=["alone", "pairs"])
@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("number", [1, 2, 3])
async def test_any_number_of_frontends_and_workers(
    tiny_model: Path, number: int, num_workers: int, roles: tuple[Role, ...]
) -> None:
    """Every frontend serves exactly, all workers get work, and nothing is left over."""
    async with running(tiny_model, number, roles * num_workers, "--step-ms", "0") as (
        frontends,
        workers,
    ):
        first = await ids(frontends[0])
        asked = [ids(one) for one in frontends for _ in range(6)]
        assert all(one == first for one in await asyncio.gather(*asked))
        for worker in workers:
            assert num_frontends(worker) == number
            await idle(worker)
            assert num_orphans(worker) == 0


def aborts(worker: SimWorker, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that each abort of the worker's engine is added to."""
    aborted: list[str] = []
    abort = worker.engine.abort

    def recorded(request_id: str) -> None:
        aborted.append(request_id)
        abort(request_id)

    monkeypatch.setattr(worker.engine, "abort", recorded)
    return aborted


@pytest.mark.parametrize("roles", [(Role.AGGREGATED,) * 2, PAIR], ids=["alone", "pair"])
async def test_what_a_lost_frontend_had_open_is_aborted(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, roles: tuple[Role, ...]
) -> None:
    """While the other frontend's requests go on exactly."""
    async with running(tiny_model, 2, roles, "--step-ms", "10") as (
        (lost, stays),
        workers,
    ):
        aborted = [aborts(worker, monkeypatch) for worker in workers]
        undisturbed = await ids(stays, 60)
        asked = [asyncio.create_task(ids(lost, 2_000)) for _ in range(6)]
        await eventually(lambda: workers[-1].service.num_requests >= 3)
        other = asyncio.create_task(ids(stays, 60))
        making = [one for one in workers if one.role is not Role.PREFILL]
        await eventually(lambda: sum(one.service.num_requests for one in making) == 7)
        cut(lost.pool)
        await eventually(lambda: sum(map(len, aborted)) == 6, "all six are aborted")
        assert await other == undisturbed
        assert sum(map(len, aborted)) == 6
        for worker in workers:
            await idle(worker)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


def dies_between_the_legs(monkeypatch: pytest.MonkeyPatch, pool: Pool) -> asyncio.Event:
    """Have a frontend die when its prefill leg has ended and no decode leg is there."""
    died = asyncio.Event()
    real = legs.PrefillLeg.finished

    def finished(leg: legs.PrefillLeg, end: Finished) -> None:
        if died.is_set():
            real(leg, end)
            return
        died.set()
        cut(pool)

    monkeypatch.setattr(legs.PrefillLeg, "finished", finished)
    return died


async def test_another_frontend_releases_what_a_lost_one_left(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV that no decode leg will read does not wait for the end of its lease."""
    async with running(tiny_model, 2, PAIR, "--step-ms", "0") as (
        (lost, stays),
        (prefill, decode),
    ):
        died = dies_between_the_legs(monkeypatch, lost.pool)
        asked = asyncio.create_task(ids(lost))
        await died.wait()
        assert prefill.engine.load().kv_usage
        await eventually(lambda: prefill.idle, "freed, long before the lease is over")
        assert num_orphans(prefill) == 0
        assert not decode.service.num_requests
        assert prefill.engine._scheduler.num_kv_expired == 0  # pyright: ignore[reportPrivateUsage]
        assert len(await ids(stays)) == 20
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)


async def test_a_frontend_that_comes_later_releases_it_too(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as the lease is not over, when the KV is free anyway."""
    async with running(tiny_model, 1, PAIR, "--step-ms", "0") as (
        (lost,),
        (prefill, decode),
    ):
        died = dies_between_the_legs(monkeypatch, lost.pool)
        asked = asyncio.create_task(ids(lost))
        await died.wait()
        await eventually(lambda: num_frontends(prefill) == 0)
        assert num_orphans(prefill) == 1
        async with frontend(tiny_model) as late:
            await late.know([prefill, decode])
            await eventually(lambda: prefill.idle)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)


async def test_a_frontend_that_missed_an_end_releases_it_itself(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its link broke while the end was on its way: the request goes on, the KV is freed."""
    async with running(tiny_model, 1, PAIR, "--step-ms", "0") as (
        (alone,),
        (prefill, _),
    ):
        link = next(one for one in alone.pool.links if one.worker_id == prefill.name)
        received = link.received
        num_missed = 0

        def miss_once(data: bytes) -> None:
            nonlocal num_missed
            message = decode_from_worker(data)
            if not num_missed and isinstance(message, Batch) and message.finished:
                num_missed += 1
                link._reset("the test")  # pyright: ignore[reportPrivateUsage]
                return
            received(data)

        monkeypatch.setattr(link, "received", miss_once)
        assert len(await ids(alone)) == 20
        assert num_missed == 1
        await eventually(lambda: prefill.idle)
        assert num_orphans(prefill) == 0


async def test_kv_that_is_about_to_be_read_is_not_released(tiny_model: Path) -> None:
    """The frontend had passed it on, but its word was lost with the connection."""
    options = ("--step-ms", "0", "--transfer-ms", "1000")
    async with running(tiny_model, 1, PAIR, *options) as (
        (alone,),
        (prefill, decode),
    ):
        released: list[str] = []

        def release(request_id: str, handover: JsonObject) -> None:
            del handover
            released.append(request_id)

        decode.engine.release_kv = release  # type: ignore[method-assign]
        link = next(one for one in alone.pool.links if one.worker_id == prefill.name)
        settle = link._settle  # pyright: ignore[reportPrivateUsage]
        link._settle = lambda request_id: None  # type: ignore[method-assign]
        asked = asyncio.create_task(ids(alone))
        await eventually(lambda: decode.service.num_requests == 1)
        assert num_orphans(prefill) == 1
        link._settle = settle  # type: ignore[method-assign]
        link._reset("the test")  # pyright: ignore[reportPrivateUsage]
        await eventually(lambda: num_orphans(prefill) == 0, "settled")
        assert prefill.engine.load().kv_usage, "the read is over: too late to tell"
        assert len(await asked) == 20
        assert released == []


async def test_without_a_decode_worker_an_orphan_is_offered_again(
    tiny_model: Path,
) -> None:
    """A taker that cannot help does not settle it."""
    async with running(tiny_model, 1, PAIR, "--step-ms", "0") as (
        (alone,),
        (prefill, decode),
    ):
        adopt = alone.pool._adopt  # pyright: ignore[reportPrivateUsage]
        orphan = OrphanedKV("1", {"remote_engine_id": "gone"})
        assert adopt(orphan)
        alone.pool.set_endpoints([prefill.link.endpoint])
        assert not adopt(orphan)
        assert not decode.service.num_requests
