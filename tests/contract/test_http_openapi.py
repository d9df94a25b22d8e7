"""``/openapi.json`` is true: all routes are in it, and all answers are as it says."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio
from api_document import ApiDocument

from support.stack import Reply, Stack, stack
from tokenwire.frontend.bounds import BOUNDS
from tokenwire.frontend.nvext import SELECTORS, Placement
from tokenwire.frontend.routes import ROUTES
from tokenwire.protocol.messages import Role

PATHS = {"ChatRequest": "/v1/chat/completions", "CompletionRequest": "/v1/completions"}
PROMPT = [70, 71, 72, 73]
PAIR = (Role.PREFILL, Role.DECODE)
GENERATE = "/inference/v1/generate"
BODIES: dict[str, dict[str, Any]] = {
    PATHS["ChatRequest"]: {"messages": [{"role": "user", "content": "hello"}]},
    PATHS["CompletionRequest"]: {"prompt": PROMPT},
    GENERATE: {"token_ids": PROMPT},
}
ANSWERS = {  # and the types of whole answers
    PATHS["ChatRequest"]: "ChatCompletion",
    PATHS["CompletionRequest"]: "Completion",
    GENERATE: "Generated",
}
PARSED = {"reasoning_tokens", "reasoning", "tool_calls", "completion_tokens_details"}
"""Keys of answers that went through a parser: test_http_tools.py checks them."""

# No engine without a model has any to show; and no weights change under these requests.
NOT_SIMULATED = {
    "kv_transfer_params",
    "weight_versions",
    "parent",  # needs a checkpoint: test_http_resume.py
}
TURNS: dict[str, Any] = {
    "required_prefix_token_ids": [5, 6, 2],
    "messages": [{"role": role, "content": role} for role in ("user", "assistant")],
    "nvext": {"extra_fields": ["timing"]},
}


@pytest_asyncio.fixture
async def served(tiny_model: Path) -> AsyncIterator[Stack]:
    """A pair of workers behind a frontend."""
    async with stack(tiny_model, PAIR) as running:
        yield running
        await running.idle()


async def document_of(served: Stack) -> ApiDocument:
    """Return what the frontend says of itself."""
    return ApiDocument((await served.get("/openapi.json")).json)


def faults(document: ApiDocument, method: str, path: str, reply: Reply) -> list[str]:
    """Return in what a reply is not as the document says."""
    kind = reply.headers["Content-Type"]
    return document.answer_faults(method, path, reply.status, kind, reply.text)


async def test_every_route_is_in_the_document(served: Stack) -> None:
    """A route that is served and not described, or the other way round, is named.

    Those of the live page are its own, and change with it.
    """
    routes = {
        (route.method.lower(), route.resource.canonical)
        for route in served.app.router.routes()
        if route.resource is not None and route.method != "HEAD"  # with every GET
        if not re.match("/ui(/|$)", route.resource.canonical)
    }

    described = {(route.method, route.path) for route in ROUTES}
    assert routes - described == set(), "describe these in frontend/routes.py"
    assert described - routes == set()


def variants(path: str) -> list[dict[str, Any]]:
    """Return what can be asked beside the prompt, and changes the answer's keys."""
    if path == GENERATE:
        sampled: list[dict[str, Any]] = [
            {},
            {"n": 2},
            {"logprobs": 2},
            {"stop": list("abcdefghijklmnop")},
        ]
        roots: list[dict[str, Any]] = [{}, {"return_token_ids": True}, {"stream": True}]
        return [
            *(
                {"sampling_params": {"max_tokens": 20, **params}, **root}
                for params, root in itertools.product(sampled, roots)
            ),
            {"sampling_params": {"prompt_logprobs": 2}},
            {"sampling_params": {}, "stream": True, "return_token_ids": True},
        ]
    chat = path == PATHS["ChatRequest"]
    options: list[dict[str, Any]] = [
        {},
        {"return_token_ids": True},
        *({"nvext": {"extra_fields": [selector]}} for selector in sorted(SELECTORS)),
        {"nvext": {"extra_fields": sorted(SELECTORS)}},
        {"nvext": {"resumable": True, "checkpoint": {"prompt": "ids"}}, "seed": 1},
        {"nvext": {"resume_from": {"output_token_ids": [70]}}, "seed": 1},
        {"n": 2},
        {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2},
        {"stop": [chr(byte) for byte in range(97, 113)]},
        {
            "stop": [chr(byte) for byte in range(97, 113)],
            "nvext": {"extra_fields": ["stop_reason"]},
        },
    ]
    whole: list[dict[str, Any]] = [{"prompt_logprobs": 1}]
    if chat:
        whole.append(TURNS)
    else:
        whole += [{"echo": True, "logprobs": 1}, {"prompt": ["a", "b"]}]
    usage = {"include_usage": True, "continuous_usage_stats": True}
    streams: list[dict[str, Any]] = [{}, {"stream_options": usage}]
    if not chat:
        streams.append({"echo": True})
    return [
        *({**one, "max_tokens": 20} for one in [*options, *whole]),
        *(
            {**one, **stream, "stream": True, "max_tokens": 20}
            for one, stream in itertools.product(options, streams)
            if not ("logprobs" in one and "echo" in stream)  # refused
        ),
    ]


