"""``/inference/v1/generate`` on simulated workers: ids in, ids out, vLLM's shape."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from support.stack import MODEL_NAME, Reply, Stack, eventually, stack
from tokenwire.frontend.generate import GenerateRequest, generate_call
from tokenwire.protocol.messages import Role, StructuredOutput

PATH = "/inference/v1/generate"
PROMPT = [5, 6, 7]
TOPOLOGIES = {
    "aggregated": (Role.AGGREGATED,),
    "pair": (Role.PREFILL, Role.DECODE),
}

# What vLLM 0.32 answers (recorded): every key, null where there is nothing.
RESPONSE_KEYS = {
    "request_id", "model", "created", "usage", "prompt_logprobs",
    "prompt_token_id_logprobs", "prompt_token_ids", "mm_placeholders", "metrics",
    "kv_transfer_params", "ec_transfer_params", "output_mode", "choices",
}  # fmt: skip
CHOICE_KEYS = {
    "index", "finish_reason", "stop_reason", "token_ids", "routed_experts",
    "sampling_mask", "weight_versions", "logprobs",
}  # fmt: skip
CHUNK_KEYS = {"request_id", "usage", "output_mode", "choices"}
# ``token`` is of earlier releases, and the renderers library insists on it.
ENTRY_KEYS = {"token", "token_id", "logprob", "rank"}


@pytest_asyncio.fixture
async def pair(tiny_model: Path) -> AsyncIterator[Stack]:
    """A prefill and a decode worker."""
    async with stack(tiny_model, TOPOLOGIES["pair"]) as running:
        yield running
        await running.idle()


async def generate(
    served: Stack,
    token_ids: Any = PROMPT,
    root: dict[str, Any] | None = None,
    **params: Any,
) -> Reply:
    """POST a generate request; *params* are its sampling parameters."""
    body = {"token_ids": token_ids, "sampling_params": params, **(root or {})}
    return await served.post(PATH, body)


def chunks_of(reply: Reply) -> list[dict[str, Any]]:
    """Return the chunks of a stream, which ends with ``[DONE]``."""
    *chunks, done = [event.body for event in reply.events]
    assert done is None
    return [chunk for chunk in chunks if chunk is not None]


def ids_by_choice(chunks: list[dict[str, Any]]) -> dict[int, list[int]]:
    """Return all ids of a stream by choice."""
    ids: dict[int, list[int]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            ids.setdefault(choice["index"], []).extend(choice["token_ids"])
    return ids


@pytest.mark.parametrize("max_tokens", [1, 2, 40])
async def test_the_whole_answer_has_vllms_keys(served: Stack, max_tokens: int) -> None:
    """All keys are there, ids are ints, usage counts them."""
    reply = await generate(served, max_tokens=max_tokens, logprobs=2)

    body = reply.json
    [choice] = body["choices"]
    assert reply.status == 200
    assert set(body) == RESPONSE_KEYS
    assert set(choice) == CHOICE_KEYS
    assert body["request_id"].startswith("generate-tokens-")
    assert body["model"] == MODEL_NAME
    assert body["output_mode"] == "tokens"
    assert body["prompt_token_ids"] is None
    assert len(choice["token_ids"]) == max_tokens
    assert choice["finish_reason"] == "length"
    assert choice["weight_versions"] == [
        {"version": "default", "start": 0, "end": max_tokens}
    ]
    assert body["usage"]["prompt_tokens"] == len(PROMPT)
    assert body["usage"]["completion_tokens"] == max_tokens
    assert len(choice["logprobs"]["content"]) == max_tokens


async def test_ids_are_those_of_completions(served: Stack) -> None:
    """The same prompt gives the same ids on both routes."""
    here = await generate(served, max_tokens=20, temperature=0)
    there = await served.complete(
        prompt=PROMPT, max_tokens=20, temperature=0, return_token_ids=True
    )

    ids = there.json["nvext"]["completion_token_ids"]
    assert here.json["choices"][0]["token_ids"] == ids


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("logprobs", [None, 0, 3])
async def test_a_stream_is_the_whole_answer_in_pieces(
    served: Stack, n: int, logprobs: int | None
) -> None:
    """Ids and log probabilities, joined by choice, are those of the whole answer."""
    params: dict[str, Any] = {
        "max_tokens": 30, "n": n, "seed": 3, "logprobs": logprobs
    }  # fmt: skip
    whole = await generate(served, **params)
    streamed = await generate(
        served,
        root={"stream": True, "stream_options": {"include_usage": True}},
        **params,
    )

    *chunks, last = chunks_of(streamed)
    choices = whole.json["choices"]
    assert [choice["index"] for choice in choices] == list(range(n))
    assert ids_by_choice(chunks) == {c["index"]: c["token_ids"] for c in choices}
    for choice in choices:
        entries: list[Any] = []
        for chunk in chunks:
            [part] = chunk["choices"]
            assert set(chunk) == CHUNK_KEYS
            assert set(part) == CHOICE_KEYS
            assert (part["logprobs"] is None) is (logprobs is None)
            if part["index"] == choice["index"] and logprobs is not None:
                entries += part["logprobs"]["content"]
        if logprobs is not None:
            assert entries == choice["logprobs"]["content"]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 30 * n
    assert last["usage"] == whole.json["usage"]
    ends = [c["choices"][0] for c in chunks if c["choices"][0]["finish_reason"]]
    assert sorted(end["index"] for end in ends) == list(range(n))
    assert all(end["weight_versions"][0]["end"] == 30 for end in ends)


async def test_usage_can_come_with_every_chunk(served: Stack) -> None:
    """``continuous_usage_stats`` counts along; without it, usage is null."""
    root = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    counted = chunks_of(await generate(served, root=root, max_tokens=5))
    plain = chunks_of(await generate(served, root={"stream": True}, max_tokens=5))

    sums = [chunk["usage"]["completion_tokens"] for chunk in counted]
    assert sums == sorted(sums)
    assert sums[-1] == 5
    assert all(chunk["usage"] is None for chunk in plain)


@pytest.mark.parametrize("logprobs", [0, 1, 4])
async def test_every_logprob_entry_names_its_token_twice(
    served: Stack, logprobs: int
) -> None:
    """The sampled token comes first; 0 means it alone, as 1 does."""
    reply = await generate(served, max_tokens=6, logprobs=logprobs)

    [choice] = reply.json["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in content] == choice["token_ids"]
    for entry in content:
        assert set(entry) == {*ENTRY_KEYS, "top_logprobs"}
        top = entry["top_logprobs"]
        assert len(top) == max(logprobs, 1)
        assert {**top[0], "top_logprobs": top} == entry
        assert len({one["token_id"] for one in top}) == len(top)
        for one in top:
            assert set(one) == ENTRY_KEYS
            assert one["token"] == f"token_id:{one['token_id']}"
            assert one["rank"] >= 1
            assert one["logprob"] <= 0


async def test_the_prompt_comes_back_if_asked_for(served: Stack) -> None:
    """``return_token_ids`` counts at the root alone; a stream has it on chunk one."""
    root = {"return_token_ids": True}
    whole = await generate(served, root=root, max_tokens=5)
    streamed = await generate(served, root={**root, "stream": True}, max_tokens=5, n=2)
    inside = await generate(served, max_tokens=5, return_token_ids=True)

    first, *others = chunks_of(streamed)
    assert whole.json["prompt_token_ids"] == PROMPT
    assert inside.json["prompt_token_ids"] is None
    assert first["prompt_token_ids"] == PROMPT
    assert all("prompt_token_ids" not in chunk for chunk in others)


async def test_prompt_logprobs_are_vllms(served: Stack) -> None:
    """One entry for each prompt token but the first, keyed by id."""
    reply = await generate(served, max_tokens=2, prompt_logprobs=1)

    first, *others = reply.json["prompt_logprobs"]
    assert first is None
    assert len(others) == len(PROMPT) - 1
    for token_id, entry in zip(PROMPT[1:], others, strict=True):
        assert set(entry[str(token_id)]) == {"logprob", "rank", "decoded_token"}


async def test_eos_is_among_the_ids(tiny_model: Path) -> None:
    """An output that ends by itself ends with EOS, which has a logprob too."""
    options = ("--step-ms", "0", "--mean-output-tokens", "5")
    async with stack(tiny_model, TOPOLOGIES["pair"], options) as served:
        reply = await generate(served, temperature=0, logprobs=0)

        [choice] = reply.json["choices"]
        assert choice["finish_reason"] == "stop"
        assert choice["token_ids"][-1] == 2
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
        await served.idle()


async def test_a_stop_string_ends_the_ids(served: Stack) -> None:
    """The tokens of the stop string are the last ones, streamed or not."""
    free = await generate(served, max_tokens=12)
    ids = free.json["choices"][0]["token_ids"]
    text = served.model.decode(ids[3:5], skip_special_tokens=False)
    whole = await generate(served, max_tokens=12, stop=[text], logprobs=0)
    streamed = await generate(
        served, root={"stream": True}, max_tokens=12, stop=[text], logprobs=0
    )

    [choice] = whole.json["choices"]
    assert choice["token_ids"] == ids[:5]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == text
    assert len(choice["logprobs"]["content"]) == 5
    chunks = chunks_of(streamed)
    assert ids_by_choice(chunks) == {0: ids[:5]}
    assert chunks[-1]["choices"][0]["stop_reason"] == text


async def test_a_stop_token_ends_the_ids(served: Stack) -> None:
    """The stop token is the last id and the stop reason."""
    free = await generate(served, max_tokens=12)
    ids = free.json["choices"][0]["token_ids"]
    reply = await generate(served, max_tokens=12, stop_token_ids=[ids[4]])

    [choice] = reply.json["choices"]
    assert choice["token_ids"] == ids[: ids.index(ids[4]) + 1]
    assert choice["stop_reason"] == ids[4]


async def test_what_renderers_put_into_the_parameters_is_no_error(
    served: Stack,
) -> None:
    """Keys that are not parameters are ignored inside ``sampling_params``."""
    params = {
        "max_tokens": 3, "temperature": 0, "top_k": -1, "min_p": 0.0, "logprobs": 1,
        "return_token_ids": True, "cache_salt": "0", "routed_experts_prompt_start": 4,
        "no_such_thing": [1], "seed": None, "stop": None, "model": 5, "nvext": 7,
    }  # fmt: skip
    reply = await generate(served, root={"cache_salt": "0"}, **params)

    assert reply.status == 200, reply.text
    assert len(reply.json["choices"][0]["token_ids"]) == 3


async def test_max_tokens_is_what_fits(served: Stack) -> None:
    """Without a bound, or with one beyond the context, the output fills it."""
    room = 2048 - 2000
    prompt = [5] * 2000

    bounds: list[dict[str, Any]] = [{}, {"max_tokens": 5000}, {"max_tokens": None}]
    for params in bounds:
        reply = await generate(served, prompt, **params)
        assert len(reply.json["choices"][0]["token_ids"]) == room


async def test_generation_defaults_do_not_count(pair: Stack) -> None:
    """``generation_config.json`` changes nothing that a trainer did not ask for."""
    pair.model.sampling_defaults.temperature = 0.3
    pair.model.sampling_defaults.top_p = 0.5
    for params in ({}, {"temperature": None}, {"temperature": 0}):
        request = GenerateRequest(token_ids=PROMPT, sampling_params=params)
        [(job, _)] = (await generate_call(request, pair.model, pair.pool)).jobs

        assert job.sampling.temperature == (0 if params.get("temperature") == 0 else 1)
        assert job.sampling.top_p == 1


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a reasoning that ended, perhaps": ({"reasoning_ended": 1}, {}, "reasoning_ended"),
    "arguments that no parser has": (
        {"reasoning_parser_kwargs": {"x": 1}},
        {},
        "reasoning_parser_kwargs",
    ),
    "arguments of another form": (
        {"reasoning_parser_kwargs": {"chat_template_kwargs": 1}},
        {},
        "reasoning_parser_kwargs",
    ),
    # name: (root, parameters, param of the error)
    "no ids": ({"token_ids": []}, {}, "token_ids"),
    "ids of text": ({"token_ids": "abc"}, {}, "token_ids"),
    "a boolean id": ({"token_ids": [5, True]}, {}, "token_ids"),
    "a negative id": ({"token_ids": [5, -1]}, {}, "token_ids"),
    "2**31": ({"token_ids": [2**31]}, {}, "token_ids"),
    "2**70": ({"token_ids": [2**70]}, {}, "token_ids"),
    "a fraction": ({"token_ids": [5.0]}, {}, "token_ids"),
    "an id above the vocabulary": ({"token_ids": [264]}, {}, "token_ids"),
    "too long": ({"token_ids": [5] * 2048}, {}, "token_ids"),
    "unknown root": ({"prompt": "a"}, {}, "prompt"),
    "kv": ({"kv_transfer_params": {"a": 1}}, {}, "kv_transfer_params"),
    "ec": ({"ec_transfer_params": {"a": 1}}, {}, "ec_transfer_params"),
    "images": ({"features": {"mm_hashes": {}}}, {}, "features"),
    "parts": ({"content_parts": [{}]}, {}, "content_parts"),
    "text mode": ({"output_mode": "text"}, {}, "output_mode"),
    "a salt without characters": ({"cache_salt": ""}, {}, "cache_salt"),
    "a request id with a slash": ({"request_id": "../a"}, {}, "request_id"),
    "priority": ({"priority": 2**63}, {}, "priority"),
    "stream options alone": ({"stream_options": {}}, {}, "stream_options"),
    "return_token_ids": ({"return_token_ids": "yes"}, {}, "return_token_ids"),
    "parameters of text": ({"sampling_params": "a"}, {}, "sampling_params"),
    "n": ({}, {"n": 0}, "sampling_params.n"),
    "n above the bound": ({}, {"n": 129}, "sampling_params.n"),
    "logprobs of all": ({}, {"logprobs": -1}, "sampling_params.logprobs"),
    "logprobs": ({}, {"logprobs": 21}, "sampling_params.logprobs"),
    "logprobs like chat's": ({}, {"logprobs": True}, "sampling_params.logprobs"),
    "prompt_logprobs": ({}, {"prompt_logprobs": 99}, "sampling_params.prompt_logprobs"),
    "temperature": ({}, {"temperature": -1}, "sampling_params.temperature"),
    "temperature of text": ({}, {"temperature": "hot"}, "sampling_params.temperature"),
    "max_tokens": ({}, {"max_tokens": 0}, "sampling_params.max_tokens"),
    "stop": ({}, {"stop": [""]}, "sampling_params.stop"),
    "stop ids": ({}, {"stop_token_ids": [999]}, "sampling_params.stop_token_ids"),
    "budget": (
        {},
        {"thinking_token_budget": 5},
        "sampling_params.thinking_token_budget",
    ),
    "model": ({"model": "other"}, {}, "model"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", REFUSED)
async def test_bad_requests_are_plain_400s(
    pair: Stack, case: str, stream: bool
) -> None:
    """The field is named with its path; nothing reaches a worker."""
    root, params, param = REFUSED[case]
    if case == "stream options alone" and stream:
        root = {"stream_options": {"nonsense": 1}}
        param = "stream_options"
    reply = await generate(pair, root={"stream": stream, **root}, **params)

    assert reply.status == (404 if case == "model" else 400), reply.text
    assert reply.headers["Content-Type"].startswith("application/json")
    assert reply.error["param"].startswith(param)
    assert all(worker.idle for worker in pair.workers)


async def test_sampling_params_are_required(pair: Stack) -> None:
    """As in vLLM, a body without them is a 400."""
    reply = await pair.post(PATH, {"token_ids": PROMPT})

    assert reply.status == 400
    assert reply.error["param"] == "sampling_params"


async def test_prompt_logprobs_are_not_streamed(pair: Stack) -> None:
    """Chunks of vLLM's shape have no place for them: refused rather than dropped."""
    reply = await generate(pair, root={"stream": True}, prompt_logprobs=1)

    assert reply.status == 400
    assert reply.error["param"] == "sampling_params.prompt_logprobs"


