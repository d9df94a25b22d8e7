"""A worker is lost under its outputs: the client sees a pause and nothing else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from support.held import Held, brake
from support.stack import SimWorker, Stack, eventually, stack
from tokenwire.protocol.messages import Role

TOPOLOGIES = {
    "aggregated": (Role.AGGREGATED, Role.AGGREGATED),
    "pair": (Role.PREFILL, Role.DECODE, Role.DECODE),
}
SLOW = ("--step-ms", "5")
EVERYTHING = ["completion_token_ids", "worker_id", "engine_data"]
NUM_TOKENS = 60


@pytest_asyncio.fixture(params=TOPOLOGIES)
async def served(
    request: pytest.FixtureRequest, tiny_model: Path
) -> AsyncIterator[Stack]:
    """Two workers for the output, and one for prompts or none."""
    async with stack(tiny_model, TOPOLOGIES[request.param], options=SLOW) as running:
        yield running


class Stream:
    """One streamed chat, read as it comes."""

    def __init__(self) -> None:
        self.chunks: list[dict[str, Any]] = []
        self.done = False

    async def run(self, served: Stack, **fields: Any) -> None:
        """Read to the end."""
        body = {
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "logprobs": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "nvext": {"extra_fields": EVERYTHING},
            **fields,
        }
        url = served.url + "/v1/chat/completions"
        async with served.client.post(url, json=body) as answer:
            assert answer.status == 200
            async for line in answer.content:
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    self.done = True
                elif data:
                    self.chunks.append(json.loads(data))

    @property
    def content(self) -> tuple[list[int], str, list[float]]:
        """Ids, text and logprobs, joined."""
        ids: list[int] = []
        text = ""
        logprobs: list[float] = []
        for chunk in self.chunks:
            ids += chunk.get("nvext", {}).get("completion_token_ids", [])
            for choice in chunk.get("choices", []):
                text += choice["delta"].get("content", "")
                entries: list[dict[str, float]] = []
                if choice["logprobs"]:
                    entries = choice["logprobs"]["content"]
                logprobs += [entry["logprob"] for entry in entries]
        return ids, text, logprobs

    @property
    def end(self) -> dict[str, Any]:
        """The nvext of the chunk with the finish reason."""
        [chunk] = [
            c for c in self.chunks if c["choices"] and c["choices"][0]["finish_reason"]
        ]
        return dict(chunk["nvext"])

    @property
    def usage(self) -> dict[str, Any]:
        """The usage chunk's."""
        return dict(self.chunks[-1]["usage"])


def busy(served: Stack) -> SimWorker:
    """Return the worker that decodes now."""
    [worker] = [
        one
        for one in served.workers
        if one.engine.load().num_running and one.role is not Role.PREFILL
    ]
    return worker


def decoders(served: Stack) -> list[SimWorker]:
    """Return the workers that make output."""
    return [one for one in served.workers if one.role is not Role.PREFILL]


async def lose(victim: SimWorker, brakes: list[Held]) -> None:
    """Let a worker die while its engine stands still, and the others go on."""
    await victim.die()
    for held in brakes:
        held.release()


async def broken(served: Stack, **fields: Any) -> tuple[Stream, SimWorker]:
    """Run a stream whose worker is lost when it has brought some tokens."""
    stream = Stream()
    brakes = [
        brake(one.engine, lambda: len(stream.chunks) > 8) for one in decoders(served)
    ]
    task = asyncio.create_task(stream.run(served, **fields))
    await eventually(lambda: any(held.num_waiting for held in brakes), "tokens")
    victim = busy(served)
    await lose(victim, brakes)
    await task
    return stream, victim


@pytest.mark.pitfall(9)
@pytest.mark.pitfall(10)
async def test_a_lost_worker_is_a_pause(served: Stack) -> None:
    """Ids, text, logprobs and usage are those of an undisturbed run; it is named who served."""
    calm = Stream()
    await calm.run(served, cache_salt="calm")
    stream, victim = await broken(served, cache_salt="broken")

    assert stream.done
    assert stream.content == calm.content
    assert len(stream.content[0]) == NUM_TOKENS
    assert stream.end["engine_data"] == calm.end["engine_data"]
    worker = stream.end["worker_id"]["decode_worker_id"]
    assert worker != victim.name
    assert stream.usage == calm.usage  # its own blocks do not count as cached


async def test_what_was_cached_is_still_known(served: Stack) -> None:
    """Of the prompt, by whoever computed it first, although that worker is gone."""
    message = {"messages": [{"role": "user", "content": "hello " * 20}]}
    warm = Stream(), Stream()
    await asyncio.gather(*(one.run(served, **message) for one in warm))  # one at each
    calm = Stream()
    await calm.run(served, **message)
    assert calm.usage["prompt_tokens_details"]["cached_tokens"] > 0
    stream, _ = await broken(served, **message)

    assert stream.content == calm.content
    assert stream.usage == calm.usage


async def test_a_grammar_or_a_veto_is_an_error_event(served: Stack) -> None:
    """What may not be moved ends clearly, and only that."""
    stream, _ = await broken(
        served, nvext={"extra_fields": EVERYTHING, "migratable": False}
    )

    assert stream.done
    assert "migratable" in stream.chunks[-1]["error"]["message"]


async def test_the_metric_says_so(served: Stack) -> None:
    """Moved outputs are counted, with whether they are exact."""
    await broken(served)
    text = (await served.get("/metrics")).text

    assert 'tokenwire_migrations_total{exactness="exact",kind="engine"} 1.0' in text
    assert "tokenwire_migration_pause_seconds_count 1.0" in text


@pytest.mark.pitfall(24)
async def test_many_streams_lose_nothing(served: Stack) -> None:
    """Thirty at once, half of them on the worker that is lost."""
    calm = Stream()
    await calm.run(served)
    streams = [Stream() for _ in range(30)]
    workers = decoders(served)
    brakes = [brake(one.engine) for one in workers]
    tasks = [asyncio.create_task(stream.run(served)) for stream in streams]
    await eventually(
        lambda: sum(one.service.num_requests for one in workers) == 30, "all are there"
    )
    for held in brakes:
        held.release()
    brakes = [
        brake(one.engine, lambda: all(len(s.chunks) > 8 for s in streams))
        for one in workers
    ]
    await eventually(lambda: all(held.num_waiting for held in brakes), "tokens")
    assert [one.service.num_requests for one in workers] == [15, 15]  # an even load
    await lose(workers[-1], brakes)
    await asyncio.gather(*tasks)

    assert all(stream.content == calm.content for stream in streams)
    assert all(stream.done for stream in streams)


@pytest.mark.pitfall(25)
async def test_an_engine_that_freezes_before_a_first_token(tiny_model: Path) -> None:
    """It beats, and all its requests wait; its count of steps gives it away."""
    arguments = ("--stall-timeout-s", "0.2", "--worker-wait-s", "0.5")
    options = ("--step-ms", "1", "--fault", "freeze@1")
    async with stack(tiny_model, options=options, arguments=arguments) as frozen:
        reply = await frozen.complete(prompt="hello")

    assert reply.status == 502
    assert "no token for" in reply.error["message"]
