"""Clients that ask before they send a body (``Expect: 100-continue``)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from support.awake import within
from support.keyed import Keyed
from support.stack import Stack, frontend

BODY = json.dumps({"prompt": "a"}).encode()
GO_ON = b"HTTP/1.1 100 Continue\r\n\r\n"
MOST = 1_000  # bytes of a body


def asking(path: str, *headers: str, length: int = len(BODY)) -> bytes:
    """Return a request whose client waits for a word."""
    lines = [
        f"POST {path} HTTP/1.1",
        *("Host: localhost", "Content-Type: application/json"),
        *(f"Content-Length: {length}", "Expect: 100-Continue", *headers),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


async def answered(url: str, head: bytes, body: bytes = b"") -> tuple[bytes, bytes]:
    """Return what comes before *body* is sent, and all behind that until the close."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with within(60):
            writer.write(head)
            before = await reader.readuntil(b"\r\n\r\n")
            if not body:
                return before, b""
            writer.write(body)
            return before, await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize("path", ["/tokenize", "/nothing", "/v1/models"])
async def test_who_is_refused_is_asked_for_no_body(
    tiny_model: Path, tmp_path: Path, path: str
) -> None:
    """Without a key, on any route or none: the answer comes at once, and closes."""
    arguments = Keyed(tmp_path / "keys", ["a"]).arguments
    async with frontend(tiny_model, arguments) as served:
        before, _ = await answered(served.url, asking(path, length=10**9))
        assert before.startswith(b"HTTP/1.1 401 ")
        assert b"Connection: close" in before


@pytest.mark.parametrize(
    ("path", "length", "status"), [("/tokenize", MOST + 1, 413), ("/nothing", 9, 404)]
)
async def test_nor_is_who_has_asked_for_what_is_not_there(
    tiny_model: Path, path: str, length: int, status: int
) -> None:
    """Nor who announces too much; behind the answer nobody knows what would come next."""
    async with frontend(tiny_model, ("--max-body-bytes", str(MOST))) as served:
        before, _ = await answered(served.url, asking(path, length=length))
        assert before.startswith(b"HTTP/1.1 %d " % status)
        assert b"Connection: close" in before


async def test_who_may_is_told_to_go_on(served: Stack) -> None:
    """Once, and then it is answered as anybody is."""
    head = asking("/tokenize", "Connection: close")
    before, behind = await answered(served.url, head, BODY)
    assert before == GO_ON
    assert behind.startswith(b"HTTP/1.1 200 ")
    assert b'"tokens"' in behind
    assert GO_ON not in behind


async def test_a_body_that_is_there_is_not_asked_for(served: Stack) -> None:
    """Its client did not wait; and its connection goes on."""
    first, last = asking("/tokenize"), asking("/tokenize", "Connection: close")
    before, behind = await answered(served.url, first + BODY, last + BODY)
    assert before.startswith(b"HTTP/1.1 200 ")
    assert behind.count(b"HTTP/1.1 200 ") == 1


async def test_the_admin_plane_does_the_same(
    tiny_model: Path, tmp_path: Path, served: Stack
) -> None:
    """With its key a body is asked for; without it none is."""
    path = "/load_lora_adapter"
    key_file = tmp_path / "key"
    key_file.write_text("k" * 32)
    key_file.chmod(0o600)
    async with frontend(tiny_model, ("--admin-key-file", str(key_file))) as locked:
        before, _ = await answered(locked.admin, asking(path))
        assert before.startswith(b"HTTP/1.1 401 ")
    before, behind = await answered(
        served.admin, asking(path, "Connection: close"), BODY
    )
    assert before == GO_ON
    assert behind.startswith(b"HTTP/1.1 400 ")
