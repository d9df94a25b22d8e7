"""API keys over HTTP: who is let in, what each key may use, and what is told of it."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from api_document import ApiDocument
from openapi_spec_validator import validate

from support.awake import within
from support.keyed import Keyed, with_key
from support.stack import Reply, Stack, eventually, stack
from tokenwire.frontend import live
from tokenwire.frontend.access import OPEN_ROUTES
from tokenwire.frontend.live_files import PAGE_PATHS
from tokenwire.protocol.api_keys import ApiKey, KeyLimits, digest_of, line_of
from tokenwire.protocol.messages import Role

ALICE, BOB = with_key("key-of-alice"), with_key("key-of-bob")
BODY: dict[str, Any] = {"prompt": [5], "max_tokens": 2}
WRONG = {
    "none": {},
    "empty": {"Authorization": ""},
    "scheme alone": {"Authorization": "Bearer"},
    "another's": with_key("key-of-nobody"),
    "longer": with_key("key-of-alicee"),
    "other scheme": {"Authorization": "Basic key-of-alice"},
    "bare": {"Authorization": "key-of-alice"},
    "a name": with_key("alice"),
    "a hash": with_key(digest_of("key-of-alice").hex()),
    "zero byte's name": {"Authorization": "\\0alice"},
    "other header": {"api-key": "key-of-alice", "X-API-Key": "key-of-alice"},
}


@pytest.fixture
def keys(tmp_path: Path) -> Keyed:
    """Two keys without limits."""
    return Keyed(tmp_path / "keys", ["alice", "bob"])


@pytest_asyncio.fixture
async def locked(tiny_model: Path, keys: Keyed) -> AsyncIterator[Stack]:
    """A pair behind a frontend with keys."""
    roles = (Role.PREFILL, Role.DECODE)
    async with stack(tiny_model, roles, arguments=keys.arguments) as running:
        yield running
        await running.idle()


async def ask(
    served: Stack, method: str, path: str, headers: dict[str, str], body: Any = None
) -> Reply:
    """Send a request of any method, and read the whole answer."""
    sent = {"Content-Type": "application/json", **headers}
    data = None if body is None else json.dumps(body).encode()
    async with served.client.request(
        method, served.url + path, headers=sent, data=data
    ) as answer:
        return Reply(answer.status, answer.headers, await answer.text())


def routes_of(served: Stack) -> list[tuple[str, str]]:
    """Return every route that is served, open ones apart, and some that are not."""
    known = [
        (route.method, route.resource.canonical)
        for route in served.app.router.routes()
        if route.resource is not None
    ]
    closed = [
        (method, path)
        for method, path in known
        if path not in OPEN_ROUTES or method not in {"GET", "HEAD"}
        if path != "/ui/events"  # which goes on and on: see below
    ]
    assert len(closed) > 15
    more = [("GET", "/nowhere"), ("POST", "/health"), ("OPTIONS", "/v1/models")]
    return [*closed, *more]


def filled(path: str) -> str:
    """Return a path for a route's pattern."""
    return path.replace("{id}", "chatcmpl-1").replace("{model}", "tiny")


async def outcomes(served: Stack) -> dict[str, float]:
    """Return what was counted of keys, by labels."""
    text = (await ask(served, "GET", "/metrics", ALICE)).text
    lines = [line for line in text.splitlines() if line.startswith("tokenwire_api_key")]
    pairs = (line.removeprefix("tokenwire_api_key_").rpartition(" ") for line in lines)
    return {name: float(value) for name, _, value in pairs}


# --- who is let in -----------------------------------------------------------------------


@pytest.mark.parametrize("case", WRONG)
async def test_no_route_is_answered_without_a_key(locked: Stack, case: str) -> None:
    """Whatever stands in a key's place; not even whether there is such a route."""
    for method, path in routes_of(locked):
        reply = await ask(locked, method, filled(path), WRONG[case], BODY)
        assert reply.status == 401, (method, path)
        assert reply.headers["WWW-Authenticate"].startswith("Bearer")
        if method != "HEAD":
            assert reply.error["code"] == "invalid_api_key"
            assert set(reply.error) == {"message", "type", "param", "code"}
            assert "key-of" not in reply.text
    assert all(worker.idle for worker in locked.workers)


