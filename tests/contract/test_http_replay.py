"""Kept generations: told again byte for byte, followed, cancelled, gone on from."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from support.resumable import PATHS
from support.stack import SimWorker, Stack, eventually, frontend
from tokenwire.frontend import calls
from tokenwire.frontend.journals import Found, Journals
from tokenwire.frontend.recalls import TakeRecalled
from tokenwire.protocol.messages import Admin, Recalled, Role
from tokenwire.worker.entry import Entry
from tokenwire.worker.journal import Lost

CHAT, COMPLETIONS = PATHS["chat"], PATHS["completions"]
ASKS: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "hello"}]},
    "completions": {"prompt": "hello"},
}
BYTES = list(range(3, 259))  # each a byte: mostly no character by itself
CONTINUE = {"on_disconnect": "continue"}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 7, "allowed_token_ids": BYTES}


@dataclass
class Raw:
    """A stream as bytes: one item for each event, with its lines."""

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    events: list[bytes] = field(default_factory=list[bytes])
    is_over: bool = False

    @property
    def id(self) -> str:
        """The generation's."""
        return self.headers["X-Generation-Id"]

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """What each event says, but for [DONE]."""
        found = [event.partition(b"data: ")[2] for event in self.events]
        return [json.loads(body) for body in found if body != b"[DONE]"]

    @property
    def seqs(self) -> list[int]:
        """The number in each event's id."""
        found = [event.partition(b"id: ")[2] for event in self.events]
        return [int(one.partition(b"\n")[0].rpartition(b":")[2]) for one in found]

    @property
    def token_ids(self) -> list[int]:
        """All ids, joined."""
        chunks = [body for body in self.bodies if body.get("choices")]
        return [id_ for one in chunks for id_ in one["nvext"]["completion_token_ids"]]

    async def take(self, answer: aiohttp.ClientResponse) -> None:
        """Read a response to its end."""
        self.status, self.headers = answer.status, answer.headers
        waiting = b""
        async for part in answer.content.iter_any():
            waiting += part
            *events, waiting = waiting.split(b"\n\n")
            self.events += [event.replace(b": ping\n", b"") for event in events]
        self.is_over = True

    async def has(self, num_events: int) -> None:
        """Return when so many events are here."""
        await eventually(lambda: len(self.events) >= num_events, "events")


class Client:
    """Who asks a frontend."""

    def __init__(self, served: Stack, key: str | None = None) -> None:
        self.served = served
        self.headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    async def ask(
        self,
        route: str,
        raw: Raw | None = None,
        nvext: dict[str, Any] | None = None,
        **fields: Any,
    ) -> Raw:
        """Stream a resumable generation to its end."""
        raw = raw or Raw()
        body: dict[str, Any] = {
            **ASKS[route],
            "stream": True,
            "nvext": {"resumable": True} | (nvext or {}),
        } | fields
        url = self.served.url + PATHS[route]
        async with self.served.client.post(
            url, json=body, headers=self.headers
        ) as answer:
            await raw.take(answer)
        return raw

    def begin(self, route: str, **fields: Any) -> tuple[Raw, asyncio.Task[Raw]]:
        """Stream one in the background."""
        raw = Raw()
        return raw, asyncio.create_task(self.ask(route, raw, **fields))

    def outliving(self, max_tokens: int) -> tuple[Raw, asyncio.Task[Raw]]:
        """Stream, in the background, a sampled chat that goes on without its client."""
        nvext = {"resumable": CONTINUE}
        return self.begin("chat", nvext=nvext, max_tokens=max_tokens, **SAMPLED)

    async def replay(
        self,
        generation_id: str,
        after: int | None = None,
        raw: Raw | None = None,
        sent: dict[str, str] | None = None,
    ) -> Raw:
        """Follow a generation to its end."""
        raw = raw or Raw()
        params = {} if after is None else {"starting_after": str(after)}
        url = f"{self.served.url}/v1/generations/{generation_id}/stream"
        async with self.served.client.get(
            url, params=params, headers={**self.headers, **(sent or {})}
        ) as answer:
            if answer.content_type != "text/event-stream":
                raw.status, raw.headers = answer.status, answer.headers
                raw.events = [await answer.read()]
            else:
                await raw.take(answer)
        return raw

    async def call(self, method: str, path: str) -> tuple[int, dict[str, Any]]:
        """Return the status and the JSON of a call about a generation."""
        url = f"{self.served.url}/v1/generations/{path}"
        async with self.served.client.request(
            method, url, headers=self.headers
        ) as answer:
            return answer.status, await answer.json()

    async def state(self, generation_id: str) -> dict[str, Any]:
        """Return what is said of a generation."""
        status, body = await self.call("GET", generation_id)
        assert status == 200, body
        return body


