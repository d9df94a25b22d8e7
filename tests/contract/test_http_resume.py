"""Requests that go on from earlier output: exactly, or refused by what differs."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import pytest_asyncio

from support.resumable import PATHS, Stream, cut, laws, resumed, texts_after_each_id
from support.stack import SimWorker, Stack, stack
from support.tiny_model import EOS
from tokenwire.frontend import answers
from tokenwire.frontend.calls import Call
from tokenwire.frontend.intake import ticket_of
from tokenwire.frontend.job import Job
from tokenwire.frontend.router import Router
from tokenwire.protocol.messages import Role, Sampling

TOPOLOGIES = {"aggregated": (Role.AGGREGATED,), "pair": (Role.PREFILL, Role.DECODE)}
OPTIONS = ("--step-ms", "0", "--output-draws")
ASKS: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "hello"}], "logprobs": True},
    "completions": {"prompt": "hello", "logprobs": 1},
}
BYTES = list(range(3, 259))  # each a byte: mostly no character by itself
SAMPLED: dict[str, Any] = {
    "max_tokens": 40,
    "seed": 7,
    "frequency_penalty": 0.5,
    "allowed_token_ids": BYTES,
    "stream_options": {"include_usage": True},
    "nvext": {"resumable": True},
}


@pytest_asyncio.fixture(params=TOPOLOGIES)
async def served(
    request: pytest.FixtureRequest, tiny_model: Path
) -> AsyncIterator[Stack]:
    """A stack whose seeds and penalties count what is output."""
    async with stack(tiny_model, TOPOLOGIES[request.param], OPTIONS) as running:
        yield running
        await running.idle()


@pytest_asyncio.fixture
async def one(tiny_model: Path) -> AsyncIterator[Stack]:
    """One such worker."""
    async with stack(tiny_model, options=OPTIONS) as running:
        yield running
        await running.idle()


def ask(route: str, **fields: Any) -> Stream:
    """Return a stream that is to be read."""
    return Stream(PATHS[route], {**ASKS[route], **SAMPLED, **fields})


def logprobs_of(stream: Stream) -> list[Any]:
    """Return all entries, in the form of the endpoint."""
    entries: list[Any] = []
    for chunk in stream.chunks:
        given: dict[str, Any] = chunk["choices"][0]["logprobs"] or {}
        if "content" in given:
            entries += given["content"]
        elif given:
            entries += zip(*(given[name] for name in sorted(given)), strict=True)
    return entries


@pytest.mark.parametrize("route", PATHS)
async def test_from_anywhere_the_same_comes(served: Stack, route: str) -> None:
    """Ids, text, logprobs and the finish reason, at each cut, inside of characters too."""
    calm = await ask(route).run(served)
    checkpoint = calm.last["checkpoint"]
    num_tokens, num_prompt = len(calm.token_ids), len(calm.first["prompt_token_ids"])
    assert num_tokens == 40

    ends: dict[int, str] = {}
    found_cached = 0
    for k in range(num_tokens):
        made = await resumed(calm, checkpoint=cut(checkpoint, k)).run(served)
        laws(made, k)
        assert made.token_ids == calm.token_ids[k:]
        assert made.finish_reason == "length"
        assert logprobs_of(made) == logprobs_of(calm)[k:]
        assert (
            made.last["checkpoint"]["state"]["output"]
            == (checkpoint["state"]["output"])
        )
        ends[k] = made.text
        if route == "chat":
            assert all("role" not in c["choices"][0]["delta"] for c in made.chunks)
        told = made.first["resume"]
        assert (told["prefix_tokens"], told["downgrades"]) == (k, [])
        assert told["exactness"] == made.first["generation"]["exactness"] == "same_rng"
        assert told["cached_tokens"] + told["recomputed_tokens"] == num_prompt + k
        assert told["recomputed_tokens"] > 0
        cached = made.usage["prompt_tokens_details"]["cached_tokens"]
        assert cached == min(told["cached_tokens"], num_prompt)
        found_cached = max(found_cached, told["cached_tokens"])
        assert made.usage["prompt_tokens"] == num_prompt
        assert made.usage["completion_tokens"] == num_tokens - k
        assert made.usage["completion_tokens_details"] == {"resumed_prefix_tokens": k}
    assert (
        found_cached >= 16
    )  # blocks of earlier resumes, the prefill worker's in a pair
    before = texts_after_each_id(served.model, calm.token_ids)
    assert {before[k] + rest for k, rest in ends.items()} == {calm.text}


@pytest.mark.parametrize("route", PATHS)
async def test_a_resumed_answer_fits_its_type(one: Stack, route: str) -> None:
    """Of /openapi.json, streamed and whole."""
    calm = await ask(route).run(one)
    again = resumed(calm, checkpoint=cut(calm.last["checkpoint"], 9))
    chunk, whole = {
        "chat": (answers.ChatCompletionChunk, answers.ChatCompletion),
        "completions": (answers.CompletionChunk, answers.Completion),
    }[route]

    made = await again.run(one)
    reply = await one.post(PATHS[route], {**again.body, "stream_options": None})

    for event in made.events[:-1]:
        msgspec.convert(event.body, chunk)
    msgspec.convert(reply.json, whole)


@pytest.mark.parametrize("route", PATHS)
async def test_a_whole_answer_has_the_whole_message(one: Stack, route: str) -> None:
    """Its ids and its usage are the new ones alone; who did not stream saw no text."""
    calm = await ask(route).run(one)
    again = resumed(calm, checkpoint=cut(calm.last["checkpoint"], 11))
    reply = await one.post(PATHS[route], {**again.body, "stream_options": None})

    [choice] = reply.json["choices"]
    text = choice["text"] if route == "completions" else choice["message"]["content"]
    assert text == calm.text
    nvext = reply.json["nvext"]
    assert nvext["completion_token_ids"] == calm.token_ids[11:]
    assert nvext["token_offset"] == nvext["resume"]["prefix_tokens"] == 11
    assert nvext["checkpoint"]["state"] == calm.last["checkpoint"]["state"] | {
        "cumulative_logprob": None
    }
    assert reply.json["usage"]["completion_tokens"] == 29


async def test_ids_alone_are_enough(served: Stack) -> None:
    """With the prompt's and the contract, which are compared, or without."""
    calm = await ask("chat").run(served)
    ids = calm.token_ids[:17]
    sure = {
        "prompt_token_ids": calm.first["prompt_token_ids"],
        "contract": calm.first["generation"]["contract"],
    }

    for more in ({}, sure):
        made = await resumed(calm, output_token_ids=ids, **more).run(served)
        laws(made, 17)
        assert made.token_ids == calm.token_ids[17:]
        assert "parent" not in made.first["generation"]


