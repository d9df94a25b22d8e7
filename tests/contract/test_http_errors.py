"""Wrong values at every field of every body: a 400 that names it, and no harm done.

The fields come from the schema, so a new one is tested without a word here.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest
import pytest_asyncio

from support.awake import within
from support.stack import MODEL_NAME, Reply, Stack, frontend, stack
from tokenwire.frontend.fold import Fold
from tokenwire.frontend.generate import PARAMS, GenerateParams, GenerateRequest
from tokenwire.frontend.nvext import Nvext
from tokenwire.frontend.schema import ChatRequest, CompletionRequest, StreamOptions
from tokenwire.frontend.tokens import Detokenize, TokenizeChat, TokenizeText
from tokenwire.protocol.messages import Role

pytestmark = pytest.mark.asyncio(loop_scope="module")

MESSAGES = [{"role": "user", "content": "hello"}]
BODIES: dict[str, tuple[str, type[msgspec.Struct], dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        ChatRequest,
        {"messages": MESSAGES, "max_tokens": 2},
    ),
    "completions": (
        "/v1/completions",
        CompletionRequest,
        {"prompt": "hello", "max_tokens": 2},
    ),
    "generate": (
        "/inference/v1/generate",
        GenerateRequest,
        {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}},
    ),
    "tokenize": ("/tokenize", TokenizeText, {"prompt": "hello"}),
    "tokenize chat": ("/tokenize", TokenizeChat, {"messages": MESSAGES}),
    "detokenize": ("/detokenize", Detokenize, {"tokens": [5, 6]}),
}
NESTED: dict[str, type[msgspec.Struct]] = {
    "nvext": Nvext,
    "sampling_params": GenerateParams,
    "stream_options": StreamOptions,
}
"""Fields that are objects of their own."""

CASES = [
    *((body, (name,)) for body in BODIES for name in BODIES[body][1].__struct_fields__),
    *(
        (body, (outer, name))
        for body in BODIES
        for outer, kind in NESTED.items()
        if outer in BODIES[body][1].__struct_fields__
        for name in kind.__struct_fields__
        if outer != "sampling_params" or name in PARAMS  # others are ignored there
    ),
]

# As JSON texts: some of them Python would not write.
VALUES = {
    "true": "true",
    "one": "1",
    "minus one": "-1",
    "minus zero": "-0.0",
    "half": "0.5",
    "2**31": str(2**31),
    "2**32": str(2**32),
    "2**63": str(2**63),
    "2**64": str(2**64),
    "10**400": "1" + "0" * 400,
    "10**5000": "1" + "0" * 5000,
    "minus 10**5000": "-1" + "0" * 5000,
    "1e308": "1e308",
    "1e999": "1e999",
    "NaN": "NaN",
    "Infinity": "-Infinity",
    "empty text": '""',
    "text": '"text"',
    "null character": '"\\u0000"',
    "lone surrogate": '"\\ud800"',
    "invalid UTF-8": '"\udcff"',
    "long text": '"' + "x" * 100_000 + '"',
    "no values": "[]",
    "nulls": "[null, null]",
    "booleans": "[true, false]",
    "texts": '["a", "\\ud83d", ""]',
    "numbers": "[5, 6]",
    "huge numbers": f"[{10**400}, {2**31}, -1]",
    "fractions": "[5.0, 1e2]",
    "lists": "[[], [[]]]",
    "many": "[" + "1," * 5000 + "1]",
    "no entries": "{}",
    "entry": '{"a": null}',
    "ids": '{"5": 1e999, "-1": 2, "99999": true}',
    "deep": "[" * 600 + "]" * 600,
    "deep objects": '{"a":' * 600 + "1" + "}" * 600,
    "too deep": "[" * 100_000 + "]" * 100_000,
    "objects": '[{}, {"role": 5}, {"type": "text"}, 7]',
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tiny_model: Path) -> AsyncIterator[Stack]:
    """A stack for all cases: what one does to it the next one sees."""
    async with stack(tiny_model, (Role.PREFILL, Role.DECODE)) as running:
        yield running
        await running.idle()


def written(fields: dict[str, Any], path: tuple[str, ...], value: str) -> bytes:
    """Return a body in which the field at *path* has the JSON text *value*."""
    for name in reversed(path[1:]):
        value = f'{{"{name}": {value}}}'
    others = {name: one for name, one in fields.items() if name != path[0]}
    members = [f"{json.dumps(name)}: {json.dumps(one)}" for name, one in others.items()]
    text = "{" + ", ".join([*members, f'"{path[0]}": {value}']) + "}"
    return text.encode("utf-8", "surrogateescape")


def fits(kind: type[msgspec.Struct], path: tuple[str, ...], value: str) -> bool:
    """Return whether a JSON text has the type of the field at *path*."""
    for outer in path[:-1]:
        kind = NESTED[outer]
    hint = get_type_hints(kind)[path[-1]]
    if value == "-0.0" and hint in (int, int | None):
        return True  # a whole number with a point is one
    try:
        data = value.encode("utf-8", "surrogateescape")
        msgspec.json.decode(data, type=hint)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        return False
    return True


def has_form(value: str) -> bool:
    """Return whether a JSON text is one, but for what is in its texts and numbers."""
    try:
        json.loads(value.replace("0" * 5000, "0"))
    except (ValueError, RecursionError):
        return False
    return True


def check_error(reply: Reply, path: tuple[str, ...], *, named: bool) -> None:
    """Fail unless *reply* is an error of the caller's that names the field."""
    error = reply.error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 3000
    if named:
        param = error["param"]
        # A field may be wrong for another's sake, but some field is named.
        assert isinstance(param, str), (path, error)
        assert param