@asynccontextmanager
async def running(
    model: Path, roles: Sequence[Role], *options: str, **started: Any
) -> AsyncGenerator[tuple[Client, Client, list[SimWorker]]]:
    """Run two frontends that know all workers."""
    async with AsyncExitStack() as stack:
        workers: list[SimWorker] = []
        for number, role in enumerate(roles):
            worker = SimWorker(model, role, f"{role.value}-{number}", options)
            stack.push_async_callback(worker.stop)
            await worker.start(**started)
            workers.append(worker)
        served = [
            await stack.enter_async_context(frontend(model, ("--worker-wait-s", "0.1")))
            for _ in range(2)
        ]
        for one in served:
            await one.know(workers)
        yield Client(served[0]), Client(served[1]), workers


PAIR = (Role.PREFILL, Role.DECODE)
ONE = (Role.AGGREGATED,)


@pytest_asyncio.fixture
async def slow(
    tiny_model: Path,
) -> AsyncIterator[tuple[Client, Client, list[SimWorker]]]:
    """A worker that takes its time."""
    async with running(tiny_model, ONE, "--step-ms", "5") as two:
        yield two


async def idle(worker: SimWorker) -> None:
    """Return when a worker has nothing left."""
    await eventually(lambda: worker.idle, "idle")


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat", SAMPLED),
    "completions": ("completions", SAMPLED),
    "usage": (
        "chat",
        {
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            **SAMPLED,
        },
    ),
    "logprobs": ("chat", {"logprobs": True, "top_logprobs": 3, **SAMPLED}),
    "completion logprobs": ("completions", {"logprobs": 2, **SAMPLED}),
    "checkpoints": ("chat", {"nvext": {"checkpoint": {"every_tokens": 16}}}),
    "stop string": ("completions", {"stop": ["e", "zz"]}),
    "native ids": ("completions", {"return_token_ids": True}),
    "echo": ("completions", {"echo": True}),
    "everything": (
        "chat",
        {
            "nvext": {
                "exactness": "same_rng",
                "extra_fields": [
                    "completion_token_ids",
                    "worker_id",
                    "stop_reason",
                    "engine_data",
                    "prompt_logprobs",
                    "weight_version",
                ],
            },
            "temperature": 1.0,
        },
    ),
}


@pytest.mark.parametrize("roles", [ONE, PAIR], ids=["one", "pair"])
@pytest.mark.parametrize("case", CASES)
async def test_every_event_comes_again(
    tiny_model: Path, case: str, roles: Sequence[Role]
) -> None:
    """From each number on, through another frontend, byte for byte; then there is none."""
    route, fields = CASES[case]
    async with running(
        tiny_model, roles, "--step-ms", "0", "--tokens-per-step", "3"
    ) as (first, second, _):
        calm = await first.ask(route, max_tokens=40, **fields)
        assert calm.status == 200
        assert b"[DONE]" in calm.events[-1]
        total = len(calm.events)
        for seq in range(total):
            again = await second.replay(calm.id, seq)
            assert again.events == calm.events[seq:], seq
            assert again.id == calm.id
        by_header = await second.replay(
            calm.id, sent={"Last-Event-ID": f"{calm.id}:{total - 2}"}
        )
        nothing = await second.replay(calm.id, total)

    assert by_header.events == calm.events[-2:]
    assert nothing.status == 204
    assert nothing.events == [b""]


