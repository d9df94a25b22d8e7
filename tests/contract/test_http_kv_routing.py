"""Requests go where their prefix is cached, as the workers tell it over the wire."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.stack import SimWorker, Stack, eventually, frontend
from tokenwire.frontend import calls, prefixes
from tokenwire.frontend.link import Link
from tokenwire.frontend.prefixes import Chain
from tokenwire.frontend.routing import num_requests
from tokenwire.protocol.blocks import block_hashes
from tokenwire.protocol.messages import FromWorker, KVBlocks, Role
from tokenwire.protocol.tokens import pack_ids
from tokenwire.worker import kv_watch
from tokenwire.worker.frontends import Frontend

BLOCK = 16
PROMPT = [3 + n % 250 for n in range(24 * BLOCK + 5)]
CACHED = 24 * BLOCK
OPTIONS = ("--step-ms", "2", "--output-draws")


def a_worker(model: Path, name: str, listen: str = "tcp://127.0.0.1:0") -> SimWorker:
    """Return a worker that tells of its blocks."""
    role = Role.AGGREGATED
    return SimWorker(model, role, name, OPTIONS, listen=listen, kv_events=True)


@contextlib.asynccontextmanager
async def three_workers(
    model: Path, *arguments: str
) -> AsyncGenerator[tuple[Stack, list[SimWorker]]]:
    """Run a frontend and workers that tell."""
    workers = [a_worker(model, f"w{n}") for n in range(3)]
    async with frontend(model, arguments) as served:
        try:
            for worker in workers:
                await worker.start()
            await served.know(workers)
            yield served, workers
        finally:
            for worker in served.workers:
                await worker.stop()


async def ask(served: Stack, prompt: list[int], **fields: Any) -> tuple[str, int]:
    """Complete *prompt*; return who did, and how many tokens were cached there."""
    extra = {"extra_fields": ["worker_id"], **fields.pop("nvext", {})}
    body = {"prompt": prompt, "max_tokens": 4, "nvext": extra, **fields}
    reply = await served.post("/v1/completions", body)
    assert reply.status == 200, reply.text
    usage = reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]
    return reply.json["nvext"]["worker_id"]["decode_worker_id"], usage


def links_of(served: Stack) -> dict[str, Link]:
    """Return the links by their workers' names."""
    return {link.worker_id: link for link in served.pool.links}


def num_told(served: Stack, name: str) -> int:
    """Return how many blocks a worker is known to have."""
    blocks = links_of(served)[name].blocks
    return 0 if blocks is None else blocks.num_blocks


def knows(served: Stack, name: str) -> bool:
    """Return whether the prompt is known to be at a worker."""
    return num_told(served, name) >= CACHED // BLOCK


def has_one(served: Stack, name: str) -> bool:
    """Return whether a worker has one request, as a frontend knows."""
    link = links_of(served)[name]
    return num_requests(link) == 1 and not link.num_queued_tokens


@contextlib.asynccontextmanager
async def busy(served: Stack, worker: SimWorker) -> AsyncGenerator[None]:
    """Keep a request running at a worker: the others are idle."""
    url = served.url + "/v1/completions"
    async with contextlib.AsyncExitStack() as running:
        for seed in itertools.count():  # one after the other, until it has one
            if worker.service.num_requests:
                break
            prompt = [7, 3 + seed]
            body = {"prompt": prompt, "max_tokens": 2_000, "ignore_eos": True}
            request = served.client.post(url, json={**body, "stream": True})
            answer = await running.enter_async_context(request)
            await answer.content.readany()
        yield


async def test_a_request_goes_to_who_has_its_prefix(tiny_model: Path) -> None:
    """Also from a frontend that never sent it there, and though others are idle."""
    async with (
        three_workers(tiny_model) as (one, workers),
        frontend(tiny_model) as two,
    ):
        await two.know(workers)
        name, num_cached = await ask(one, PROMPT)
        assert num_cached == 0
        for served in (one, two):
            await eventually(partial(knows, served, name), "it is told")
        [home] = [worker for worker in workers if worker.name == name]
        async with busy(one, home):
            for served in (one, two):
                for more in range(3):
                    await eventually(partial(has_one, served, name), "a Load")
                    assert await ask(served, [*PROMPT, more]) == (name, CACHED)
        page = (await two.get("/metrics")).text
        assert f"tokenwire_prefix_tokens_predicted_total {3.0 * CACHED}" in page
        assert f"tokenwire_prefix_tokens_found_total {3.0 * CACHED}" in page
        assert "tokenwire_prefix_tokens_missed_total 0.0" in page
        assert f'tokenwire_kv_index_blocks{{worker_id="{name}"}}' in page
        await one.idle()


