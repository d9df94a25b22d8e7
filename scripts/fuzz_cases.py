"""Requests that are almost right, and the ways in which they are sent."""

from __future__ import annotations

import gzip
from collections.abc import Sequence

from api_document import ApiDocument
from fuzz_bodies import MODEL_NAME, bodies, cut
from fuzz_http import Case
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

__all__ = ["cases"]


def cases(document: ApiDocument) -> SearchStrategy[Case]:
    """Return requests to all routes of *document*, most of them to generate."""
    posts: list[str] = []
    others: list[tuple[str, str]] = []
    for path, operations in document.document["paths"].items():
        for method, operation in operations.items():
            if "requestBody" in operation:
                posts.append(path)
            else:
                others.append((method.upper(), path.replace("{model}", MODEL_NAME)))
    made = {path: bodies(document, path) for path in posts}
    return st.one_of(
        *(_posts(path, made[path]) for path in posts for _ in range(3)),
        _others(posts, others),
    )


CONTENT_TYPES = [
    *("application/json", "application/json; charset=utf-8", "application/json;"),
    *("application/octet-stream", "text/plain", "", "application", "*/*", ";", "a/b/c"),
    *("application/x-www-form-urlencoded", "multipart/form-data; boundary=a"),
    *(
        "application/json; charset=utf-16",
        "application/json; charset=none",
        "\xff/json",
    ),
]
HEADERS: list[tuple[str, str]] = [
    *(("X-Request-Id", value) for value in ("a", "", "a b", "x" * 128, "x" * 129, "é")),
    *(("X-Session-ID", value) for value in ("s", "", "a b", "x" * 256, "x" * 257, "é")),
    *(
        ("Content-Encoding", value)
        for value in ("identity", "gzip", "deflate", "br", "x")
    ),
    *(("Accept", value) for value in ("text/html", "text/event-stream", "", "*/*")),
    *(("Expect", value) for value in ("100-continue", "more")),
    *(("Accept-Encoding", "gzip"), ("Range", "bytes=0-1"), ("Upgrade", "websocket")),
    *(("Authorization", "Bearer x"), ("Cookie", "a=b; c"), ("If-None-Match", "*")),
    *(("X-Odd", "x" * 9000), ("X-Odd", "\udcff\udc80"), ("X" * 200, "1"), ("X", "")),
    *(("X-Odd", "\t"), ("Content-Length", "x"), ("Transfer-Encoding", "gzip")),
    *(("Host", ""), ("Origin", "null"), ("X-HTTP-Method-Override", "DELETE")),
]


@st.composite
def _posts(draw: DrawFn, path: str, made: SearchStrategy[bytes]) -> Case:
    body = draw(made)
    headers = [("Content-Type", "application/json")]
    odd = draw(st.sampled_from(["", "", "", "", "", "", "type", "headers", "gzip"]))
    if odd == "type":
        headers = [("Content-Type", draw(st.sampled_from(CONTENT_TYPES)))]
    elif odd == "headers":
        headers += draw(st.lists(st.sampled_from(HEADERS), min_size=1, max_size=3))
    elif odd == "gzip":
        headers.append(("Content-Encoding", "gzip"))
        body = gzip.compress(body, mtime=0)
        body = body if draw(st.booleans()) else cut(draw, body)
    way = draw(st.sampled_from([*[""] * 12, "cut", "leave", "leave", "promise"]))
    leave_sent = draw(st.integers(0, 400 + len(body))) if way == "cut" else None
    leave_read = (
        draw(st.sampled_from([0, 1, 200, 1000, 5000])) if way == "leave" else None
    )
    missing = draw(st.integers(1, 5000)) if way == "promise" else 0
    return Case(
        "POST",
        path,
        body,
        tuple(headers),
        chunked=not missing and draw(st.booleans()),
        num_pieces=draw(st.sampled_from([1, 1, 1, 2, 5])),
        missing_bytes=missing,
        leave_after_sent=leave_sent,
        leave_after_read=leave_read,
    )


@st.composite
def _others(
    draw: DrawFn, posts: Sequence[str], others: Sequence[tuple[str, str]]
) -> Case:
    """Return what is no POST with a body: the probes, other methods, other paths."""
    paths = [*posts, *(path for _, path in others)]
    method, path = draw(
        st.sampled_from(others)
        | st.tuples(
            st.sampled_from(
                ["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE"]
            ),
            st.sampled_from(paths),
        )
        | st.tuples(
            st.sampled_from(["GET", "POST"]),
            st.sampled_from(
                ["/", "//", "/v1", "/v1/models/", "/v1/models/%ff%00", "/a b"]
            )
            | st.sampled_from(paths).map(lambda path: path + "/")
            | st.sampled_from(paths).map(lambda path: path + "?a=%ff&b"),
        )
    )
    headers = draw(st.lists(st.sampled_from(HEADERS), max_size=2))
    return Case(method, path, headers=tuple(headers))