@pytest.mark.untraced  # what it asks, other tests ask, too
async def test_all_answers_are_as_the_document_says(tiny_model: Path) -> None:
    """Each endpoint, stream, selector and placement; and no described key is invented."""
    seen: set[tuple[str, str]] = set()
    schemas: dict[str, Any] = {}
    for placement in Placement:
        arguments = ("--token-ids-placement", placement.value)
        async with stack(tiny_model, PAIR, arguments=arguments) as served:
            document = await document_of(served)
            schemas = document.document["components"]["schemas"]
            for path, body in BODIES.items():
                for fields in variants(path):
                    reply = await served.post(path, {**body, **fields})
                    assert reply.status == 200, (fields, reply.text)
                    assert not faults(document, "POST", path, reply), (path, fields)
                    note(path, reply, schemas, seen)

    generated = {name for name, _ in seen}
    assert {"ChatChunkChoice", "CompletionLogprobs", "EngineData"} <= generated
    assert {"TokenTopLogprob", "GeneratedChunkChoice", "KeptPrefix"} <= generated
    described = {
        (name, key)
        for name in generated
        for key in schemas[name]["properties"].keys() - NOT_SIMULATED - PARSED
    }
    assert described - seen == set(), "described, and never there"


def note(
    path: str, reply: Reply, schemas: dict[str, Any], seen: set[tuple[str, str]]
) -> None:
    """Put all keys of an answer into *seen*, by the type that they belong to."""
    name = ANSWERS[path]
    if reply.headers["Content-Type"].startswith("text/event-stream"):
        for event in reply.events:
            if event.body is not None:
                walk({"$ref": f"#/{name}Chunk"}, event.body, schemas, seen)
    else:
        walk({"$ref": f"#/{name}"}, reply.json, schemas, seen)


def walk(
    schema: dict[str, Any],
    value: object,
    schemas: dict[str, Any],
    seen: set[tuple[str, str]],
) -> None:
    """Follow a valid value through its schema; note each key of each named type."""
    name = schema.get("$ref", "").rpartition("/")[2]
    if name:
        schema = schemas[name]
    for branch in schema.get("anyOf", ()):
        if value is not None and branch.get("type") != "null":
            walk(branch, value, schemas, seen)
    if isinstance(value, list):
        for item in cast("list[object]", value):
            walk(schema.get("items", {}), item, schemas, seen)
    elif isinstance(value, dict):
        for key, inner in cast("dict[str, object]", value).items():
            if name:
                seen.add((name, key))
            rest = schema.get("additionalProperties", {})
            part = schema.get("properties", {}).get(key, rest)
            walk(part or {}, inner, schemas, seen)