@pytest.mark.parametrize("roles", [ONE, PAIR], ids=["one", "pair"])
async def test_a_running_generation_is_followed(
    tiny_model: Path, roles: Sequence[Role]
) -> None:
    """From each frontend in turn; who followed it before is told so."""
    async with running(tiny_model, roles, "--step-ms", "5") as (first, second, workers):
        made, reading = first.outliving(200)
        await made.has(10)
        other = Raw()
        following = asyncio.create_task(second.replay(made.id, 5, other))
        await reading
        await other.has(30)
        last = await first.replay(made.id, 0)
        await following
        state = await second.state(made.id)
        for worker in workers:
            await idle(worker)

    for raw in (made, other):
        assert raw.bodies[-1]["error"]["code"] == "generation_interrupted"
        assert raw.bodies[-1]["nvext"]["reason"] == "taken_over"
        place = raw.bodies[-2]["nvext"]["seq"]
        assert raw.seqs[-3:] == [place] * 3
    told = made.events[:-2]
    assert told == last.events[: len(told)]
    told = other.events[:-2]
    assert told == last.events[5 : 5 + len(told)]
    assert len(last.token_ids) == 200
    assert state["status"] == "completed"
    assert state["completion_tokens"] == 200
    assert state["seq"] == len(last.events)
    assert not state["is_followed"]
    assert state["checkpoint"]["state"]["output"]["ids"] == last.token_ids


async def test_a_single_token_comes_again(tiny_model: Path) -> None:
    """Which a prefill worker brings, and keeps."""
    async with running(tiny_model, PAIR, "--step-ms", "0") as (first, second, _):
        made = await first.ask("chat", max_tokens=1)
        again = await second.replay(made.id, 0)
    assert len(made.token_ids) == 1
    assert again.events == made.events


async def test_it_goes_on_without_its_client(
    slow: tuple[Client, Client, list[SimWorker]],
) -> None:
    """Where that was asked for: whoever comes back finds all of it."""
    first, second, [worker] = slow
    calm = await first.ask("chat", max_tokens=100, **SAMPLED)
    made, reading = first.outliving(100)
    await made.has(20)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    [link] = first.served.pool.links
    await eventually(lambda: not link.num_open, "left")
    state = await second.state(made.id)
    assert state["on_disconnect"] == "continue"
    seen = len(made.events)
    rest = await second.replay(made.id, seen)

    assert made.token_ids + rest.token_ids == calm.token_ids
    assert b"[DONE]" in rest.events[-1]
    await idle(worker)


async def test_it_ends_with_its_client(
    slow: tuple[Client, Client, list[SimWorker]],
) -> None:
    """By default: what it had is kept, and can be gone on from by its id."""
    first, second, [worker] = slow
    calm = await first.ask("chat", max_tokens=100, **SAMPLED)
    made, reading = first.begin("chat", max_tokens=100, **SAMPLED)
    await made.has(20)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await idle(worker)
    state = await second.state(made.id)
    assert state["status"] == "cancelled"
    assert state["finish_reason"] is None
    assert state["completion_tokens"] < 100

    again = await second.replay(made.id, len(made.events))
    assert made.events + again.events == (await first.replay(made.id, 0)).events
    error = again.bodies[-1]
    assert error["error"]["code"] == "generation_interrupted"
    assert error["nvext"]["reason"] == "disconnected"
    assert error["nvext"]["checkpoint"]["state"]["output"]["len"] < 100

    seq = 12  # the role, and 11 ids
    source = {"generation_id": made.id, "seq": seq}
    rest = await second.ask(
        "chat", nvext={"resume_from": source}, max_tokens=100, **SAMPLED
    )
    assert calm.token_ids[:11] + rest.token_ids == calm.token_ids
    opened = rest.bodies[0]["nvext"]
    assert opened["generation"]["parent"] == made.id
    assert opened["resume"]["prefix_tokens"] == 11
    told = await first.replay(rest.id, 0)  # which is kept as well
    assert told.events == rest.events


