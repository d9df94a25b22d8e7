"""Resumable streams through vLLM's parsers: the same message, however ids were batched."""

from __future__ import annotations

import hashlib
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.format_stacks import Start, format_stacks
from support.formats import DEEPSEEK_R1, HERMES, LLAMA3, QWEN3, TOOLS, Format
from support.resumable import Stream, cut, laws, resumed
from support.stack import Stack, frontend
from tokenwire.frontend.message import MessagePart, merged
from tokenwire.frontend.parsing import ParsingFold
from tokenwire.frontend.planning import plan_output
from tokenwire.frontend.policy import Policy
from tokenwire.frontend.schema import ChatRequest

pytestmark = pytest.mark.timeout(120)  # the library takes 10 s to import

OVER_HTTP = (HERMES, QWEN3, LLAMA3, DEEPSEEK_R1)
WITH_USAGE = {"stream_options": {"include_usage": True}}
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
        fold.feed([token_id], stopped=token_id in served.model.end_ids)
        parts.append(fold.take())
        made = merged(parts)
        calls = tuple((call.name or "", call.arguments) for call in made.tool_calls)
        found.append((made.reasoning, made.content, calls))
    return found


def views(stream: Stream, start: View = ("", "", ())) -> dict[int, View]:
    """Return what a client has by how many ids it has: at -1 when it is finished."""
    reasoning, content, begun = start
    calls = {index: list(call) for index, call in enumerate(begun)}
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
                assert found == dict(enumerate(expected))  # after each of them

    assert len(finished) == len(form.cases)  # the same in each batching


def call_ids(stream: Stream) -> dict[int, str]:
    """Return the ids of the calls that begin in a stream, by their index."""
    return {
        call["index"]: call["id"]
        for chunk in stream.chunks
        for call in chunk["choices"][0]["delta"].get("tool_calls", ())
        if "id" in call
    }


@pytest.mark.parametrize("form", OVER_HTTP, ids=lambda form: form.name)
async def test_a_message_goes_on_from_anywhere(serve: Start, form: Format) -> None:
    """Inside of reasoning, of a tool's name and of its arguments; ids of calls stay."""
    num_begun = 0
    async with serve(form) as served:
        for case in form.cases:
            calm = await ask(case.name).run(served)
            at, whole = folded(served, calm), views(calm)[-1]
            again = calm
            for k in range(len(calm.token_ids)):
                again = resumed(calm, checkpoint=cut(calm.last["checkpoint"], k))
                made = await again.run(served)
                laws(made, k)
                assert made.token_ids == calm.token_ids[k:]
                assert made.finish_reason == calm.finish_reason
                assert views(made, at[k])[-1] == whole
                assert call_ids(made).items() <= call_ids(calm).items()
                num_begun += len(at[k][2]) > 0 and at[k][2] != whole[2]
            reply = await served.post(again.path, again.body)
            message = reply.json["choices"][0]["message"]
            assert message["content"] == (whole[1] or None)
            calls = message.get("tool_calls", [])
            assert [call["id"] for call in calls] == list(call_ids(calm).values())
            assert [call["function"]["arguments"] for call in calls] == [
                arguments for _, arguments in whole[2]
            ]
    assert num_begun > 0 or form is DEEPSEEK_R1  # which has no calls


async def test_reasoning_is_counted_where_it_is_generated(serve: Start) -> None:
    """Usage counts the new tokens alone, and so it does those of the reasoning."""
    counted: dict[int, tuple[int, int]] = {}
    async with serve(QWEN3) as served:
        calm = await ask("thought", **WITH_USAGE).run(served)
        num_ids = len(calm.token_ids)
        for k in (0, 2, num_ids - 1):
            checkpoint = cut(calm.last["checkpoint"], k)
            made = await resumed(calm, checkpoint=checkpoint).run(served)
            details = made.usage["completion_tokens_details"]
            assert details["resumed_prefix_tokens"] == k
            counted[k] = details["reasoning_tokens"], made.usage["completion_tokens"]

    total = calm.usage["completion_tokens_details"]["reasoning_tokens"]
    assert counted[0] == (total, num_ids)
    assert 0 < counted[2][0] <= total
    assert counted[num_ids - 1] == (0, 1)


async def test_call_ids_follow_from_the_generation(serve: Start) -> None:
    """From its id, the choice and the call's index: they can be made again."""
    async with serve(HERMES) as served:
        stream = await ask("two").run(served)

    generation_id = stream.first["generation"]["id"]
    digests = [hashlib.sha256(f"{generation_id}/0/{n}".encode()) for n in range(2)]
    assert list(call_ids(stream).values()) == [
        f"chatcmpl-tool-{one.hexdigest()[:32]}" for one in digests
    ]


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


@pytest.mark.parametrize("form", OVER_HTTP, ids=lambda form: form.name)
async def test_a_message_comes_again(serve: Start, form: Format) -> None:
    """Reasoning and calls too, from each event on, at a frontend that saw none of it."""
    async with AsyncExitStack() as also:
        served = await also.enter_async_context(serve(form))
        other = await also.enter_async_context(
            frontend(Path(served.model.folder), parsers=served.parsers)
        )
        await other.know(served.workers)
        for case in form.cases:
            calm = await ask(case.name).run(served)
            name = calm.first["generation"]["id"]
            for seq in range(len(calm.events)):
                again = await calm.again(other, name, seq)
                assert again.events == calm.events[seq:], (case.name, seq)
