"""More requests than the workers have room for: who waits, who is turned away, and how."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.awake import within
from support.clock import MovedClock
from support.stack import MODEL_NAME, Reply, Stack, eventually, frontend, stack
from tokenwire.frontend import intake
from tokenwire.frontend.large import LARGE_BODY_BYTES
from tokenwire.protocol.messages import Role

SMALL = (
    *("--step-ms", "2", "--max-num-seqs", "1", "--prefill-tokens-per-s", "0"),
    *("--max-model-len", "65536"),
)
"""One slot and two in the engine's queue: three requests are at the worker."""
ROOM = 3
LONG = 30_000
"""Tokens of an output that goes on until its client leaves: a minute."""


@contextlib.asynccontextmanager
async def small(
    model: Path,
    *arguments: str,
    roles: tuple[Role, ...] = (Role.AGGREGATED,),
    options: tuple[str, ...] = SMALL,
) -> AsyncGenerator[Stack]:
    """Run a frontend with a small queue on a small worker."""
    async with stack(
        model, roles, options, ("--max-queue-requests", "2", *arguments)
    ) as running:
        yield running


def ask(running: Stack, key: str = "", **body: Any) -> asyncio.Task[Reply]:
    """Send a completion of a tenant."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    fields = {"prompt": "hello", "max_tokens": LONG, "ignore_eos": True, **body}
    return asyncio.create_task(running.post("/v1/completions", fields, headers))


async def metric(running: Stack, name: str) -> float:
    """Return a metric of the frontend, by its whole name with labels."""
    text = (await running.get("/metrics")).text
    for line in text.splitlines():
        if line.startswith(f"{name} "):
            return float(line.rpartition(" ")[2])
    return 0.0


async def becomes(running: Stack, name: str, value: float) -> None:
    """Return when a metric of the frontend is *value*."""
    async with within(60):
        while await metric(running, name) != value:
            await asyncio.sleep(0.01)


async def waits(running: Stack, number: int) -> None:
    """Return when so many sequences wait in the frontend."""
    await becomes(running, "tokenwire_queue_requests", number)


async def idle(running: Stack) -> None:
    """Return when the workers have nothing left, and the frontend knows."""
    await running.idle()
    await becomes(running, "tokenwire_requests_admitted", 0)


async def full(running: Stack, key: str = "", **body: Any) -> list[asyncio.Task[Reply]]:
    """Fill the worker; return the requests that do."""
    tasks = [ask(running, key, **body) for _ in range(ROOM)]
    service = running.workers[0].service
    await eventually(lambda: service.num_requests == ROOM, "the worker is full")
    return tasks


async def left(*tasks: asyncio.Task[Reply]) -> None:
    """Have clients leave."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def refused(reply: Reply, status: int, code: str) -> None:
    """Check an answer's shape."""
    kind = "rate_limit_error" if status == 429 else "service_unavailable_error"
    assert (reply.status, reply.error["code"]) == (status, code)
    assert (reply.error["type"], reply.error["param"]) == (kind, None)
    assert 1 <= int(reply.headers["Retry-After"]) <= 60


async def test_a_full_queue_answers_429(tiny_model: Path) -> None:
    """The worker has its own, the queue is bounded, and what waits is served later."""
    async with small(tiny_model) as running:
        busy = await full(running)
        waiting = [ask(running, max_tokens=3) for _ in range(2)]
        await waits(running, 2)
        assert running.workers[0].service.num_requests == ROOM
        refused(await ask(running), 429, "queue_full")
        others: list[tuple[str, dict[str, Any]]] = [
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {}}),
        ]
        for path, body in others:
            refused(await running.post(path, body), 429, "queue_full")
        name = 'tokenwire_requests_shed_total{priority="normal",reason="requests"}'
        assert await metric(running, name) == 3
        await left(*busy)
        replies = await asyncio.gather(*waiting)
        assert [reply.status for reply in replies] == [200, 200]
        assert replies[0].json["usage"]["completion_tokens"] == 3
        await idle(running)


