"""The admin plane on simulated workers: pauses, updates, adapters, and what fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from ports import free_port

from support.admin import adapter, admin_get, admin_post, weights
from support.awake import within
from support.clock import move_clock
from support.held import held_reads, held_updates
from support.stack import (
    MODEL_NAME,
    SimWorker,
    Stack,
    eventually,
    frontend,
    stack,
)
from tokenwire.frontend.stall import STALL_TIMEOUT_S
from tokenwire.protocol.messages import Role

PAIR = (Role.PREFILL, Role.DECODE)
PROMPT = list(range(100, 140))
ASKS = {
    "model": MODEL_NAME,
    "prompt": PROMPT,
    "max_tokens": 8,
    "return_token_ids": True,
}
VERSIONED = {
    "prompt": PROMPT,
    "nvext": {"extra_fields": ["completion_token_ids", "weight_version", "worker_id"]},
}
SLOW = ("--step-ms", "10")


@pytest_asyncio.fixture(params=["aggregated", "pair"])
async def served(
    request: pytest.FixtureRequest, tiny_model: Path
) -> AsyncIterator[Stack]:
    """Two aggregated workers, or a pair; fast."""
    roles = PAIR if request.param == "pair" else (Role.AGGREGATED, Role.AGGREGATED)
    async with stack(tiny_model, roles) as running:
        yield running
        await running.idle()


async def ids(running: Stack, **changes: Any) -> list[int]:
    """Return the ids of an answer."""
    reply = await running.complete(**{**ASKS, **changes})
    assert reply.status == 200, reply.text
    return list(reply.json["choices"][0]["token_ids"])


class Streamed:
    """A stream that a task reads."""

    def __init__(self, running: Stack, **body: Any) -> None:
        self.nvext: list[dict[str, Any]] = []
        self.finish_reason: str | None = None
        self.error: dict[str, Any] | None = None
        self._task = asyncio.create_task(self._read(running, body))

    @property
    def token_ids(self) -> list[int]:
        """The ids so far."""
        return [i for one in self.nvext for i in one.get("completion_token_ids", [])]

    async def end(self) -> dict[str, Any]:
        """Wait for the end; return the last chunk's nvext."""
        async with within(60):
            await self._task
        return self.nvext[-1] if self.nvext else {}

    async def _read(self, running: Stack, body: dict[str, Any]) -> None:
        asked = {**VERSIONED, "model": MODEL_NAME, "stream": True, **body}
        url = f"{running.url}/v1/completions"
        async with running.client.post(url, json=asked) as answer:
            async for line in answer.content:
                text = line.decode().strip().removeprefix("data: ")
                if not text or text == "[DONE]":
                    continue
                chunk = json.loads(text)
                if "error" in chunk:
                    self.error = chunk["error"]
                    continue
                self.nvext.append(chunk.get("nvext", {}))
                reason = chunk["choices"][0]["finish_reason"]
                self.finish_reason = reason or self.finish_reason


async def begun(running: Stack, **body: Any) -> Streamed:
    """Return a stream that has brought some ids."""
    streamed = Streamed(running, **{"max_tokens": 60, **body})
    await eventually(lambda: len(streamed.token_ids) > 3, "the stream runs")
    return streamed


# --- weights -----------------------------------------------------------------------------


async def test_other_weights_give_other_ids_and_the_old_ones_the_old(
    served: Stack, tmp_path: Path, tiny_model: Path
) -> None:
    """Both workers load them: whichever serves, the ids are the new weights'."""
    before = await ids(served)
    folder = weights(tmp_path / "step_1", b"one")
    done = await admin_post(served, "/update_weights", {"weight_dir": str(folder)})
    assert (done.status, done.json) == (200, {"status": "ok"})
    after = [await ids(served) for _ in range(4)]
    assert after[0] != before
    assert after == after[:1] * 4
    assert (await admin_get(served, "/weight_version")).json == {
        "weight_version": "step_1"
    }
    await admin_post(served, "/update_weights", {"weight_dir": str(tiny_model)})
    assert await ids(served) == before


async def test_answers_say_which_weights_made_them(
    served: Stack, tmp_path: Path
) -> None:
    """The version that the body names; one word while it was one version."""
    nvext = (await served.complete(model=MODEL_NAME, **VERSIONED)).json["nvext"]
    assert nvext["weight_version"] == "default"
    body = {"weight_dir": str(weights(tmp_path)), "weight_version": "policy-7"}
    await admin_post(served, "/update_weights", body)
    nvext = (await served.complete(model=MODEL_NAME, **VERSIONED)).json["nvext"]
    assert nvext["weight_version"] == "policy-7"
    assert "weight_versions" not in nvext


