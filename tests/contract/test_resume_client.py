"""The client of resumable generations, before servers that break and before a real stack."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from resume_client import (
    BadStream,
    GaveUp,
    Outcome,
    Patience,
    Progress,
    Refused,
    ResumableStream,
)

from support.resumable import PATHS

CHAT = PATHS["chat"]
QUICK = Patience(first_s=0.001, longest_s=0.01, longest_asked_s=0.01)

# --- servers that break ------------------------------------------------------------------


@dataclass
class Reply:
    """What a server says to one request."""

    status: int = 200
    body: str = ""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    cut: bool = False  # break the connection behind it


@dataclass
class Request:
    """What it was asked."""

    method: str
    path: str
    last_event_id: str | None
    authorization: str | None
    body: dict[str, Any]


@dataclass
class Server:
    """A server with an answer for each request, in their order."""

    url: str
    replies: list[Reply] = field(default_factory=list[Reply])
    requests: list[Request] = field(default_factory=list[Request])

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer as planned."""
        self.requests.append(
            Request(
                request.method,
                request.path,
                request.headers.get("Last-Event-ID"),
                request.headers.get("Authorization"),
                json.loads(await request.read() or b"{}"),
            )
        )
        reply = self.replies.pop(0)
        response = web.StreamResponse(status=reply.status, headers=reply.headers)
        if reply.status == 0:
            assert request.transport is not None
            request.transport.abort()
            return response
        await response.prepare(request)
        await response.write(reply.body.encode())
        if reply.cut:
            assert request.transport is not None
            request.transport.close()  # what was written is sent
        return response


@asynccontextmanager
async def serving() -> AsyncGenerator[Server]:
    """Run such a server."""
    server = Server("")
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        server.url = f"http://{host}:{port}"
        yield server
        assert not server.replies, "an answer that nobody asked for"
    finally:
        await runner.cleanup()


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    """A server; all of its answers must be asked for."""
    async with serving() as running:
        yield running


def events(generation: str, first: int, *bodies: dict[str, Any] | str) -> str:
    """Return events with numbers from *first* on."""
    texts = [one if isinstance(one, str) else json.dumps(one) for one in bodies]
    return "".join(
        f"id: {generation}:{number}\ndata: {text}\n\n"
        for number, text in enumerate(texts, first)
    )


def chunk(offset: int, ids: list[int], text: str = "", **more: Any) -> dict[str, Any]:
    """Return a chat's chunk; *more* is nvext, and the finish reason as ``end``."""
    end = more.pop("end", None)
    nvext = {"token_offset": offset, "completion_token_ids": ids, **more}
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": end}
    return {"choices": [choice], "nvext": nvext}


FIRST = chunk(0, [], prompt_token_ids=[1], generation={"contract": "sha256:c"})
DONE = "[DONE]"
USAGE: dict[str, Any] = {"choices": [], "usage": {"completion_tokens": 2}}
BEGUN = "retry: 1\n" + events("g", 1, FIRST, chunk(0, [5], "a"))
REST = events("g", 3, chunk(1, [6], "b"), chunk(2, [], end="stop"), DONE)
HEAD = {"X-Generation-Id": "g"}
NEW = {"X-Generation-Id": "h"}
GONE = Reply(404, json.dumps({"error": {"code": "generation_not_found"}}))
ON = Reply(
    200,
    events(
        "h",
        1,
        chunk(1, [6], "b", prompt_token_ids=[1], resume={"prefix_tokens": 1}),
        chunk(2, [], end="stop"),
        DONE,
    ),
    NEW,
)
WHOLE = Reply(200, BEGUN + REST, HEAD)


def held(*ids: int) -> dict[str, Any]:
    """Return what the client looks at in a checkpoint."""
    return {"state": {"output": {"ids": list(ids)}}}


def interruption(**nvext: Any) -> dict[str, Any]:
    """Return the event of an early end."""
    error = {"code": "generation_interrupted", "message": "why", "type": "server_error"}
    return {"error": error, "nvext": {"resumable": True, "retry_after_ms": 1, **nvext}}


async def run(*urls: str, **fields: Any) -> Outcome:
    """Stream a chat to its end."""
    body: dict[str, Any] = {"messages": [], **fields}
    async with ResumableStream(urls, CHAT, body, "key", patience=QUICK) as stream:
        return await stream.complete()


