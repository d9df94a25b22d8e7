"""A line for each request at its end, and nothing of what clients wrote in any."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.keyed import Keyed, with_key
from support.stack import Stack, eventually, stack
from tokenwire.frontend.access_log import MAX_PROMPT_CHARS
from tokenwire.protocol.log_lines import JsonLines, TextLines
from tokenwire.protocol.messages import Role

ON = ("--access-log",)
SECRET = "xyzzy-marker"
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"


def lines(
    caplog: pytest.LogCaptureFixture, name: str = "access"
) -> list[dict[str, Any]]:
    """Return the lines, each as JSON has it."""
    formatter = JsonLines({})
    records = [one for one in caplog.records if one.name == f"tokenwire.{name}"]
    return [json.loads(formatter.format(one)) for one in records]


@pytest.fixture(autouse=True)
def _all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)


async def served_once(
    model: Path, arguments: Sequence[str], path: str, body: Any, **headers: str
) -> str:
    """Serve one request; return its answer."""
    async with stack(model, arguments=arguments) as served:
        return (await served.post(path, body, headers)).text


async def test_a_line_says_who_asked_and_what_it_took(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On one line, by the names of the answer's usage."""
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    headers = {
        "X-Request-Id": "mine-1",
        "Authorization": "Bearer sk-secret",
        "traceparent": TRACEPARENT,
    }
    answer = await served_once(tiny_model, ON, "/v1/chat/completions", body, **headers)
    [line] = lines(caplog)
    whole = json.loads(answer)
    assert line.pop("time")
    assert 0 < line.pop("ttft_s") <= line.pop("duration_s")
    client = line.pop("client")
    assert client.startswith("#")
    assert len(client) == 13
    assert line == {
        "level": "info",
        "logger": "tokenwire.access",
        "message": "request",
        "method": "POST",
        "route": "/v1/chat/completions",
        "status": 200,
        "client_request_id": "mine-1",
        "trace_id": TRACEPARENT[3:35],
        "request_id": whole["id"],
        "model": "tiny",
        "prompt_tokens": whole["usage"]["prompt_tokens"],
        "completion_tokens": 3,
        "cached_tokens": 0,
        "finish_reason": "length",
        "workers": ["aggregated-0"],
        "sent_bytes": len(answer.encode()),
    }
    assert "sk-secret" not in caplog.text


