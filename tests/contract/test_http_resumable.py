"""Resumable streams: every id once, in order, with the text that it makes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from support.resumable import PATHS, Stream, laws, text_of, texts_after_each_id
from support.stack import MODEL_NAME, SimWorker, Stack, eventually, stack
from support.tiny_model import EOS
from tokenwire.frontend import answers, contract, resumable, session, sse
from tokenwire.frontend.checkpoint import check_hashes, read_checkpoint
from tokenwire.protocol.messages import Role

MESSAGES = [{"role": "user", "content": "hello"}]
ASKS: dict[str, dict[str, Any]] = {
    "chat": {"messages": MESSAGES},
    "completions": {"prompt": "hello"},
}
CHUNK_TYPES = {
    "chat": answers.ChatCompletionChunk,
    "completions": answers.CompletionChunk,
}
RESUMABLE: dict[str, Any] = {"nvext": {"resumable": True}}
BYTES = list(range(3, 259))  # each a byte: mostly no character by itself
WITH_USAGE = {"stream_options": {"include_usage": True}}


@pytest_asyncio.fixture
async def slow(tiny_model: Path) -> AsyncIterator[Stack]:
    """One worker, which takes its time, and no patience without it."""
    options, arguments = ("--step-ms", "5"), ("--worker-wait-s", "0.1")
    async with stack(tiny_model, options=options, arguments=arguments) as running:
        yield running


def ask(route: str, **fields: Any) -> Stream:
    """Return a stream that is to be read."""
    return Stream(PATHS[route], {**ASKS[route], **RESUMABLE, **fields})


@pytest.mark.parametrize("tokens_per_step", ["1", "3", "7"])
@pytest.mark.parametrize("route", PATHS)
async def test_what_a_client_has_is_the_fold_of_its_ids(
    tiny_model: Path, route: str, tokens_per_step: str
) -> None:
    """At every chunk, in any batches, inside of characters too; every id comes once."""
    options = ("--step-ms", "0", "--tokens-per-step", tokens_per_step)
    asked: dict[str, Any] = {"max_tokens": 150, "seed": 5, "allowed_token_ids": BYTES}
    async with stack(tiny_model, (Role.PREFILL, Role.DECODE), options) as served:
        whole = await served.post(
            PATHS[route], {**ASKS[route], **asked, "return_token_ids": True}
        )
        made = await ask(route, **asked, **WITH_USAGE).run(served)

    laws(made)
    expected = whole.json["nvext"]["completion_token_ids"]
    assert made.token_ids == expected
    assert made.usage["completion_tokens"] == len(expected) == 150
    assert made.first["prompt_token_ids"] == whole.json["nvext"]["prompt_token_ids"]
    views = texts_after_each_id(served.model, expected)
    text, num_ids, num_silent = "", 0, 0
    for chunk in made.chunks:
        new = text_of(chunk["choices"][0])
        num_silent += not new and bool(chunk["nvext"]["completion_token_ids"])
        text += new
        num_ids += len(chunk["nvext"]["completion_token_ids"])
        if chunk["choices"][0]["finish_reason"] is None:
            assert text == views[num_ids]
    if tokens_per_step == "1":
        assert num_silent > 5  # R4: half a character holds no id back


@pytest.mark.parametrize("route", PATHS)
async def test_chunks_fit_their_types(served: Stack, route: str) -> None:
    """Those of /openapi.json; the usage chunk has no nvext, the first the headers' id."""
    reply = await served.post(
        PATHS[route],
        {**ASKS[route], **RESUMABLE, **WITH_USAGE, "max_tokens": 20, "stream": True},
    )

    *chunks, usage, done = reply.events
    for chunk in chunks:
        msgspec.convert(chunk.body, CHUNK_TYPES[route])
    assert usage.body is not None
    assert "nvext" not in usage.body
    assert done.body is None
    assert reply.text.startswith("retry: 2000\nid: ")
    assert "event:" not in reply.text
    generation = chunks[0].nvext["generation"]
    assert reply.headers["X-Generation-Id"] == generation["id"]
    assert reply.headers["Cache-Control"] == "no-cache, no-transform"
    assert reply.headers["X-Accel-Buffering"] == "no"
    assert "seed" not in generation
    assert generation["contract"].startswith("sha256:")
    assert [("checkpoint" in chunk.nvext) for chunk in chunks] == [
        chunk is chunks[-1] for chunk in chunks
    ]