async def test_the_prompt_is_not_echoed_again(one: Stack) -> None:
    """It was, at first; nor is it in a whole answer."""
    calm = await ask("completions", echo=True, logprobs=None).run(one)
    again = resumed(calm, checkpoint=cut(calm.last["checkpoint"], 0))
    made = await again.run(one)
    reply = await one.post(again.path, {**again.body, "stream_options": None})

    assert calm.text == "hello" + made.text
    assert reply.json["choices"][0]["text"] == made.text


async def test_an_eos_that_is_ignored_ends_nothing(one: Stack) -> None:
    """The output goes on behind it, as it would have."""
    ignoring = ask("completions", ignore_eos=True, logprobs=None)
    made = await resumed(ignoring, output_token_ids=[67, EOS]).run(one)

    assert len(made.token_ids) == 38


def test_earlier_output_counts_in_the_queue() -> None:
    """It has to be computed like a prompt, and leaves so much less to generate."""
    job = Job([1, 2, 3], Sampling(max_tokens=10), output_token_ids=[4, 5])
    ticket = ticket_of(b"t", cast("Call", SimpleNamespace(jobs=[(job, None)])))

    assert (ticket.num_prompt_tokens, ticket.max_tokens) == (5, 8)


async def test_it_can_be_resumed_again(one: Stack) -> None:
    """Each generation names the one before it, and the first; the sum goes on, too."""
    calm = await ask("completions").run(one)
    total = calm.last["checkpoint"]["state"]["cumulative_logprob"]
    first = cut(calm.last["checkpoint"], 5)
    first["state"]["cumulative_logprob"] = 0.0
    second = await resumed(calm, checkpoint=first).run(one)
    rest = second.last["checkpoint"]["state"]["cumulative_logprob"]
    third = await resumed(calm, checkpoint=cut(second.last["checkpoint"], 30)).run(one)

    assert third.token_ids == calm.token_ids[30:]
    assert total < rest < 0
    identity = third.last["checkpoint"]["identity"]
    assert identity["parent"] == second.first["generation"]["id"]
    assert second.first["generation"]["parent"] == calm.first["generation"]["id"]
    assert identity["root"] == calm.first["generation"]["id"]
    assert identity["id"] == third.first["generation"]["id"]
    assert (
        len({calm.first["generation"]["id"], identity["id"], identity["parent"]}) == 3
    )


