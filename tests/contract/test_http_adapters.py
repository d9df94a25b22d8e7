"""Adapters that leave, or are replaced, while requests run on them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.admin import adapter, admin_post
from support.stack import MODEL_NAME, Reply, Stack, eventually, stack
from tokenwire.protocol.messages import Role

TWO = (Role.AGGREGATED,) * 2
PAIR = (Role.PREFILL, Role.DECODE)
SLOW = ("--step-ms", "10")
NUM_TOKENS = 200
ASKS: dict[str, Any] = {
    "model": "a",
    "prompt": list(range(100, 140)),
    "max_tokens": NUM_TOKENS,
    "nvext": {"extra_fields": ["completion_token_ids", "worker_id"]},
}


async def load(running: Stack, folder: Path, content: bytes = b"one") -> None:
    """Load the adapter ``a``, in place."""
    body = {"lora_name": "a", "lora_path": str(adapter(folder, content))}
    assert (await admin_post(running, "/load_lora_adapter", body)).status == 200


async def begun(running: Stack, **body: Any) -> asyncio.Task[Reply]:
    """Return a request that has brought some ids; no other runs."""
    workers = [one for one in running.workers if one.role is not Role.PREFILL]
    before = {one: one.engine.load().num_steps or 0 for one in workers}
    asking = asyncio.create_task(running.complete(**{**ASKS, **body}))
    await eventually(
        lambda: any(
            (one.engine.load().num_steps or 0) > steps + 6
            for one, steps in before.items()
        ),
        "it runs",
    )
    return asking


@pytest.mark.parametrize("roles", [TWO, PAIR])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_adapter_that_is_unloaded_ends_its_requests(
    tiny_model: Path, tmp_path: Path, roles: Sequence[Role], stream: bool
) -> None:
    """By an error that says that it is gone; requests of the model go on."""
    async with stack(tiny_model, roles, SLOW) as running:
        await load(running, tmp_path)
        asking = await begun(running, stream=stream)
        plain = asyncio.create_task(running.complete(**{**ASKS, "model": MODEL_NAME}))
        body = {"lora_name": "a"}
        done = await admin_post(running, "/unload_lora_adapter", body)
        assert done.json == {"status": "ok"}
        ended = await asking
        if stream:
            *some, failed, last = ended.events
            assert some
            assert last.body is None
            assert failed.body is not None
            error = failed.body["error"]
        else:
            assert ended.status == 404
            error = ended.error
        assert error["code"] == "model_not_found"
        assert "'a' does not exist" in error["message"]
        assert (await plain).json["usage"]["completion_tokens"] == NUM_TOKENS
        await running.idle()


async def test_an_adapter_that_leaves_one_worker_goes_on_at_another(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Exactly, as after any worker's failure."""
    async with stack(tiny_model, TWO, SLOW) as running:
        await load(running, tmp_path)
        whole = (await running.complete(**ASKS)).json["nvext"]["completion_token_ids"]
        asking = await begun(running)
        (busy,) = [one.name for one in running.workers if one.service.num_requests]
        path = f"/v1/rl/workers/{busy}/unload_lora_adapter"
        assert (await admin_post(running, path, {"lora_name": "a"})).status == 200
        nvext = (await asking).json["nvext"]
        assert nvext["completion_token_ids"] == whole
        assert nvext["worker_id"]["decode_worker_id"] != busy


async def test_an_adapter_in_the_place_of_another_interrupts_nobody(
    tiny_model: Path, tmp_path: Path
) -> None:
    """What runs goes on with it; what waits begins with it, and not in between."""
    one = (*SLOW, "--max-num-seqs", "1")
    async with stack(tiny_model, (Role.AGGREGATED,), one) as running:
        await load(running, tmp_path / "1")
        asking = await begun(running, nvext={"migratable": False})
        short = {**ASKS, "max_tokens": 8}
        waiting = asyncio.create_task(running.complete(**short))
        service = running.workers[0].service
        await eventually(lambda: service.num_requests == 2, "it waits")
        await load(running, tmp_path / "2", b"two")
        assert (await asking).json["usage"]["completion_tokens"] == NUM_TOKENS
        waited = (await waiting).json["nvext"]["completion_token_ids"]
        again = (await running.complete(**short)).json["nvext"]["completion_token_ids"]
        assert waited == again
