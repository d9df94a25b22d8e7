"""The HTTP contract, on simulated workers: shapes, ids, errors, ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from support.stack import (
    MODEL_NAME,
    Reply,
    SimWorker,
    Stack,
    eventually,
    stack,
)
from tokenwire.protocol.messages import Role

TOPOLOGIES = {
    "aggregated": (Role.AGGREGATED,),
    "pair": (Role.PREFILL, Role.DECODE),
    "decode-alone": (Role.DECODE,),
}
IDS: dict[str, Any] = {"return_token_ids": True}


@pytest_asyncio.fixture(params=TOPOLOGIES)
async def served(
    request: pytest.FixtureRequest, tiny_model: Path
) -> AsyncIterator[Stack]:
    """A stack of each topology."""
    async with stack(tiny_model, TOPOLOGIES[request.param]) as running:
        yield running
        await running.idle()  # no test may leave a request or KV behind


@pytest_asyncio.fixture
async def pair(tiny_model: Path) -> AsyncIterator[Stack]:
    """A prefill and a decode worker."""
    async with stack(tiny_model, TOPOLOGIES["pair"]) as running:
        yield running
        await running.idle()


def concatenated(reply: Reply) -> list[int]:
    """Return all completion ids of a stream."""
    return [
        token_id
        for event in reply.events
        for token_id in event.nvext.get("completion_token_ids", [])
    ]


def text_of(reply: Reply) -> str:
    """Return all text of a stream, of either endpoint."""
    return "".join(
        choice.get("text") or choice.get("delta", {}).get("content") or ""
        for event in reply.events
        for choice in (event.body or {}).get("choices", [])
    )


# --- ids -----------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1, 2, 40])
async def test_the_trio_on_a_completion(served: Stack, max_tokens: int) -> None:
    """Ids, prompt ids and usage agree."""
    reply = await served.complete(prompt=[5, 6, 7], max_tokens=max_tokens, **IDS)

    body = reply.json
    assert reply.status == 200
    assert body["nvext"]["prompt_token_ids"] == [5, 6, 7]
    assert len(body["nvext"]["completion_token_ids"]) == max_tokens
    assert body["usage"]["completion_tokens"] == max_tokens
    assert body["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
@pytest.mark.pitfall(4)
async def test_a_stream_carries_the_same_ids_and_text(
    served: Stack, endpoint: str
) -> None:
    """Streamed ids and text, joined, are those of the whole response."""
    call = served.chat if endpoint == "chat" else served.complete
    prompt = {} if endpoint == "chat" else {"prompt": "hello world"}
    whole = await call(max_tokens=30, **prompt, **IDS)
    streamed = await call(max_tokens=30, stream=True, **prompt, **IDS)

    choice = whole.json["choices"][0]
    text = choice["text"] if endpoint == "complete" else choice["message"]["content"]
    assert concatenated(streamed) == whole.json["nvext"]["completion_token_ids"]
    assert text_of(streamed) == text


async def test_the_final_chunk_alone_has_the_prompt(served: Stack) -> None:
    """Prompt ids come once, with the finish reason; the usage chunk has no nvext."""
    reply = await served.chat(
        max_tokens=4, stream=True, stream_options={"include_usage": True}, **IDS
    )

    *chunks, final, usage, done = reply.events
    assert done.body is None
    assert usage.body is not None
    assert final.body is not None
    assert usage.body["choices"] == []
    assert "nvext" not in usage.body
    assert final.body["choices"][0]["finish_reason"] == "length"
    assert final.nvext["prompt_token_ids"]
    assert all("prompt_token_ids" not in event.nvext for event in chunks)
    assert usage.body["usage"]["completion_tokens"] == len(concatenated(reply))


async def test_not_asked_for_not_one_key(served: Stack) -> None:
    """The default response and the default stream have OpenAI's keys and no other."""
    whole = (await served.chat(max_tokens=2)).json
    stream = (await served.chat(max_tokens=2, stream=True)).events

    assert set(whole) == {"id", "object", "created", "model", "choices", "usage"}
    assert set(whole["choices"][0]["message"]) == {"role", "content", "refusal"}
    for event in stream[:-1]:
        assert event.body is not None
        assert set(event.body) == {"id", "object", "created", "model", "choices"}
        [choice] = event.body["choices"]
        assert set(choice) == {"index", "delta", "logprobs", "finish_reason"}