@pytest.mark.untraced
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("body", "path"), CASES, ids=lambda one: ".".join(one))
async def test_no_value_of_any_field_is_a_500(
    served: Stack, body: str, path: tuple[str, ...], stream: bool
) -> None:
    """Each is served, or refused with a plain 400; of a wrong type, by its own name."""
    url, kind, fields = BODIES[body]
    if stream and "stream" not in kind.__struct_fields__:
        return
    # A body is checked before it is streamed: a third of the values will do there.
    for name, value in list(VALUES.items())[:: 3 if stream else 1]:
        options = {"stream": True} if stream else {}
        data = written({**fields, **options}, path, value)
        reply = await served.post(url, data)

        assert reply.status in {200, 400, 404}, (name, reply.status, reply.text[:300])
        if not fits(kind, path, value):
            assert reply.status == 400, (name, reply.text[:300])
        if reply.status == 404:
            assert (path, reply.error["param"]) == (("model",), "model")
        elif reply.status == 400:
            check_error(reply, path, named=has_form(value))
            if not fits(kind, path, value) and has_form(value):
                assert reply.error["param"].startswith(path[0]), (name, reply.error)

    again = await served.post(url, json.dumps(fields).encode())
    assert again.status == 200


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(
    "data",
    [
        b"", b" ", b"{", b"null", b"5", b'"x"', b"[]", b"{}", b"\xff\xfe{}\x00",
        b'{"prompt": "\xff"}', b"{'prompt': 1}", b'{"prompt": 1e}', b"\x00" * 100,
        b'{"a":' * 100_000, b"[" * 3_000_000, b'{"prompt": "a"} {}',
    ],
    ids=lambda data: str(data[:12]),
)  # fmt: skip
async def test_what_is_no_json_object_is_a_400(
    served: Stack, body: str, data: bytes
) -> None:
    """Broken, empty, deep or of another type: a sentence, and no 500."""
    url, _, fields = BODIES[body]

    reply = await served.post(url, data)

    assert reply.status == 400
    check_error(reply, (), named=False)
    assert (await served.post(url, json.dumps(fields).encode())).status == 200


@pytest.mark.parametrize("body", BODIES)
async def test_unknown_fields_are_named_whatever_their_name(
    served: Stack, body: str
) -> None:
    """A name of any form is refused, and quoted as it is."""
    url, _, fields = BODIES[body]
    for name in ("banana", "", "\x00", "a.b", "é" * 1000, "$", "__class__"):
        reply = await served.post(url, {**fields, name: 1})

        assert reply.status == 400, name
        assert reply.error["param"] == name


@pytest.mark.parametrize("body", ["chat", "completions"])
async def test_the_last_of_equal_fields_counts(served: Stack, body: str) -> None:
    """As every parser of JSON has it."""
    url, _, fields = BODIES[body]
    data = json.dumps(fields)[:-1].encode() + b', "max_tokens": "x", "max_tokens": 1}'

    reply = await served.post(url, data)

    assert reply.status == 200
    assert reply.json["usage"]["completion_tokens"] == 1


METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS")