def check(outcome: Outcome) -> None:
    """Assert that all has come, once."""
    assert outcome.token_ids == [5, 6]
    assert outcome.text == "ab"
    assert outcome.finish_reason == "stop"


async def test_what_was_missed_comes_from_where_it_broke(server: Server) -> None:
    """With the number of the last event, and the same key."""
    server.replies = [Reply(200, BEGUN, HEAD, cut=True), Reply(200, REST)]

    outcome = await run(server.url)

    check(outcome)
    assert (outcome.num_reconnects, outcome.num_resumes) == (1, 0)
    asked, again = server.requests
    assert (again.method, again.path) == ("GET", "/v1/generations/g/stream")
    assert again.last_event_id == "g:2"
    assert asked.authorization == again.authorization == "Bearer key"


async def test_another_frontend_is_asked(server: Server) -> None:
    """Who cannot be reached at all, or has no time, is passed over."""
    async with serving() as other:
        server.replies = [Reply(200, BEGUN, HEAD, cut=True), Reply(0)]
        other.replies = [Reply(503, "busy", {"Retry-After": "1"}), Reply(200, REST)]
        nobody = "http://127.0.0.1:1"

        outcome = await run(server.url, other.url, nobody)

    check(outcome)
    assert {one.last_event_id for one in other.requests} == {"g:2"}


@pytest.mark.parametrize("gone", [GONE, Reply(410, "{}"), Reply(204)])
async def test_where_nobody_has_it_one_goes_on_behind_the_ids(
    server: Server, gone: Reply
) -> None:
    """The same request, with all ids; the new generation's events have new numbers."""
    server.replies = [Reply(200, BEGUN, HEAD, cut=True), gone, ON]

    outcome = await run(server.url, seed=3)

    check(outcome)
    assert (outcome.num_reconnects, outcome.num_resumes) == (0, 1)
    assert outcome.claims == [{"prefix_tokens": 1}]
    asked = server.requests[-1].body
    assert (asked["seed"], asked["messages"], asked["stream"]) == (3, [], True)
    assert asked["nvext"]["resume_from"] == {
        "output_token_ids": [5],
        "prompt_token_ids": [1],
        "contract": "sha256:c",
    }


async def test_who_does_not_know_its_workers_yet_is_passed_over(server: Server) -> None:
    """A frontend that has just started: the other one has the events."""
    async with serving() as other:
        server.replies = [Reply(200, BEGUN, HEAD, cut=True), Reply(200, REST)]
        no_workers = Reply(503, "no worker", {"Retry-After": "1"})
        other.replies = [GONE, no_workers]

        outcome = await run(server.url, other.url)

    check(outcome)
    assert (outcome.num_reconnects, outcome.num_resumes) == (1, 0)


async def test_one_that_is_not_had_may_have_a_checkpoint(server: Server) -> None:
    """It is taken where it has the same ids."""
    error = {"error": {"code": "replay_window_lost"}, "nvext": {"checkpoint": held(5)}}
    gone = Reply(410, json.dumps(error))
    server.replies = [Reply(200, BEGUN, HEAD, cut=True), gone, ON]

    check(await run(server.url))

    asked = server.requests[-1].body
    assert asked["nvext"]["resume_from"] == {"checkpoint": held(5)}


async def test_an_interruption_is_gone_on_behind_at_once(server: Server) -> None:
    """Its events have come to their end: nobody is asked for more of them."""
    told = events("g", 3, interruption(reason="worker_lost", checkpoint=held(5)), DONE)
    server.replies = [Reply(200, BEGUN + told, HEAD), ON]

    check(await run(server.url))

    assert [one.method for one in server.requests] == ["POST", "POST"]
    asked = server.requests[-1].body
    assert asked["nvext"]["resume_from"] == {"checkpoint": held(5)}


@pytest.mark.parametrize("outlives", [False, True])
async def test_a_frontend_that_leaves_lets_it_go_on(
    server: Server, outlives: bool
) -> None:
    """What outlives that is followed: its events go on where they were."""
    told = events("g", 2, interruption(reason="draining", checkpoint=held(5)))
    rest = Reply(200, REST) if outlives else ON
    server.replies = [Reply(200, BEGUN + told, HEAD), rest]
    life = {"on_disconnect": "continue" if outlives else "cancel"}

    outcome = await run(server.url, nvext={"resumable": life})

    check(outcome)
    again = server.requests[-1]
    assert again.method == ("GET" if outlives else "POST")
    assert again.last_event_id == ("g:2" if outlives else None)
    assert (outcome.num_reconnects, outcome.num_resumes) == (outlives, not outlives)