async def test_a_refused_request_is_not_tokenized(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turning away is cheap: the prompt is not looked at."""
    async with small(tiny_model) as running:
        busy = await full(running)
        waiting = [ask(running) for _ in range(2)]
        await waits(running, 2)

        def fail(*_: object, **__: object) -> None:
            pytest.fail("tokenized")

        monkeypatch.setattr(type(running.model), "encode", fail)
        refused(await ask(running, prompt="a long text"), 429, "queue_full")
        await left(*busy, *waiting)


async def test_the_queue_is_bounded_by_tokens(tiny_model: Path) -> None:
    """Prompt tokens of all prompts and choices count."""
    async with small(tiny_model, "--max-queue-tokens", "20") as running:
        busy = await full(running)
        waiting = ask(running, prompt=[5] * 15)
        await waits(running, 1)
        refused(await ask(running, prompt=[5] * 6), 429, "queue_full")
        name = 'tokenwire_requests_shed_total{priority="normal",reason="tokens"}'
        assert await metric(running, name) == 1
        assert await metric(running, "tokenwire_queue_tokens") == 15
        await left(*busy, waiting)


async def test_every_choice_takes_a_place(tiny_model: Path) -> None:
    """Two more in a queue of two are too many; alone, even three may wait."""
    async with small(tiny_model) as running:
        busy = await full(running)
        waiting = ask(running)
        await waits(running, 1)
        refused(await ask(running, n=2), 429, "queue_full")
        refused(await ask(running, prompt=["a", "b"]), 429, "queue_full")
        await left(waiting)
        await waits(running, 0)
        waiting = ask(running, n=3)
        await waits(running, 3)
        await left(*busy, waiting)


async def test_what_waits_for_too_long_gets_503(tiny_model: Path) -> None:
    """Before any header of a stream is sent."""
    async with small(tiny_model, "--max-queue-wait-s", "0.1") as running:
        busy = await full(running)
        refused(await ask(running, stream=True), 503, "queue_timeout")
        await left(*busy)


async def test_what_would_wait_for_too_long_gets_503_at_once(tiny_model: Path) -> None:
    """Known once something has ended; Retry-After says for how long."""
    arguments = ("--max-queue-wait-s", "0.1", "--max-queue-requests", "100")
    async with small(tiny_model, *arguments) as running:
        assert (
            await ask(running, max_tokens=200)
        ).status == 200  # takes 0.4 s and more
        busy = await full(running)
        reply = await ask(running)
        refused(reply, 503, "queue_wait")
        await left(*busy)


async def test_priorities_are_honoured(tiny_model: Path) -> None:
    """A lower value goes first, and into a full queue."""
    async with small(tiny_model) as running:
        busy = await full(running)
        late = ask(running, priority=5)
        await waits(running, 1)
        usual = ask(running)
        await waits(running, 2)
        urgent = ask(running, max_tokens=1, priority=-1)
        refused(await late, 429, "evicted")
        await waits(running, 2)
        await left(busy[0])
        await waits(running, 1)
        await left(usual)
        await waits(running, 0)  # so the other one had its turn
        name = 'tokenwire_requests_shed_total{priority="low",reason="evicted"}'
        assert await metric(running, name) == 1
        await left(*busy)
        assert (await urgent).status == 200


async def test_a_flood_does_not_starve_a_quiet_tenant(tiny_model: Path) -> None:
    """One with another key gets into a full queue, and its turn before the flood's rest."""
    async with small(tiny_model, "--max-queue-requests", "8") as running:
        busy = await full(running, "flood")
        flood = [ask(running, "flood", max_tokens=50) for _ in range(20)]
        await waits(running, 8)
        quiet = ask(running, "quiet", max_tokens=1)
        await eventually(
            lambda: sum(task.done() for task in flood) == 13, "one evicted"
        )
        assert await metric(running, "tokenwire_queue_requests") == 8
        await left(*busy)
        assert (await quiet).status == 200
        assert sum(not task.done() for task in flood) >= 4
        replies = await asyncio.gather(*flood)
        assert [reply.status for reply in replies].count(200) == 7
        for reply in replies:
            if reply.status != 200:
                assert reply.error["code"] in {"queue_full", "evicted"}


async def test_one_that_leaves_the_queue_costs_nothing(tiny_model: Path) -> None:
    """Its place is free at once, and no worker hears of it."""
    async with small(tiny_model) as running:
        busy = await full(running)
        waiting = [ask(running) for _ in range(2)]
        await waits(running, 2)
        await left(*waiting)
        await waits(running, 0)
        assert running.workers[0].service.num_requests == ROOM
        await left(*busy)
        await running.idle()
        assert running.workers[0].service._num_submits == ROOM  # pyright: ignore[reportPrivateUsage]


async def test_a_slow_reader_holds_no_place(tiny_model: Path) -> None:
    """Its output has ended; that it is not read yet is nothing to the workers."""
    options = (*SMALL, "--tokens-per-step", "500", "--step-ms", "0")
    async with small(tiny_model, options=options) as running:
        body = {"prompt": "hello", "max_tokens": 60_000, "ignore_eos": True}
        data = json.dumps({**body, "stream": True, "logprobs": 3}).encode()
        port = int(running.url.rpartition(":")[2])
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", port))
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                % (len(data), data)
            )
            worker = running.workers[0]
            await eventually(lambda: worker.service.num_requests == 1, "it runs")
            # 10 MB, of which the kernel takes 4.
            await idle(running)
            assert await metric(running, "tokenwire_requests_inflight") == 1