async def test_an_interrupted_generation_goes_on_at_a_new_worker(
    tiny_model: Path,
) -> None:
    """With the checkpoint of the error event; nothing is lost, nothing comes twice."""
    options, arguments = (
        ("--step-ms", "2", "--output-draws"),
        ("--worker-wait-s", "0.1"),
    )
    async with stack(tiny_model, options=options, arguments=arguments) as served:
        calm = await ask("chat", max_tokens=400).run(served)
        broken = ask("chat", max_tokens=400)
        reading = broken.start(served)
        await broken.has(20)
        await served.workers[0].die()
        await reading
        other = SimWorker(tiny_model, Role.AGGREGATED, "other", options)
        await other.start()
        try:
            await served.know([other])
            checkpoint = broken.interruption["nvext"]["checkpoint"]
            made = await resumed(calm, checkpoint=checkpoint).run(served)
        finally:
            await other.stop()

    laws(broken)
    laws(made, len(broken.token_ids))
    assert 20 <= len(broken.token_ids) < 400
    assert broken.token_ids + made.token_ids == calm.token_ids
    assert broken.text + made.text == calm.text


async def test_nothing_of_a_half_character_is_told_at_an_early_end(
    tiny_model: Path, one: Stack
) -> None:
    """It is no end of the text: the other half may come, from another worker."""
    high = [one_id for one_id in BYTES if one.model.token_bytes(one_id)[0] >= 0x80]
    calm = await ask("completions", allowed_token_ids=high).run(one)
    num_halves = 0
    for step in range(10, 22):
        options = (*OPTIONS, "--fault", f"die@{step}")
        arguments = ("--worker-wait-s", "0.01")
        async with stack(tiny_model, options=options, arguments=arguments) as dying:
            broken = await ask("completions", allowed_token_ids=high).run(dying)
        laws(broken)
        checkpoint = broken.interruption["nvext"]["checkpoint"]
        made = await resumed(calm, checkpoint=checkpoint).run(one)

        num_ids = len(broken.token_ids)
        assert broken.token_ids + made.token_ids == calm.token_ids
        assert broken.text + made.text == calm.text
        bytes_so_far = b"".join(map(one.model.token_bytes, broken.token_ids))
        num_halves += bytes_so_far.decode(errors="replace") != broken.text
        assert 0 < num_ids < len(calm.token_ids)
    assert num_halves > 2


# --- complete already --------------------------------------------------------------------