async def test_vllms_structure_object_is_taken(pair: Stack) -> None:
    """With its switches, as long as they are off."""
    structure = {"regex": "a+", "disable_any_whitespace": False, "json": None}
    on = {**structure, "disable_any_whitespace": True}

    request = GenerateRequest(
        token_ids=PROMPT, sampling_params={"structured_outputs": structure}
    )
    [(job, _)] = (await generate_call(request, pair.model, pair.pool)).jobs
    assert job.sampling.structured_output == StructuredOutput("regex", "a+")
    refused = await generate(pair, structured_outputs=on)
    assert refused.status == 400
    assert "disable_any_whitespace" in refused.error["message"]


async def test_the_request_id_is_part_of_the_answers(pair: Stack) -> None:
    """A client's id comes back in the body and in the header."""
    reply = await generate(pair, root={"request_id": "roll-1"}, max_tokens=1)

    assert reply.json["request_id"] == "generate-tokens-roll-1"
    assert reply.headers["X-Request-Id"] == "roll-1"


async def test_a_session_header_is_taken(pair: Stack) -> None:
    """``X-Session-ID``, which verifiers sends, changes no answer."""
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4}}
    with_id = await pair.post(PATH, body, headers={"X-Session-ID": "trace-1"})
    without = await pair.post(PATH, body)

    ids = [reply.json["choices"][0]["token_ids"] for reply in (with_id, without)]
    assert ids[0] == ids[1]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_costs_nothing(
    tiny_model: Path, stream: bool
) -> None:
    """All choices are cancelled on all workers."""
    options = ("--step-ms", "20")
    async with stack(tiny_model, TOPOLOGIES["pair"], options) as served:
        call = asyncio.create_task(
            generate(served, root={"stream": stream}, max_tokens=1000, n=4)
        )
        decode = served.workers[1]
        await eventually(lambda: decode.engine.load().num_running == 4, "running")
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await served.idle()


async def test_a_rendered_chat_can_be_generated(served: Stack) -> None:
    """What a render route answers is a request: the ids are those of the chat."""
    body = {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 12, "temperature": 0.5, "seed": 7, "n": 2, "stop": "zzz",
        "cache_salt": "s",
    }  # fmt: skip
    rendered = await served.post("/v1/chat/completions/render", body)
    reply = await served.post(PATH, rendered.json)
    chat = await served.post("/v1/chat/completions", body)

    assert reply.status == 200, reply.text
    texts = [
        served.model.decode(choice["token_ids"], skip_special_tokens=True)
        for choice in reply.json["choices"]
    ]
    assert texts == [c["message"]["content"] for c in chat.json["choices"]]