async def test_it_is_cancelled(
    slow: tuple[Client, Client, list[SimWorker]],
) -> None:
    """Through any frontend, as often as one likes; its stream says so."""
    first, second, [worker] = slow
    options: dict[str, Any] = {"nvext": {"resumable": CONTINUE}, "max_tokens": 400}
    made, reading = first.begin("chat", **options)
    await made.has(5)
    status, error = await second.call("GET", f"{made.id}x")
    assert (status, error["error"]["code"]) == (404, "generation_not_found")
    source = {"generation_id": made.id}
    active = await second.ask("chat", nvext={"resume_from": source}, max_tokens=400)
    assert active.status == 409
    states = [await second.call("POST", f"{made.id}/cancel") for _ in range(2)]
    await reading
    await idle(worker)

    assert [status for status, _ in states] == [200, 200]
    assert {state["status"] for _, state in states} == {"cancelled"}
    assert made.bodies[-1]["nvext"]["reason"] == "cancelled"
    assert (await second.replay(made.id, 0)).events == made.events


async def test_it_is_deleted(slow: tuple[Client, Client, list[SimWorker]]) -> None:
    """Running or not: nobody finds it any more."""
    first, second, [worker] = slow
    made, reading = first.begin("chat", max_tokens=400)
    await made.has(5)
    status, deleted = await second.call("DELETE", made.id)
    await reading
    assert (status, deleted["deleted"]) == (200, True)
    assert made.bodies[-1]["nvext"]["reason"] == "cancelled"
    await idle(worker)
    for method, path in (
        ("GET", made.id),
        ("DELETE", made.id),
        ("POST", f"{made.id}/cancel"),
    ):
        status, error = await second.call(method, path)
        assert (status, error["error"]["code"]) == (404, "generation_not_found")


async def test_only_its_own_client_finds_it(
    slow: tuple[Client, Client, list[SimWorker]],
) -> None:
    """By the API key; for others it does not exist, whatever they try."""
    first, second, [worker] = slow
    mine = Client(first.served, "mine")
    made, reading = mine.begin("chat", max_tokens=400)
    await made.has(5)
    for other in (second, Client(second.served, "another")):
        assert (await other.replay(made.id, 0)).status == 404
        for method, path in (
            ("GET", made.id),
            ("DELETE", made.id),
            ("POST", f"{made.id}/cancel"),
        ):
            assert (await other.call(method, path))[0] == 404
        source = {"generation_id": made.id}
        assert (await other.ask("chat", nvext={"resume_from": source})).status == 404
    assert not reading.done()
    same = Client(second.served, "mine")
    assert (await same.call("DELETE", made.id))[0] == 200
    await reading
    await idle(worker)


@pytest.mark.parametrize(
    ("query", "headers"),
    [
        ("starting_after=x", {}),
        ("starting_after=-1", {}),
        ("starting_after=", {}),
        ("starting_after=" + "9" * 30, {}),
        ("starting_after=" + "0" * 5000, {}),
        ("starting_after=1000", {}),
        ("", {"Last-Event-ID": "another:3"}),
        ("", {"Last-Event-ID": "3"}),
    ],
)
async def test_a_place_that_is_none(
    tiny_model: Path, query: str, headers: dict[str, str]
) -> None:
    """It is told what is wrong with it."""
    async with running(tiny_model, ONE, "--step-ms", "0") as (first, second, _):
        made = await first.ask("chat", max_tokens=5)
        url = f"{second.served.url}/v1/generations/{made.id}/stream?{query}"
        async with second.served.client.get(url, headers=headers) as answer:
            body = await answer.json()

    assert answer.status == 400
    assert body["error"]["param"] in ("starting_after", "Last-Event-ID")


