"""``/ui``: the page's files and headers, and what its data says of requests and workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
import pytest_asyncio

from support.stack import Stack, eventually, stack
from tokenwire.frontend import live
from tokenwire.frontend.live_files import FOLDER, PAGE_PATHS, POLICY, page_files
from tokenwire.frontend.share import Share
from tokenwire.protocol.messages import Role

PAIR = (Role.PREFILL, Role.DECODE)
SECRET = "xylophone"  # a word that no page may show
LONG = 2_000
SLOW = ("--step-ms", "50", "--prefill-tokens-per-s", "0")


@pytest_asyncio.fixture
async def served(tiny_model: Path) -> AsyncIterator[Stack]:
    """A pair whose steps take a while."""
    async with stack(tiny_model, PAIR, SLOW) as running:
        yield running


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let moments follow each other soon."""
    monkeypatch.setattr(live, "TICK_S", 0.02)


async def state(running: Stack) -> dict[str, Any]:
    """Return a moment behind this call: one that has just been made is told again."""
    asked_at = time.time()
    while True:
        reply = await running.get("/ui/state")
        assert reply.status == 200
        if reply.json["at"] > asked_at + 0.001:  # it is rounded
            return reply.json


async def seen(running: Stack, stage: str) -> dict[str, Any]:
    """Return the first moment with a request at *stage*."""
    moments: list[dict[str, Any]] = []

    async def look() -> None:
        while not (moments and moments[-1]["stages"][stage]):
            moments.append(await state(running))

    await asyncio.wait_for(look(), 60)
    return moments[-1]


@contextlib.asynccontextmanager
async def streaming(running: Stack, **body: Any) -> AsyncGenerator[str]:
    """Have a chat streamed; yields its response's id when its first event is there."""
    messages = [{"role": "user", "content": f"{SECRET} {SECRET}"}]
    fields = {"messages": messages, "max_tokens": LONG, "ignore_eos": True, **body}
    url = f"{running.url}/v1/chat/completions"
    async with running.client.post(url, json={"stream": True, **fields}) as answer:
        async for line in answer.content:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])["id"]
                return


class Markup(HTMLParser):
    """What a page's markup would have a browser run or load."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []
        self.files: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note files, and what a strict policy forbids."""
        given = dict(attrs)
        if tag == "style" or (tag == "script" and "src" not in given):
            self.faults.append(tag)
        self.faults += [name for name in given if name == "style" or name[:2] == "on"]
        source = given.get("src") or (given.get("href") if tag == "link" else None)
        if source:
            self.files.add(source)


# --- the files ---------------------------------------------------------------------------


async def test_the_page_and_its_files_are_served_strictly(served: Stack) -> None:
    """Each with its type and the policy; all that the page names is there."""
    page = await served.get("/ui")
    markup = Markup()
    markup.feed(page.text)
    names = {f"ui/{name}" for name in page_files()} - {"ui/index.html"}

    assert page.status == 200
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    assert not markup.faults
    assert markup.files <= names
    for path in ["/ui", *(f"/{name}" for name in names)]:
        reply = await served.get(path)
        assert reply.status == 200, path
        assert reply.headers["Content-Security-Policy"] == POLICY
        assert reply.headers["X-Content-Type-Options"] == "nosniff"
    assert {"/ui", "/ui/", *(f"/{name}" for name in names)} == PAGE_PATHS
    assert "'unsafe" not in POLICY
    assert "default-src 'none'" in POLICY


def test_inline_script_is_seen() -> None:
    """The check above can fail."""
    markup = Markup()
    markup.feed("<p onclick='a()' style='b'><script>c()</script><style>d</style>")
    assert markup.faults == ["onclick", "style", "script", "style"]


def test_no_module_writes_markup_or_names_another_host() -> None:
    """Text goes in as text; nothing is loaded from elsewhere."""
    sinks = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b"
        r"|new Function|srcdoc|javascript:"
    )
    for path in FOLDER.iterdir():
        text = path.read_text()
        assert not sinks.search(text), path
        hosts = set(re.findall(r"https?://[^\s\"'`)]+", text))
        assert hosts <= {"http://www.w3.org/2000/svg"}, path
        assert "import " not in text or not re.search(r"from \"(?!\./)", text), path