async def test_an_unnamed_update_is_called_as_its_folder(
    served: Stack, tmp_path: Path
) -> None:
    """And the same folder again, with other files, is another version."""
    folder = weights(tmp_path / "live", b"one")
    for content, version in ((b"one", "live"), (b"two", "live#2"), (b"3", "live#3")):
        weights(folder, content)
        await admin_post(served, "/update_weights", {"weight_dir": str(folder)})
        told = (await admin_get(served, "/weight_version")).json
        assert told == {"weight_version": version}


@pytest.mark.parametrize("roles", [(Role.AGGREGATED,), PAIR])
async def test_a_request_that_runs_through_an_update_says_which_ids_are_whose(
    tiny_model: Path, tmp_path: Path, roles: Sequence[Role]
) -> None:
    """Pause, update, resume: it goes on, and the first ids are the old weights'."""
    async with stack(tiny_model, roles, SLOW) as running:
        old = await ids(running, max_tokens=60)
        streamed = await begun(running)
        await admin_post(running, "/pause?mode=keep&clear_cache=false")
        num_before = len(streamed.token_ids)
        await admin_post(
            running, "/update_weights", {"weight_dir": str(weights(tmp_path / "new"))}
        )
        await admin_post(running, "/resume")
        end = await streamed.end()
        assert streamed.finish_reason == "length"
        assert len(streamed.token_ids) == 60
        first, second = end["weight_versions"]
        assert first == {"version": "default", "first_index": 0}
        assert second["version"] == end["weight_version"] == "new"
        at = second["first_index"]
        assert 0 < num_before <= at < 60
        assert streamed.token_ids[:at] == old[:at]
        assert streamed.token_ids[at:] != old[at:]
        # What goes on behind the old ids does so as the new weights would have.
        rest = await ids(
            running, prompt=PROMPT + streamed.token_ids[:at], max_tokens=60 - at
        )
        assert streamed.token_ids[at:] == rest


async def test_cached_prompts_of_old_weights_are_not_found_again(
    served: Stack, tmp_path: Path
) -> None:
    """Unless the update says that they may be."""
    asked = {**ASKS, "nvext": {"extra_fields": ["timing"]}, "return_token_ids": None}
    asked["session_id"] = "s"  # always the same worker

    async def num_cached() -> int:
        reply = await served.complete(**asked)
        return int(reply.json["nvext"]["timing"]["cached_tokens"])

    await num_cached()
    await eventually_cached(num_cached)
    folder = str(weights(tmp_path))
    await admin_post(served, "/update_weights", {"weight_dir": folder})
    assert not await num_cached()
    await eventually_cached(num_cached)
    body = {"weight_dir": folder, "reset_prefix_cache": False}
    await admin_post(served, "/update_weights", body)
    assert await num_cached() > 0


async def eventually_cached(num_cached: Any) -> None:
    """Ask until the worker has the prompt in its cache."""
    for _ in range(20):
        if await num_cached() and await num_cached():
            return
    pytest.fail("nothing is ever cached")


# --- pauses ------------------------------------------------------------------------------


async def beats(running: Stack) -> None:
    """Return when every worker has said once more how busy it is."""
    links = list(running.pool.links)
    before = [link.load for link in links]
    await eventually(
        lambda: all(
            link.load is not load for link, load in zip(links, before, strict=True)
        ),
        "beats",
    )


@pytest.mark.parametrize("roles", [(Role.AGGREGATED,), PAIR])
async def test_a_paused_worker_is_no_stalled_one(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, roles: Sequence[Role]
) -> None:
    """Far beyond the stall timeout its request stands still, and then goes on."""
    async with stack(tiny_model, roles, SLOW) as running:
        whole = await ids(running, max_tokens=60)
        streamed = await begun(running)
        assert (await admin_post(running, "/pause?mode=keep")).json == {
            "status": "paused"
        }
        assert (await admin_get(running, "/is_paused")).json == {"is_paused": True}
        num_tokens = len(streamed.token_ids)
        for _ in range(int(2 * STALL_TIMEOUT_S)):
            move_clock(monkeypatch, 1.0)
            await beats(running)
            assert all(link.usable for link in running.pool.links)
        assert len(streamed.token_ids) == num_tokens
        assert (await admin_post(running, "/resume")).json == {"status": "resumed"}
        await streamed.end()
        assert streamed.token_ids == whole
        assert not running.pool.is_paused