@pytest.mark.pitfall(2)
async def test_every_id_has_a_logprob(served: Stack) -> None:
    """Logprobs and ids come from one record, streamed or not."""
    reply = await served.chat(max_tokens=9, logprobs=True, top_logprobs=2, **IDS)
    streamed = await served.chat(
        max_tokens=9, logprobs=True, top_logprobs=2, stream=True, **IDS
    )

    content = reply.json["choices"][0]["logprobs"]["content"]
    assert len(content) == len(reply.json["nvext"]["completion_token_ids"]) == 9
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    for event in streamed.events[:-1]:
        assert event.body is not None
        logprobs = event.body["choices"][0]["logprobs"]
        ids = event.nvext.get("completion_token_ids", [])
        assert len(ids) == (len(logprobs["content"]) if logprobs else 0)


async def test_logprobs_zero_means_the_sampled_token(served: Stack) -> None:
    """``logprobs: 0`` is not "no logprobs": the sampled token is in each top list."""
    reply = await served.complete(prompt="a", max_tokens=3, logprobs=0)

    logprobs = reply.json["choices"][0]["logprobs"]
    assert len(logprobs["token_logprobs"]) == 3
    assert logprobs["top_logprobs"] == [
        {token: value}
        for token, value in zip(
            logprobs["tokens"], logprobs["token_logprobs"], strict=True
        )
    ]


async def test_no_alternatives_need_no_logprobs(served: Stack) -> None:
    """``top_logprobs: 0`` asks for nothing, as in vLLM; more without logprobs is a 400."""
    absent: list[dict[str, Any]] = [{}, {"logprobs": False}, {"logprobs": None}]
    for logprobs in absent:
        none = await served.chat(max_tokens=1, top_logprobs=0, **logprobs)
        one = await served.chat(max_tokens=1, top_logprobs=1, **logprobs)

        assert none.status == 200, none.text
        assert none.json["choices"][0]["logprobs"] is None
        assert (one.status, one.error["param"]) == (400, "top_logprobs")


@pytest.mark.pitfall(3)
@pytest.mark.pitfall(22)
async def test_choices_and_prompts_keep_their_order(served: Stack) -> None:
    """Two prompts with n=2 give four choices; each equals its prompt's own answer."""
    both = await served.complete(prompt=["ab", "cd"], n=2, max_tokens=6)
    alone = [await served.complete(prompt=text, max_tokens=6) for text in ("ab", "cd")]

    texts = [choice["text"] for choice in both.json["choices"]]
    first, second = (reply.json["choices"][0]["text"] for reply in alone)
    assert texts == [first, first, second, second]
    assert both.json["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 24,
        "total_tokens": 28,
        "prompt_tokens_details": both.json["usage"]["prompt_tokens_details"],
    }


async def test_worker_id_and_timing(pair: Stack) -> None:
    """The selectors name the workers that served, and where the time went."""
    reply = await pair.complete(
        prompt=[9] * 40, max_tokens=3, nvext={"extra_fields": ["worker_id", "timing"]}
    )

    nvext = reply.json["nvext"]
    assert nvext["worker_id"] == {
        "prefill_worker_id": "prefill-0",
        "decode_worker_id": "decode-1",
    }
    assert set(nvext["timing"]) == {
        "queue_ms", "prefill_ms", "ttft_ms", "total_ms", "cached_tokens"
    }  # fmt: skip
    assert set(nvext) == {"worker_id", "timing"}


async def test_hand_over_handles_never_leave(pair: Stack) -> None:
    """What the prefill worker tells the decode worker is not the client's."""
    reply = await pair.complete(prompt=[9] * 40, max_tokens=3, **IDS)

    assert "kv_transfer_params" not in reply.json["nvext"]
    assert "remote" not in reply.text


@pytest.mark.pitfall(11)
async def test_cached_tokens_are_the_prefill_sides(pair: Stack) -> None:
    """The second of two equal prompts reports what prefill found in its cache."""
    prompt = list(range(10, 74))
    first = await pair.complete(prompt=prompt, max_tokens=2)
    second = await pair.complete(prompt=prompt, max_tokens=2)

    details = [r.json["usage"]["prompt_tokens_details"] for r in (first, second)]
    assert details[0] == {"cached_tokens": 0}
    assert 0 < details[1]["cached_tokens"] < 64