async def test_it_ends_while_it_is_looked_for(
    slow: tuple[Client, Client, list[SimWorker]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has all of it is told so, whatever was found a moment before."""
    first, second, _ = slow
    made, reading = first.begin("chat", max_tokens=30)
    await made.has(5)
    read = Journals.read

    async def late(journals: Journals, found: Found) -> Recalled:
        await reading
        return await read(journals, found)

    monkeypatch.setattr(Journals, "read", late)
    nothing = await second.replay(made.id, 33)

    assert len(made.events) == 33
    assert (nothing.status, nothing.events) == (204, [b""])


async def test_it_is_gone_before_it_is_followed(
    slow: tuple[Client, Client, list[SimWorker]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is open then that would never end."""
    first, second, [worker] = slow
    made, reading = first.begin("chat", max_tokens=400)
    await made.has(5)
    follow = Journals.follow

    async def late(journals: Journals, found: Found, take: TakeRecalled) -> Recalled:
        await journals.delete(found)
        return await follow(journals, found, take)

    monkeypatch.setattr(Journals, "follow", late)
    gone = await second.replay(made.id, 3)
    await reading

    assert gone.status == 404
    [link] = second.served.pool.links
    assert not link.num_open
    await idle(worker)


@pytest.mark.parametrize(
    ("source", "param"),
    [
        ({"generation_id": "x", "output_token_ids": [1]}, "nvext.resume_from"),
        ({"seq": 1, "output_token_ids": [1]}, "nvext.resume_from.seq"),
        ({"seq": 1}, "nvext.resume_from"),
    ],
)
async def test_a_source_that_is_none(
    tiny_model: Path, source: dict[str, Any], param: str
) -> None:
    """One of the three, with what belongs to it."""
    async with running(tiny_model, ONE, "--step-ms", "0") as (first, _, _):
        made = await first.ask("chat", nvext={"resume_from": source}, max_tokens=5)
    assert made.status in (400, 404)


async def test_without_a_journal_nothing_goes_on(tiny_model: Path) -> None:
    """It is refused at the beginning; the rest of what is resumable works."""
    async with running(tiny_model, ONE, "--step-ms", "0", capabilities=[]) as (
        first,
        second,
        _,
    ):
        refused = await first.ask("chat", nvext={"resumable": CONTINUE})
        made = await first.ask("chat", max_tokens=5)
        assert refused.status == 400
        assert (await second.replay(made.id, 0)).status == 404


async def test_without_a_worker_it_may_come_later(tiny_model: Path) -> None:
    """That is no fault of the request: a client tries again."""
    async with running(tiny_model, ONE, "--step-ms", "0") as (first, _, [worker]):
        await worker.die()
        await eventually(lambda: not first.served.pool.ready, "the loss")
        refused = await first.ask("chat", nvext={"resumable": CONTINUE})
    assert refused.status == 503


async def test_what_is_too_large_to_be_kept_cannot_outlive_its_client(
    slow: tuple[Client, Client, list[SimWorker]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told so; without that wish it is served, and not kept."""
    first, second, _ = slow
    monkeypatch.setattr(calls, "MAX_BODY_BYTES", 100)
    refused = await first.ask("chat", nvext={"resumable": CONTINUE}, max_tokens=5)
    made = await first.ask("chat", max_tokens=5)

    assert (refused.status, made.status) == (413, 200)
    assert (await second.replay(made.id, 0)).status == 404


async def test_a_frontend_that_leaves_lets_it_go_on(
    slow: tuple[Client, Client, list[SimWorker]],
) -> None:
    """Its client is told that it is interrupted, and finds all of it elsewhere."""
    first, second, _ = slow
    calm = await first.ask("chat", max_tokens=150, **SAMPLED)
    made, reading = first.outliving(150)
    await made.has(10)
    await first.served.intake.drain(0, asyncio.Event())
    await reading
    assert made.bodies[-1]["nvext"]["reason"] == "draining"
    rest = await second.replay(made.id, made.seqs[-1])  # as an EventSource does

    assert made.token_ids + rest.token_ids == calm.token_ids


async def test_it_moves_while_it_is_followed(tiny_model: Path) -> None:
    """A worker's death behind a second frontend: the same events, and told again."""
    roles = (Role.AGGREGATED, Role.AGGREGATED)
    async with running(tiny_model, roles, "--step-ms", "5") as (first, second, workers):
        calm = await first.ask("chat", max_tokens=150, **SAMPLED)
        made, reading = first.outliving(150)
        await made.has(10)
        reading.cancel()
        other = Raw()
        following = asyncio.create_task(second.replay(made.id, 8, other))
        await other.has(30)
        [busy] = [worker for worker in workers if not worker.idle]
        await busy.die()
        await following
        again = await first.replay(made.id, 8)

    assert made.token_ids[:7] + other.token_ids == calm.token_ids
    assert b"[DONE]" in other.events[-1]
    assert again.events == other.events


@pytest.mark.parametrize("on_disconnect", ["cancel", "continue"])
async def test_a_worker_that_was_given_up_has_no_say(
    tiny_model: Path, on_disconnect: str
) -> None:
    """What it kept ends before the end: 410 where the rest is gone, not an end."""
    roles = (Role.AGGREGATED, Role.AGGREGATED)
    async with running(tiny_model, roles, "--step-ms", "5") as (first, second, workers):
        made, reading = first.begin(
            "chat", nvext={"resumable": {"on_disconnect": on_disconnect}}
        )
        await made.has(10)
        [busy] = [worker for worker in workers if not worker.idle]
        [link] = [one for one in first.served.pool.links if one.worker_id == busy.name]
        link._reset("it has stalled")  # pyright: ignore[reportPrivateUsage]
        seen = len(made.events)
        await made.has(seen + 20)
        seen = len(made.events)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        [other] = [worker for worker in workers if worker is not busy]
        await other.die()
        await idle(busy)
        behind = await second.replay(made.id, seen)
        source = {"generation_id": made.id, "seq": seen}
        resumed = await second.ask("chat", nvext={"resume_from": source})
        assert (behind.status, resumed.status) == (410, 410)
        if on_disconnect == "continue":
            status, _ = await second.call("GET", made.id)
            begun = await second.replay(made.id, 0)
            assert (status, begun.status) == (410, 410)


async def test_the_newest_that_is_known_counts(tiny_model: Path) -> None:
    """Also if it is lost: what an earlier worker has does not stand for it."""
    async with running(tiny_model, ONE * 2, "--step-ms", "5") as (
        first,
        second,
        workers,
    ):
        made, reading = first.begin("chat", max_tokens=400)
        await made.has(10)
        [busy] = [worker for worker in workers if not worker.idle]
        [link] = [one for one in first.served.pool.links if one.worker_id == busy.name]
        link._reset("it has stalled")  # pyright: ignore[reportPrivateUsage]
        await made.has(30)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        [other] = [worker for worker in workers if worker is not busy]
        await idle(other)
        journal = other.journal
        entry = journal.find(made.id, b"")
        assert isinstance(entry, Entry)
        journal.drop(entry, Lost.EXPIRED)
        assert (await second.replay(made.id, 3)).status == 410


async def test_what_is_told_of_workers_is_as_it_was(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Checkpoints of before a move, and of before newer weights, come again as such."""
    (tmp_path / "model.safetensors").write_bytes(b"newer")
    roles = (Role.AGGREGATED, Role.AGGREGATED)
    nvext = {"resumable": CONTINUE, "checkpoint": {"every_tokens": 16}}
    async with running(tiny_model, roles, "--step-ms", "5") as (first, second, workers):
        made, reading = first.begin("chat", nvext=nvext, max_tokens=100, **SAMPLED)
        await made.has(40)
        [busy] = [worker for worker in workers if not worker.idle]
        await busy.die()
        await reading
        [other] = [worker for worker in workers if worker is not busy]
        update = Admin(
            "a1",
            "update_weights",
            {"weight_version": "newer", "update": 5, "weight_dir": str(tmp_path)},
            5.0,
        )
        [link] = [one for one in first.served.pool.links if one.is_ready]
        done = await link.administer(update)
        assert not done.error, done
        await eventually(lambda: link.weight_version == "newer", "newer weights")
        again = await second.replay(made.id, 0)

    told = [body["nvext"].get("checkpoint") for body in made.bodies if "nvext" in body]
    holders = [one["holder"]["worker_id"] for one in told if one is not None]
    assert holders[0] == busy.name
    assert holders[-1] == other.name
    assert again.events == made.events


async def test_a_client_that_leaves_while_it_moves(tiny_model: Path) -> None:
    """It goes on at the worker that comes, and is found there."""
    roles = (Role.AGGREGATED, Role.AGGREGATED)
    async with running(tiny_model, roles, "--step-ms", "5") as (first, second, workers):
        calm = await first.ask("chat", max_tokens=150, **SAMPLED)
        made, reading = first.outliving(150)
        await made.has(10)
        [busy] = [worker for worker in workers if not worker.idle]
        await busy.die()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        [other] = [worker for worker in workers if worker is not busy]
        await eventually(lambda: not other.idle, "it moves")
        rest = await second.replay(made.id, 8)

    assert made.token_ids[:7] + rest.token_ids == calm.token_ids