@pytest.fixture
def idle_router(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Returns what makes every question for a worker an error."""

    def fail(*_: object, **__: object) -> None:
        msg = "a worker was asked for"
        raise AssertionError(msg)

    return lambda: monkeypatch.setattr(Router, "route", fail)


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(
    ("fields", "reason", "stop_reason"),
    [
        ({}, "length", None),
        ({"allowed_token_ids": None, "stop_token_ids": [77]}, "stop", 77),
        ({"allowed_token_ids": None, "stop": ["X"]}, "stop", "X"),
        ({}, "eos", None),
    ],
)
async def test_what_is_complete_needs_no_worker(
    one: Stack,
    idle_router: Callable[[], None],
    streamed: bool,
    fields: dict[str, Any],
    reason: str,
    stop_reason: int | str | None,
) -> None:
    """One chunk with the finish reason, and no ids; a whole answer has the message."""
    selected = {"resumable": True, "extra_fields": ["stop_reason"]}
    ids = [67, 68, 69]
    if reason == "eos":
        ids, reason = [*ids, EOS], "stop"
    elif reason == "length":
        fields = {**fields, "max_tokens": 3}
    else:
        [last] = (
            [77]
            if stop_reason == 77
            else await one.model.encode("X", add_special_tokens=False)
        )
        ids = [*ids, last]
    asked = ask("completions", logprobs=None, nvext=selected, **fields)
    again = resumed(asked, output_token_ids=ids)
    idle_router()

    if streamed:
        made = await again.run(one)
        laws(made, len(ids))
        assert len(made.chunks) == 1
        assert made.token_ids == []
        assert made.text == ""
        assert made.finish_reason == reason
        nvext, usage = made.first, made.usage
    else:
        reply = await one.post(again.path, {**again.body, "stream_options": None})
        [choice] = reply.json["choices"]
        assert choice["finish_reason"] == reason
        assert choice["text"] == one.model.decode(ids[:3], skip_special_tokens=True)
        nvext, usage = reply.json["nvext"], reply.json["usage"]
    assert nvext.get("stop_reason") == stop_reason
    assert nvext["resume"]["recomputed_tokens"] == 0
    assert nvext["checkpoint"]["state"]["output"]["ids"] == ids
    assert usage["completion_tokens"] == 0
    assert usage["completion_tokens_details"] == {"resumed_prefix_tokens": len(ids)}


async def test_text_held_back_comes_with_the_end(
    one: Stack, idle_router: Callable[[], None]
) -> None:
    """Half a character at the end is told when it is the end."""
    [half] = (await one.model.encode("é", add_special_tokens=False))[:1]
    asked = ask("completions", max_tokens=2, logprobs=None)
    idle_router()
    made = await resumed(asked, output_token_ids=[67, half]).run(one)

    assert made.text == "\N{REPLACEMENT CHARACTER}"


# --- refusals ----------------------------------------------------------------------------


async def refusal(
    served: Stack, asked: Stream, status: int, code: str | None
) -> dict[str, Any]:
    """Return the error of a request that is refused, streamed or not."""
    error: dict[str, Any] = {}
    for stream in (True, False):
        body = {**asked.body, "stream": stream, "stream_options": None}
        reply = await served.post(asked.path, body, asked.headers)
        error = reply.error
        assert (reply.status, error["code"]) == (status, code), reply.text
        assert reply.headers["Content-Type"].startswith("application/json")
    return error


def put(checkpoint: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return a checkpoint with another value somewhere."""
    made: dict[str, Any] = json.loads(json.dumps(checkpoint))
    *parents, name = path.split(".")
    inner = made
    for parent in parents:
        inner = inner[parent]
    inner[name] = value
    return made


HASH = "a" * 64


@pytest.mark.parametrize(
    ("path", "value", "status", "code"),
    [
        ("version", 2, 400, "invalid_resume"),
        ("more", 1, 400, "invalid_resume"),
        ("identity.expires", 1, 403, "checkpoint_forbidden"),
        ("identity.choice", 1, 403, "checkpoint_forbidden"),
        ("contract.model", "other", 409, "model_mismatch"),
        ("contract.weight_version", "step-9", 409, "model_mismatch"),
        ("contract.tokenizer_sha256", HASH, 409, "tokenizer_mismatch"),
        ("contract.chat_template_sha256", HASH, 409, "chat_template_mismatch"),
        ("contract.adapter", {"id": "l"}, 409, "adapter_mismatch"),
        ("contract.grammar", {"kind": "json", "sha256": HASH}, 409, "grammar_mismatch"),
        ("contract.tools_sha256", HASH, 409, "tools_mismatch"),
        ("contract.tool_parser", "hermes", 409, "parser_mismatch"),
        ("contract.cache_salt_sha256", HASH, 409, "prompt_mismatch"),
        ("state.prompt.sha256", HASH, 409, "prompt_mismatch"),
        ("sampling.temperature", 0.3, 409, "sampling_mismatch"),
        ("sampling.max_tokens", 41, 409, "sampling_mismatch"),
        ("state.output.sha256", HASH, 412, "output_hash_mismatch"),
        ("state.output.ids", [1], 412, "output_hash_mismatch"),
    ],
)
async def test_a_checkpoint_that_does_not_fit_is_refused(
    one: Stack, path: str, value: Any, status: int, code: str
) -> None:
    """By the field that differs, before a worker hears of it, also when streamed."""
    calm = await ask("chat").run(one)
    checkpoint = put(cut(calm.last["checkpoint"], 9), path, value)

    error = await refusal(one, resumed(calm, checkpoint=checkpoint), status, code)

    assert error["param"].startswith("nvext.resume_from.checkpoint")
    if status == 409:
        assert error["param"].endswith(path.removesuffix(".sha256"))
        inside: dict[str, Any] = {"grammar": HASH, "adapter": "l"}
        shown = inside.get(path.rpartition(".")[2], value)
        assert str(shown) in error["message"]


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"temperature": 0.5}, "sampling_mismatch", "sampling.temperature"),
        ({"seed": 8}, "sampling_mismatch", "sampling.seed"),
        ({"max_tokens": 41}, "sampling_mismatch", "sampling.max_tokens"),
        ({"stop": ["x"]}, "sampling_mismatch", "sampling.stop"),
        (
            {"messages": [{"role": "user", "content": "hallo"}]},
            "prompt_mismatch",
            "state.prompt",
        ),
        ({"cache_salt": "s"}, "prompt_mismatch", "contract.cache_salt_sha256"),
        (
            {"chat_template_kwargs": {"a": 1}},
            "chat_template_mismatch",
            "contract.template_kwargs_sha256",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f"}}],
                "tool_choice": "none",
            },
            "tools_mismatch",
            "contract.tools_sha256",
        ),
        (
            {"response_format": {"type": "json_object"}},
            "grammar_mismatch",
            "contract.grammar",
        ),
    ],
)
async def test_another_request_is_refused(
    one: Stack, fields: dict[str, Any], code: str, param: str
) -> None:
    """The same by its own side: what the body asks is not what was begun."""
    calm = await ask("chat").run(one)
    asked = resumed(calm, checkpoint=cut(calm.last["checkpoint"], 9))
    asked.body |= fields

    error = await refusal(one, asked, 409, code)

    assert error["param"] == f"nvext.resume_from.checkpoint.{param}"