async def test_without_a_worker_nobody_waits(tiny_model: Path) -> None:
    """A newcomer hears at once that there is none."""
    async with small(tiny_model, "--max-queue-wait-s", "3600") as running:
        busy = await full(running)
        waiting = ask(running, max_tokens=1)
        await waits(running, 1)
        await running.workers[0].die()
        await eventually(lambda: not running.pool.ready, "the worker is lost")
        refused(await ask(running), 503, "no_worker")
        assert not waiting.done()
        await left(*busy, waiting)


async def test_what_waits_is_served_by_a_worker_that_comes_back(
    tiny_model: Path,
) -> None:
    """Workers die while requests wait: those go to the next one."""
    roles = (Role.AGGREGATED, Role.AGGREGATED)
    async with small(tiny_model, roles=roles) as running:
        first, second = running.workers
        running.pool.set_endpoints([first.link.endpoint])
        busy = await full(running)
        waiting = [ask(running, max_tokens=2) for _ in range(2)]
        await waits(running, 2)
        await first.die()
        await eventually(lambda: not running.pool.ready, "the worker is lost")
        running.pool.set_endpoints([second.link.endpoint])
        await left(*busy)  # which go on there, too
        replies = await asyncio.gather(*waiting)
        assert [reply.status for reply in replies] == [200, 200]


