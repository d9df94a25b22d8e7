"""Where token ids stand: exact key sets of each endpoint, placement and selector."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from support.stack import Reply, Stack, stack
from tokenwire.frontend.nvext import Placement
from tokenwire.protocol.messages import Role

PROMPT = [5, 6, 7]
ASKED: dict[str, dict[str, Any]] = {
    "neither": {},
    "selector": {"nvext": {"extra_fields": ["completion_token_ids"]}},
    "alias": {"return_token_ids": True},
}
ROOT = {"id", "object", "created", "model", "choices"}
CHOICE = {
    "chat": {"index", "message", "logprobs", "finish_reason"},
    "completions": {"index", "text", "logprobs", "finish_reason"},
}
CHUNK_CHOICE = {
    "chat": {"index", "delta", "logprobs", "finish_reason"},
    "completions": CHOICE["completions"],
}


@pytest_asyncio.fixture(params=list(Placement))
async def placed(
    request: pytest.FixtureRequest, tiny_model: Path
) -> AsyncIterator[tuple[Placement, Stack]]:
    """A pair of workers behind a frontend with each placement."""
    arguments = ("--token-ids-placement", request.param.value)
    roles = (Role.PREFILL, Role.DECODE)
    async with stack(tiny_model, roles, arguments=arguments) as running:
        yield request.param, running
        await running.idle()


async def ask(served: Stack, endpoint: str, **fields: Any) -> Reply:
    """Ask either endpoint for three tokens behind the same prompt ids."""
    if endpoint == "completions":
        return await served.complete(prompt=PROMPT, max_tokens=3, **fields)
    nvext = {**fields.pop("nvext", {}), "token_data": PROMPT}
    return await served.chat(max_tokens=3, nvext=nvext, **fields)


def native(placement: Placement, asked: str) -> Placement | None:
    """Return in whose places the ids of a request also stand."""
    if asked == "neither" or placement is Placement.NVEXT:
        return None
    if placement is Placement.AUTO:
        return Placement.VLLM if asked == "alias" else None
    return placement


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_a_whole_response_has_these_keys(
    placed: tuple[Placement, Stack], endpoint: str, asked: str
) -> None:
    """Ids under nvext, in the native places where they belong, and not one key more."""
    placement, served = placed
    where = native(placement, asked)
    body = (await ask(served, endpoint, **ASKED[asked])).json
    [choice] = body["choices"]

    root = ROOT | {"usage"}
    keys = set(CHOICE[endpoint])
    if asked != "neither":
        root.add("nvext")
        assert set(body["nvext"]) == {"completion_token_ids", "prompt_token_ids"}
    if where is not None:
        keys.add("token_ids")
        assert choice["token_ids"] == body["nvext"]["completion_token_ids"]
        at_root = where is Placement.VLLM and endpoint == "chat"
        (root if at_root else keys).add("prompt_token_ids")
        holder = body if at_root else choice
        assert holder["prompt_token_ids"] == body["nvext"]["prompt_token_ids"] == PROMPT
    assert set(body) == root
    assert set(choice) == keys


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_each_chunk_has_these_keys(
    placed: tuple[Placement, Stack], endpoint: str, asked: str
) -> None:
    """Native prompt ids come on the first chunk, native ids on the chunk they belong to."""
    placement, served = placed
    where = native(placement, asked)
    reply = await ask(served, endpoint, stream=True, **ASKED[asked])
    *events, done = reply.events
    assert done.body is None
    at_root = where is Placement.VLLM and endpoint == "chat"

    ids: list[int] = []
    for number, event in enumerate(events):
        assert event.body is not None
        [choice] = event.body["choices"]
        root, keys = set(ROOT), set(CHUNK_CHOICE[endpoint])
        if number == 0 and where is not None:
            (root if at_root else keys).add("prompt_token_ids")
            holder = event.body if at_root else choice
            assert holder["prompt_token_ids"] == PROMPT
        new = event.nvext.get("completion_token_ids", [])
        if new:
            root.add("nvext")
            ids += new
            if where is not None:
                keys.add("token_ids")
                assert choice["token_ids"] == new
        final = choice["finish_reason"] is not None
        assert final is (event is events[-1])
        if final and asked != "neither":
            root.add("nvext")
            assert event.nvext["prompt_token_ids"] == PROMPT
        assert set(event.body) == root
        assert set(choice) == keys
        if endpoint == "completions" and asked != "neither":
            assert new, "as in vLLM, no chunk comes without ids"
    assert len(ids) == (0 if asked == "neither" else 3)


async def test_native_ids_need_a_selector_of_ids(
    placed: tuple[Placement, Stack],
) -> None:
    """Another selector puts nothing into the native places."""
    _, served = placed
    fields = {"nvext": {"extra_fields": ["worker_id"]}}
    body = (await ask(served, "completions", **fields)).json

    assert set(body["choices"][0]) == CHOICE["completions"]
    assert set(body["nvext"]) == {"worker_id"}