async def test_other_weights_are_refused(tiny_model: Path) -> None:
    """Each worker that may serve must have those of the checkpoint."""
    async with stack(tiny_model, options=OPTIONS) as served:
        calm = await ask("completions").run(served)
        other = SimWorker(tiny_model, Role.AGGREGATED, "other", OPTIONS)
        await other.start(weight_version="step-2")
        try:
            await served.know([*served.workers, other])
            asked = resumed(calm, checkpoint=cut(calm.last["checkpoint"], 9))
            error = await refusal(served, asked, 409, "model_mismatch")
        finally:
            await other.stop()

    assert "default" in error["message"]
    assert "step-2" in error["message"]


@pytest.mark.parametrize(
    ("given", "status", "code", "param"),
    [
        ({}, 400, "invalid_resume", ""),
        ({"checkpoint": {}}, 400, "invalid_resume", ".checkpoint"),
        ({"output_token_ids": [3], "checkpoint": {}}, 400, "invalid_resume", ""),
        (
            {"checkpoint": {}, "contract": "x"},
            400,
            "invalid_resume",
            ".contract",
        ),
        ({"output_token_ids": [3, 264]}, 400, "invalid_resume", ""),
        ({"output_token_ids": [3, -1]}, 400, "invalid_resume", ""),
        ({"output_token_ids": [3] * 41}, 400, "invalid_resume", ""),
        ({"output_token_ids": [3] * 2_049}, 413, "resume_too_large", ""),
        ({"output_token_ids": [True]}, 400, None, ".output_token_ids[0]"),
        ({"output_token_ids": "x"}, 400, None, ".output_token_ids"),
        ({"more": 1}, 400, None, ""),
        (
            {"output_token_ids": [3], "prompt_token_ids": [3]},
            409,
            "prompt_mismatch",
            ".prompt_token_ids",
        ),
        (
            {"output_token_ids": [3], "contract": "sha256:0"},
            409,
            "contract_mismatch",
            ".contract",
        ),
    ],
)
async def test_what_makes_no_sense_is_refused(
    one: Stack, given: dict[str, Any], status: int, code: str | None, param: str
) -> None:
    """By its name."""
    error = await refusal(one, resumed(ask("completions"), **given), status, code)

    assert error["param"] == f"nvext.resume_from{param}"