async def test_resume_is_idempotent(served: Stack) -> None:
    """Also where nothing is paused."""
    for _ in range(2):
        assert (await admin_post(served, "/resume")).status == 200
    assert (await admin_get(served, "/is_paused")).json == {"is_paused": False}


@pytest.mark.parametrize("roles", [(Role.AGGREGATED,), PAIR])
async def test_a_pause_that_waits_lets_requests_end(
    tiny_model: Path, roles: Sequence[Role]
) -> None:
    """The pause is answered behind the last end, and what comes then waits."""
    async with stack(tiny_model, roles, SLOW) as running:
        streamed = await begun(running)
        assert (await admin_post(running, "/pause?mode=wait")).status == 200
        await streamed.end()
        assert streamed.finish_reason == "length"
        assert len(streamed.token_ids) == 60
        later = asyncio.create_task(running.complete(**ASKS))
        await eventually(lambda: running.intake.num_waiting == 1, "it waits")
        await admin_post(running, "/resume")
        assert (await later).status == 200


async def test_a_pause_that_waits_lets_a_prompt_go_on_to_its_decode_worker(
    tiny_model: Path,
) -> None:
    """Nothing runs there yet when the pause begins: it must not be paused first."""
    slow = (*SLOW, "--prefill-tokens-per-s", "100")
    async with stack(tiny_model, PAIR, slow) as running:
        asking = asyncio.create_task(running.complete(**ASKS))
        prefill = running.workers[0].service
        await eventually(lambda: prefill.num_requests == 1, "the prompt is computed")
        assert (await admin_post(running, "/pause?mode=wait")).status == 200
        async with within(60):
            reply = await asking
        assert reply.json["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("roles", [(Role.AGGREGATED,), PAIR])
async def test_a_pause_that_aborts_ends_requests_as_vllm_does(
    tiny_model: Path, roles: Sequence[Role]
) -> None:
    """With what they have, and the reason ``abort``; that is the default."""
    async with stack(tiny_model, roles, SLOW) as running:
        whole = await ids(running, max_tokens=60)
        streamed = await begun(running)
        assert (await admin_post(running, "/pause")).status == 200
        await streamed.end()
        assert streamed.finish_reason == "abort"
        assert streamed.error is None
        assert 3 < len(streamed.token_ids) < 60
        assert streamed.token_ids == whole[: len(streamed.token_ids)]
        await running.idle()
        await admin_post(running, "/resume")
        assert await ids(running, max_tokens=60) == whole


async def test_a_resume_ends_a_pause_that_waits(tiny_model: Path) -> None:
    """A trainer that gives up is not kept waiting by a long output."""
    async with stack(tiny_model, (Role.AGGREGATED,), SLOW) as running:
        streamed = await begun(running, max_tokens=400)
        pausing = asyncio.create_task(admin_post(running, "/pause?mode=wait"))
        await eventually(lambda: running.pool.is_paused, "the pause has begun")
        assert (await admin_post(running, "/resume")).status == 200
        refused = await pausing
        assert refused.status == 500
        assert "it was resumed" in refused.error["message"]
        await streamed.end()
        assert len(streamed.token_ids) == 400


async def test_new_requests_are_refused_while_paused_where_that_is_asked(
    tiny_model: Path,
) -> None:
    """``--while-paused refuse``: 503 with Retry-After, at once."""
    arguments = ("--while-paused", "refuse")
    async with stack(tiny_model, (Role.AGGREGATED,), arguments=arguments) as running:
        await admin_post(running, "/pause")
        reply = await running.complete(**ASKS)
        assert (reply.status, reply.error["code"]) == (503, "paused")
        assert reply.headers["Retry-After"]
        assert (await running.get("/ready")).status == 200
        await admin_post(running, "/resume")
        assert (await running.complete(**ASKS)).status == 200


async def test_nothing_new_begins_anywhere_while_one_worker_is_paused(
    tiny_model: Path,
) -> None:
    """One that joins during a pause would else serve old weights in it."""
    async with stack(tiny_model, (Role.AGGREGATED,)) as running:
        await admin_post(running, "/pause")
        late = SimWorker(tiny_model, Role.AGGREGATED, "late", ("--step-ms", "0"))
        await late.start()
        try:
            await running.know([*running.workers, late])
            waiting = asyncio.create_task(running.complete(**ASKS))
            await eventually(lambda: running.intake.num_waiting == 1, "it waits")
            await admin_post(running, "/resume")
            assert (await waiting).status == 200
        finally:
            await late.stop()


async def test_sleep_and_wake_up(served: Stack) -> None:
    """Asleep, nothing is computed; a resume does not wake; the tags do, in turn."""
    slept = await admin_post(served, "/sleep?level=2")
    assert slept.json == {"status": "sleeping", "level": 2}
    assert (await admin_get(served, "/is_sleeping")).json == {"is_sleeping": True}
    assert (await admin_post(served, "/resume")).status == 400
    partly = await admin_post(served, "/wake_up?tags=weights")
    assert partly.json == {"status": "sleeping", "tags": ["weights"]}
    waiting = asyncio.create_task(served.complete(**ASKS))
    await eventually(lambda: served.intake.num_waiting == 1, "it waits")
    awake = await admin_post(served, "/wake_up")
    assert awake.json == {"status": "awake", "tags": None}
    assert (await waiting).status == 200


async def test_reset_prefix_cache(served: Stack) -> None:
    """VLLM's answer; the frontend forgets what it thought was cached, too."""
    await served.complete(**ASKS)
    reset = await admin_post(served, "/reset_prefix_cache?reset_running_requests=true")
    assert reset.json == {"success": True}
    assert not any(len(link.prefixes or ()) for link in served.pool.links)
    asked = {**ASKS, "nvext": {"extra_fields": ["timing"]}, "return_token_ids": None}
    timing = (await served.complete(**asked)).json["nvext"]["timing"]
    assert not timing["cached_tokens"]


# --- adapters ----------------------------------------------------------------------------


async def test_an_adapter_is_a_model_of_its_own_name(
    served: Stack, tmp_path: Path
) -> None:
    """Loaded, listed, served with its own ids under its name; unloaded, gone."""
    plain = await ids(served)
    folder = adapter(tmp_path / "a", b"one")
    body = {"lora_name": "run-1", "lora_path": str(folder)}
    assert (await admin_post(served, "/load_lora_adapter", body)).json == {
        "status": "ok"
    }
    listed = (await served.get("/v1/models")).json["data"]
    assert [(one["id"], one["parent"]) for one in listed] == [
        (MODEL_NAME, None),
        ("run-1", MODEL_NAME),
    ]
    assert (await served.get("/v1/models/run-1")).json["root"] == "run-1"
    reply = await served.complete(**{**ASKS, "model": "run-1"})
    assert reply.json["model"] == "run-1"
    adapted = reply.json["choices"][0]["token_ids"]
    assert adapted != plain
    assert [await ids(served, model="run-1") for _ in range(3)] == [adapted] * 3
    assert await ids(served) == plain
    gone = await admin_post(served, "/unload_lora_adapter", {"lora_name": "run-1"})
    assert gone.status == 200
    reply = await served.complete(**{**ASKS, "model": "run-1"})
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")
    assert len((await served.get("/v1/models")).json["data"]) == 1
    assert await ids(served) == plain


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/inference/v1/generate"])
async def test_every_route_takes_an_adapter(
    served: Stack, tmp_path: Path, path: str
) -> None:
    """Chat, and tokens in, tokens out."""
    body: dict[str, Any] = {"model": "a"}
    if path.startswith("/inference"):
        body |= {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4}}
    else:
        body |= {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    assert (await served.post(path, body)).status == 404
    loaded = {"lora_name": "a", "lora_path": str(adapter(tmp_path))}
    await admin_post(served, "/load_lora_adapter", loaded)
    reply = await served.post(path, body)
    assert reply.status == 200
    assert reply.json["model"] == "a"


async def test_an_adapter_loaded_anew_is_another(served: Stack, tmp_path: Path) -> None:
    """In place where the path says so by itself; else vLLM's refusal, and its words."""
    body = {"lora_name": "a", "lora_path": str(adapter(tmp_path / "1", b"one"))}
    first = await admin_post(served, "/v1/load_lora_adapter", body)
    assert first.text == "Success: LoRA adapter 'a' added successfully."
    before = await ids(served, model="a")
    await ids(served, model="a")  # from the cache
    body["lora_path"] = str(adapter(tmp_path / "2", b"two"))
    again = await admin_post(served, "/v1/load_lora_adapter", body)
    assert again.status == 400
    assert "has already been loaded" in again.error["message"]
    assert (await admin_post(served, "/load_lora_adapter", body)).status == 200
    after = [await ids(served, model="a") for _ in range(3)]
    assert after == after[:1] * 3
    assert after[0] != before


async def test_adapters_and_plain_requests_share_no_cache(
    served: Stack, tmp_path: Path
) -> None:
    """Neither in the engine nor in what the frontend thinks is cached."""
    asked = {**ASKS, "nvext": {"extra_fields": ["timing"]}, "return_token_ids": None}
    body = {"lora_name": "a", "lora_path": str(adapter(tmp_path))}
    await admin_post(served, "/load_lora_adapter", body)
    await served.complete(**asked)
    await served.complete(**asked)
    reply = await served.complete(**{**asked, "model": "a"})
    assert not reply.json["nvext"]["timing"]["cached_tokens"]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"lora_name": "a", "lora_path": "/nowhere"}, 404, "No adapter found"),
        ({"lora_name": MODEL_NAME, "lora_path": "/x"}, 400, "base model"),
        ({"lora_name": "../a b", "lora_path": "/x"}, 400, "lora_name must match"),
        ({"lora_name": "a"}, 400, "lora_path"),
        ({"lora_name": "a", "lora_path": "/x", "rank": 8}, 400, "rank"),
        ({"lora_name": "a", "lora_path": 3}, 400, "lora_path"),
    ],
)
async def test_bad_adapters_are_refused(
    served: Stack, body: dict[str, Any], status: int, words: str
) -> None:
    """In OpenAI's shape, with vLLM's status; nothing is loaded."""
    reply = await admin_post(served, "/v1/load_lora_adapter", body)
    assert reply.status == status, reply.text
    assert words in reply.error["message"]
    assert not served.pool.weights.adapters


