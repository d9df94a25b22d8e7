"""What broke servers like this one, row by row of the table in CONTRIBUTING.md.

Rows that another module's tests guard are marked there.
"""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from support.stack import Reply, SimWorker, eventually, stack
from support.tiny_model import EOS
from tokenwire.frontend.choice import Choice
from tokenwire.frontend.generation import Generation
from tokenwire.frontend.job import End, Job
from tokenwire.frontend.session import Session
from tokenwire.frontend.trail import Trail
from tokenwire.protocol.messages import Leg, Role
from tokenwire.worker.engine import EngineRequest

PAIR = (Role.PREFILL, Role.DECODE)
TWO = (Role.AGGREGATED, Role.AGGREGATED)
IDS: dict[str, Any] = {"return_token_ids": True}


def recorded(worker: SimWorker) -> list[EngineRequest]:
    """Return a list that every request of the worker's engine is added to."""
    requests: list[EngineRequest] = []
    submit = worker.engine.submit

    def record(request: EngineRequest) -> None:
        requests.append(request)
        submit(request)

    worker.engine.submit = record  # type: ignore[method-assign]
    return requests


@pytest.mark.pitfall(1)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_eos_token_is_among_the_ids(tiny_model: Path, stream: bool) -> None:
    """An output that ends by itself has the id that ended it, and counts it."""
    options = ("--step-ms", "0", "--mean-output-tokens", "8")
    async with stack(tiny_model, PAIR, options) as running:
        for seed in range(5):
            reply = await running.complete(
                prompt=[60, 61 + seed], max_tokens=500, seed=seed, stream=stream,
                **({"stream_options": {"include_usage": True}} if stream else {}), **IDS,
            )  # fmt: skip

            ids, reason, usage = outcome(reply, stream=stream)
            assert (ids[-1], reason) == (EOS, "stop")
            assert ids.count(EOS) == 1
            assert usage["completion_tokens"] == len(ids)
        await running.idle()


def outcome(reply: Reply, *, stream: bool) -> tuple[list[int], str, dict[str, Any]]:
    """Return ids, finish reason and usage of a completion."""
    if not stream:
        body = reply.json
        ids = body["nvext"]["completion_token_ids"]
        return ids, body["choices"][0]["finish_reason"], body["usage"]
    bodies = [event.body for event in reply.events if event.body is not None]
    ids = [
        token_id
        for event in reply.events
        for token_id in event.nvext.get("completion_token_ids", [])
    ]
    return ids, bodies[-2]["choices"][0]["finish_reason"], bodies[-1]["usage"]


@pytest.mark.pitfall(8)
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_zeros_reach_the_engine(tiny_model: Path, endpoint: str) -> None:
    """Nothing is taken for "not given" because it is zero, empty or false."""
    zeros: dict[str, Any] = {
        "temperature": 0, "seed": 0, "presence_penalty": 0, "frequency_penalty": 0,
        "min_p": 0, "min_tokens": 0, "priority": 0, "ignore_eos": False, "max_tokens": 1,
        "stop": [], "stop_token_ids": [], "logit_bias": {}, "bad_words": [],
    }  # fmt: skip
    async with stack(tiny_model) as running:
        requests = recorded(running.workers[0])
        if endpoint == "chat":
            reply = await running.chat(logprobs=True, top_logprobs=0, **zeros)
        else:
            reply = await running.complete(prompt="a", logprobs=0, **zeros)

    assert reply.status == 200, reply.text
    [request] = requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.seed, sampling.logprobs) == (0, 0, 0)
    assert (sampling.min_p, sampling.min_tokens, request.priority) == (0, 0, 0)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0, 0)
    assert not sampling.ignore_eos


@pytest.mark.pitfall(9)
@pytest.mark.pitfall(10)
@pytest.mark.parametrize("stream", [False, True])
async def test_after_a_worker_died_the_answer_is_the_other_ones(
    tiny_model: Path, stream: bool
) -> None:
    """Usage, prompt ids and worker id are those of a request that nothing happened to."""
    options = ("--step-ms", "20", "--prefill-tokens-per-s", "1000")
    async with stack(tiny_model, TWO, options) as running:
        prompt = list(range(10, 250))
        call = asyncio.create_task(
            running.complete(
                prompt=prompt, max_tokens=3, stream=stream,
                nvext={"extra_fields": ["completion_token_ids", "worker_id"]},
                **({"stream_options": {"include_usage": True}} if stream else {}),
            )
        )  # fmt: skip
        await eventually(
            lambda: any(w.engine.load().num_running for w in running.workers)
        )
        [first] = [w for w in running.workers if w.engine.load().num_running]
        [other] = [w for w in running.workers if w is not first]
        await first.stop()

        reply = await call

        assert reply.status == 200, reply.text
        ids, _, usage = outcome(reply, stream=stream)
        assert len(ids) == 3
        assert usage["prompt_tokens"] == len(prompt)
        nvext = reply.events[-3].nvext if stream else reply.json["nvext"]
        assert nvext["prompt_token_ids"] == prompt
        assert set(nvext["worker_id"].values()) == {other.name}