async def test_output_behind_a_stop_string_is_refused(one: Stack) -> None:
    """No run could have gone on there."""
    ids = await one.model.encode("aXb", add_special_tokens=False)
    asked = ask("completions", stop=["X"], logprobs=None)

    await refusal(one, resumed(asked, output_token_ids=ids), 400, "invalid_resume")


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"n": 2}, 400, "n"),
        ({"prompt": ["a", "b"]}, 400, "prompt"),
        ({"echo": True, "max_tokens": 0, "logprobs": None}, 422, "max_tokens"),
    ],
)
async def test_only_one_output_can_be_resumed(
    one: Stack, fields: dict[str, Any], status: int, param: str
) -> None:
    """And there must be one."""
    asked = resumed(ask("completions"), output_token_ids=[3])
    asked.body |= fields
    code = "not_resumable" if status == 422 else None

    assert (await refusal(one, asked, status, code))["param"] == param


# --- exactness ---------------------------------------------------------------------------


@pytest_asyncio.fixture
async def inexact(tiny_model: Path) -> AsyncIterator[Stack]:
    """A worker to which output is a prompt like any other."""
    options = (*OPTIONS, "--no-exact-resume")
    async with stack(tiny_model, options=options) as running:
        yield running


async def test_what_is_lost_is_told(inexact: Stack) -> None:
    """Where a worker cannot count draws and penalties from the output."""
    calm = await ask("chat").run(inexact)
    checkpoint = cut(calm.last["checkpoint"], 9)
    made = await resumed(calm, checkpoint=checkpoint).run(inexact)

    told = made.first["resume"]
    assert told["exactness"] == "best_effort"
    assert told["downgrades"] == ["seed", "frequency_penalty"]
    assert calm.first["generation"]["exactness"] == "best_effort"
    assert len(made.token_ids) == len(calm.token_ids) - 9


async def test_exactness_that_nobody_has_is_refused(inexact: Stack) -> None:
    """409, with what stands against it; greedy needs none."""
    calm = await ask("chat").run(inexact)
    exact = resumed(calm, checkpoint=cut(calm.last["checkpoint"], 9))
    exact.body["nvext"]["exactness"] = "same_rng"
    error = await refusal(inexact, exact, 409, "exactness_unavailable")
    assert "same_rng" in error["message"]

    greedy = ask("chat", temperature=0, frequency_penalty=0, seed=None)
    calm = await greedy.run(inexact)
    exact = resumed(calm, checkpoint=cut(calm.last["checkpoint"], 9))
    exact.body["nvext"]["exactness"] = "same_rng"
    made = await exact.run(inexact)
    assert made.token_ids == calm.token_ids[9:]
    assert made.first["resume"]["exactness"] == "same_rng"


async def test_an_environment_that_differs_is_told(one: Stack) -> None:
    """Another engine draws others; refused where exactness was asked for."""
    calm = await ask("chat").run(one)
    other = put(cut(calm.last["checkpoint"], 9), "environment.engine", "vllm")
    asked = resumed(calm, checkpoint=other)
    told = (await asked.run(one)).first["resume"]
    assert (told["exactness"], told["downgrades"]) == ("best_effort", ["engine"])

    exact = resumed(calm, checkpoint=other)
    exact.body["nvext"]["exactness"] = "same_rng"
    error = await refusal(one, exact, 409, "exactness_unavailable")
    assert "engine" in error["message"]


async def test_a_seed_is_chosen_where_exactness_needs_one(one: Stack) -> None:
    """It is told, goes on, and is not asked of the client; else there is none."""
    nvext = {"resumable": True, "exactness": "same_rng"}
    calm = await ask("chat", seed=None, nvext=nvext).run(one)
    generation = calm.first["generation"]
    assert generation["seed_source"] == "frontend"
    assert 0 <= generation["seed"] < 2**53
    made = await resumed(calm, checkpoint=cut(calm.last["checkpoint"], 9)).run(one)
    assert made.token_ids == calm.token_ids[9:]
    assert made.first["generation"]["seed"] == generation["seed"]
    assert made.first["resume"]["exactness"] == "same_rng"

    plain = await ask("chat", seed=None).run(one)
    assert "seed" not in plain.first["generation"]
    told = await resumed(plain, checkpoint=cut(plain.last["checkpoint"], 9)).run(one)
    assert told.first["resume"]["downgrades"] == ["unseeded"]


