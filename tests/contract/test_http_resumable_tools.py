"""Resumable streams through vLLM's parsers: the same message, however ids were batched."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import pytest

from support.format_stacks import Start, format_stacks
from support.formats import DEEPSEEK_R1, HERMES, LLAMA3, QWEN3, TOOLS, Format
from support.resumable import Stream, laws
from support.stack import Stack
from tokenwire.frontend.message import MessagePart, merged
from tokenwire.frontend.parsing import ParsingFold
from tokenwire.frontend.planning import plan_output
from tokenwire.frontend.policy import Policy
from tokenwire.frontend.schema import ChatRequest

pytestmark = pytest.mark.timeout(120)  # the library takes 10 s to import

OVER_HTTP = (HERMES, QWEN3, LLAMA3, DEEPSEEK_R1)
View = tuple[str, str, tuple[tuple[str, str], ...]]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Starts a stack that answers a case's name with the case's output."""
    return format_stacks(tmp_path_factory)


def ask(name: str, **fields: Any) -> Stream:
    """Return a stream that is to be read."""
    body = {
        "messages": [{"role": "user", "content": name}],
        "tools": TOOLS,
        "nvext": {"resumable": True},
        **fields,
    }
    return Stream("/v1/chat/completions", body)


def folded(served: Stack, stream: Stream) -> list[View]:
    """Return the view after no id, after one, ...: through a parser of our own."""
    body = {name: stream.body[name] for name in ("messages", "tools")}
    plan = plan_output(
        msgspec.convert(body, ChatRequest), Policy(parsers=served.parsers)
    )
    assert plan is not None
    prompt = stream.first["prompt_token_ids"]
    fold = ParsingFold(
        plan.parser(prompt, "x", 0),
        served.model.detokenizer(prompt, skip_special_tokens=plan.skip_special_tokens),
    )
    parts: list[MessagePart] = []
    found: list[View] = [("", "", ())]
    for token_id in stream.token_ids:
        fold.feed([token_id])
        parts.append(fold.take())
        made = merged(parts)
        calls = tuple((call.name or "", call.arguments) for call in made.tool_calls)
        found.append((made.reasoning, made.content, calls))
    return found


def views(stream: Stream) -> dict[int, View]:
    """Return what a client has by how many ids it has: at -1 when it is finished."""
    reasoning = content = ""
    calls: dict[int, list[str]] = {}
    found: dict[int, View] = {}
    num_ids = 0
    for chunk in stream.chunks:
        choice = chunk["choices"][0]
        delta = choice["delta"]
        reasoning += delta.get("reasoning", "")
        content += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            parts = calls.setdefault(call["index"], ["", ""])
            parts[0] += call["function"].get("name", "")
            parts[1] += call["function"]["arguments"]
        num_ids += len(chunk["nvext"]["completion_token_ids"])
        key = -1 if choice["finish_reason"] else num_ids
        found[key] = reasoning, content, tuple((a, b) for a, b in calls.values())
    return found


@pytest.mark.parametrize("form", OVER_HTTP, ids=lambda form: form.name)
async def test_a_view_follows_from_the_ids_alone(serve: Start, form: Format) -> None:
    """At each chunk of each batching: reasoning, content and calls so far."""
    finished: set[tuple[str, View, str | None]] = set()
    for tokens_per_step in ("1", "3", "7", "1000"):
        async with serve(form, "--tokens-per-step", tokens_per_step) as served:
            for case in form.cases:
                stream = await ask(case.name).run(served)
                laws(stream)
                expected, found = folded(served, stream), views(stream)
                finished.add((case.name, found.pop(-1), stream.finish_reason))
                assert found == {number: expected[number] for number in found}

    assert len(finished) == len(form.cases)  # the same in each batching


async def test_call_ids_follow_from_the_generation(serve: Start) -> None:
    """From its id, the choice and the call's index: they can be made again."""
    async with serve(HERMES) as served:
        stream = await ask("two").run(served)

    generation_id = stream.first["generation"]["id"]
    ids = [
        call["id"]
        for chunk in stream.chunks
        for call in chunk["choices"][0]["delta"].get("tool_calls", ())
        if "id" in call
    ]
    digests = [hashlib.sha256(f"{generation_id}/0/{n}".encode()) for n in range(2)]
    assert ids == [f"chatcmpl-tool-{one.hexdigest()[:32]}" for one in digests]


async def test_the_contract_names_parsers_and_tools(serve: Start) -> None:
    """So that a resume under others is refused."""
    async with serve(HERMES) as served:
        stream = await ask("two").run(served)
        plain = await ask("two", tools=None).run(served)

    held = stream.last["checkpoint"]["contract"]
    assert held["tool_parser"] == "hermes"
    assert held["tools_sha256"]
    assert plain.last["checkpoint"]["contract"]["tools_sha256"] is None
    assert (
        plain.first["generation"]["contract"]
        != (stream.first["generation"]["contract"])
    )