async def test_an_unknown_adapter_cannot_be_unloaded(served: Stack) -> None:
    """404, as from vLLM."""
    reply = await admin_post(served, "/v1/unload_lora_adapter", {"lora_name": "a"})
    assert reply.status == 404
    assert "cannot be found" in reply.error["message"]


# --- several frontends, failures, restarts -----------------------------------------------


@contextlib.asynccontextmanager
async def workers(
    model: Path, *options: Sequence[str], roles: Sequence[Role] | None = None
) -> AsyncGenerator[list[SimWorker]]:
    """Run workers, each with its own options."""
    made = [
        SimWorker(
            model,
            (roles or [Role.AGGREGATED] * 9)[n],
            f"w{n}",
            one,
            listen=f"tcp://127.0.0.1:{free_port()}",  # for its successor, too
        )
        for n, one in enumerate(options)
    ]
    try:
        for worker in made:
            await worker.start()
        yield made
    finally:
        for worker in made:
            await worker.stop()


FAST = ("--step-ms", "0")


async def test_all_frontends_learn_what_one_has_done(
    tiny_model: Path, tmp_path: Path
) -> None:
    """From the workers: versions, adapters and pauses."""
    async with (
        workers(tiny_model, FAST, FAST) as running,
        frontend(tiny_model) as first,
        frontend(tiny_model) as second,
    ):
        await first.know(running)
        await second.know(running)
        folder = weights(tmp_path / "w")
        await admin_post(first, "/update_weights", {"weight_dir": str(folder)})
        body = {"lora_name": "a", "lora_path": str(adapter(tmp_path / "a"))}
        await admin_post(first, "/load_lora_adapter", body)
        await eventually(lambda: "a" in second.pool.weights.adapters, "it knows")
        assert (await admin_get(second, "/weight_version")).json[
            "weight_version"
        ] == "w"
        assert await ids(second, model="a") == await ids(first, model="a")
        await admin_post(first, "/pause")
        await eventually(lambda: second.pool.is_paused, "it is paused")
        waiting = asyncio.create_task(second.complete(**ASKS))
        await eventually(lambda: second.intake.num_waiting == 1, "it waits")
        await admin_post(second, "/resume")
        assert (await waiting).status == 200