async def test_who_looks_at_the_root_is_told_where_to_go(locked: Stack) -> None:
    """A person with a browser has no key there; nothing else is told so."""
    reply = await locked.get("/")
    assert reply.status == 404
    assert "/ui is the live page, /openapi.json has all" in reply.error["message"]
    assert (await locked.post("/", BODY)).status == 401
    assert (await locked.get("/nowhere")).status == 401


async def test_every_route_is_answered_with_a_key(locked: Stack) -> None:
    """As it would be without keys: none of these is a 401."""
    for method, path in routes_of(locked):
        reply = await ask(locked, method, filled(path), ALICE, BODY)
        assert reply.status not in {401, 403, 500}, (method, path)
    assert (await locked.post("/v1/completions", BODY, ALICE)).status == 200
    upper = {"Authorization": "BEARER key-of-alice"}
    assert (await locked.post("/v1/completions", BODY, upper)).status == 200


async def test_probes_need_no_key_and_are_told_little(locked: Stack) -> None:
    """Neither names nor addresses of workers; who has a key is told all."""
    for path in sorted(OPEN_ROUTES):
        reply = await locked.get(path)
        assert reply.status == 200, path
        assert "decode-0" not in reply.text
        assert "tcp://" not in reply.text
    assert (await locked.get("/health")).json == {"status": "ok"}
    wrong = await ask(locked, "GET", "/health", with_key("no"))
    assert (wrong.status, wrong.json) == (200, {"status": "ok"})
    assert len((await ask(locked, "GET", "/health", BOB)).json["instances"]) == 2


async def test_metrics_have_a_listener_without_keys(locked: Stack) -> None:
    """Beside probes, and nothing else; ``/health`` is as brief there."""
    async with locked.client.get(f"{locked.probes}/metrics") as answer:
        assert answer.status == 200
        assert "tokenwire_requests_inflight" in await answer.text()
    async with locked.client.get(f"{locked.probes}/health") as answer:
        assert await answer.json() == {"status": "ok"}
    for path in ("/v1/models", "/version", "/openapi.json"):
        async with locked.client.get(locked.probes + path) as answer:
            assert answer.status == 404