@pytest.mark.parametrize("script", sorted(FOLDER.glob("*.js")), ids=lambda p: p.name)
def test_every_import_is_a_file_of_the_page(script: Path) -> None:
    """A module that is not there would leave the page dead."""
    for name in re.findall(r"from \"\./([^\"]+)\"", script.read_text()):
        assert name in page_files(), f"{script.name} imports {name}"


async def test_a_file_that_is_known_is_not_sent_again(served: Stack) -> None:
    """By its entity tag; after an upgrade that is another one."""
    first = await served.get("/ui/app.js")
    tag = {"If-None-Match": first.headers["ETag"]}
    async with served.client.get(f"{served.url}/ui/app.js", headers=tag) as again:
        assert again.status == 304
        assert not await again.read()
    other = {"If-None-Match": '"another"'}
    async with served.client.get(f"{served.url}/ui/app.js", headers=other) as anew:
        assert anew.status == 200


@pytest.mark.parametrize(
    "path",
    ["/ui/none.js", "/ui/index.html", "/ui/..%2fserver.py", "/ui/%2e%2e/server.py"],
)
async def test_nothing_else_is_below_the_page(served: Stack, path: str) -> None:
    """Names are looked up in a table: no path of a client's is opened."""
    reply = await served.get(path)
    assert reply.status == 404


async def test_a_slash_behind_the_page_leads_to_it(served: Stack) -> None:
    """Its links stand beside it, also behind a proxy that serves it below a prefix."""
    url = f"{served.url}/ui/"
    async with served.client.get(url, allow_redirects=False) as answer:
        assert answer.status == 308
        assert answer.headers["Location"] == "../ui"
    assert (await served.get("/ui/")).status == 200


async def test_without_the_page_there_is_nothing_of_it(tiny_model: Path) -> None:
    """Neither files nor data."""
    async with stack(tiny_model, arguments=("--no-ui",)) as running:
        for path in ("/ui", "/ui/", "/ui/app.js", "/ui/state", "/ui/events"):
            assert (await running.get(path)).status == 404, path


# --- the data ----------------------------------------------------------------------------


async def test_workers_and_a_request_are_told_without_its_text(served: Stack) -> None:
    """Its stage, workers and tokens; enough of its id to know one's own by, and no more."""
    async with streaming(served, nvext={"resumable": True}) as response_id:
        moment = await seen(served, "decode")
        [request] = moment["requests"]
        text = json.dumps(moment)

        assert {(one["id"], one["role"]) for one in moment["workers"]} == {
            ("prefill-0", "prefill"),
            ("decode-1", "decode"),
        }
        assert response_id.startswith(request["id"])
        assert (
            len(response_id) - len(request["id"]) == 16
        )  # 64 bits that nobody is told
        assert (request["prefill"], request["decode"]) == ("prefill-0", "decode-1")
        assert request["kind"] == "chat"
        assert request["stream"]
        assert request["max_tokens"] == LONG
        assert request["prompt_tokens"] > len(SECRET)
        assert request["tokens"] > 0
        assert moment["inflight"] == 1
        assert response_id not in text
        assert SECRET not in text

    await eventually(lambda: not served.intake.visits)
    moment = await state(served)
    assert moment["requests"] == []
    assert not any(moment["stages"].values())