@pytest.mark.parametrize("reason", ["cancelled", "taken_over"])
async def test_an_end_that_somebody_wanted_is_one(server: Server, reason: str) -> None:
    """What has come is kept."""
    told = events("g", 3, interruption(reason=reason, checkpoint=held(5)), DONE)
    server.replies = [Reply(200, BEGUN + told, HEAD)]

    async with ResumableStream([server.url], CHAT, {}, patience=QUICK) as stream:
        with pytest.raises(Refused) as caught:
            await stream.complete()

    assert caught.value.code == "generation_interrupted"
    assert stream.progress.token_ids == [5]
    assert stream.progress.checkpoint == held(5)


async def test_one_that_ended_with_its_connection(server: Server) -> None:
    """It is gone on behind: nobody wanted that."""
    nvext = {"reason": "disconnected", "checkpoint": held(5)}
    told = events("g", 3, interruption(**nvext), DONE)
    server.replies = [Reply(200, BEGUN, HEAD, cut=True), Reply(200, told), ON]

    check(await run(server.url))

    asked = server.requests[-1].body
    assert asked["nvext"]["resume_from"] == {"checkpoint": held(5)}


@pytest.mark.parametrize("nothing", [Reply(0), Reply(200, "", cut=True), Reply(502)])
async def test_before_anything_has_come_the_request_is_made_anew(
    server: Server, nothing: Reply
) -> None:
    """There is nothing to lose."""
    server.replies = [nothing, WHOLE]

    outcome = await run(server.url)

    check(outcome)
    assert (outcome.num_reconnects, outcome.num_resumes) == (0, 0)
    assert server.requests[0] == server.requests[1]


async def test_a_generation_that_was_only_named_is_asked_for(server: Server) -> None:
    """From its first event on; where it is gone, the request is made anew."""
    named = Reply(200, "id: g:1\ndata: {", HEAD, cut=True)
    server.replies = [named, Reply(200, BEGUN + REST), named, GONE, WHOLE]

    for num_reconnects in (1, 0):
        outcome = await run(server.url)
        check(outcome)
        assert outcome.num_reconnects == num_reconnects
    assert server.requests[1].last_event_id == "g:0"
    assert "resume_from" not in server.requests[-1].body["nvext"]


async def test_a_new_generation_that_breaks_is_asked_for(server: Server) -> None:
    """Not the one before it; and behind that, all ids of both."""
    text = events("h", 1, chunk(1, [6], "b", prompt_token_ids=[1]))
    third = chunk(2, [], prompt_token_ids=[1], end="stop")
    server.replies = [
        *(Reply(200, BEGUN, HEAD, cut=True), GONE, Reply(200, text, NEW, cut=True)),
        *(GONE, Reply(200, events("i", 1, third, DONE), {"X-Generation-Id": "i"})),
    ]

    outcome = await run(server.url)

    check(outcome)
    assert outcome.num_resumes == 2
    assert server.requests[3].last_event_id == "h:1"
    resume_from = server.requests[4].body["nvext"]["resume_from"]
    assert resume_from["output_token_ids"] == [5, 6]


END = events("g", 3, chunk(1, [6], "b"), chunk(2, [], end="stop"))


async def test_behind_the_end_nothing_is_missed(server: Server) -> None:
    """Without [DONE]; but the usage, where it was asked for: 204 says it is not there."""
    cut = Reply(200, BEGUN + END, HEAD, cut=True)
    server.replies = [
        cut,
        cut,
        Reply(204),
        cut,
        Reply(200, events("g", 5, USAGE, DONE)),
    ]
    wanted = {"include_usage": True}

    check(await run(server.url))
    for usage in (None, USAGE["usage"]):
        outcome = await run(server.url, stream_options=wanted)
        check(outcome)
        assert outcome.usage == usage


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, "invalid_resume"),
        (403, "checkpoint_forbidden"),
        (409, "sampling_mismatch"),
        (412, "output_hash_mismatch"),
        (422, "grammar_rejects_prefix"),
    ],
)
async def test_a_refusal_is_final(server: Server, status: int, code: str) -> None:
    """By its code, message and field; nothing is tried again."""
    error = {"code": code, "message": "differs", "param": "nvext.resume_from"}
    refusal = Reply(status, json.dumps({"error": error}))
    server.replies = [Reply(200, BEGUN, HEAD, cut=True), GONE, refusal]

    with pytest.raises(Refused) as caught:
        await run(server.url)

    found = caught.value
    assert (found.status, found.code, found.message, found.param) == (
        status, code, "differs", "nvext.resume_from"
    )  # fmt: skip