@pytest.mark.pitfall(12)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_output_that_cannot_go_on_says_so(
    tiny_model: Path, stream: bool
) -> None:
    """Never silence and never half an answer with 200: an error, and the end."""
    arguments = ("--worker-wait-s", "0.2")
    async with stack(
        tiny_model, options=("--step-ms", "20"), arguments=arguments
    ) as running:
        call = asyncio.create_task(
            running.complete(prompt=[5], max_tokens=1000, stream=stream, **IDS)
        )
        [worker] = running.workers
        await eventually(lambda: worker.engine.load().kv_usage > 0)
        await eventually(lambda: worker.engine.load().num_running == 1)
        await asyncio.sleep(0)
        await worker.stop()

        reply = await call

    if stream and reply.status == 200:
        error, done = reply.events[-2:]
        assert done.body is None
        assert error.body is not None
        assert set(error.body["error"]) == {"message", "type", "param", "code"}
    else:
        assert reply.status in {502, 503}
        assert set(reply.error) == {"message", "type", "param", "code"}


@pytest.mark.pitfall(14)
async def test_min_tokens_are_the_decode_legs(tiny_model: Path) -> None:
    """The prefill leg makes its one token all the same; the decode leg keeps them."""
    async with stack(tiny_model, PAIR) as running:
        prefill, decode = map(recorded, running.workers)
        reply = await running.complete(
            prompt=[5, 6, 7], min_tokens=5, max_tokens=9, **IDS
        )

        assert reply.status == 200, reply.text
        [first], [second] = prefill, decode
        assert (first.leg, second.leg) == (Leg.PREFILL, Leg.DECODE)
        assert (second.sampling.min_tokens, second.sampling.max_tokens) == (5, 9)
        assert 5 <= len(reply.json["nvext"]["completion_token_ids"]) <= 9


@pytest.mark.pitfall(15)
async def test_router_and_engines_see_the_same_tokens(tiny_model: Path) -> None:
    """Tokenized once, here: both legs have the ids that the answer repeats."""
    async with stack(tiny_model, PAIR) as running:
        prefill, decode = map(recorded, running.workers)
        reply = await running.post(
            "/v1/chat/completions",
            {
                "messages": [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": "héllo wörld"},
                ],
                "max_tokens": 3,
                **IDS,
            },
        )

        ids = reply.json["nvext"]["prompt_token_ids"]
        assert [request.token_ids for request in (*prefill, *decode)] == [ids, ids]
        text = running.model.decode(ids, skip_special_tokens=False)
        assert "Be brief." in text
        assert "héllo wörld" in text


@pytest.mark.pitfall(29)
async def test_nothing_is_kept_of_requests_that_are_over(tiny_model: Path) -> None:
    """Whatever requests bring, good, bad or left: as many objects and metrics as before."""
    arguments = ("--trust-request-chat-template",)
    async with stack(tiny_model, PAIR, arguments=arguments) as running:

        async def round_of(number: int) -> None:
            tag = f"r{number}"
            headers = {"X-Request-Id": tag}
            body: dict[str, Any] = {"prompt": f"hello {tag}", "max_tokens": 2}
            chat = {"messages": [{"role": "user", "content": tag}], "max_tokens": 2}
            await running.post("/v1/completions", {**body, "stop": [tag]}, headers)
            await running.post("/v1/completions", {**body, "stream": True}, headers)
            await running.post("/v1/completions", {**body, "model": tag}, headers)
            await running.post("/v1/completions", {**body, tag: 1, "user": tag})
            await running.post(f"/v1/{tag}", body)
            await running.get(f"/v1/models/{tag}")
            await running.post(
                "/v1/chat/completions", {**chat, "chat_template": f"{tag} a"}
            )
            await running.post(
                "/v1/chat/completions", {**chat, "chat_template_kwargs": {tag: tag}}
            )
            call = asyncio.create_task(running.complete(prompt=tag, max_tokens=2000))
            await asyncio.sleep(0)
            call.cancel()

        async def kept() -> tuple[Counter[str], set[str]]:
            await running.idle()
            gc.collect()
            objects = Counter(
                type(one).__qualname__
                for one in gc.get_objects()
                if str(type(one).__module__).startswith("tokenwire.")
            )
            lines = (await running.get("/metrics")).text.splitlines()
            return objects, {line.rpartition(" ")[0] for line in lines}

        await running.get("/metrics")
        for number in range(40):  # fills what has a bound, compiled templates above all
            await round_of(number)
        objects, series = await kept()
        for number in range(40, 100):
            await round_of(number)
        more_objects, more_series = await kept()

    assert more_series == series
    grown = more_objects - objects
    assert sum(grown.values()) <= 5, grown  # a message that is on its way


