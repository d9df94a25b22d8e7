"""Sessions on simulated workers: turns find their prefix cache, and nobody is pinned."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.stack import Reply, SimWorker, Stack, eventually, frontend, stack
from tokenwire.frontend.routing import SEQUENCE_TOKENS, SESSION_TOKENS
from tokenwire.protocol.messages import Role

BLOCK = 16
NUM_TURNS = 6
AGGREGATED = (Role.AGGREGATED,) * 4
PAIRS = (Role.PREFILL,) * 3 + (Role.DECODE,) * 3
MOST = SESSION_TOKENS // SEQUENCE_TOKENS
"""Requests at a session's worker with which it is left for another one."""

GENERATE = "/inference/v1/generate"


async def ask(
    served: Stack, prompt: list[int], session: str | None = None, **fields: Any
) -> Reply:
    """Complete *prompt*, as part of a session."""
    body: dict[str, Any] = {
        "prompt": prompt, "max_tokens": 8, "temperature": 0,
        "nvext": {"extra_fields": ["completion_token_ids", "worker_id"]}, **fields,
    }  # fmt: skip
    headers = {} if session is None else {"X-Session-ID": session}
    reply = await served.post("/v1/completions", body, headers)
    assert reply.status == 200, reply.text
    return reply


def workers_of(reply: Reply) -> dict[str, str]:
    """Return who served it."""
    return dict(reply.json["nvext"]["worker_id"])


async def worker_of(served: Stack, session: str) -> str:
    """Return who serves the outputs of a session now."""
    reply = await ask(served, [5] * 20, session)
    return workers_of(reply)["decode_worker_id"]


def nothing_waits(served: Stack) -> bool:
    """Return whether no prompt waits at prefill workers, as far as is known."""
    prefillers = served.pool.usable(Role.PREFILL)
    return not any(link.num_queued_tokens for link in prefillers)


def has_workers(served: Stack, number: int) -> bool:
    """Return whether a frontend has so many workers to choose from."""
    return len(served.pool.usable(Role.AGGREGATED)) == number


@contextlib.asynccontextmanager
async def background(served: Stack, session: str | None = None) -> AsyncGenerator[None]:
    """Keep a request running that is part of a session, or of none."""
    before = sum(worker.service.num_requests for worker in served.workers)
    body = {"prompt": [7], "max_tokens": 2_000, "ignore_eos": True, "stream": True}
    headers = {} if session is None else {"X-Session-ID": session}
    url = served.url + "/v1/completions"
    async with served.client.post(url, json=body, headers=headers) as answer:
        await answer.content.readany()

        def num_running() -> int:
            return sum(worker.service.num_requests for worker in served.workers)

        assert num_running() == before + 1
        yield


@dataclass
class Talk:
    """A conversation's turns but the first."""

    num_cached: int = 0  # prompt tokens that its workers had
    num_known: int = 0  # that they had if all turns went to the same
    decoders: set[str] = field(default_factory=set[str])


async def talk(served: Stack, session: str | None) -> Talk:
    """Have a conversation.

    A request that stays is begun before each turn: the least busy worker is another one.
    """
    history = list(range(20, 84))
    result = Talk()
    async with contextlib.AsyncExitStack() as others:
        for turn in range(NUM_TURNS):
            await eventually(partial(nothing_waits, served), "no tokens wait")
            reply = await ask(served, history, session)
            if turn:
                usage = reply.json["usage"]
                result.num_cached += usage["prompt_tokens_details"]["cached_tokens"]
                # A prefill worker has not seen the last answer, nor the new question.
                result.num_known += (len(history) - 40 - 8) // BLOCK * BLOCK
            result.decoders.add(workers_of(reply)["decode_worker_id"])
            ids = reply.json["nvext"]["completion_token_ids"]
            history = [*history, *ids, *range(100 + turn, 140 + turn)]
            await others.enter_async_context(background(served))
    return result


@pytest.mark.parametrize("roles", [AGGREGATED, PAIRS], ids=["aggregated", "pairs"])
async def test_turns_of_a_session_find_their_prefix(
    tiny_model: Path, roles: tuple[Role, ...]
) -> None:
    """All of them, while by load alone other workers get them and compute anew."""
    async with stack(tiny_model, roles, ("--step-ms", "5")) as served:
        session = await talk(served, "rollout-1")
    by_load = ("--routing", "load")
    async with stack(tiny_model, roles, ("--step-ms", "5"), by_load) as served:
        none = await talk(served, None)

    assert session.num_cached >= session.num_known
    assert len(session.decoders) == 1
    assert len(none.decoders) > 1
    if roles == AGGREGATED:  # of prefill workers, an idle one is as good as another
        assert none.num_cached < session.num_cached


async def test_both_legs_of_a_session_stay(tiny_model: Path) -> None:
    """The prefill worker for its prompts, the decode worker for what it has read.

    Idle as they are, all sessions would get the same two without this.
    """
    prefillers: set[str] = set()
    async with stack(tiny_model, PAIRS) as served:
        for number in range(12):
            served_by: list[dict[str, str]] = []
            for length in (40, 120):
                # A Load that was made during a prefill counts until the next one.
                await eventually(partial(nothing_waits, served), "no tokens wait")
                reply = await ask(served, [5 + number] * length, f"s{number}")
                served_by.append(workers_of(reply))
            first, again = served_by
            assert again == first
            prefillers.add(first["prefill_worker_id"])
        await served.idle()
    assert len(prefillers) > 1