async def test_a_body_without_a_key_is_not_waited_for(
    locked: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer comes before the body, of which nothing is read nor unpacked."""
    unpacked: list[bytes] = []

    def feed_data(buffer: object, data: bytes, size: int) -> bool:
        unpacked.append(data)
        return False

    monkeypatch.setattr("aiohttp.http_parser.DeflateBuffer.feed_data", feed_data)
    host, port = locked.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 60000000\r\n"
    head += "Content-Encoding: gzip\r\nContent-Type: application/json\r\n\r\n"
    writer.write(head.encode())
    async with within(20):
        answer = await reader.readuntil(b"}}")
        assert answer.startswith(b"HTTP/1.1 401")
        assert b"Connection: close" in answer
        writer.write(gzip.compress(b"a" * 1_000_000))
        await writer.drain()
        assert (await locked.get("/live")).status == 200  # what was sent has come
        writer.write_eof()
        assert not await reader.read()
    writer.close()
    assert not unpacked


async def test_openais_client_is_told_what_it_knows(locked: Stack) -> None:
    """By the exceptions of its own; with a right key, it is served."""
    base = f"{locked.url}/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key="key-of-alice") as client:
        done = await client.completions.create(
            model="tiny", prompt="a", max_tokens=2, user="me"
        )
        assert done.usage is not None
        assert done.usage.completion_tokens == 2
    async with openai.AsyncOpenAI(base_url=base, api_key="wrong") as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            await client.models.list()
        assert caught.value.code == "invalid_api_key"


async def test_keys_change_under_requests(tiny_model: Path, keys: Keyed) -> None:
    """A key that is gone is out, a new one is in; what runs goes on."""
    body = {"prompt": [5], "max_tokens": 1_000, "stream": True}
    options = ("--step-ms", "20")
    async with stack(tiny_model, options=options, arguments=keys.arguments) as running:
        url = f"{running.url}/v1/completions"
        async with running.client.post(url, json=body, headers=ALICE) as answer:
            await answer.content.readline()
            keys.write([line_of(ApiKey("carol", digest_of("c"), KeyLimits()))])

            async def is_out() -> bool:
                reply = await running.post("/tokenize", {"prompt": "a"}, ALICE)
                return reply.status == 401

            async with within(20):
                while not await is_out():
                    await asyncio.sleep(0.05)
            new = with_key("c")
            assert (await running.post("/v1/completions", BODY, new)).status == 200
            assert running.intake.give_up, "what ran was ended"
        await running.idle()


async def test_the_document_says_where_a_key_is_needed(locked: Stack) -> None:
    """``/openapi.json``, to who has one; its 401 is the one that is answered."""
    document = (await ask(locked, "GET", "/openapi.json", ALICE)).json
    validate(document)
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert ("security" in operation) == (path not in OPEN_ROUTES), path
    described = ApiDocument(document)
    reply = await locked.post("/v1/completions", BODY)
    kind = reply.headers["Content-Type"]
    assert not described.answer_faults(
        "POST", "/v1/completions", reply.status, kind, reply.text
    )


# --- whose a thing is --------------------------------------------------------------------


async def test_a_generation_is_its_key_names(locked: Stack, keys: Keyed) -> None:
    """Nobody else finds it; whoever has another key of that name does."""
    keys.add("alice", "second")
    keys_changed = with_key("second")
    ask_for: dict[str, Any] = {"prompt": [5], "max_tokens": 4, "stream": True}
    ask_for["nvext"] = {"resumable": {"on_disconnect": "continue"}}
    reply = await locked.post("/v1/completions", ask_for, ALICE)
    path = f"/v1/generations/{(reply.events[0].body or {})['id']}"

    async with within(20):  # until the second key is read
        while (await ask(locked, "GET", path, keys_changed)).status != 200:
            await asyncio.sleep(0.05)
    for who, status in [(ALICE, 200), (BOB, 404), ({}, 401)]:
        assert (await ask(locked, "GET", path, who)).status == status
        stream = await ask(locked, "GET", f"{path}/stream", who)
        assert stream.status == status
    assert (await ask(locked, "DELETE", path, BOB)).status == 404
    assert (await ask(locked, "DELETE", path, keys_changed)).status == 200


# --- what a key may use ------------------------------------------------------------------


@pytest.fixture
def limited(keys: Keyed) -> dict[str, dict[str, str]]:
    """Keys that have used up one limit each, or will at once."""
    return {
        "requests": keys.add("requests", requests_per_minute=1),
        "tokens": keys.add("tokens", tokens_per_minute=4),
        "concurrency": keys.add("concurrency", concurrency=1),
        "prompt": keys.add("prompt", tokens_per_minute=1_000),
    }


FREES = {("DELETE", "/v1/generations/{id}"), ("POST", "/v1/generations/{id}/cancel")}
"""What makes room is no matter of how many run."""


@pytest.mark.parametrize("limit", ["requests", "tokens", "concurrency"])
async def test_no_route_is_answered_over_a_limit(
    limited: dict[str, dict[str, str]], tiny_model: Path, keys: Keyed, limit: str
) -> None:
    """429 with ``Retry-After``, the headers of OpenAI's limits, and no body read."""
    key = limited[limit]
    options = ("--step-ms", "20")
    async with stack(tiny_model, options=options, arguments=keys.arguments) as running:
        long = {"prompt": [5], "max_tokens": 1_000, "stream": True}
        first = long if limit == "concurrency" else {**BODY, "prompt": [5] * 9}
        running_one = asyncio.create_task(running.post("/v1/completions", first, key))
        if limit == "concurrency":
            await eventually(lambda: bool(running.intake.give_up))
        else:
            assert (await running_one).status == 200
        for method, path in routes_of(running):
            reply = await ask(running, method, filled(path), key)
            if limit == "concurrency" and (method, path) in FREES:
                assert reply.status == 404
                continue
            assert reply.status == 429, (method, path)
            assert int(reply.headers["Retry-After"]) >= 1
            if method != "HEAD":
                assert reply.error["type"] == "rate_limit_error"
                assert reply.error["code"].endswith("_limit_exceeded")
        assert (await running.post("/v1/completions", BODY, ALICE)).status == 200
        running_one.cancel()
        await asyncio.gather(running_one, return_exceptions=True)
        await running.idle()
        if limit == "concurrency":
            await eventually(lambda: not running.intake.give_up)
            assert (await running.post("/v1/completions", BODY, key)).status == 200
        counted = await outcomes(running)
        name = f'requests_total{{key="{limit}",outcome="{limit}"}}'
        assert counted[name] >= len(routes_of(running)) - len(FREES)


async def test_the_live_page_is_open_and_its_data_is_not(
    limited: dict[str, dict[str, str]], locked: Stack
) -> None:
    """Whoever watches has a key, and may do something else with it meanwhile."""
    assert PAGE_PATHS <= OPEN_ROUTES
    for path in ("/ui/state", "/ui/events"):
        for headers in ({}, with_key("no")):
            reply = await ask(locked, "GET", path, headers)
            assert reply.status == 401, path
    assert "prefill-0" in (await ask(locked, "GET", "/ui/state", ALICE)).text
    one = limited["concurrency"]
    async with locked.client.get(f"{locked.url}/ui/events", headers=one) as watching:
        assert watching.status == 200
        await watching.content.readline()
        assert (await locked.post("/v1/completions", BODY, one)).status == 200


async def test_no_key_goes_before_others_by_its_own_word(
    tiny_model: Path, keys: Keyed
) -> None:
    """Only as far as its line says; later than others it may always be."""
    urgent = keys.add("urgent", urgency=5)
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    routes: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", BODY),
        ("/v1/chat/completions", chat),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {}}),
    ]
    async with stack(tiny_model, arguments=keys.arguments) as running:
        for key, priority, status in (
            (ALICE, -1, 400),
            (ALICE, -(2**63), 400),
            (ALICE, 0, 200),
            (ALICE, 7, 200),
            (urgent, -5, 200),
            (urgent, -6, 400),
        ):
            for path, fields in routes:
                reply = await running.post(path, {**fields, "priority": priority}, key)
                assert reply.status == status, (path, priority)
                if status == 400:
                    assert reply.error["param"] == "priority"


