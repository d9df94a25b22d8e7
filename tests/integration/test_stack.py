"""The whole stack on the real engine and the real model, as a client sees it."""

from __future__ import annotations

import asyncio
import json
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from openai import AsyncOpenAI, AsyncStream
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from support.real_stack import (
    LOAD_S,
    NAME,
    PAIR,
    another_frontend,
    gauge_pages,
    prompt_of,
)
from support.up import Up, until
from support.vllm_engine import (
    MODEL,
    PROMPT_TOKENS,
    PROMPTS,
    REFERENCE_TOKENS,
    reference_ids,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
session = pytest.mark.asyncio(loop_scope="session")

EMPTY_S = 15.0
"""Half of the lease that would also free what is held. It takes 0.2 to 1.5 s, a step of
the engine or two: ``scripts/survive.py`` measures. Traced, on two cores, a step alone may
take a second."""
EOS = 2
IDS = {"return_token_ids": True}
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


def gauges(running: Up, worker: str) -> dict[str, float]:
    """Return running, waiting and KV usage of a worker, as it says at this moment."""
    page_url = gauge_pages(running, worker)[-1]
    with urllib.request.urlopen(page_url, timeout=60) as answer:  # noqa: S310 - loopback
        page = answer.read().decode()
    found = {
        name: float(line.rpartition(" ")[2])
        for line in page.splitlines()
        for name in GAUGES
        if line.startswith(f"tokenwire_worker_{name}{{")
    }
    assert set(found) == set(GAUGES)
    return found


def busy(running: Up) -> float:
    """Return the sum of everything that is zero on idle engines."""
    return sum(
        sum(gauges(running, worker).values()) for worker in ("prefill-0", "decode-0")
    )


@session
async def test_greedy_ids_equal_plain_vllm(pair: Up) -> None:
    """Through both engines and NIXL come the ids of one engine, at every block edge."""
    expected = await reference_ids()

    got: list[list[int]] = []
    async with aiohttp.ClientSession() as http:
        for prompt in PROMPTS:
            body = {
                "prompt": prompt, "max_tokens": REFERENCE_TOKENS, "temperature": 0, **IDS
            }  # fmt: skip
            async with http.post(pair.url + "/v1/completions", json=body) as answer:
                nvext = (await answer.json())["nvext"]
            assert nvext["prompt_token_ids"] == prompt
            got.append(nvext["completion_token_ids"])

    assert dict(zip(PROMPT_TOKENS, got, strict=True)) == dict(
        zip(PROMPT_TOKENS, expected, strict=True)
    )


@session
@pytest.mark.parametrize("max_tokens", [1, 2, 24])
async def test_the_openai_client_chat(client: AsyncOpenAI, max_tokens: int) -> None:
    """Chat, streamed and not: same text, same ids, the trio in its place."""
    request: dict[str, Any] = {
        "model": NAME,
        "messages": [{"role": "user", "content": "Say 🙂 and name three colours."}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "extra_body": IDS,
    }
    whole = cast("ChatCompletion", await client.chat.completions.create(**request))
    ids: list[int] = []
    text = ""
    prompts: list[list[int]] = []
    usage = None
    async for chunk in await client.chat.completions.create(
        stream=True, stream_options={"include_usage": True}, **request
    ):
        extra = chunk.model_extra or {}
        if chunk.usage is not None:
            usage = chunk.usage
            assert "nvext" not in extra
            continue
        nvext = extra.get("nvext", {})
        ids += nvext.get("completion_token_ids", [])
        text += chunk.choices[0].delta.content or ""
        if "prompt_token_ids" in nvext:
            assert chunk.choices[0].finish_reason is not None
            prompts.append(nvext["prompt_token_ids"])

    nvext = (whole.model_extra or {})["nvext"]
    assert ids == nvext["completion_token_ids"]
    assert prompts == [nvext["prompt_token_ids"]]
    assert text == whole.choices[0].message.content
    assert whole.usage is not None
    assert usage is not None
    assert whole.usage.completion_tokens == usage.completion_tokens == len(ids)
    assert whole.usage.prompt_tokens == len(prompts[0]) > 20


@session
async def test_the_openai_client_completion(client: AsyncOpenAI) -> None:
    """Completions, streamed and not: the same, with a prompt of ids echoed exactly."""
    prompt = prompt_of(40)
    request: dict[str, Any] = {
        "model": NAME,
        "prompt": prompt,
        "max_tokens": 20,
        "temperature": 0,
        "extra_body": IDS,
    }
    whole = cast("Completion", await client.completions.create(**request))
    ids: list[int] = []
    text = ""
    async for chunk in await client.completions.create(stream=True, **request):
        ids += (
            (chunk.model_extra or {}).get("nvext", {}).get("completion_token_ids", [])
        )
        text += chunk.choices[0].text

    nvext = (whole.model_extra or {})["nvext"]
    assert nvext["prompt_token_ids"] == prompt
    assert nvext["completion_token_ids"] == ids
    assert whole.choices[0].text == text


@session
async def test_eos_is_among_the_ids(client: AsyncOpenAI) -> None:
    """An answer that ends by itself ends with EOS, which is counted and not shown."""
    reply = await client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=200,
        temperature=0,
        extra_body=IDS,
    )

    ids = (reply.model_extra or {})["nvext"]["completion_token_ids"]
    assert reply.choices[0].finish_reason == "stop"
    assert ids[-1] == EOS
    assert reply.usage is not None
    assert reply.usage.completion_tokens == len(ids)
    assert "<|im_end|>" not in (reply.choices[0].message.content or "")


@session
async def test_logprobs_are_one_to_one(client: AsyncOpenAI) -> None:
    """Every id has a logprob, and greedy takes the most likely one."""
    reply = await client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=8,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
        extra_body=IDS,
    )

    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    ids = (reply.model_extra or {})["nvext"]["completion_token_ids"]
    assert len(logprobs.content) == len(ids) == 8
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0