@pytest.mark.parametrize("placed", ["header", "body", "both", "chat", "generate"])
async def test_a_session_is_told_by_header_or_body(
    tiny_model: Path, placed: str
) -> None:
    """On all three routes; where both say one, the body does."""
    async with stack(tiny_model, AGGREGATED) as served:
        # Which differ: else this says nothing.
        names = [f"s{n}" for n in range(20)]
        homes = [await worker_of(served, name) for name in names]
        name, home = names[0], homes[0]
        other = next(name for name, of in zip(names, homes, strict=True) if of != home)
        header = {"X-Session-ID": other if placed == "both" else name}
        fields: dict[str, Any] = {"max_tokens": 1}
        if placed in ("body", "both"):
            fields["session_id"] = name
        if placed == "body":
            header = {}
        counts = [_num_prompts(worker) for worker in served.workers]
        match placed:
            case "chat":
                messages = [{"role": "user", "content": "a"}]
                path, body = "/v1/chat/completions", {"messages": messages, **fields}
            case "generate":
                path, body = GENERATE, {"token_ids": [5], "sampling_params": fields}
            case _:
                path, body = "/v1/completions", {"prompt": "a", **fields}
        reply = await served.post(path, body, header)

        assert reply.status == 200, reply.text
        served_by = [
            worker.name
            for worker, count in zip(served.workers, counts, strict=True)
            if _num_prompts(worker) > count
        ]
        assert served_by == [home]


def _num_prompts(worker: SimWorker) -> int:
    """Return how many requests a worker has had."""
    return worker.service._num_submits  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("value", ["", "a b", "x" * 257, "a\tb", "é"])
async def test_a_session_of_another_form_is_refused_in_a_body(
    tiny_model: Path, path: str, value: str
) -> None:
    """A 400 in OpenAI's shape that names the field; nothing reaches a worker."""
    body: dict[str, Any] = {"prompt": "a", "session_id": value}
    if path == "/v1/chat/completions":
        messages = [{"role": "user", "content": "a"}]
        body = {"messages": messages, "session_id": value}
    async with stack(tiny_model) as served:
        reply = await served.post(path, body)
        assert (reply.status, reply.error["param"]) == (400, "session_id")
        assert reply.error["type"] == "invalid_request_error"
        assert _num_prompts(served.workers[0]) == 0


@pytest.mark.parametrize("value", ["", "a b", "x" * 4_000, "a\tb", "é"])
async def test_a_header_may_have_any_form(tiny_model: Path, value: str) -> None:
    """Gateways put tokens there: it is a hint, and no request fails for it."""
    async with stack(tiny_model, AGGREGATED, ("--step-ms", "5")) as served:
        first = await worker_of(served, value)
        async with background(served, value):
            assert not value or await worker_of(served, value) == first


async def test_a_busy_worker_is_left(tiny_model: Path) -> None:
    """While a session's worker has notably more to do, its requests go elsewhere."""
    async with stack(tiny_model, AGGREGATED, ("--step-ms", "5")) as served:
        home = await worker_of(served, "s")
        async with contextlib.AsyncExitStack() as others:
            for _ in range(MOST):
                await others.enter_async_context(background(served, "s"))
            counts = {one.name: one.service.num_requests for one in served.workers}
            assert counts[home] == MOST
            away = await worker_of(served, "s")
            assert away != home
            assert await worker_of(served, "s") == away
        await served.idle()
        assert await worker_of(served, "s") == home


async def test_a_lost_worker_moves_only_its_own_sessions(tiny_model: Path) -> None:
    """The others find their cache where it was, at whichever frontend."""
    sessions = [f"rollout-{n}" for n in range(24)]
    workers = [
        SimWorker(tiny_model, Role.AGGREGATED, f"worker-{n}", ("--step-ms", "0"))
        for n in range(4)
    ]
    async with frontend(tiny_model) as one, frontend(tiny_model) as two:
        try:
            for worker in workers:
                await worker.start()
            # In another order: what a frontend knows first must not count.
            await one.know(workers)
            await two.know(workers[::-1])
            before = [await worker_of(one, session) for session in sessions]
            assert [await worker_of(two, session) for session in sessions] == before
            lost = next(worker for worker in workers if worker.name == before[0])
            await lost.die()
            for served in (one, two):
                await eventually(partial(has_workers, served, 3))
            after = [await worker_of(one, session) for session in sessions]
            assert [await worker_of(two, session) for session in sessions] == after
        finally:
            for worker in workers:
                await worker.stop()

    stayed = [was for was in before if was != lost.name]
    assert len(stayed) < len(sessions)
    for was, now in zip(before, after, strict=True):
        assert now != lost.name
        assert was in (lost.name, now)


async def test_a_draining_worker_is_left(tiny_model: Path) -> None:
    """It takes nothing new, and the session goes on at the next in its order."""
    async with stack(tiny_model, AGGREGATED) as served:
        home = await worker_of(served, "s")
        [worker] = [one for one in served.workers if one.name == home]
        worker.service.drain()
        await eventually(partial(has_workers, served, 3))
        away = await worker_of(served, "s")

        assert away != home
        assert await worker_of(served, "s") == away


async def test_parallel_requests_of_a_session_all_end(tiny_model: Path) -> None:
    """Many more than its worker may have: the rest goes elsewhere, none waits for it."""
    async with stack(tiny_model, AGGREGATED, ("--step-ms", "5")) as served:
        calls = [ask(served, [5] * 20, "s") for _ in range(64)]
        replies = await asyncio.gather(*calls)
        names = {workers_of(reply)["decode_worker_id"] for reply in replies}

        assert len(names) > 1
        await served.idle()