async def test_attempts_are_bounded(server: Server) -> None:
    """Those in a row that bring no id; the last failure is told."""
    patience = Patience(max_attempts=4, first_s=0.001, longest_asked_s=0.001)
    server.replies = [Reply(200, BEGUN, HEAD, cut=True), *[Reply(500, "oh")] * 3]

    async with ResumableStream([server.url], CHAT, {}, patience=patience) as stream:
        with pytest.raises(GaveUp, match="500"):
            await stream.complete()

    assert stream.progress.token_ids == [5]


async def test_an_id_renews_the_attempts(server: Server) -> None:
    """A link that breaks all the time brings everything in the end."""
    patience = Patience(max_attempts=4, first_s=0.001, longest_asked_s=0.001)
    busy = Reply(503, "busy")
    some = Reply(200, events("g", 3, chunk(1, [6], "b")), cut=True)
    last = Reply(200, events("g", 4, chunk(2, [], end="stop"), DONE))
    server.replies = [
        *(Reply(200, BEGUN, HEAD, cut=True), busy, busy, some),
        *(busy, busy, last),
    ]

    async with ResumableStream([server.url], CHAT, {}, patience=patience) as stream:
        check(await stream.complete())


@pytest.mark.parametrize(
    "rest", [events("g", 4, chunk(1, [6])), events("g", 3, chunk(0, [5]))]
)
async def test_a_gap_or_a_repeat_is_not_gone_on_behind(
    server: Server, rest: str
) -> None:
    """Whatever came next would be wrong, too."""
    server.replies = [Reply(200, BEGUN + rest, HEAD)]

    with pytest.raises(BadStream):
        await run(server.url)


async def test_a_server_without_such_streams_is_told(server: Server) -> None:
    """It has neither numbers nor ids."""
    server.replies = [Reply(200, 'data: {"choices": [{"delta": {}}]}\n\n')]

    with pytest.raises(BadStream, match="event ''"):
        await run(server.url)


async def test_silence_is_a_broken_connection() -> None:
    """A frozen frontend, a dead network: comments would come otherwise."""
    silent = asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers=HEAD)
        await response.prepare(request)
        await response.write(BEGUN.encode() if request.method == "POST" else b"")
        if request.method == "POST":
            await silent.wait()
        await response.write(REST.encode())
        return response

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        patience = Patience(first_s=0.001, longest_asked_s=0.01, silence_s=0.2)
        async with ResumableStream(
            [f"http://{host}:{port}"], CHAT, {}, patience=patience
        ) as stream:
            check(await stream.complete())
        assert stream.num_reconnects == 1
    finally:
        silent.set()
        await runner.cleanup()


async def test_another_process_goes_on_with_what_was_stored(server: Server) -> None:
    """A client that was restarted, too, misses nothing."""
    server.replies = [Reply(200, BEGUN, HEAD, cut=True), Reply(200, REST)]
    async with ResumableStream([server.url], CHAT, {}, patience=QUICK) as stream:
        async for body in stream:
            if body["choices"][0]["delta"]["content"]:
                break
    progress = Progress(**vars(stream.progress))

    async with ResumableStream([server.url], CHAT, {}, progress=progress) as stream:
        check(await stream.complete())


async def test_who_leaves_cancels_what_would_go_on(server: Server) -> None:
    """A generation that outlives its connection would go on for nobody."""
    server.replies = [Reply(200, BEGUN, HEAD, cut=True), Reply(200)]
    body = {"nvext": {"resumable": {"on_disconnect": "continue"}}}
    async with ResumableStream([server.url], CHAT, body, patience=QUICK) as stream:
        async for _ in stream:
            break

    told = server.requests[-1]
    assert (told.method, told.path) == ("POST", "/v1/generations/g/cancel")
