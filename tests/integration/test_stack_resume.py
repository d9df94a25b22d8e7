"""What is resumed on the real pair of engines: it is found in the cache it was left in."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from support.real_stack import another_frontend, prompt_of
from support.up import Up

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="session"),
]

BLOCK_SIZE = 128  # vLLM's on a CPU
NUM_PROMPT = 1_900  # its last block is filled by the output
NUM_OUTPUT = 60
CUT = 50


async def streamed(url: str, **nvext: Any) -> list[dict[str, Any]]:
    """Return the chunks of a resumable stream."""
    body = {
        "prompt": prompt_of(NUM_PROMPT),
        "max_tokens": NUM_OUTPUT,
        "temperature": 0.8,
        "seed": 3,
        "ignore_eos": True,
        "stream": True,
        "nvext": {
            "resumable": True, "extra_fields": ["worker_id"],
            "checkpoint": {"every_tokens": CUT}, **nvext,
        },
    }  # fmt: skip
    async with (
        aiohttp.ClientSession() as http,
        http.post(url + "/v1/completions", json=body) as answer,
    ):
        assert answer.status == 200, await answer.text()
        lines = [line async for line in answer.content if line.startswith(b"data: {")]
    return [json.loads(line.removeprefix(b"data: ")) for line in lines]


def ids_of(chunks: list[dict[str, Any]]) -> list[int]:
    """Return all ids."""
    return [
        one
        for chunk in chunks
        for one in chunk["nvext"].get("completion_token_ids", [])
    ]


async def test_all_but_a_last_block_is_found(pair: Up) -> None:
    """By a frontend that never saw it: the decode worker has prompt and output."""
    calm = await streamed(pair.url)
    checkpoints = [c["nvext"]["checkpoint"] for c in calm if "checkpoint" in c["nvext"]]
    checkpoint = checkpoints[0]
    num_prior = checkpoint["state"]["output"]["len"]
    assert CUT <= num_prior < NUM_OUTPUT == len(ids_of(calm))

    async with another_frontend(pair, "--remote-prefill-min-tokens", "16") as (url, _):
        made = await streamed(url, resume_from={"checkpoint": checkpoint})

    assert ids_of(made) == ids_of(calm)[num_prior:]
    resume = made[0]["nvext"]["resume"]
    num_tokens = NUM_PROMPT + num_prior
    assert resume["cached_tokens"] == (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert resume["recomputed_tokens"] == num_tokens - resume["cached_tokens"]
    assert resume["recomputed_tokens"] <= BLOCK_SIZE
    assert "prefill_worker_id" in calm[-1]["nvext"]["worker_id"]
    assert made[-1]["nvext"]["worker_id"] == {"decode_worker_id": "decode-0"}


def events_of(data: bytes) -> list[bytes]:
    """Return the whole events of a stream, without pings."""
    return [one.replace(b": ping\n", b"") for one in data.split(b"\n\n")[:-1]]


def ids_in(events: list[bytes]) -> list[int]:
    """Return the ids of a resumable stream's events, joined."""
    bodies = [event.partition(b"data: ")[2] for event in events]
    chunks = [json.loads(body) for body in bodies if b'"completion_token_ids"' in body]
    return [id_ for one in chunks for id_ in one["nvext"]["completion_token_ids"]]


async def test_a_killed_frontend_is_told_on_by_another(pair: Up) -> None:
    """Byte for byte from where its client was, with the draws of an undisturbed run."""
    request: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "max_tokens": 60,
        "temperature": 0.8,
        "seed": 11,
        "stream": True,
        "nvext": {"resumable": {"on_disconnect": "continue"}},
    }
    path = "/v1/chat/completions"
    async with aiohttp.ClientSession() as http:
        async with http.post(pair.url + path, json=request) as answer:
            calm = events_of(await answer.read())
        async with another_frontend(pair) as (url, process):
            read = b""
            async with http.post(url + path, json=request) as answer:
                name = answer.headers["X-Generation-Id"]
                while read.count(b"\n\n") < 20:
                    read += await answer.content.readany()
                process.kill()
                await process.wait()
        seen = events_of(read)
        follow = f"{pair.url}/v1/generations/{name}/stream"
        params = {"starting_after": str(len(seen))}
        async with http.get(follow, params=params) as answer:
            assert answer.status == 200
            rest = events_of(await answer.read())
        async with http.get(follow) as answer:
            again = events_of(await answer.read())

    assert seen + rest == again
    assert ids_in(again) == ids_in(calm)
    assert len(ids_in(seen)) < len(ids_in(calm))