async def test_token_data_replaces_template_and_tokenizer(served: Stack) -> None:
    """The ids of ``nvext.token_data`` are the prompt, to the id."""
    reply = await served.chat(nvext={"token_data": [7, 8, 9]}, max_tokens=2, **IDS)

    assert reply.json["nvext"]["prompt_token_ids"] == [7, 8, 9]


async def test_a_stop_string_ends_text_and_ids(served: Stack) -> None:
    """The string is cut off the text; the ids end with the one that completes it."""
    free = await served.complete(prompt=[5, 6], max_tokens=40, **IDS)
    text = free.json["choices"][0]["text"]
    stop = text[3:5]
    reply = await served.complete(prompt=[5, 6], max_tokens=40, stop=stop, **IDS)
    streamed = await served.complete(
        prompt=[5, 6], max_tokens=40, stop=stop, stream=True, **IDS
    )

    body = reply.json
    ids = body["nvext"]["completion_token_ids"]
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["text"] == text[: text.index(stop)]
    assert ids == free.json["nvext"]["completion_token_ids"][: len(ids)]
    assert served.model.decode(ids, skip_special_tokens=True).endswith(stop)
    assert body["usage"]["completion_tokens"] == len(ids)
    assert concatenated(streamed) == ids
    assert text_of(streamed) == text[: text.index(stop)]


@pytest.mark.pitfall(1)
async def test_a_stop_token_is_among_the_ids(served: Stack) -> None:
    """The token that stops is returned and counted."""
    free = await served.complete(prompt=[5, 6], max_tokens=9, temperature=0, **IDS)
    ids = free.json["nvext"]["completion_token_ids"]
    for position in (0, 4):
        stop = ids[position]
        reply = await served.complete(
            prompt=[5, 6], max_tokens=9, temperature=0, stop_token_ids=[stop], **IDS
        )

        got = reply.json["nvext"]["completion_token_ids"]
        assert got == ids[: ids.index(stop) + 1]
        assert reply.json["choices"][0]["finish_reason"] == "stop"
        assert reply.json["usage"]["completion_tokens"] == len(got)


# --- refusals ------------------------------------------------------------------------