async def test_without_a_worker_the_wait_ends_with_503(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound holds also when there is nobody to wait for."""
    clock = MovedClock(time.monotonic)
    monkeypatch.setattr(intake, "time", SimpleNamespace(monotonic=clock))
    async with small(tiny_model, "--max-queue-wait-s", "100") as running:
        busy = await full(running)
        waiting = ask(running)
        await waits(running, 1)
        await running.workers[0].die()
        await eventually(lambda: not running.pool.ready, "the worker is lost")
        clock.by_s += 100.0
        refused(await waiting, 503, "no_worker")
        await left(*busy)


async def test_a_drained_frontend_serves_its_queue(tiny_model: Path) -> None:
    """Nothing new is taken; what waits gets its turn."""
    async with small(tiny_model) as running:
        busy = await full(running)
        served = ask(running, max_tokens=2)
        await waits(running, 1)
        force = asyncio.Event()
        drain = asyncio.create_task(running.intake.drain(60, force))
        await eventually(lambda: running.intake.draining, "draining")
        refused(await ask(running), 503, "draining")
        await left(*busy)
        assert (await served).status == 200
        await drain


async def test_a_forced_end_sheds_the_queue(tiny_model: Path) -> None:
    """With an answer, not with a closed connection."""
    async with small(tiny_model) as running:
        busy = await full(running)
        waiting = [ask(running), ask(running)]
        await waits(running, 2)
        force = asyncio.Event()
        force.set()
        await running.intake.drain(60, force)
        for reply in await asyncio.gather(*waiting):
            refused(reply, 503, "draining")
        await left(*busy)


@pytest.mark.pitfall(12)
async def test_what_does_not_end_in_time_is_told(tiny_model: Path) -> None:
    """An error, or an error event and [DONE]: no connection just closes."""
    async with stack(tiny_model, options=("--step-ms", "50")) as running:
        fields: dict[str, Any] = {"prompt": "a", "max_tokens": 1_000}
        whole = asyncio.create_task(running.complete(**fields))
        url = running.url + "/v1/completions"
        body = {**fields, "stream": True}
        async with running.client.post(url, json=body) as answer:
            assert (await answer.content.readline()).startswith(b"data:")
            await running.intake.drain(0.0, asyncio.Event())
            *_, error, done = (await answer.text()).strip().split("\n\n")
        refused(await whole, 503, "draining")
        await running.idle()

    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "draining"
    assert done == "data: [DONE]"


async def test_the_queue_may_be_at_the_workers(tiny_model: Path) -> None:
    """Then all goes there at once, and they refuse what is too much for them."""
    async with small(tiny_model, "--queue-at", "worker") as running:
        tasks = [ask(running) for _ in range(20)]
        service = running.workers[0].service
        await eventually(lambda: service.num_requests == 20, "all are at the worker")
        assert await metric(running, "tokenwire_queue_requests") == 0
        await left(*tasks)


async def test_prefill_and_decode_workers_are_filled(tiny_model: Path) -> None:
    """More requests than both have room for: all are served, and none is left over."""
    roles = (Role.PREFILL, Role.DECODE)
    arguments = ("--max-queue-requests", "100")
    async with small(tiny_model, *arguments, roles=roles) as running:
        tasks = [ask(running, max_tokens=3) for _ in range(30)]
        replies = await asyncio.gather(*tasks)
        assert {reply.status for reply in replies} == {200}
        await idle(running)


def _post(port: int, size: int, *, chunked: bool = False) -> socket.socket:
    """Begin a request whose body does not come to its end."""
    client = socket.create_connection(("127.0.0.1", port))
    length = b"Transfer-Encoding: chunked"
    if not chunked:
        length = b"Content-Length: %d" % (size + 1)
    client.sendall(
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        + length
        + b"\r\n\r\n"
    )
    spaces = b" " * size
    client.sendall(b"%x\r\n%s\r\n" % (size, spaces) if chunked else spaces)
    return client


@pytest.mark.parametrize("chunked", [False, True])
async def test_bodies_held_at_once_are_bounded(tiny_model: Path, chunked: bool) -> None:
    """By what has come, however it was announced; one alone is always taken."""
    async with stack(
        tiny_model, arguments=("--max-inflight-body-bytes", "1000")
    ) as running:
        large = {"prompt": "a" * 2000}
        assert (await running.post("/tokenize", large)).status == 200
        with _post(int(running.url.rpartition(":")[2]), 990, chunked=chunked):
            async with within(60):
                while (reply := await running.post("/tokenize", large)).status == 200:
                    await asyncio.sleep(0.01)
            refused(reply, 429, "overloaded")
            assert (await running.post("/tokenize", {"p": 1})).status == 400
        async with within(60):
            while (await running.post("/tokenize", large)).status != 200:
                await asyncio.sleep(0.01)


async def test_large_bodies_are_prepared_one_at_a_time(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Generating or not; smaller requests pass, and a client that leaves makes way."""
    async with stack(tiny_model) as running:
        large = {"prompt": [1] * 600_000}  # of no use, but large
        some = {**large, "model": MODEL_NAME, "max_tokens": 1}
        prepared: list[bool] = []
        preparing = running.intake.large.preparing

        def noted(num_bytes: int) -> AbstractAsyncContextManager[None]:
            prepared.append(num_bytes > LARGE_BODY_BYTES)
            return preparing(num_bytes)

        async with preparing(LARGE_BODY_BYTES + 1):
            monkeypatch.setattr(running.intake.large, "preparing", noted)
            tasks = [
                asyncio.create_task(running.post(path, body))
                for path, body in (
                    ("/tokenize", {"prompt": "a", "messages": large["prompt"]}),
                    ("/v1/completions", some),
                    ("/v1/completions", some),
                )
            ]
            await eventually(lambda: len(prepared) == 3, "all wait for their turn")
            assert (await running.complete(prompt=[7], max_tokens=1)).status == 200
            assert prepared == [True, True, True, False]
            assert not any(task.done() for task in tasks)
            tasks.pop().cancel()
        async with within(60):
            statuses = [(await task).status for task in tasks]

        assert statuses == [400, 400]
        await eventually(lambda: not running.intake.visits, "all are over")


async def test_a_text_far_too_long_is_not_tokenized_whole(tiny_model: Path) -> None:
    """Its answer is that of any prompt that does not fit; a text to be cut may be long."""
    async with stack(tiny_model) as running:
        text = "hello world " * 100_000
        replies = [
            await running.complete(prompt=text, max_tokens=1),
            await running.chat(text, max_tokens=1),
        ]
        for reply in replies:
            assert reply.status == 400
            assert reply.error["code"] == "context_length_exceeded"
            assert "maximum context length is" in reply.error["message"]
            assert "has more than" in reply.error["message"]
        cut = await running.complete(
            prompt=text, max_tokens=1, truncate_prompt_tokens=10
        )

        assert cut.status == 200


async def test_a_body_that_is_only_announced_keeps_nobody_out(
    tiny_model: Path,
) -> None:
    """Nor does one that is held: what is within a request's part is always taken."""
    arguments = ("--max-inflight-body-bytes", "4000", "--max-inflight-requests", "10")
    async with stack(
        tiny_model, arguments=(*arguments, "--max-body-bytes", "5000")
    ) as running:
        head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
        port = int(running.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as silent:
            silent.sendall(head + b"\r\nContent-Length: 4900\r\n\r\n")
            await eventually(lambda: len(running.intake.visits) == 1, "it has begun")
            large = await running.post("/tokenize", {"prompt": "a" * 2000})
            assert large.status == 200
        with _post(port, 3900):
            held = "_num_body_bytes"
            await eventually(
                lambda: getattr(running.intake, held) == 3900, "it is held"
            )
            refused(
                await running.post("/tokenize", {"prompt": "a" * 2000}),
                429,
                "overloaded",
            )
            assert (
                await running.post("/tokenize", {"prompt": "a" * 300})
            ).status == 200


async def test_a_body_that_unpacks_to_too_much_is_refused(tiny_model: Path) -> None:
    """What counts is what it takes here, not what came over the wire."""
    arguments = ("--max-inflight-body-bytes", "100000")
    async with stack(tiny_model, arguments=arguments) as running:
        packed = gzip.compress(json.dumps({"prompt": "a" * 200_000}).encode())
        with _post(int(running.url.rpartition(":")[2]), 900):
            headers = {"Content-Encoding": "gzip"}
            async with within(60):
                while True:
                    reply = await running.post("/tokenize", packed, headers)
                    if reply.status != 200:
                        break
            refused(reply, 429, "overloaded")


async def test_a_second_frontend_gets_its_share(tiny_model: Path) -> None:
    """The first to come may fill the workers, but not keep the others out."""
    options = (*SMALL, "--max-num-seqs", "4")
    async with (
        small(tiny_model, options=options) as first,
        frontend(tiny_model, ("--max-queue-requests", "2")) as second,
    ):
        worker = first.workers[0]
        second.pool.set_endpoints([worker.link.endpoint])
        await eventually(lambda: second.pool.ready, "the second frontend is there")
        busy = [ask(first) for _ in range(6)]
        await eventually(lambda: worker.service.num_requests == 6, "it is full")
        waiting = [ask(first) for _ in range(2)]
        await waits(first, 2)
        await eventually(
            lambda: all(link.load.num_requests == 6 for link in second.pool.links),
            "the second frontend knows that the worker is full",
        )
        mine = [ask(second) for _ in range(3)]
        await eventually(lambda: worker.service.num_requests == 9, "its half")
        late = ask(second)
        await waits(second, 1)
        # What ends makes no room for who has more than its half, once it is known.
        await becomes(first, "tokenwire_requests_limit", 3)  # it may be 10 ms old
        await left(busy[0])
        await eventually(lambda: worker.service.num_requests == 8, "one has left")
        assert await metric(first, "tokenwire_queue_requests") == 2
        await left(*busy, *waiting, *mine, late)