@pytest.mark.parametrize("fault", ["fail-update", "break-update"])
async def test_a_worker_that_missed_an_update_is_kept_out_until_the_next(
    tiny_model: Path, tmp_path: Path, fault: str
) -> None:
    """The answer names it and all states; ``/health`` says why; one more try heals it."""
    broken = (*FAST, "--fault", f"{fault}@1")
    async with (
        workers(tiny_model, FAST, broken) as made,
        frontend(tiny_model) as running,
    ):
        await running.know(made)
        body = {"weight_dir": str(weights(tmp_path / "new"))}
        failed = await admin_post(running, "/update_weights", body)
        assert failed.status == 500
        assert failed.error["code"] == "partial_failure"
        assert "failed at 1 of 2 workers: w1: injected fault" in failed.error["message"]
        states = {one["worker_id"]: one for one in failed.json["workers"]}
        assert (states["w0"]["ok"], states["w0"]["weight_version"]) == (True, "new")
        assert (states["w1"]["ok"], states["w1"]["weight_version"]) == (
            False,
            "default",
        )
        assert bool(states["w1"]["fault"]) is (fault == "break-update")
        assert not states["w1"]["paused"]
        assert [link.worker_id for link in running.pool.usable(Role.AGGREGATED)] == [
            "w0"
        ]
        health = (await running.get("/health")).json["instances"]
        reason = next(one for one in health if one["worker_id"] == "w1")["reason"]
        words = "serves nobody" if fault == "break-update" else "older than others'"
        assert words in reason
        new = {str(await ids(running)) for _ in range(6)}
        assert len(new) == 1
        assert (await admin_post(running, "/update_weights", body)).status == 200
        assert len(running.pool.usable(Role.AGGREGATED)) == 2
        assert len({str(await ids(running)) for _ in range(6)}) == 1