def routes(served: Stack) -> dict[str, set[str]]:
    """Return the methods that each path of the server takes."""
    taken: dict[str, set[str]] = {}
    for route in served.app.router.routes():
        assert route.resource is not None
        path = route.resource.canonical.replace("{model}", MODEL_NAME)
        path = path.replace("{id}", "chatcmpl-0")
        taken.setdefault(path, set()).add(route.method)
    return taken


async def test_another_method_is_a_405_on_every_route(served: Stack) -> None:
    """The error says which methods the route takes."""
    taken = routes(served)
    assert {"/v1/completions", "/v1/models", f"/v1/models/{MODEL_NAME}"} <= taken.keys()
    for path, methods in taken.items():
        for method in set(METHODS) - methods:
            async with served.client.request(method, served.url + path) as answer:
                body = await answer.json()

            assert answer.status == 405, (method, path)
            assert set(answer.headers["Allow"].split(",")) == methods
            assert set(body["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("ui", [True, False])
async def test_at_the_root_is_said_where_to_go(tiny_model: Path, ui: bool) -> None:
    """To a person who has typed the address; not by listeners which have none of it."""
    async with frontend(tiny_model, () if ui else ("--no-ui",)) as served:
        reply = await served.get("/")
        assert reply.status == 404
        assert ("/ui" in reply.error["message"]) == ui
        assert "/openapi.json" in reply.error["message"]
        for other in (served.admin, served.probes, f"{served.url}/v1"):
            async with served.client.get(f"{other}/") as answer:
                assert answer.status == 404
                assert "/openapi.json" not in await answer.text()


async def test_no_answer_tells_releases(served: Stack) -> None:
    """Whole, streamed, refused, or of what is no HTTP."""
    stream = await served.complete(prompt="a", max_tokens=1, stream=True)
    told = [reply.headers["Server"] for reply in (await served.get("/live"), stream)]
    host, port = served.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"nonsense\r\n\r\n")
    async with within(20):
        answer = (await reader.read()).decode()
    writer.close()
    told += [line[8:] for line in answer.split("\r\n") if line.startswith("Server: ")]
    assert told == ["tokenwire"] * 3


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/", "/v2/completions", "/v1/chat", "//"]
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
async def test_an_unknown_route_is_a_404(served: Stack, path: str, method: str) -> None:
    """In our shape, with any method."""
    async with served.client.request(method, served.url + path) as answer:
        body = await answer.json()

    assert answer.status == 404
    assert set(body["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "kind", ["text/plain", "multipart/form-data", "application/xml", "", None]
)
async def test_another_type_of_body_is_a_415_on_every_route(
    served: Stack, kind: str | None
) -> None:
    """Only JSON is taken; a client that says nothing is believed to send it."""
    headers = {} if kind is None else {"Content-Type": kind}
    for path, methods in routes(served).items():
        if "POST" not in methods:
            continue
        async with served.client.post(
            served.url + path,
            data=b"{}",
            headers=headers,
            skip_auto_headers=["Content-Type"],
        ) as answer:
            body = await answer.json()

        good = 404 if path.endswith("/cancel") else 400  # which needs no body
        assert answer.status == (415 if kind else good), path
        assert set(body["error"]) == {"message", "type", "param", "code"}


async def test_a_body_too_large_is_a_413_on_every_route(tiny_model: Path) -> None:
    """Before anything of it is parsed."""
    async with stack(tiny_model, arguments=("--max-body-bytes", "100")) as running:
        for path, methods in routes(running).items():
            if "POST" in methods:
                reply = await running.post(path, b" " * 101)

                assert reply.status == 413, path
                assert set(reply.error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 20])
async def test_a_bug_at_the_end_is_an_error_and_harms_nobody(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, stream: bool, max_tokens: int
) -> None:
    """It hung, or a second response head was written into the stream."""

    def fail(self: Fold) -> str:
        del self
        raise ZeroDivisionError

    async with stack(tiny_model, options=("--step-ms", "2")) as served:
        with monkeypatch.context() as patched:
            patched.setattr(Fold, "finish", fail)
            reply = await served.complete(
                prompt="hello", max_tokens=max_tokens, ignore_eos=True, stream=stream
            )
        if stream:
            error, done = reply.events[-2:]
            assert error.body is not None
            assert error.body["error"]["type"] == "server_error"
            assert done.body is None
        else:
            assert (reply.status, reply.error["type"]) == (500, "server_error")
        await served.idle()
        assert "tokenwire_requests_admitted 0.0" in (await served.get("/metrics")).text
        assert (await served.complete(prompt="hello", max_tokens=2)).status == 200