def found_by_the_collector() -> set[str]:
    """Return which of a request's parts only the collector of cycles has come by."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    kinds = (Session, Choice, Generation, Trail, Job, web.BaseRequest)
    found = {type(one).__name__ for one in gc.garbage if isinstance(one, kinds)}
    gc.garbage.clear()
    return found


@pytest.mark.parametrize("roles", [(Role.AGGREGATED,), PAIR])
async def test_a_request_leaves_no_cycle_behind(
    tiny_model: Path, roles: tuple[Role, ...]
) -> None:
    """What it was made of goes at once, and not when the collector of cycles comes by."""
    async with stack(tiny_model, roles) as running:

        async def leaves_the_queue() -> None:
            running.pool.is_paused = True
            asked = asyncio.create_task(running.complete(prompt="a"))
            await eventually(lambda: running.intake.num_waiting == 1)
            asked.cancel()
            await eventually(lambda: not running.intake.visits)
            running.pool.is_paused = False

        async def is_looked_at() -> None:
            reply = await running.complete(
                prompt="a", max_tokens=2, stream=True, nvext={"resumable": True}
            )
            body = reply.events[0].body or {}
            looked = await running.get(f"/v1/generations/{body['id']}")
            assert looked.status == 200

        refused = {"structured_outputs": {"regex": "("}}  # by its worker
        requests: dict[str, Callable[[], Awaitable[object]]] = {
            "whole": lambda: running.complete(prompt="a", max_tokens=2),
            "streamed": lambda: running.complete(prompt="a", max_tokens=2, stream=True),
            "refused": lambda: running.complete(prompt="a", **refused),
            "no route": lambda: running.get("/v1/nothing"),
            "leaves the queue": leaves_the_queue,
            "is looked at": is_looked_at,
        }
        found: dict[str, set[str]] = {}
        gc.disable()
        try:
            for how, send in requests.items():
                await send()
                await running.idle()
                found_by_the_collector()  # and what a first request leaves
                await send()
                await running.idle()
                found[how] = found_by_the_collector()
        finally:
            gc.enable()
        assert not any(found.values()), found


@pytest.mark.pitfall(29)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_idle_connection_keeps_nothing_of_its_last_request(
    tiny_model: Path, stream: bool
) -> None:
    """A prompt of 100,000 ids goes with its request, and a long answer when it is sent."""
    async with stack(tiny_model) as running:
        await running.complete(prompt="a", max_tokens=2, stream=stream)
        await running.idle()
        await eventually(lambda: not running.intake.visits)
        gc.collect()
        known = gc.get_objects()
        assert [one for one in known if isinstance(one, Session | Job | End)] == []
        assert [
            one for one in known if isinstance(one, web.Response) and one.body
        ] == []


@pytest.mark.pitfall(32)
@pytest.mark.pitfall(33)
async def test_liveness_is_its_own_and_readiness_the_workers(tiny_model: Path) -> None:
    """At its bound it is alive and ready; without its worker alive, and not ready."""
    arguments = ("--max-inflight-requests", "1", "--worker-wait-s", "0.2")
    options = ("--step-ms", "50")
    async with stack(tiny_model, options=options, arguments=arguments) as running:
        call = asyncio.create_task(running.complete(prompt="a", max_tokens=100))
        await eventually(lambda: running.workers[0].engine.load().num_running > 0)
        full = [await running.get(path) for path in ("/live", "/ready", "/health")]
        assert [reply.status for reply in full] == [200, 200, 200]
        assert (await running.complete(prompt="a")).status == 429

        await running.workers[0].stop()
        await eventually(lambda: not running.pool.ready)
        alone = [await running.get(path) for path in ("/live", "/ready", "/health")]

        assert [reply.status for reply in alone] == [200, 503, 503]
        assert alone[1].json["ready"] is False
        await call


@pytest.mark.pitfall(34)
async def test_a_request_id_may_come_twice(tiny_model: Path) -> None:
    """At once, and in headers and bodies: each is served, under an id of ours."""
    async with stack(tiny_model, PAIR, ("--step-ms", "5")) as running:
        prefill, decode = map(recorded, running.workers)
        body = {"prompt": [5, 6], "max_tokens": 4, "request_id": "job-1"}
        replies = await asyncio.gather(
            *(
                running.post("/v1/completions", body, {"X-Request-Id": "job-1"})
                for _ in range(8)
            )
        )

        assert {reply.status for reply in replies} == {200}
        assert {reply.headers["X-Request-Id"] for reply in replies} == {"job-1"}
        assert len({reply.json["id"] for reply in replies}) == 8
        for requests in (prefill, decode):
            assert len({request.request_id for request in requests}) == 8
            assert "job-1" not in json.dumps([r.request_id for r in requests])