@pytest.mark.parametrize("route", PATHS)
async def test_logprobs_are_those_of_the_chunks_ids(served: Stack, route: str) -> None:
    """One entry an id, in each chunk; their sum is in the checkpoint."""
    logprobs: Any = True if route == "chat" else 0
    made = await ask(route, max_tokens=30, logprobs=logprobs).run(served)

    laws(made)
    total = 0.0
    for chunk in made.chunks:
        entries: dict[str, Any] = chunk["choices"][0]["logprobs"] or {}
        numbers: list[float] = entries.get("token_logprobs", [])
        numbers = [one["logprob"] for one in entries.get("content", ())] or numbers
        assert len(numbers) == len(chunk["nvext"]["completion_token_ids"])
        for number in numbers:
            total += number
    assert made.last["checkpoint"]["state"]["cumulative_logprob"] == total


@pytest.mark.parametrize("tokens_per_step", ["1", "5"])
async def test_checkpoints_come_when_they_are_due(
    tiny_model: Path, tokens_per_step: str
) -> None:
    """Each says what the client has at that chunk: its ids, its number, its prompt."""
    options = ("--step-ms", "0", "--tokens-per-step", tokens_per_step)
    asked = {
        "resumable": {"ttl_s": 60},
        "checkpoint": {"every_tokens": 16, "prompt": "ids"},
    }
    async with stack(tiny_model, options=options) as served:
        made = await ask("chat", max_tokens=70, seed=1, nvext=asked).run(served)

    laws(made)
    due = [16, 32, 48, 64, 70]
    num_ids, found = 0, list[int]()
    for chunk in made.chunks:
        num_ids += len(chunk["nvext"]["completion_token_ids"])
        given = chunk["nvext"].get("checkpoint")
        if given is None:
            continue
        found.append(num_ids)
        checkpoint = read_checkpoint(given)
        check_hashes(checkpoint.state)
        assert checkpoint.state.output.ids == made.token_ids[:num_ids]
        assert checkpoint.state.prompt.ids == made.first["prompt_token_ids"]
        assert checkpoint.state.rng.draws == num_ids
        assert checkpoint.identity.seq == chunk["nvext"]["seq"]
        assert checkpoint.identity.id == made.first["generation"]["id"]
        assert checkpoint.identity.expires == checkpoint.identity.created + 60
        assert checkpoint.sampling.max_tokens == 70
        assert checkpoint.state.rng.seed == made.first["generation"]["seed"] == 1
    assert len(found) == len(due)
    steps = int(tokens_per_step)
    assert all(0 <= at - want < steps for at, want in zip(found, due, strict=True))


@pytest.mark.parametrize("route", PATHS)
async def test_a_whole_answer_has_its_checkpoint(served: Stack, route: str) -> None:
    """And the rest of what a stream's first and last chunk say; nothing has a number."""
    reply = await served.post(
        PATHS[route], {**ASKS[route], **RESUMABLE, "max_tokens": 9, "seed": 2}
    )

    nvext = reply.json["nvext"]
    assert reply.headers["X-Generation-Id"] == nvext["generation"]["id"]
    checkpoint = read_checkpoint(nvext["checkpoint"])
    assert checkpoint.state.output.ids == nvext["completion_token_ids"]
    assert checkpoint.state.prompt.len == len(nvext["prompt_token_ids"])
    assert checkpoint.state.prompt.ids is None
    assert nvext["token_offset"] == 0
    assert "seq" not in nvext


# --- an early end ------------------------------------------------------------------------


def check_interruption(body: dict[str, Any], ids: list[int], seq: int) -> None:
    """Assert that an error says where the generation stands."""
    msgspec.convert(body, answers.ErrorAnswer)
    assert body["error"]["code"] == "generation_interrupted"
    assert body["nvext"]["resumable"] is True
    assert body["nvext"]["retry_after_ms"] >= 1000
    checkpoint = read_checkpoint(body["nvext"]["checkpoint"])
    check_hashes(checkpoint.state)
    assert checkpoint.state.output.ids == ids
    assert checkpoint.identity.seq == seq