async def test_a_burst_behind_a_new_prefix_stays_together(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any worker has told of it: what was sent is promised."""
    monkeypatch.setattr(kv_watch, "PERIOD_S", 600.0)
    async with three_workers(tiny_model) as (served, _):
        name, _ = await ask(served, PROMPT)
        for more in range(5):
            assert await ask(served, [*PROMPT, more]) == (name, CACHED)
        assert num_told(served, name) == 0


@pytest.mark.parametrize("policy", ["kv", "load", "round-robin"])
async def test_who_does_not_look_does_not_ask(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """A policy without caches has no worker tell of its blocks, and hashes nothing."""
    asked: list[str] = []
    watch = kv_watch.KVWatch.watch

    def watched(self: kv_watch.KVWatch, frontend: Frontend) -> None:
        asked.append(frontend.hello.frontend_id)
        watch(self, frontend)

    hashed: list[int] = []
    blocks, extend = Chain.blocks, Chain.extend

    def counted(self: Chain, block_size: int, packed: bytes) -> list[int]:
        hashed.append(block_size)
        return blocks(self, block_size, packed)

    def extended(self: Chain, packed: bytes) -> None:
        hashed.append(0)
        extend(self, packed)

    monkeypatch.setattr(kv_watch.KVWatch, "watch", watched)
    monkeypatch.setattr(Chain, "blocks", counted)
    monkeypatch.setattr(Chain, "extend", extended)
    looks = policy == "kv"
    async with three_workers(tiny_model, "--routing", policy) as (served, _):
        name = ""
        for _ in range(4):  # behind a Submit nothing is under way that was sent before
            name, _ = await ask(served, PROMPT)
        if looks:
            await eventually(partial(knows, served, name), "it is told")
        assert len(asked) == (3 if looks else 0)
        assert bool(hashed) == bool(len(served.pool.index)) == looks


async def test_salts_share_nothing(tiny_model: Path) -> None:
    """The same ids under another salt are neither cached nor expected to be."""
    async with three_workers(tiny_model) as (served, _):
        name, _ = await ask(served, PROMPT, cache_salt="a")
        await eventually(partial(knows, served, name), "it is told")
        assert (await ask(served, [*PROMPT, 1], cache_salt="b"))[1] == 0
        assert (await ask(served, [*PROMPT, 1]))[1] == 0
        assert await ask(served, [*PROMPT, 1], cache_salt="a") == (name, CACHED)
        page = (await served.get("/metrics")).text
        assert f"tokenwire_prefix_tokens_predicted_total {1.0 * CACHED}" in page


async def test_a_long_prompt_is_hashed_beside_the_event_loop(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each prompt once, however many choices; it is found where it is cached."""
    async with three_workers(tiny_model) as (served, _):
        name, _ = await ask(served, PROMPT)
        await eventually(partial(knows, served, name), "it is told")
        hashed_by: list[bool] = []

        def noted(packed: bytes, block_size: int, root: int) -> list[int]:
            hashed_by.append(threading.current_thread() is threading.main_thread())
            return block_hashes(packed, block_size, root)

        monkeypatch.setattr(prefixes, "block_hashes", noted)
        assert await ask(served, PROMPT) == (name, CACHED)
        assert hashed_by == [True]  # a short one here
        monkeypatch.setattr(calls, "LONG_IDS", 100)

        assert await ask(served, PROMPT) == (name, CACHED)
        reply = await served.complete(prompt=[PROMPT, PROMPT[::-1]], n=2, max_tokens=4)
        assert reply.status == 200
        assert hashed_by == [True, False, False, False]


@pytest.mark.pitfall(35)
async def test_a_restarted_worker_has_nothing(tiny_model: Path) -> None:
    """From the loss of its link on; what the new process has is told anew."""
    async with three_workers(tiny_model) as (served, workers):
        name, _ = await ask(served, PROMPT)
        await eventually(partial(knows, served, name), "it is told")
        at = next(n for n, worker in enumerate(workers) if worker.name == name)
        await workers[at].die()
        await eventually(
            lambda: len(served.pool.usable(Role.AGGREGATED)) == 2, "it is lost"
        )
        hashes = Chain().blocks(BLOCK, pack_ids(PROMPT))
        assert served.pool.index.matches(hashes) == {}
        again = a_worker(tiny_model, name, workers[at].link.endpoint)
        workers[at] = served.workers[at] = again
        await again.start(incarnation=f"{name}-2")
        await eventually(lambda: len(served.pool.usable(Role.AGGREGATED)) == 3)
        assert num_told(served, name) == 0
        assert (await ask(served, [*PROMPT, 1]))[1] == 0


@pytest.mark.pitfall(35)
async def test_a_lost_message_leads_to_a_new_snapshot(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link notices by its numbers, begins anew, and is told all there is."""
    async with three_workers(tiny_model) as (served, workers):
        dropped: list[KVBlocks] = []
        for worker in workers:
            send = worker.link.send

            def lossy(identity: bytes, message: FromWorker, send: Any = send) -> bool:
                if isinstance(message, KVBlocks) and message.stored and not dropped:
                    dropped.append(message)
                    return True
                return bool(send(identity, message))

            monkeypatch.setattr(worker.link, "send", lossy)
        name, _ = await ask(served, PROMPT)
        links = served.pool.links
        await eventually(lambda: any(one.num_protocol_errors for one in links))

        # If the request was under way, it has gone on elsewhere.
        [broken] = [one.worker_id for one in links if one.num_protocol_errors]
        await eventually(partial(knows, served, broken), "it is told again")
        assert len(dropped) == 1
        assert [
            one.num_protocol_errors for one in links if one.num_protocol_errors
        ] == [1]
        await eventually(lambda: len(served.pool.usable(Role.AGGREGATED)) == 3)
        again, num_cached = await ask(served, [*PROMPT, 1])
        assert again in (broken, name)
        assert num_cached == CACHED


async def test_policies_that_do_not_look(tiny_model: Path) -> None:
    """In turns, every worker gets its share of one prefix."""
    async with three_workers(tiny_model, "--routing", "round-robin") as (served, _):
        names = [(await ask(served, [*PROMPT, n]))[0] for n in range(6)]
        assert sorted(names) == ["w0", "w0", "w1", "w1", "w2", "w2"]
