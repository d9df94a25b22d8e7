"""One update that is sent to worker after worker, by their own addresses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path

import pytest

from support.admin import adapter, admin_post, weights
from support.stack import Stack, eventually, frontend, stack
from tokenwire.protocol.messages import Role


@contextlib.asynccontextmanager
async def two_frontends(model: Path) -> AsyncGenerator[tuple[Stack, Stack]]:
    """Run two aggregated workers and two frontends; both have seen an update."""
    async with stack(model, (Role.AGGREGATED,) * 2) as first, frontend(model) as second:
        await second.know(first.workers)
        await admin_post(first, "/update_weights", {"weight_dir": str(model)})
        links = [*first.pool.links, *second.pool.links]
        await eventually(
            lambda: (
                min(link.status.update for link in links) > 0
                and not any(link.status.busy for link in links)
            ),
            "both know",
        )
        yield first, second


def serve(plane: Stack, version: str | None = None, lora: str = "") -> bool:
    """Return whether all workers serve a version, or the newest of an adapter."""
    return all(
        link.usable
        and version in {None, link.weight_version}
        and plane.pool.weights.has(link, lora)
        for link in plane.pool.links
    )


@pytest.mark.parametrize("num_frontends", [1, 2])
@pytest.mark.parametrize("at_once", [True, False])
async def test_an_update_of_single_workers_is_one_update(
    tiny_model: Path, tmp_path: Path, num_frontends: int, at_once: bool
) -> None:
    """At once or in turn, through one frontend or two: all workers serve, and agree."""
    async with two_frontends(tiny_model) as planes:
        through = planes * 2 if num_frontends == 2 else planes[:1] * 2
        links = list(planes[0].pool.links)
        for step in ("step_1", "step_2"):
            body = {"weight_dir": str(weights(tmp_path / step, step.encode()))}
            calls = [
                admin_post(
                    plane, f"/v1/rl/workers/{link.worker_id}/update_weights", body
                )
                for plane, link in zip(through, links, strict=False)
            ]
            if at_once:
                replies = await asyncio.gather(*calls)
            else:
                replies = [await call for call in calls]
            assert [reply.status for reply in replies] == [200, 200]
            for plane in planes:
                await eventually(partial(serve, plane, step), "all have it, and serve")
            assert len({link.status.update for link in links}) == 1


async def test_an_adapter_of_single_workers_is_one_version(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Loaded in place, step after step, worker after worker: all of them serve it."""
    async with two_frontends(tiny_model) as planes:
        links = list(planes[0].pool.links)
        for step in ("1", "2"):
            path = str(adapter(tmp_path / step, step.encode()))
            body = {"lora_name": "a", "lora_path": path}
            for plane, link in zip(planes, links, strict=True):
                one = f"/v1/rl/workers/{link.worker_id}/load_lora_adapter"
                assert (await admin_post(plane, one, body)).status == 200
            for plane in planes:
                await eventually(partial(serve, plane, lora="a"), "all serve it")