STRUCTURED: dict[str, Any] = {
    "structured_outputs": {"regex": "[a-z]+"},
    "logprobs": None,
    "allowed_token_ids": None,
}


@pytest.mark.parametrize("exact", [True, False])
async def test_a_grammar_goes_on_or_refuses(
    tiny_model: Path, tmp_path: Path, exact: bool
) -> None:
    """422 for what it could not have led to; 409 where it would begin again."""
    script = tmp_path / "script.json"
    script.write_text(json.dumps([{"output_token_ids": list(range(67, 77))}]))
    options = [*OPTIONS, "--script", str(script)]
    if not exact:
        options.append("--no-exact-resume")
    async with stack(tiny_model, options=options) as served:
        calm = await ask("completions", **STRUCTURED).run(served)
        assert calm.last["checkpoint"]["contract"]["grammar"]["kind"] == "regex"
        again = resumed(calm, checkpoint=cut(calm.last["checkpoint"], 4))
        if not exact:
            await refusal(served, again, 409, "exactness_unavailable")
            return
        assert (await again.run(served)).token_ids == calm.token_ids[4:]
        wrong = resumed(calm, output_token_ids=[67, 99])
        error = await refusal(served, wrong, 422, "grammar_rejects_prefix")
        assert error["param"] == "nvext.resume_from"
        await served.idle()


# --- signed ------------------------------------------------------------------------------


async def test_signed_checkpoints_are_their_clients(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Over HTTP: another API key, an altered, an unsigned one: 403. Keys may change."""
    file, old, new = tmp_path / "keys", secrets.token_hex(32), secrets.token_hex(32)

    def write(*keys: str) -> None:
        file.unlink(missing_ok=True)
        file.write_text("\n".join(keys))
        file.chmod(0o600)

    write(old)
    arguments = ("--resume-key-file", str(file))
    alice = {"Authorization": "Bearer alice"}
    nvext = {"resumable": True, "checkpoint": {"every_tokens": 16}}
    async with stack(tiny_model, options=OPTIONS, arguments=arguments) as served:
        calm = ask("chat", nvext=nvext)
        calm.headers = alice
        await calm.run(served)
        [checkpoint] = [
            chunk["nvext"]["checkpoint"]
            for chunk in calm.chunks
            if chunk["nvext"].get("seq") and "checkpoint" in chunk["nvext"]
        ][:1]
        num_ids = checkpoint["state"]["output"]["len"]
        assert num_ids >= 16
        write(new, old)
        made = await resumed(calm, checkpoint=checkpoint).run(served)
        laws(made, num_ids)
        assert made.token_ids == calm.token_ids[num_ids:]
        signed_anew = made.last["checkpoint"]["integrity"]["key_id"]
        assert signed_anew != checkpoint["integrity"]["key_id"]

        for altered in (
            cut(checkpoint, num_ids - 1),
            put(checkpoint, "sampling.seed", 8),
            put(checkpoint, "integrity", None),
        ):
            asked = resumed(calm, checkpoint=altered)
            await refusal(served, asked, 403, "checkpoint_forbidden")
        asked = resumed(calm, checkpoint=checkpoint)
        for headers in ({}, {"Authorization": "Bearer bob"}):
            asked.headers = headers
            await refusal(served, asked, 403, "checkpoint_forbidden")
        write(new)
        asked.headers = alice
        await refusal(served, asked, 403, "checkpoint_forbidden")


async def test_a_plain_request_has_none_of_it(one: Stack) -> None:
    """No details of the usage, no nvext, as ever."""
    reply = await one.complete(prompt="a", max_tokens=2)

    assert set(reply.json["usage"]) == {
        "prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"
    }  # fmt: skip
    assert "nvext" not in reply.json