async def test_a_key_that_is_not_described_is_seen(served: Stack) -> None:
    """The check that the others stand on: one more key, or one less, is a fault."""
    document = await document_of(served)
    body = (await served.complete(prompt="a", max_tokens=1)).json
    fine = document.answer_faults(
        "POST", "/v1/completions", 200, "application/json", json.dumps(body)
    )
    more: dict[str, Any] = {**body, "extra": 1}
    less = {key: body[key] for key in body.keys() - {"usage"}}

    assert fine == []
    for wrong in (more, less):
        assert document.answer_faults(
            "POST", "/v1/completions", 200, "application/json", json.dumps(wrong)
        )


async def test_the_other_routes_are_as_the_document_says(served: Stack) -> None:
    """Each GET, with a worker and without one."""
    document = await document_of(served)
    gets = [route.path for route in ROUTES if route.method == "get"]
    for path in [*gets, "/v1/models/tiny", "/v1/models/none", "/nowhere", "/tokenise"]:
        reply = await served.get(path)
        assert not faults(document, "GET", path, reply), path
    wrong_method = await served.post("/live", {})
    assert wrong_method.status == 405
    assert not faults(document, "POST", "/live", wrong_method)


async def test_the_token_routes_are_as_the_document_says(served: Stack) -> None:
    """All that no worker is asked about, right requests and wrong ones."""
    document = await document_of(served)
    chat = BODIES[PATHS["ChatRequest"]]
    bodies: dict[str, list[dict[str, Any]]] = {
        "/tokenize": [
            {"prompt": "ab", "return_token_strs": True},
            {"prompt": "ab"},
            chat,
        ],
        "/detokenize": [{"tokens": PROMPT}, {"tokens": []}],
        "/v1/chat/completions/render": [chat, {**chat, "stream": True, "n": 2}],
        "/v1/completions/render": [
            {"prompt": ["a", "b"], "cache_salt": "s"},
            {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}},
        ],
    }
    for path, good in bodies.items():
        for body, status in [*((one, 200) for one in good), ({}, 400)]:
            reply = await served.post(path, body)
            assert reply.status == status, (path, body, reply.text)
            assert not faults(document, "POST", path, reply), (path, body)


async def test_without_a_worker_answers_are_as_the_document_says(
    tiny_model: Path,
) -> None:
    """503 everywhere, in the forms that it lists."""
    async with stack(tiny_model, ()) as served:
        document = await document_of(served)
        for path in ("/health", "/ready", "/v1/models"):
            reply = await served.get(path)
            assert not faults(document, "GET", path, reply), path
        for path, body in BODIES.items():
            params: dict[str, Any] = {"sampling_params": {}} if path == GENERATE else {}
            reply = await served.post(path, {**body, **params})
            assert reply.status == 503
            assert reply.headers["Retry-After"] == "1"
            assert not faults(document, "POST", path, reply), path


@pytest.mark.parametrize("schema", PATHS)
async def test_the_bounds_are_those_of_the_document(served: Stack, schema: str) -> None:
    """Beside a bound a value is refused by the field's name, on it it is not."""
    document = await document_of(served)
    properties = document.document["components"]["schemas"][schema]["properties"]
    for field in BOUNDS.keys() & properties.keys():
        if (schema, field) == ("ChatRequest", "logprobs"):
            continue  # a boolean there
        bound = BOUNDS.get(f"{schema}.{field}", BOUNDS[field])
        needs: dict[str, Any] = {"max_tokens": 1}
        if field == "top_logprobs":
            needs["logprobs"] = True
        if field == "max_tokens" and schema == "CompletionRequest":
            needs["echo"] = True
        for value, step in ((bound.low, -1), (bound.high, 1)):
            if value is None:
                continue
            on, beside = value, value + step
            if bound.above and step < 0:
                on, beside = value + 1, value
            for number, refused in ((on, False), (beside, True)):
                sent: Any = {"70": number} if field == "logit_bias" else number
                body = {**BODIES[PATHS[schema]], **needs, field: sent}
                reply = await served.post(PATHS[schema], body)
                is_refused = reply.status == 400 and reply.error["param"] == field
                assert is_refused is refused, (field, number, reply.text)
                assert bool(document.request_faults(schema, body)) is refused, field