async def test_one_key_does_not_keep_other_pages_dark(
    locked: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a part of the watchers; others go on to be let in."""
    monkeypatch.setattr(live, "MAX_WATCHERS_OF_KEY", 1)
    url = f"{locked.url}/ui/events"
    for _ in range(2):
        async with locked.client.get(url, headers=ALICE) as first:
            assert first.status == 200
            refused = await ask(locked, "GET", "/ui/events", ALICE)
            assert (refused.status, refused.error["code"]) == (429, "too_many_watchers")
            async with locked.client.get(url, headers=BOB) as second:
                assert second.status == 200
        await eventually(lambda: not locked.live.num_watchers, "they have left")


async def test_what_is_left_is_told(
    limited: dict[str, dict[str, str]], tiny_model: Path, keys: Keyed
) -> None:
    """In the headers of every answer, streams too; and nothing to keys without limits."""
    async with stack(tiny_model, arguments=keys.arguments) as running:
        body = {**BODY, "prompt": [5] * 9}
        for stream in (False, True):
            reply = await running.post(
                "/v1/completions", {**body, "stream": stream}, limited["prompt"]
            )
            assert reply.headers["x-ratelimit-limit-tokens"] == "1000"
            left = int(reply.headers["x-ratelimit-remaining-tokens"])
            assert 900 < left <= 991
            assert reply.headers["x-ratelimit-reset-tokens"].endswith("s")
            assert "x-ratelimit-limit-requests" not in reply.headers
        free = await running.post("/v1/completions", body, ALICE)
        assert not [name for name in free.headers if name.startswith("x-ratelimit")]


async def test_keys_are_counted_by_name(locked: Stack) -> None:
    """Requests and tokens; a wrong key has no name there, and no key is to be seen."""
    await locked.post("/v1/completions", {**BODY, "prompt": [5] * 9}, ALICE)
    await locked.post("/v1/completions", BODY, with_key("wrong"))
    await locked.post("/v1/completions", BODY)
    counted = await outcomes(locked)
    assert counted['requests_total{key="",outcome="invalid"}'] == 1
    assert counted['requests_total{key="",outcome="missing"}'] == 1
    assert counted['tokens_total{key="alice",kind="prompt"}'] == 9
    assert counted['tokens_total{key="alice",kind="generation"}'] == 2
    assert not [name for name in counted if "key-of" in name or "bob" in name]


@pytest.mark.parametrize("case", ["bad id", "left"])
async def test_what_had_no_turn_is_not_paid_for(
    limited: dict[str, dict[str, str]], tiny_model: Path, keys: Keyed, case: str
) -> None:
    """However it ended before a worker had it; its prompt is not computed."""
    options = ("--step-ms", "20", "--max-num-seqs", "1")
    async with stack(tiny_model, options=options, arguments=keys.arguments) as running:
        key, url = limited["prompt"], "/v1/completions"
        body = {"prompt": [5] * 100, "max_tokens": 2}
        if case == "bad id":
            headers = {**key, "X-Request-Id": "a b"}
            assert (await running.post(url, body, headers)).status == 400
        else:
            long = {"prompt": [6], "max_tokens": 200}
            busy = [
                asyncio.create_task(running.post(url, long, ALICE)) for _ in range(4)
            ]
            await eventually(lambda: running.intake.num_waiting == 1)
            waiting = asyncio.create_task(running.post(url, body, key))
            await eventually(lambda: running.intake.num_waiting == 2)
            for task in (waiting, *busy):
                task.cancel()
            await asyncio.gather(waiting, *busy, return_exceptions=True)
            await running.idle()
        reply = await ask(running, "GET", "/v1/models", key)
        assert int(reply.headers["x-ratelimit-remaining-tokens"]) > 990


async def test_what_waits_for_a_slow_client_is_paid_for(
    tiny_model: Path, keys: Keyed
) -> None:
    """Else who reads nothing, and then leaves, would have had most of it for nothing."""
    key = keys.add("slow", tokens_per_minute=100_000)
    options = ("--step-ms", "0", "--tokens-per-step", "500", "--max-model-len", "8192")
    async with stack(tiny_model, options=options, arguments=keys.arguments) as running:
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": "hello"}],
            "n": 2,
            "max_tokens": 3_500,
            "ignore_eos": True,
            "stream": True,
            "logprobs": True,
            "top_logprobs": 20,  # 12 MB: the kernel takes 4
        }
        url = f"{running.url}/v1/chat/completions"
        async with running.client.post(url, json=body, headers=key) as answer:
            assert answer.status == 200
            [visit] = running.intake.visits
            session = visit.session
            assert session is not None
            await eventually(lambda: session.num_made == 7_000)
            assert session.num_tokens < 7_000
        await eventually(lambda: not running.intake.visits)
        reply = await ask(running, "GET", "/v1/models", key)
        assert int(reply.headers["x-ratelimit-remaining-tokens"]) < 94_000


async def test_a_generation_without_its_client_is_paid_for(
    limited: dict[str, dict[str, str]], tiny_model: Path, keys: Keyed
) -> None:
    """Else who leaves at once would have it for nothing."""
    body: dict[str, Any] = {"prompt": [5], "max_tokens": 900, "stream": True}
    body["nvext"] = {"resumable": {"on_disconnect": "continue"}}
    options = ("--step-ms", "20")
    async with stack(tiny_model, options=options, arguments=keys.arguments) as running:
        url = f"{running.url}/v1/completions"
        async with running.client.post(
            url, json=body, headers=limited["prompt"]
        ) as answer:
            await answer.content.readline()
        await eventually(lambda: not running.intake.give_up)
        reply = await ask(running, "GET", "/v1/models", limited["prompt"])
        assert int(reply.headers["x-ratelimit-remaining-tokens"]) < 120