BAD_COMPLETIONS: dict[str, tuple[dict[str, Any], str | None]] = {
    "n": ({"n": 2, **IDS}, "n"),
    "best_of": ({"best_of": 2}, "best_of"),
    "best_of with ids": ({"best_of": 2, **IDS}, "n"),
    "two prompts": ({"prompt": ["a", "b"], **IDS}, "prompt"),
    "no prompt": ({"prompt": []}, "prompt"),
    "boolean id": ({"prompt": [1, True]}, "prompt"),
    "id out of vocabulary": ({"prompt": [512]}, "prompt"),
    "negative id": ({"prompt": [-1]}, "prompt"),
    "huge id": ({"prompt": [2**31]}, "prompt"),
    "id beyond 64 bits": ({"prompt": [10**30]}, "prompt"),
    "mixed": ({"prompt": ["a", [1]]}, "prompt"),
    "temperature": ({"temperature": -0.1}, "temperature"),
    "top_p": ({"top_p": 0}, "top_p"),
    "max_tokens": ({"max_tokens": 0}, "max_tokens"),
    "too long": ({"max_tokens": 10**6}, "max_tokens"),
    "min over max": ({"min_tokens": 9, "max_tokens": 2}, "min_tokens"),
    "min over none": ({"min_tokens": 1, "max_tokens": 0, "echo": True}, "min_tokens"),
    "stop": ({"stop": [""]}, "stop"),
    "logit_bias": ({"logit_bias": {"x": 1}}, "logit_bias"),
    "logprobs": ({"logprobs": 21}, "logprobs"),
    "seed": ({"seed": 2**63}, "seed"),
    "stream_options": ({"stream_options": {"banana": True}}, "stream_options"),
    "echo": ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
    "suffix": ({"suffix": "x"}, "suffix"),
    "unknown": ({"banana": 1}, "banana"),
    "return_token_ids": ({"return_token_ids": "yes"}, "return_token_ids"),
    "selector": ({"nvext": {"extra_fields": ["x"]}}, "nvext.extra_fields"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", BAD_COMPLETIONS)
async def test_bad_requests_are_plain_400s(
    pair: Stack, case: str, stream: bool
) -> None:
    """Each names its field, streaming or not, and the engine hears nothing."""
    fields, param = BAD_COMPLETIONS[case]
    reply = await pair.post(
        "/v1/completions", {"prompt": "a", "max_tokens": 5, "stream": stream, **fields}
    )

    assert reply.status == 400
    assert reply.headers["Content-Type"].startswith("application/json")
    assert set(reply.error) == {"message", "type", "param", "code"}
    assert reply.error["type"] == "invalid_request_error"
    assert reply.error["param"] == param


@pytest.mark.pitfall(3)
async def test_n_is_refused_by_the_selectors_name(pair: Stack) -> None:
    """The message names the selector that needs one choice."""
    reply = await pair.complete(prompt="a", n=2, **IDS)

    assert "completion_token_ids" in reply.error["message"]


async def test_best_of_speaks_of_a_selector_only_if_one_is_on(pair: Stack) -> None:
    """Without one, the message says what it must equal."""
    plain = await pair.complete(prompt="a", n=2, best_of=3)
    selected = await pair.complete(prompt="a", best_of=2, **IDS)

    assert plain.error["message"] == "best_of must equal n, 2: outputs are not ranked"
    assert "completion_token_ids" in selected.error["message"]


async def test_a_prompt_too_long_names_the_context_length(pair: Stack) -> None:
    """The message has vLLM's words, which clients look for."""
    reply = await pair.complete(prompt=[5] * 3000, max_tokens=1)

    assert reply.status == 400
    assert "maximum context length is 2048 tokens" in reply.error["message"]
    assert reply.error["code"] == "context_length_exceeded"


async def test_other_statuses_have_the_same_shape(pair: Stack) -> None:
    """404, 405, 413, 415 and an unknown model answer like every error."""
    too_large = b'{"prompt":"' + b"a" * (64 * 1024 * 1024) + b'"}'
    replies = {
        404: await pair.get("/nope"),
        405: await pair.get("/v1/completions"),
        413: await pair.post("/v1/completions", too_large),
        415: await pair.post("/v1/completions", b"x", {"Content-Type": "text/plain"}),
    }
    unknown = await pair.complete(model="gpt-9", prompt="a")

    for status, reply in replies.items():
        assert reply.status == status
        assert set(reply.error) == {"message", "type", "param", "code"}
    assert replies[405].headers["Allow"] == "POST"
    assert unknown.status == 404
    assert unknown.error["code"] == "model_not_found"


@pytest.mark.pitfall(34)
async def test_request_ids_are_echoed_if_they_are_ids(pair: Stack) -> None:
    """A well-formed id comes back; another is a 400 and is not repeated."""
    body = {"prompt": "a", "max_tokens": 1}
    good = await pair.post("/v1/completions", body, {"X-Request-Id": "job-7.a_b"})
    bad = await pair.post("/v1/completions", body, {"X-Request-Id": "../../x"})

    assert good.headers["X-Request-Id"] == "job-7.a_b"
    assert bad.status == 400
    assert "X-Request-Id" not in bad.headers


# --- clients that leave, read slowly, or find nobody -----------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.pitfall(30)
@pytest.mark.pitfall(16)
@pytest.mark.pitfall(17)
async def test_a_client_that_leaves_costs_nothing(
    tiny_model: Path, stream: bool
) -> None:
    """After a disconnect both engines are empty, also of KV held for a hand-over."""
    options = ("--step-ms", "20", "--prefill-tokens-per-s", "2000")
    async with stack(tiny_model, TOPOLOGIES["pair"], options) as running:
        body = {"prompt": [5] * 64, "max_tokens": 1000, "stream": stream}
        async with asyncio.TaskGroup() as tasks:
            calls = [
                tasks.create_task(running.post("/v1/completions", body))
                for _ in range(8)
            ]
            await eventually(
                lambda: any(w.engine.load().num_running for w in running.workers)
            )
            # Leave at different stages: queued, in prefill, handing over, decoding.
            for call in calls:
                await asyncio.sleep(0.015)
                call.cancel()

        await running.idle()


async def test_a_slow_reader_gets_everything_later(tiny_model: Path) -> None:
    """A client that stops reading is held, and loses and repeats nothing."""
    async with stack(tiny_model, (Role.AGGREGATED,)) as running:
        body = {
            "prompt": [5], "max_tokens": 2000, "stream": True, "logprobs": 5, **IDS
        }  # fmt: skip
        whole = await running.post("/v1/completions", {**body, "stream": False})
        async with running.client.post(
            running.url + "/v1/completions", json=body
        ) as answer:
            await running.idle()  # the engine is done before the client reads
            text = await answer.text()

        streamed = Reply(200, {}, text)
        assert concatenated(streamed) == whole.json["nvext"]["completion_token_ids"]


@pytest.mark.pitfall(33)
async def test_nobody_to_serve_is_a_503(tiny_model: Path) -> None:
    """Without a worker: not ready, alive, and 503 with Retry-After."""
    async with stack(tiny_model, ()) as running:
        reply = await running.complete(prompt="a")
        ready = await running.get("/ready")
        live = await running.get("/live")
        health = await running.get("/health")

    assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
    assert (ready.status, live.status, health.status) == (503, 200, 503)


async def test_more_than_the_bound_is_a_429(tiny_model: Path) -> None:
    """The frontend's own bound answers 429 with Retry-After."""
    options = ("--step-ms", "50")
    arguments = ("--max-inflight-requests", "1")
    async with stack(tiny_model, (Role.AGGREGATED,), options, arguments) as running:
        first = asyncio.create_task(running.complete(prompt="a", max_tokens=20))
        await eventually(lambda: running.workers[0].engine.load().num_running > 0)
        second = await running.complete(prompt="a")

        assert (second.status, second.headers["Retry-After"]) == (429, "1")
        assert (await first).status == 200


async def test_a_worker_of_another_model_is_refused(tiny_model: Path) -> None:
    """One clear sentence, and the frontend goes on with the others."""
    async with stack(tiny_model) as running:
        other = SimWorker(tiny_model, Role.AGGREGATED, "other", ("--step-ms", "0"))
        await other.start(model="another")
        endpoints = [w.link.endpoint for w in (*running.workers, other)]
        running.pool.set_endpoints(endpoints)
        await eventually(
            lambda: any("another" in i.reason for i in running.pool.instances())
        )

        assert (await running.complete(prompt="a", max_tokens=1)).status == 200
        await other.stop()


async def test_a_refusal_says_what_is_wrong_with_each_worker(tiny_model: Path) -> None:
    """It named workers that stop as "ready", and prefill workers not at all."""
    async with stack(tiny_model) as running:
        [worker] = running.workers
        worker.service.drain()
        await eventually(lambda: not running.pool.ready)
        refused = await running.complete(prompt="a", max_tokens=1)
        assert refused.status == 503
        assert "(aggregated-0: is stopping)" in refused.error["message"]
        [instance] = (await running.get("/health")).json["instances"]
        assert (instance["state"], instance["reason"]) == ("ready", "is stopping")
    async with stack(tiny_model, (Role.PREFILL,)) as running:
        refused = await running.complete(prompt="a", max_tokens=1)
        assert refused.status == 503
        assert "(only prefill workers are ready)" in refused.error["message"]


async def test_models_and_metrics(pair: Stack) -> None:
    """The served model is listed with its context length; metrics have vLLM's names."""
    await pair.complete(prompt="abc", max_tokens=4)
    models = (await pair.get("/v1/models")).json
    metrics = (await pair.get("/metrics")).text

    assert models["data"][0]["id"] == MODEL_NAME
    assert models["data"][0]["max_model_len"] == 2048
    assert (await pair.get(f"/v1/models/{MODEL_NAME}")).json["id"] == MODEL_NAME
    assert (await pair.get("/v1/models/none")).status == 404
    assert "tokenwire_time_to_first_token_seconds_count 1.0" in metrics
    assert "tokenwire_inter_token_latency_seconds_count 3.0" in metrics
    assert "tokenwire_e2e_request_latency_seconds_count 1.0" in metrics
    assert "tokenwire_generation_tokens_total 4.0" in metrics
    assert "tokenwire_kv_handover_seconds_count 1.0" in metrics


@pytest.mark.pitfall(31)
async def test_eight_mebibytes_of_ids_are_taken(pair: Stack) -> None:
    """A large body is read, and refused for its length, not for its size."""
    body = json.dumps({"prompt": [5] * 2_800_000, "max_tokens": 1}).encode()

    reply = await pair.post("/v1/completions", body)

    assert len(body) > 8 * 1024 * 1024
    assert "maximum context length" in reply.error["message"]