@session
async def test_a_seed_repeats_and_json_is_json(client: AsyncOpenAI) -> None:
    """A seeded request is repeatable; a schema holds; seed 0 is a seed."""

    async def draw(seed: int) -> str:
        reply = await client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": "Tell me a story."}],
            max_tokens=12,
            temperature=1.5,
            seed=seed,
        )
        return reply.choices[0].message.content or ""

    assert await draw(0) == await draw(0)
    assert await draw(0) != await draw(1)
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    reply = await client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "Is water wet? Answer in JSON."}],
        max_tokens=40,
        temperature=0,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema},
        },
    )
    parsed = json.loads(reply.choices[0].message.content or "")
    assert isinstance(parsed["ok"], bool)


@session
async def test_eight_streams_at_once(client: AsyncOpenAI) -> None:
    """Eight parallel streams each get what they get alone."""

    async def stream(n: int) -> list[int]:
        ids: list[int] = []
        async for chunk in await client.completions.create(
            model=NAME,
            prompt=prompt_of(20 + n),
            max_tokens=10,
            temperature=0,
            stream=True,
            extra_body=IDS,
        ):
            ids += (
                (chunk.model_extra or {})
                .get("nvext", {})
                .get("completion_token_ids", [])
            )
        return ids

    together = await asyncio.gather(*map(stream, range(8)))
    alone = [await stream(n) for n in range(8)]

    assert together == alone
    assert all(len(ids) == 10 for ids in together)


@session
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", ["queue", "prefill", "handover", "decode"])
async def test_a_client_that_leaves_frees_everything(
    pair: Up, stage: str, stream: bool
) -> None:
    """Left at any stage, a request leaves no trace on either engine, long before a lease."""
    # An engine says what runs after each step, when what ended in it is gone: only more
    # prompts than fit into one step are sure to be seen.
    number = {"queue": 40, "prefill": 8}.get(stage, 1)
    prompt = prompt_of({"queue": 1_900, "prefill": 1_900}.get(stage, 200))
    body = {
        "prompt": prompt, "max_tokens": 100, "stream": stream, "ignore_eos": True
    }  # fmt: skip

    def has(worker: str, name: str) -> bool:
        return gauges(pair, worker)[name] > 0

    conditions: dict[str, Callable[[], bool]] = {
        "queue": lambda: has("prefill-0", "num_requests_waiting"),
        "prefill": lambda: has("prefill-0", "num_requests_running"),
        # Nothing runs there any more, but its KV is held for the decode worker.
        "handover": lambda: (
            has("prefill-0", "kv_cache_usage_perc")
            and not has("prefill-0", "num_requests_running")
        ),
        "decode": lambda: has("decode-0", "num_requests_running"),
    }
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def call(n: int) -> None:
            mine = {**body, "cache_salt": f"{stage}{stream}{n}"}  # nothing is cached
            async with http.post(pair.url + "/v1/completions", json=mine) as answer:
                await answer.read()

        if stage == "handover":
            pair.kill("decode-0", signal.SIGSTOP)  # the hand-over cannot go on
        calls = [asyncio.create_task(call(n)) for n in range(number)]
        await until(conditions[stage], 60, stage)
        assert not any(one.done() for one in calls)
        for one in calls:
            one.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        if stage == "handover":
            pair.kill("decode-0", signal.SIGCONT)
    await until(lambda: busy(pair) == 0, EMPTY_S, "both engines are empty")