async def test_an_update_that_fails_everywhere_changes_nothing(
    served: Stack, tmp_path: Path
) -> None:
    """No such folder: the old weights go on, nobody is paused."""
    before = await ids(served)
    body = {"weight_dir": str(tmp_path / "none")}
    failed = await admin_post(served, "/update_weights", body)
    assert failed.status == 503
    assert "there is no folder" in failed.error["message"]
    assert (await admin_get(served, "/is_paused")).json == {"is_paused": False}
    assert await ids(served) == before


async def test_outputs_of_a_broken_worker_go_on_elsewhere(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Half-loaded weights sample nothing: both streams end whole."""
    broken = (*SLOW, "--fault", "break-update@1")
    async with (
        workers(tiny_model, SLOW, broken) as made,
        frontend(tiny_model) as running,
    ):
        await running.know(made)
        streams = [await begun(running) for _ in range(2)]
        assert all(worker.service.num_requests == 1 for worker in made)
        body = {"weight_dir": str(weights(tmp_path / "new"))}
        assert (await admin_post(running, "/update_weights", body)).status == 500
        for streamed in streams:
            end = await streamed.end()
            assert (streamed.finish_reason, streamed.error) == ("length", None)
            assert len(streamed.token_ids) == 60
            assert end["worker_id"] == {"decode_worker_id": "w0"}


async def test_a_restarted_worker_does_not_serve_its_old_weights(
    tiny_model: Path, tmp_path: Path
) -> None:
    """It lacks weights and adapters: kept out, until the next update; also if alone."""
    async with workers(tiny_model, FAST, FAST) as made, frontend(tiny_model) as running:
        await running.know(made)
        folder = weights(tmp_path / "new")
        body = {"weight_dir": str(folder)}
        await admin_post(running, "/update_weights", body)
        loaded = {"lora_name": "a", "lora_path": str(adapter(tmp_path / "a"))}
        await admin_post(running, "/load_lora_adapter", loaded)
        new, adapted = await ids(running), await ids(running, model="a")
        endpoint = made[1].link.endpoint
        await made[1].die()
        made[1] = SimWorker(tiny_model, Role.AGGREGATED, "w1", FAST, listen=endpoint)
        await made[1].start(incarnation="w1-2")
        link = next(one for one in running.pool.links if one.endpoint == endpoint)
        await eventually(lambda: link.is_ready and link.is_outdated, "it is back")
        assert "older than others'" in link.obstacle
        assert {str(await ids(running)) for _ in range(6)} == {str(new)}
        assert {str(await ids(running, model="a")) for _ in range(4)} == {str(adapted)}
        # The other one goes as well: the newest weights are remembered.
        await made[0].die()
        await eventually(lambda: not running.pool.ready, "nobody has them")
        reply = await running.complete(**ASKS)
        assert reply.status == 503
        assert "update the weights again" in reply.error["message"]
        assert (await running.complete(**{**ASKS, "model": "a"})).status == 503
        assert (await admin_post(running, "/update_weights", body)).status == 200
        assert await ids(running) == new


async def test_a_prompt_computed_with_other_weights_is_computed_again(
    tiny_model: Path, tmp_path: Path
) -> None:
    """KV is held for a decode leg that waits when the weights change."""
    roles = [Role.PREFILL, Role.DECODE]
    async with (
        workers(tiny_model, SLOW, SLOW, roles=roles) as made,
        frontend(tiny_model) as running,
    ):
        await running.know(made)
        folder = weights(tmp_path / "new")
        await admin_post(running, "/update_weights", {"weight_dir": str(folder)})
        new = await ids(running)
        await admin_post(running, "/update_weights", {"weight_dir": str(tiny_model)})
        reads = held_reads(made[1].engine)
        reading = asyncio.create_task(running.complete(**{**ASKS, **VERSIONED}))
        await eventually(lambda: reads.num_waiting == 1, "it reads")
        body = {"weight_dir": str(folder), "weight_version": "again"}
        assert (await admin_post(running, "/update_weights", body)).status == 200
        reads.release()
        reply = await reading
        assert reply.status == 200
        assert reply.json["nvext"]["weight_version"] == "again"
        assert reply.json["nvext"]["completion_token_ids"] == new
        await running.idle()


async def test_a_prompt_that_is_computed_through_an_update_is_computed_again(
    tiny_model: Path, tmp_path: Path
) -> None:
    """A part of its KV is of the old weights."""
    slow = (*SLOW, "--max-num-batched-tokens", "8", "--prefill-tokens-per-s", "50")
    async with stack(tiny_model, PAIR, slow) as running:
        asked = {**ASKS, **VERSIONED, "return_token_ids": None}
        asking = asyncio.create_task(running.complete(**asked))
        prefill, decode = (worker.service for worker in running.workers)
        await eventually(lambda: prefill.num_requests == 1, "the prompt is computed")
        await admin_post(running, "/pause?mode=keep&clear_cache=false")
        assert (prefill.num_requests, decode.num_requests) == (1, 0)
        body = {"weight_dir": str(weights(tmp_path / "new"))}
        await admin_post(running, "/update_weights", body)
        await admin_post(running, "/resume")
        nvext = (await asking).json["nvext"]
        assert nvext["weight_version"] == "new"
        # By the same worker: it has not failed.
        assert nvext["worker_id"] == {
            "prefill_worker_id": "prefill-0",
            "decode_worker_id": "decode-1",
        }
        await running.idle()


async def test_what_waits_in_the_engine_is_sent_again_behind_an_update(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, to the same worker, its only one; what runs goes on."""
    one = (*SLOW, "--max-num-seqs", "1")
    async with stack(tiny_model, (Role.AGGREGATED,), one) as running:
        engine = running.workers[0].engine
        submitted: list[list[int]] = []

        def spy(request: Any, submit: Any = engine.submit) -> None:
            submitted.append(request.token_ids)
            submit(request)

        monkeypatch.setattr(engine, "submit", spy)
        runs = await begun(running, max_tokens=300)
        other = PROMPT[::-1]
        asked = {**ASKS, **VERSIONED, "return_token_ids": None, "prompt": other}
        waits = asyncio.create_task(running.complete(**asked))
        await eventually(lambda: other in submitted, "it waits")
        await admin_post(running, "/pause?mode=keep&clear_cache=false")
        body = {"weight_dir": str(weights(tmp_path / "new"))}
        await admin_post(running, "/update_weights", body)
        await admin_post(running, "/resume")
        nvext = (await waits).json["nvext"]
        assert len((await runs.end())["weight_versions"]) == 2
        assert nvext["weight_version"] == "new"
        assert "weight_versions" not in nvext
        assert submitted == [PROMPT, other, other]
        assert nvext["completion_token_ids"] == await ids(running, prompt=other)


async def test_a_pair_of_two_minds_hands_nothing_over(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The prefill worker missed the update: the decode worker computes by itself."""
    roles = [Role.PREFILL, Role.DECODE]
    failing = (*FAST, "--fault", "fail-update@1")
    async with (
        workers(tiny_model, failing, FAST, roles=roles) as made,
        frontend(tiny_model) as running,
    ):
        await running.know(made)
        body = {"weight_dir": str(weights(tmp_path / "new"))}
        assert (await admin_post(running, "/update_weights", body)).status == 500
        alone = await running.complete(
            **{
                **ASKS,
                "return_token_ids": None,
                "nvext": {"extra_fields": ["worker_id"]},
            }
        )
        assert alone.json["nvext"]["worker_id"] == {"decode_worker_id": "w1"}
        assert (await admin_post(running, "/update_weights", body)).status == 200
        both = await running.complete(
            **{
                **ASKS,
                "return_token_ids": None,
                "nvext": {"extra_fields": ["worker_id"]},
            }
        )
        assert both.json["nvext"]["worker_id"]["prefill_worker_id"] == "w0"


async def test_a_worker_that_hangs_is_named_and_bounded(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is the worker's as well: it is free for the next action."""
    hanging = (*FAST, "--fault", "hang-admin@1")
    arguments = ("--admin-timeout-s", "50")
    async with (
        workers(tiny_model, FAST, hanging) as made,
        frontend(tiny_model, arguments) as running,
    ):
        await running.know(made)
        pausing = asyncio.create_task(admin_post(running, "/pause"))
        first, second = running.pool.links
        await eventually(
            lambda: (
                first.status.paused
                and not first.status.busy
                and second.status.busy == "pause"
            ),
            "one has done it, one hangs",
        )
        move_clock(monkeypatch, 50.0)
        failed = await pausing
        assert failed.status == 500
        assert "w1: it was not done within 50 s" in failed.error["message"]
        paused = {one["worker_id"]: one["paused"] for one in failed.json["workers"]}
        assert paused == {"w0": True, "w1": False}
        assert (await admin_post(running, "/resume")).status == 200
        body = {"weight_dir": str(weights(tmp_path))}
        assert (await admin_post(running, "/update_weights", body)).status == 200


async def test_a_worker_lost_under_an_action_ends_it(tiny_model: Path) -> None:
    """At once, and by name."""
    hanging = (*FAST, "--fault", "hang-admin@1")
    async with (
        workers(tiny_model, FAST, hanging) as made,
        frontend(tiny_model) as running,
    ):
        await running.know(made)
        pausing = asyncio.create_task(admin_post(running, "/pause"))
        [dying] = [one for one in running.pool.links if one.worker_id == "w1"]
        await eventually(lambda: dying.status.busy == "pause", "it has begun")
        # Its engine's stop would end the action, in words of its own.
        made[1].link.close()
        await made[1].die()
        failed = await pausing
        assert failed.status == 500
        assert "w1: worker w1 was lost" in failed.error["message"]
        states = {one["worker_id"]: one for one in failed.json["workers"]}
        assert not states["w1"]["connected"]


async def test_one_action_at_a_time(tiny_model: Path, tmp_path: Path) -> None:
    """A second one is told to come again; the first is not disturbed."""
    async with stack(tiny_model, (Role.AGGREGATED,), FAST) as s:
        update = held_updates(s.workers[0].engine)
        body = {"weight_dir": str(weights(tmp_path))}
        first = asyncio.create_task(admin_post(s, "/update_weights", body))
        link = next(iter(s.pool.links))
        await eventually(lambda: link.status.busy == "update_weights", "it loads")
        second = await admin_post(s, "/reset_prefix_cache")
        assert (second.status, second.headers["Retry-After"]) == (503, "1")
        assert "update_weights is under way" in second.error["message"]
        update.release()
        assert (await first).status == 200


async def test_an_action_goes_on_when_its_client_leaves(
    tiny_model: Path, tmp_path: Path
) -> None:
    """An update that stopped half way would leave the workers paused."""
    async with stack(tiny_model, (Role.AGGREGATED,), FAST) as s:
        update = held_updates(s.workers[0].engine)
        body = {"weight_dir": str(weights(tmp_path / "new"))}
        asking = asyncio.create_task(admin_post(s, "/update_weights", body))
        link = next(iter(s.pool.links))
        await eventually(lambda: link.status.busy == "update_weights", "it loads")
        asking.cancel()
        await asyncio.wait([asking])
        update.release()
        await eventually(lambda: link.weight_version == "new", "it is updated")
        await eventually(lambda: not link.status.paused, "and resumed")
        assert (await s.complete(**ASKS)).status == 200


async def test_without_workers_actions_are_503(tiny_model: Path) -> None:
    """As requests are."""
    async with frontend(tiny_model) as running:
        reply = await admin_post(running, "/pause")
        assert (reply.status, reply.error["code"]) == (503, "no_worker")
        assert (await admin_get(running, "/is_paused")).status == 503
