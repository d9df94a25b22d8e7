"""Pages in browsers: which may read answers, by the operator's list of origins."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from support.keyed import Keyed
from support.stack import Reply, Stack, stack
from tokenwire.frontend.cors import is_origin

OURS = "https://app.example.com"
THEIRS = (
    "https://app.example.com.evil.com",
    "https://evil.com",
    "http://app.example.com",
    "https://app.example.com:8443",
    "https://APP.example.com",
    "null",
    "",
)
WANTS = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}


@pytest_asyncio.fixture
async def served(tiny_model: Path, tmp_path: Path) -> AsyncIterator[Stack]:
    """A stack with a key and an origin."""
    arguments = Keyed(tmp_path / "keys", ["a"]).arguments
    async with stack(tiny_model, arguments=(*arguments, "--cors-origin", OURS)) as s:
        yield s


async def asked(
    served: Stack, method: str, path: str, origin: str | None, **headers: str
) -> Reply:
    """Send a request as a browser does for a page of *origin*."""
    given = headers if origin is None else {"Origin": origin, **headers}
    async with served.client.request(
        method, served.url + path, headers=given
    ) as answer:
        return Reply(answer.status, answer.headers, await answer.text())


def told(reply: Reply) -> list[str]:
    """Return what an answer tells browsers that they may do."""
    return [name for name in reply.headers if name.startswith("Access-Control")]


async def test_a_page_of_ours_may_ask_and_read(served: Stack) -> None:
    """Before it has shown its key, since a browser does not send that; refusals too."""
    path = "/v1/chat/completions"
    before = await asked(served, "OPTIONS", path, OURS, **WANTS)
    assert before.status == 204
    assert before.headers["Access-Control-Allow-Origin"] == OURS
    assert "POST" in before.headers["Access-Control-Allow-Methods"]
    allowed = before.headers["Access-Control-Allow-Headers"]
    assert allowed == WANTS["Access-Control-Request-Headers"]
    assert "Access-Control-Allow-Credentials" not in before.headers

    body = {"prompt": [5], "max_tokens": 2, "stream": True}
    headers = {"Origin": OURS, "Authorization": "Bearer key-of-a"}
    answer = await served.post("/v1/completions", body, headers)
    assert answer.text.endswith("data: [DONE]\n\n")
    assert answer.headers["Access-Control-Allow-Origin"] == OURS
    assert answer.headers["Vary"] == "Origin"
    assert (
        "x-ratelimit-remaining-tokens"
        in (answer.headers["Access-Control-Expose-Headers"])
    )
    refused = await served.post("/v1/completions", body, {"Origin": OURS})
    assert refused.status == 401
    assert refused.headers["Access-Control-Allow-Origin"] == OURS


@pytest.mark.parametrize("origin", [*THEIRS, None])
async def test_other_pages_may_do_nothing(served: Stack, origin: str | None) -> None:
    """Nothing tells their browser that they may, neither before nor behind a request."""
    before = await asked(served, "OPTIONS", "/v1/models", origin, **WANTS)
    assert before.status == 401
    assert not told(before)
    after = await asked(
        served, "GET", "/v1/models", origin, Authorization="Bearer key-of-a"
    )
    assert after.status == 200
    assert not told(after)
    assert after.headers["Vary"] == "Origin"


@pytest.mark.parametrize("kind", ["", "application/octet-stream", "text/plain"])
async def test_no_page_sends_a_body_that_its_browser_asks_nobody_about(
    tiny_model: Path, kind: str
) -> None:
    """One without a type goes to any site: JSON in it is taken from programs alone."""
    body = b'{"prompt": [5], "max_tokens": 1}'
    async with stack(tiny_model) as plain:
        for origin, status in ((THEIRS[1], 415), ("null", 415), (None, 200)):
            headers = {} if origin is None else {"Origin": origin}
            async with plain.client.post(
                f"{plain.url}/v1/completions",
                data=body,
                headers={**headers, "Content-Type": kind} if kind else headers,
                skip_auto_headers=["Content-Type"],
            ) as answer:
                assert answer.status == (415 if kind == "text/plain" else status)


async def test_what_is_no_list_of_names_is_not_repeated(served: Stack) -> None:
    """Of the headers that a page would send."""
    wants = {**WANTS, "Access-Control-Request-Headers": "x: y"}
    before = await asked(served, "OPTIONS", "/v1/models", OURS, **wants)
    assert before.status == 204
    assert "Access-Control-Allow-Headers" not in before.headers


async def test_it_is_off_by_default(tiny_model: Path) -> None:
    """No page of any origin is told anything."""
    async with stack(tiny_model) as plain:
        before = await asked(plain, "OPTIONS", "/v1/models", OURS, **WANTS)
        assert before.status == 405
        after = await asked(plain, "GET", "/v1/models", OURS)
        assert (after.status, told(after)) == (200, [])
        assert "Vary" not in after.headers


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        (OURS, True),
        ("http://localhost:3000", True),
        ("http://[::1]:3000", True),
        ("*", False),
        ("null", False),
        ("https://app.example.com/", False),
        ("https://app.example.com/x", False),
        ("https://*.example.com", False),
        ("app.example.com", False),
        ("https://App.example.com", False),
        ("https://", False),
    ],
)
def test_origins_are_exact(text: str, is_one: bool) -> None:
    """Neither patterns nor paths: what a browser sends, letter by letter."""
    assert is_origin(text) is is_one