@pytest.mark.parametrize("route", PATHS)
async def test_a_lost_worker_leaves_a_checkpoint(slow: Stack, route: str) -> None:
    """Of exactly what the client has; then the stream ends as every stream does."""
    made = ask(route, max_tokens=2_000)
    reading = made.start(slow)
    await made.has(20)
    await slow.workers[0].die()
    await reading

    laws(made)
    assert made.interruption["nvext"]["reason"] == "worker_lost"
    check_interruption(made.interruption, made.token_ids, made.last["seq"])


async def test_nothing_follows_an_end_token_whose_worker_is_lost(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Nor is it text, although the worker has not said that it was the end."""
    script = tmp_path / "script.json"
    rule = {"output_token_ids": [67, 68], "then": "eos"}
    made = ask("completions", max_tokens=20, skip_special_tokens=False, **WITH_USAGE)
    async with stack(tiny_model) as served:
        workers: list[SimWorker] = []
        for name, held in (("held", {"hold_at": 3}), ("calm", {})):
            script.write_text(json.dumps([{**rule, **held}]))
            options = ("--script", str(script))
            worker = SimWorker(tiny_model, Role.AGGREGATED, name, options)
            workers.append(worker)
            await worker.start()
        try:
            await served.know(workers[:1])
            reading = made.start(served)
            await made.has(3)
            await served.know(workers)
            await workers[0].die()
            await reading
        finally:
            for worker in workers:
                await worker.stop()

    laws(made)
    assert made.token_ids == [67, 68, EOS]
    assert made.text == served.model.decode([67, 68], skip_special_tokens=True)
    assert made.finish_reason == "stop"
    assert made.usage["completion_tokens"] == 3


async def test_a_frontend_that_stops_leaves_a_checkpoint(slow: Stack) -> None:
    """The reason is the drain, which lets requests end for a while first."""
    made = ask("chat", max_tokens=2_000)
    reading = made.start(slow)
    await made.has(5)
    await slow.intake.drain(0, asyncio.Event())
    await reading

    laws(made)
    assert made.interruption["nvext"]["reason"] == "draining"
    check_interruption(made.interruption, made.token_ids, made.last["seq"])


async def test_a_whole_answer_that_is_lost_leaves_a_checkpoint(slow: Stack) -> None:
    """In the error's body: what was generated is not lost, although nothing was sent."""
    asking = asyncio.create_task(
        slow.chat(max_tokens=2_000, **RESUMABLE), name="whole answer"
    )
    [worker] = slow.workers
    await eventually(lambda: worker.engine.load().num_running == 1, "running")
    await eventually(lambda: worker.engine.load().kv_usage > 0.002, "tokens")
    await worker.die()
    reply = await asking

    assert reply.status == 502
    ids = reply.json["nvext"]["checkpoint"]["state"]["output"]["ids"]
    assert len(ids) > 0
    check_interruption(reply.json, ids, 0)


async def test_without_it_an_early_end_is_the_error_it_was(slow: Stack) -> None:
    """No checkpoint, no other code."""
    made = Stream(PATHS["chat"], {**ASKS["chat"], "max_tokens": 2_000})
    reading = made.start(slow)
    await eventually(lambda: len(made.events) > 8, "events")
    await slow.workers[0].die()
    await reading

    assert set(made.interruption) == {"error"}
    assert made.interruption["error"]["code"] == "worker_failed"


# --- what it costs -----------------------------------------------------------------------


async def test_who_asks_for_nothing_pays_nothing(
    served: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is hashed, counted or numbered for a plain request, whatever it selects."""

    def fail(*_: object, **__: object) -> None:
        msg = "a plain request has come here"
        raise AssertionError(msg)

    for owner, name in (
        (contract.Terms, "contract"),
        (resumable.Resumable, "__init__"),
        (sse.LivelyStream, "__init__"),
    ):
        monkeypatch.setattr(owner, name, fail)
    plain: list[dict[str, Any]] = [
        {},
        {"return_token_ids": True},
        {"nvext": {"resumable": False}},
    ]
    for stream in (False, True):
        for more in plain:
            reply = await served.chat(max_tokens=3, stream=stream, **more)
            assert reply.status == 200
            assert "token_offset" not in reply.text
            assert "X-Generation-Id" not in reply.headers
            assert "id: " not in reply.text

    reply = await served.chat(max_tokens=3, **RESUMABLE)
    assert reply.status == 500  # the guard is one


# --- silence -----------------------------------------------------------------------------


async def test_silence_is_broken_by_comments(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as no token comes; OpenAI's client reads over them."""
    monkeypatch.setattr(sse, "PING_S", 0.02)
    options = ("--step-ms", "1", "--fault", "freeze@20")
    arguments = ("--stall-timeout-s", "0.5", "--worker-wait-s", "0.1")
    async with stack(tiny_model, options=options, arguments=arguments) as served:
        made = await ask("chat", max_tokens=100).run(served)

    laws(made)
    assert made.num_pings > 0
    assert made.interruption["nvext"]["reason"] == "worker_lost"


async def test_nothing_is_said_behind_the_end(
    served: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A comment there would be the beginning of the connection's next answer."""
    num_looks = 0

    class Counted(sse.LivelyStream):
        def _look(self) -> None:
            nonlocal num_looks
            num_looks += 1
            super()._look()

    monkeypatch.setattr(sse, "PING_S", 0.0)
    monkeypatch.setattr(session, "LivelyStream", Counted)
    laws(await ask("chat", max_tokens=20).run(served))
    num_before = num_looks
    for _ in range(3):  # turns of the loop, in which the timer would be due
        assert (await served.get("/live")).status == 200

    assert num_looks == num_before


async def test_openais_client_reads_a_stream_with_comments(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event without data, which an empty line behind a comment makes, would end it."""
    monkeypatch.setattr(sse, "PING_S", 0.0)
    options = ("--step-ms", "5")
    async with (
        stack(tiny_model, options=options) as served,
        AsyncOpenAI(base_url=served.url + "/v1", api_key="k", max_retries=0) as client,
    ):
        messages: Any = MESSAGES
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model=MODEL_NAME, messages=messages, max_tokens=30, stream=True,
                extra_body=RESUMABLE,
            )
        ]  # fmt: skip

    assert chunks[-1].choices[0].finish_reason == "length"
    extra: Any = chunks[-1].model_extra
    assert extra["nvext"]["checkpoint"]["state"]["output"]["len"] == 30


async def test_a_client_that_leaves_ends_its_generation(slow: Stack) -> None:
    """As ever: a resumable one costs nothing either, and its timer is gone."""
    made = ask("completions", max_tokens=2_000)
    reading = made.start(slow)
    await made.has(3)
    reading.cancel()

    await slow.idle()


# --- what is asked -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"n": 2}, 400, "n"),
        ({"prompt": ["a", "b"]}, 400, "prompt"),
        ({"echo": True, "max_tokens": 0}, 422, "max_tokens"),
        ({"nvext": {"checkpoint": {}}}, 400, "nvext.checkpoint"),
        ({"nvext": {"resumable": 1}}, 400, "nvext.resumable"),
        ({"nvext": {"resumable": {"x": 1}}}, 400, "nvext.resumable"),
        ({"nvext": {"resumable": {"ttl_s": 0}}}, 400, "ttl_s"),
        ({"nvext": {"resumable": {"ttl_s": 10**30}}}, 400, "ttl_s"),
        (
            {"nvext": {"resumable": {"on_disconnect": "continue"}}},
            400,
            "nvext.resumable.on_disconnect",
        ),
        (
            {"nvext": {"resumable": {"on_disconnect": "stay"}}},
            400,
            "nvext.resumable.on_disconnect",
        ),
        (
            {"nvext": {"resumable": True, "checkpoint": {"every_tokens": 15}}},
            400,
            "every_tokens",
        ),
        (
            {"nvext": {"resumable": True, "checkpoint": {"prompt": "text"}}},
            400,
            "nvext.checkpoint.prompt",
        ),
        ({"stop": "\ud800"}, 400, "stop"),
    ],
)
async def test_what_cannot_be_is_refused_by_its_name(
    served: Stack, fields: dict[str, Any], status: int, param: str
) -> None:
    """Before anything is sent to a worker."""
    body = {**ASKS["completions"], **RESUMABLE, **fields}
    reply = await served.post("/v1/completions", json.dumps(body).encode())

    assert (reply.status, reply.error["param"]) == (status, param), reply.text
    assert reply.error["code"] == ("not_resumable" if status == 422 else None)


@pytest.mark.parametrize("off", [False, None])
async def test_false_asks_for_nothing(served: Stack, off: bool | None) -> None:
    """It is the default."""
    reply = await served.complete(prompt="a", max_tokens=2, nvext={"resumable": off})

    assert "nvext" not in reply.json