async def test_a_stream_has_the_same_line(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With the bytes that were sent, and both workers of a pair."""
    roles = (Role.PREFILL, Role.DECODE)
    async with stack(tiny_model, roles, arguments=ON) as served:
        reply = await served.complete(prompt=[5, 6], max_tokens=4, stream=True)
    [line] = lines(caplog)
    assert (line["status"], line["completion_tokens"]) == (200, 4)
    assert line["workers"] == ["prefill-0", "decode-1"]
    assert line["client"] == "127.0.0.1"
    framing = len(f"{len(reply.text):x}") + 4  # at least: of one chunk
    assert line["sent_bytes"] >= len(reply.text) + framing


@pytest.mark.parametrize("roles", [(Role.AGGREGATED,), (Role.PREFILL, Role.DECODE)])
async def test_a_stop_string_ends_a_line_as_any_end_does(
    tiny_model: Path, caplog: pytest.LogCaptureFixture, roles: tuple[Role, ...]
) -> None:
    """Also where no worker is waited for, which would call it an abort."""
    async with stack(tiny_model, roles, arguments=ON) as served:
        free = await served.complete(prompt=[5, 6], max_tokens=20)
        stop = free.json["choices"][0]["text"][3:5]
        await served.complete(prompt=[5, 6], max_tokens=20, stop=stop)
    whole, line = lines(caplog)
    assert line["finish_reason"] == "stop"
    assert line["workers"] == whole["workers"]
    assert 0 < line["ttft_s"] <= line["duration_s"]


async def test_refusals_have_a_line_and_probes_have_none(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where they fail: a cluster asks each second until a worker is there."""
    async with stack(tiny_model, arguments=ON) as served:
        await served.complete(prompt=[5], max_tokens=0)
        await served.get("/nowhere")
        served.pool.set_endpoints([])
        await eventually(lambda: not served.pool.ready)
        for path in ("/live", "/ready", "/health", "/metrics"):
            await served.get(path)
    seen = [(one["route"], one["status"], one.get("error")) for one in lines(caplog)]
    assert seen == [
        ("/v1/completions", 400, "invalid_request_error"),
        ("unknown", 404, "invalid_request_error"),
    ]


async def test_a_key_is_told_by_its_name(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Who has none is told by a hash of what it sent, and refusals have lines, too."""
    keys = Keyed(tmp_path / "keys", ["alice"])
    async with stack(tiny_model, arguments=[*ON, *keys.arguments]) as served:
        for key in ("key-of-alice", "key-of-nobody"):
            body = {"prompt": [5], "max_tokens": 1}
            await served.post("/v1/completions", body, with_key(key))
    first, second = lines(caplog)
    assert (first["client"], first["status"]) == ("alice", 200)
    assert (second["status"], second["error"]) == (401, "invalid_api_key")
    assert second["client"].startswith("#")
    assert "key-of" not in caplog.text


@pytest.mark.parametrize("is_set", [True, False])
async def test_the_admin_plane_has_lines(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, is_set: bool
) -> None:
    """Of who changes the model, and of who may not; its key is in none of them."""
    path, key = tmp_path / "key", "k3y-of-the-admin-plane"
    path.write_text(key)
    path.chmod(0o600)
    arguments = [*ON, "--admin-key-file", str(path)] if is_set else ON
    async with stack(tiny_model, arguments=arguments) as served:
        for given, status in ((key, 200), ("another", 401 if is_set else 200)):
            async with served.client.post(
                f"{served.admin}/pause?mode=keep",
                headers={**with_key(given), "traceparent": TRACEPARENT},
            ) as answer:
                assert answer.status == status
        async with served.client.get(f"{served.admin}/health"):
            pass
    first, second = lines(caplog)
    assert (first["method"], first["route"], first["status"]) == ("POST", "/pause", 200)
    assert first["trace_id"] == TRACEPARENT[3:35]
    assert second["status"] == (401 if is_set else 200)
    assert (first["client"] == "admin") == is_set
    assert second["client"].startswith("#")
    assert key not in caplog.text


async def test_a_client_that_leaves_has_a_line(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """499 before an answer began, else the status that it had; with what came so far."""
    slow = ("--step-ms", "20")
    async with stack(tiny_model, options=slow, arguments=ON) as served:
        url = served.url + "/v1/completions"
        body = {"prompt": [5], "max_tokens": 500, "stream": True}
        async with served.client.post(url, json=body) as answer:
            await answer.content.readline()
        await served.idle()
        whole = asyncio.create_task(served.complete(prompt=[5], max_tokens=500))
        await eventually(lambda: served.workers[0].service.num_requests == 1)
        whole.cancel()
        await eventually(lambda: len(lines(caplog)) == 2, "both lines")
    first, second = lines(caplog)
    assert (first["status"], second["status"]) == (200, 499)
    assert first["error"] == second["error"] == "client_left"
    assert 0 < first["completion_tokens"] < 500


async def test_without_the_option_there_is_none(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor anything else about a request that went well."""
    await served_once(tiny_model, (), "/v1/completions", {"prompt": [5]})
    assert not lines(caplog)
    assert not [
        one
        for one in caplog.records
        if one.levelno >= logging.INFO and one.name.startswith("tokenwire.frontend.s")
    ]


async def everything(served: Stack) -> None:
    """Ask in many ways, each with the marker in what a client writes."""
    text = f"{SECRET} hello"
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
    posts: list[tuple[str, Any]] = [
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", {**chat, "stream": True, "n": 2}),
        ("/v1/chat/completions", {**chat, "max_tokens": text}),
        ("/v1/chat/completions", {**chat, text: 1}),
        ("/v1/chat/completions", {**chat, "model": text}),
        ("/v1/chat/completions", {**chat, "user": text, "stop": [text]}),
        ("/v1/chat/completions", json.dumps(chat).encode()[:-3]),
        ("/v1/chat/completions", {**chat, "response_format": {"type": text}}),
        ("/v1/completions", {"prompt": text, "echo": True, "max_tokens": 1}),
        ("/v1/completions", {"prompt": [10**9], "user": text}),
        ("/v1/completions", {"prompt": text, "cache_salt": text, "max_tokens": 1}),
        ("/v1/completions", {"prompt": text, "nvext": {"resumable": True}}),
        ("/tokenize", {"prompt": text}),
        ("/tokenize", {"prompt": text, text: text}),
        (f"/{SECRET}", {}),
    ]
    for path, body in posts:
        await served.post(path, body)
    host, _, port = served.url.removeprefix("http://").partition(":")
    for line in (f"GET /{SECRET}\n\n", f"GET / HTTP/1.1\r\n{SECRET} x\r\n\r\n"):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(line.encode())
        assert await reader.read()
        writer.close()
    for name in ("X-Request-Id", "X-Session-ID", "traceparent", "Content-Type"):
        await served.post("/v1/chat/completions", chat, {name: text})


@pytest.mark.parametrize("prompts", [False, True])
async def test_nothing_that_clients_write_is_logged(
    tiny_model: Path, caplog: pytest.LogCaptureFixture, *, prompts: bool
) -> None:
    """On no level and in no format, on either side; unless it was asked for."""
    asked = ("--log-prompts",) if prompts else ()
    slow, arguments = ("--step-ms", "2"), [*ON, *asked]
    async with stack(tiny_model, options=slow, arguments=arguments) as served:
        await everything(served)
        # One whose worker sends it away has lines of its own, too.
        long = "x" * MAX_PROMPT_CHARS
        lost = asyncio.create_task(served.chat(SECRET, max_tokens=200, user=long))
        service = served.workers[0].service
        await eventually(lambda: service.num_requests == 1)
        service.evict_all()
        await eventually(lambda: "goes on elsewhere" in caplog.text)
        lost.cancel()
    told = lines(caplog, "prompts")
    assert bool(told) == prompts
    if prompts:
        assert all(SECRET in one["body"] for one in told[:2])
        assert max(len(one["body"]) for one in told) == MAX_PROMPT_CHARS
    written = [
        formatter.format(one)
        for one in caplog.records
        for formatter in (JsonLines({}), TextLines("%(message)s"))
        # Of aiohttp's own, which a process turns off, the test's server has some.
        if one.name not in {"tokenwire.prompts", "aiohttp.access"}
    ]
    assert not [one for one in written if SECRET in one]