async def test_what_goes_where_is_counted_while_somebody_looks(
    served: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is no matter at all when nobody does."""
    monkeypatch.setattr(live, "FLOWS_LIFE_S", 3600.0)
    await served.complete(prompt="hello", max_tokens=2)
    assert served.pool.flows is None

    async with served.client.get(f"{served.url}/ui/events") as watching:
        await watching.content.readline()
        await served.complete(prompt="hello again", max_tokens=2)
        moment = await state(served)
        assert moment["handovers"] == [
            {"prefill": "prefill-0", "decode": "decode-1", "count": 1}
        ]
        assert [one["sent"] for one in moment["workers"]] == [1, 1]
        assert moment["tokens"] >= 4
    monkeypatch.setattr(live, "FLOWS_LIFE_S", 0.0)
    served.live._forget()  # pyright: ignore[reportPrivateUsage] - the timer's turn
    assert served.pool.flows is None


SIZES = ("--max-num-seqs", "1", "--max-model-len", "65536")


@pytest.mark.parametrize(
    ("roles", "options", "stage"),
    [
        (PAIR, ("--step-ms", "0", "--prefill-tokens-per-s", "1"), "prefill"),
        (PAIR, ("--step-ms", "0", "--transfer-ms", "60000"), "handover"),
        ((Role.AGGREGATED,), ("--step-ms", "50", *SIZES), "queued"),
    ],
)
async def test_a_request_says_what_it_waits_for(
    tiny_model: Path, roles: tuple[Role, ...], options: tuple[str, ...], stage: str
) -> None:
    """Its prompt to be computed, its KV to be read, or room."""
    async with stack(tiny_model, roles, options) as running:
        asked = [
            asyncio.create_task(
                running.complete(prompt=SECRET, max_tokens=900, ignore_eos=True)
            )
            for _ in range(5)
        ]
        moment = await seen(running, stage)
        found = {one["stage"]: one for one in moment["requests"]}[stage]
        if stage == "prefill":
            assert found["prefill"] == "prefill-0"
            assert "decode" not in found  # it is chosen when the prompt is computed
        if stage == "queued":
            assert "decode" not in found
        for task in asked:
            task.cancel()
        await asyncio.wait(asked)


async def test_a_body_that_has_not_come_is_waited_for(served: Stack) -> None:
    """Nothing else is known of it."""
    host, port = served.url.removeprefix("http://").split(":")
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\n"
        "Content-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    )
    with socket.create_connection((host, int(port))) as slow:
        slow.sendall(head.encode())
        moment = await seen(served, "receiving")
        [request] = moment["requests"]
        assert request.keys() <= {"id", "kind", "stage", "age_s"}
        assert request["kind"] == "completion"


async def test_watchers_are_bounded_and_leave_nothing(
    served: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more is told so; one that has left makes room."""
    monkeypatch.setattr(live, "MAX_WATCHERS", 1)
    url = f"{served.url}/ui/events"
    for _ in range(2):
        async with served.client.get(url) as watching:
            assert watching.headers["Content-Type"].startswith("text/event-stream")
            for _ in range(2):  # moments come one after the other
                line = await watching.content.readline()
                assert json.loads(line.removeprefix(b"data: "))["about"]["process"] == 0
                assert await watching.content.readline() == b"\n"
            refused = await served.get("/ui/events")
            assert refused.status == 429
            assert refused.error["code"] == "too_many_watchers"
            assert "Retry-After" in refused.headers
        await eventually(lambda: not served.live.num_watchers, "it has left")


class Others:
    """The other processes of a frontend, which answer when they are told to."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.may_answer = asyncio.Event()

    async def page(self, kind: str) -> bytes:
        """Return what they have."""
        assert kind == "live"
        self.num_asked += 1
        await self.may_answer.wait()
        return b"[]"


async def test_one_look_is_for_all_who_wait_for_it(
    served: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while other processes are asked; who leaves has the next one look."""
    monkeypatch.setattr(live, "TICK_S", 60.0)
    others = Others()
    served.live._share = cast("Share", others)  # pyright: ignore[reportPrivateUsage]
    looks = [
        asyncio.create_task(served.live._now())  # pyright: ignore[reportPrivateUsage]
        for _ in range(5)
    ]
    await eventually(lambda: others.num_asked > 0)
    looks[0].cancel()
    await eventually(looks[0].done)
    others.may_answer.set()

    assert len(set(await asyncio.gather(*looks[1:]))) == 1
    assert others.num_asked == 2


async def test_a_watcher_does_not_hold_up_the_end(tiny_model: Path) -> None:
    """The stream ends, whole, when the frontend does."""
    async with stack(tiny_model) as running:
        watching = await running.client.get(f"{running.url}/ui/events")
        await watching.content.readline()
        await running.app.shutdown()
        with contextlib.suppress(aiohttp.ClientError):
            async for _ in watching.content:
                pass
        assert watching.content.at_eof()
        await eventually(lambda: not running.live.num_watchers)
