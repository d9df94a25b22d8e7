"""The admin plane where workers leave, or their links break under an action."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from support.admin import adapter, admin_post, weights
from support.held import held_updates
from support.stack import MODEL_NAME, Reply, Stack, eventually, stack
from tokenwire.frontend.link import Link
from tokenwire.protocol.messages import Role

TWO = (Role.AGGREGATED, Role.AGGREGATED)
SLOW = ("--step-ms", "10")
ASKS: dict[str, Any] = {
    "model": MODEL_NAME,
    "prompt": [100, 101, 102],
    "max_tokens": 60,
}


@contextlib.asynccontextmanager
async def busy(model: Path) -> AsyncGenerator[tuple[Stack, list[asyncio.Task[Reply]]]]:
    """Run two workers, each with a request."""
    async with stack(model, TWO, SLOW) as running:
        asking = [asyncio.create_task(running.complete(**ASKS)) for _ in TWO]
        await eventually(
            lambda: all(worker.service.num_requests for worker in running.workers),
            "both run",
        )
        yield running, asking
        await running.idle()


async def cut(running: Stack, link: Link, body: Any) -> Reply:
    """Lose a link while its worker updates its weights; return the answer."""
    held = [
        held_updates(worker.engine)
        for worker in running.workers
        if worker.name == link.worker_id
    ]
    acting = asyncio.create_task(admin_post(running, "/update_weights", body))
    await eventually(lambda: link.status.busy == "update_weights", "it is under way")
    link.disconnected()
    answer = await acting
    for one in held:
        one.release()
    return answer


def stands(link: Link) -> bool:
    """Whether a worker is paused, and does nothing else."""
    return link.is_ready and link.status.paused and not link.status.busy


async def test_what_the_plane_has_paused_it_resumes_with_the_next_update(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The link was lost under the update: the pause is not taken for the user's."""
    async with stack(tiny_model, TWO, SLOW) as running:
        link = list(running.pool.links)[1]
        body = {"weight_dir": str(weights(tmp_path))}
        failed = await cut(running, link, body)
        assert failed.status == 500
        link.connected()
        await eventually(lambda: stands(link), "it is back, paused")
        assert (await admin_post(running, "/update_weights", body)).status == 200
        assert not any(one.status.paused for one in running.pool.links)
        assert (await running.complete(**ASKS)).status == 200


async def test_nothing_is_well_while_a_worker_stands_that_cannot_be_told(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Neither an update nor a resume is, and both name it."""
    async with stack(tiny_model, TWO, SLOW) as running:
        link = list(running.pool.links)[1]
        body = {"weight_dir": str(weights(tmp_path))}
        await cut(running, link, body)
        for path, given in (("/update_weights", body), ("/resume", None)):
            failed = await admin_post(running, path, given)
            assert failed.status == 500
            assert f"{link.worker_id}: it is not connected" in failed.error["message"]
        link.connected()
        await eventually(lambda: stands(link), "it is back, paused")
        assert (await admin_post(running, "/resume")).status == 200
        assert (await running.complete(**ASKS)).status == 200


async def test_a_users_pause_stays_the_users(tiny_model: Path, tmp_path: Path) -> None:
    """Also where the plane has left one before."""
    async with stack(tiny_model, TWO, SLOW) as running:
        link = list(running.pool.links)[1]
        body = {"weight_dir": str(weights(tmp_path))}
        await cut(running, link, body)
        link.connected()
        await eventually(lambda: stands(link), "it is back, paused")
        path = f"/v1/rl/workers/{link.worker_id}/pause"
        assert (await admin_post(running, path)).status == 200
        assert (await admin_post(running, "/update_weights", body)).status == 200
        assert link.status.paused
        assert (await admin_post(running, "/resume")).status == 200


async def test_a_worker_that_leaves_is_resumed_too(tiny_model: Path) -> None:
    """Its requests would stand for ever; nobody else waits for it."""
    async with busy(tiny_model) as (running, asking):
        assert (await admin_post(running, "/pause?mode=keep")).status == 200
        endpoints = [link.endpoint for link in running.pool.links]
        running.pool.set_endpoints(endpoints[:1])
        assert (await admin_post(running, "/resume")).status == 200
        for answer in await asyncio.gather(*asking):
            assert answer.json["usage"]["completion_tokens"] == 60


async def test_a_worker_that_drains_is_resumed_too(tiny_model: Path) -> None:
    """And keeps no others from work meanwhile."""
    async with busy(tiny_model) as (running, asking):
        first, second = running.pool.links
        assert (await admin_post(running, "/pause?mode=keep")).status == 200
        await admin_post(running, f"/v1/rl/workers/{first.worker_id}/resume")
        assert running.pool.is_paused
        running.workers[1].service.drain()
        await eventually(lambda: not running.pool.is_paused, "it does not count")
        assert second.status.paused
        assert (await admin_post(running, "/resume")).status == 200
        for answer in await asyncio.gather(*asking):
            assert answer.json["usage"]["completion_tokens"] == 60


async def test_an_adapter_sent_again_goes_to_those_that_lack_it(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Who has it serves it on, as the same version; 400 when all have it."""
    async with stack(tiny_model, TWO) as running:
        first, second = running.pool.links
        body = {"lora_name": "a", "lora_path": str(adapter(tmp_path))}
        one = f"/v1/rl/workers/{first.worker_id}/v1/load_lora_adapter"
        assert (await admin_post(running, one, body)).status == 200
        assert (await admin_post(running, "/v1/load_lora_adapter", body)).status == 200
        assert first.status.adapters == second.status.adapters
        assert all(running.pool.weights.has(link, "a") for link in (first, second))
        assert (await admin_post(running, "/v1/load_lora_adapter", body)).status == 400


async def test_an_adapter_is_only_away_while_its_worker_is(
    tiny_model: Path, tmp_path: Path
) -> None:
    """503 asks to come again; 404 would say that there is none."""
    async with stack(tiny_model, TWO[:1]) as running:
        (link,) = running.pool.links
        body = {"lora_name": "a", "lora_path": str(adapter(tmp_path))}
        await admin_post(running, "/v1/load_lora_adapter", body)
        asked = {**ASKS, "model": "a"}
        link.disconnected()
        assert (await running.complete(**asked)).status == 503
        assert (await running.complete(**{**asked, "model": "b"})).status == 404
        link.connected()
        await eventually(lambda: link.usable, "it is back")
        assert (await running.complete(**asked)).status == 200