@session
async def test_leaving_after_any_time_frees_everything(pair: Up) -> None:
    """A sweep over the whole life of a request, hand-over included, leaks nothing."""
    async with aiohttp.ClientSession() as http:
        for n in range(20):
            body = {"prompt": prompt_of(200 + n), "max_tokens": 50, "ignore_eos": True}
            call = asyncio.create_task(
                http.post(pair.url + "/v1/completions", json=body)
            )
            await asyncio.wait([call], timeout=0.02 * n)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
    await until(lambda: busy(pair) == 0, EMPTY_S, "both engines are empty")


@session
async def test_nonsense_harms_nobody(pair: Up, client: AsyncOpenAI) -> None:
    """What the engine alone can refuse is a 400, beside a stream that goes on."""
    bad = [
        {"prompt": "a", "structured_outputs": {"regex": "("}},
        # Well-formed, and nothing that the engine's library can compile (xgrammar 0.2.8).
        {"prompt": "a", "structured_outputs": {"regex": r"\p{L}+"}},
        {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}},
        {"prompt": "a", "max_tokens": 5, "logit_bias": {"49151": 100}, "bad_words": ["x"]},
    ]  # fmt: skip

    async def stream() -> int:
        number = 0
        async for _ in await client.completions.create(
            model=NAME, prompt="Count: one", max_tokens=40, stream=True, temperature=0
        ):
            number += 1
        return number

    going = asyncio.create_task(stream())
    statuses: list[int] = []
    async with aiohttp.ClientSession() as http:
        for body in bad:
            async with http.post(pair.url + "/v1/completions", json=body) as answer:
                statuses.append(answer.status)
                assert "error" in await answer.json() or answer.status == 200

    assert statuses == [400, 400, 400, 200]
    assert await going > 1


@session
async def test_forced_tool_calls_obey_their_schema(pair: Up) -> None:
    """Whatever a small model would rather say; streamed and not, the same call."""
    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    named = {"type": "function", "function": {"name": "get_weather"}}
    async with (
        another_frontend(pair, "--tool-call-parser", "hermes") as (url, _),
        AsyncOpenAI(base_url=url + "/v1", api_key="none", timeout=120) as client,
    ):
        for choice, reason in (("required", "tool_calls"), (named, "stop")):
            request: dict[str, Any] = {
                "model": NAME,
                "messages": [{"role": "user", "content": "Weather in Paris?"}],
                "max_tokens": 100,
                "temperature": 0,
                "tools": [tool],
                "tool_choice": choice,
                "extra_body": IDS,
            }
            create = cast("Any", client.chat.completions.create)
            whole: ChatCompletion = await create(**request)
            [answer] = whole.choices
            assert answer.finish_reason == reason
            assert answer.message.tool_calls is not None
            [call] = answer.message.tool_calls
            assert call.type == "function"
            assert call.function.name == "get_weather"
            assert set(json.loads(call.function.arguments)) == {"city"}

            arguments, ids = "", list[int]()
            stream: AsyncStream[ChatCompletionChunk] = await create(
                stream=True, **request
            )
            async for chunk in stream:
                extra = cast("dict[str, Any]", chunk.model_extra)
                ids += extra.get("nvext", {}).get("completion_token_ids", [])
                for part in chunk.choices[0].delta.tool_calls or []:
                    assert part.function is not None
                    arguments += part.function.arguments or ""
            assert arguments == call.function.arguments
            assert ids == cast("Any", whole).nvext["completion_token_ids"]


@session
async def test_the_only_decode_worker_is_killed_under_four_streams(
    pair: Up, client: AsyncOpenAI
) -> None:
    """They pause until its engine has loaded again, and go on to the token."""
    prompts = [prompt_of(length) for length in (5, 16, 33, 100)]
    progress = dict.fromkeys(range(len(prompts)), 0)

    async def ids(number: int) -> list[int]:
        got: list[int] = []
        stream = await client.completions.create(
            model=NAME,
            prompt=prompts[number],
            max_tokens=60,
            temperature=0,
            stream=True,
            timeout=LOAD_S,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        async for chunk in stream:
            extra = (chunk.model_extra or {}).get("nvext", {})
            got += extra.get("completion_token_ids", [])
            progress[number] = len(got)
        return got

    undisturbed = [await ids(number) for number in progress]
    progress.update(dict.fromkeys(progress, 0))
    streams = [asyncio.create_task(ids(number)) for number in progress]
    await until(lambda: min(progress.values()) >= 10, 60, "ten tokens each")
    pair.kill("decode-0", signal.SIGKILL)
    broken = await asyncio.gather(*streams)

    assert broken == undisturbed
    assert all(len(one) == 60 for one in broken)
    await until(lambda: pair.ready(**PAIR), LOAD_S, "a new decode worker serves")


def test_the_model_is_the_demo_model() -> None:
    """The tests run on the model that `make run` serves."""
    config = json.loads((Path(MODEL) / "config.json").read_text())

    assert config["num_hidden_layers"] == 30
