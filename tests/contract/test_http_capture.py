"""Hidden states over HTTP, on simulated workers: who gets a path, and what is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from support.stack import Reply, SimWorker, Stack, eventually, frontend, stack
from support.states import take_states
from tokenwire.frontend.link import LinkState
from tokenwire.frontend.sse import LivelyStream
from tokenwire.protocol.messages import ErrorKind, FinishReason, Role
from tokenwire.worker import capture_files
from tokenwire.worker.capture_files import Access, Sweep
from tokenwire.worker.captures import CaptureSettings
from tokenwire.worker.engine import EngineFinished, EngineTokens

PAIR = (Role.PREFILL, Role.DECODE)
PROMPT = [5, 6, 7, 8]
TRIO = {"nvext": {"extra_fields": ["completion_token_ids"]}}
ALIAS = {"return_token_ids": True}
LAYERS = (2, 15, 28, 30)
STEPS = ("--step-ms", "0")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where states are saved."""
    return tmp_path / "states"


def settings(folder: Path, ttl_s: float = 600.0) -> CaptureSettings:
    """Return what workers are told."""
    return CaptureSettings(str(folder), LAYERS, Access(0o660), ttl_s, 1 << 30)


@pytest_asyncio.fixture(params=[(Role.AGGREGATED,), PAIR], ids=["aggregated", "pair"])
async def served(
    request: pytest.FixtureRequest, tiny_model: Path, folder: Path
) -> AsyncIterator[Stack]:
    """A stack of each topology that saves; short prompts stay where decode is."""
    arguments = ("--remote-prefill-min-tokens", "100")
    options = ("--step-ms", "1")
    async with stack(
        tiny_model, request.param, options, arguments, capture=settings(folder)
    ) as running:
        yield running
        await running.idle()


def path_of(body: dict[str, Any]) -> Path:
    """Return where the states of a response are, as ``nvext`` says."""
    return Path(body["nvext"]["kv_transfer_params"]["hidden_states_path"])


def take(path: Path) -> list[int]:
    """Take a file as clients do; return its token ids."""
    arrays = take_states(path)
    token_ids = [int(one) for one in arrays["token_ids"]]
    states = arrays["hidden_states"]
    assert states.shape[:2] == (len(token_ids), len(LAYERS))
    assert states[:, :, 1].tolist() == [list(map(float, LAYERS))] * len(token_ids)
    assert states[:, 0, 0].tolist() == list(map(float, token_ids))
    return token_ids


@pytest.mark.parametrize("max_tokens", [1, 5])
@pytest.mark.parametrize("fields", [TRIO, ALIAS], ids=["selector", "alias"])
async def test_the_prompt_s_states_are_where_the_response_says(
    served: Stack, folder: Path, fields: dict[str, Any], max_tokens: int
) -> None:
    """At once, whole, unlocked; in vLLM's place too where the alias was used."""
    reply = await served.complete(prompt=PROMPT, max_tokens=max_tokens, **fields)

    body = reply.json
    path = path_of(body)
    assert path.parent == folder
    assert (body.get("kv_transfer_params") == {"hidden_states_path": str(path)}) is (
        fields is ALIAS
    )
    assert body["nvext"]["prompt_token_ids"] == PROMPT
    assert body["usage"]["completion_tokens"] == max_tokens
    assert take(path) == PROMPT
    assert os.listdir(folder) == []


@pytest.mark.parametrize("stop", [None, ["e"]])
async def test_a_replay_that_is_cut_deletes_nothing(
    served: Stack, monkeypatch: pytest.MonkeyPatch, stop: list[str] | None
) -> None:
    """The client was told of the file by the stream that it replays."""
    nvext = {**TRIO["nvext"], "resumable": True}
    made = await served.complete(
        prompt=PROMPT, max_tokens=9, stream=True, nvext=nvext, stop=stop
    )
    path = path_of([event.body for event in made.events if event.body][-1])
    generation = f"/v1/generations/{made.headers['X-Generation-Id']}"

    num_cut = 0

    async def gone(stream: LivelyStream, first: bytes) -> None:
        nonlocal num_cut
        num_cut += 1
        raise BrokenPipeError

    monkeypatch.setattr(LivelyStream, "open", gone)
    with contextlib.suppress(aiohttp.ClientError):
        await served.get(f"{generation}/stream")
    assert num_cut == 1
    assert (await served.get(generation)).status == 200  # its worker has heard all
    assert take(path) == PROMPT


@pytest.mark.parametrize("fields", [TRIO, ALIAS], ids=["selector", "alias"])
async def test_a_stream_has_the_path_on_its_final_chunk(
    served: Stack, fields: dict[str, Any]
) -> None:
    """Once, with the finish reason; in vLLM's place too for the alias."""
    reply = await served.complete(prompt=PROMPT, max_tokens=3, stream=True, **fields)

    bodies = [event.body for event in reply.events if event.body is not None]
    with_path = [one for one in bodies if "kv_transfer_params" in one.get("nvext", {})]
    assert with_path == [bodies[-1]]
    assert bodies[-1]["choices"][0]["finish_reason"] == "length"
    path = path_of(bodies[-1])
    if fields is ALIAS:
        assert bodies[-1]["kv_transfer_params"] == {"hidden_states_path": str(path)}
    assert take(path) == PROMPT


async def test_tokens_in_tokens_out_has_the_path(served: Stack) -> None:
    """At the root, as vLLM's own endpoint."""
    reply = await served.post(
        "/inference/v1/generate",
        {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1}},
    )
    assert take(Path(reply.json["kv_transfer_params"]["hidden_states_path"])) == PROMPT


async def test_several_choices_have_one_file(served: Stack, folder: Path) -> None:
    """Their prompt is the same, and one path is told."""
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2, "n": 3}}
    reply = await served.post("/inference/v1/generate", body)
    assert len(reply.json["choices"]) == 3
    assert len(os.listdir(folder)) == 2
    take(Path(reply.json["kv_transfer_params"]["hidden_states_path"]))
    assert os.listdir(folder) == []


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"return_token_ids": False},
        {"nvext": {"extra_fields": ["prompt_token_ids"]}},
    ],
)
async def test_who_did_not_ask_leaves_no_file(
    served: Stack, folder: Path, fields: dict[str, Any]
) -> None:
    """Nobody would ever take it."""
    reply = await served.complete(prompt=PROMPT, max_tokens=3, **fields)
    assert reply.status == 200
    assert "kv_transfer_params" not in reply.text
    assert os.listdir(folder) == []


@pytest.mark.pitfall(37)
@pytest.mark.parametrize(
    "request_id", ["a/../../evil", "../evil", "/evil", "..", "x\\..\\y"]
)
async def test_no_name_comes_from_a_client(
    served: Stack, folder: Path, request_id: str
) -> None:
    """Headers and fields that vLLM makes a file name of write nothing outside."""
    before = sorted(folder.parent.rglob("*"))
    reply = await served.post(
        "/v1/completions",
        {"prompt": PROMPT, "max_tokens": 1, **ALIAS, "user": request_id},
        {"X-Request-Id": request_id},
    )
    named = await served.post(
        "/inference/v1/generate",
        {
            "token_ids": PROMPT, "sampling_params": {"max_tokens": 1},
            "request_id": request_id,
        },
    )  # fmt: skip
    for one in (reply, named):
        if one.status == 200:
            text = one.json["kv_transfer_params"]["hidden_states_path"]
            assert "evil" not in text
            take(Path(text))
    assert sorted(folder.parent.rglob("*")) == before


@pytest.mark.pitfall(37)
@pytest.mark.parametrize(
    "fields",
    [
        {"kv_transfer_params": {"hidden_states_path": "/evil"}},
        {"kv_transfer_params": {"tokenwire_capture": {"path": "/evil"}}},
        {"nvext": {"kv_transfer_params": {"hidden_states_path": "/evil"}}},
        {"vllm_xargs": {"kv_transfer_params": {"hidden_states_path": "/evil"}}},
    ],
)
async def test_no_client_says_where_to_write(
    served: Stack, folder: Path, fields: dict[str, Any]
) -> None:
    """Whatever it asks the connector for is a 400, and the engine is untouched."""
    body = {"prompt": PROMPT, "max_tokens": 1, "return_token_ids": True, **fields}
    reply = await served.post("/v1/completions", body)
    assert reply.status == 400, reply.text
    assert os.listdir(folder) == []


async def test_a_client_that_leaves_leaves_no_file(served: Stack, folder: Path) -> None:
    """Behind its prefill leg, too, whose states are saved by then."""
    request = asyncio.create_task(
        served.complete(prompt=PROMPT, max_tokens=1_500, ignore_eos=True, **TRIO)
    )
    await eventually(lambda: any(w.engine.load().num_running for w in served.workers))
    if any(worker.role is Role.PREFILL for worker in served.workers):
        await eventually(lambda: bool(os.listdir(folder)))
    request.cancel()
    await asyncio.wait({request})
    await served.idle()
    await eventually(lambda: os.listdir(folder) == [])


class Holding:
    """Holds back the ends of a worker's choices but the one that saves."""

    def __init__(self, served: Stack) -> None:
        [self._worker] = served.workers
        self._links = served.pool.links
        self._outputs = self._worker.service.outputs
        self._held: list[EngineFinished] = []
        self._worker.service.outputs = self._hold  # type: ignore[method-assign]
        self.num_aborts = 0
        abort = self._worker.engine.abort

        def counted(request_id: str) -> None:
            self.num_aborts += 1
            abort(request_id)

        self._worker.engine.abort = counted  # type: ignore[method-assign]

    def _hold(self, tokens: list[EngineTokens], finished: list[EngineFinished]) -> None:
        saved = [end for end in finished if end.kv_transfer_params is not None]
        self._held += [end for end in finished if end.kv_transfer_params is None]
        self._outputs(tokens, saved)

    async def one_ended(self) -> None:
        """Wait until the frontend knows of the one end, and the other is held."""
        await eventually(lambda: bool(self._held))
        await eventually(lambda: sum(link.num_open for link in self._links) == 1)

    def release(self, error: ErrorKind | None = None) -> None:
        """Let the rest end, or fail."""
        held, self._held = self._held, []
        if error is not None:
            reason = FinishReason.ERROR
            held = [replace(end, reason=reason, error_kind=error) for end in held]
        self._outputs([], held)


TWO = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2, "n": 2}}


@pytest.mark.parametrize("by", ["its client", "its other choice"])
async def test_an_ended_choice_of_a_lost_response_leaves_no_file(
    tiny_model: Path, folder: Path, by: str
) -> None:
    """It ended well, and nobody was told: the client left, or it all failed."""
    async with stack(tiny_model, capture=settings(folder)) as served:
        holding = Holding(served)
        request = asyncio.create_task(served.post("/inference/v1/generate", TWO))
        await holding.one_ended()
        assert len(os.listdir(folder)) == 2
        if by == "its client":
            request.cancel()
            await asyncio.wait({request})
            await eventually(lambda: holding.num_aborts == 1)
            holding.release()
        else:
            holding.release(ErrorKind.INVALID)
            assert (await request).status == 400
        await eventually(lambda: os.listdir(folder) == [])


async def test_what_a_stream_has_told_is_its_client_s(
    tiny_model: Path, folder: Path
) -> None:
    """It may act on a choice's end while the others go on, and then leave."""
    async with stack(tiny_model, capture=settings(folder)) as served:
        holding = Holding(served)
        url = f"{served.url}/inference/v1/generate"
        async with served.client.post(url, json={**TWO, "stream": True}) as answer:
            while b"hidden_states_path" not in (
                line := await answer.content.readline()
            ):
                assert line
            answer.close()
        event = json.loads(line.removeprefix(b"data: "))
        await eventually(lambda: holding.num_aborts == 1)  # behind any Discard
        holding.release()
        assert num_discarded(served) == 0
        assert take(Path(event["kv_transfer_params"]["hidden_states_path"])) == PROMPT


@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_answered_stays(served: Stack, stream: bool) -> None:
    """Until its client takes it: the end of a response deletes nothing."""
    reply = await served.complete(prompt=PROMPT, max_tokens=3, stream=stream, **TRIO)
    # To the same worker: it has heard by then whatever was said before.
    again = await served.complete(prompt=PROMPT, max_tokens=1, **TRIO)
    assert num_discarded(served) == 0
    body = reply.events[-2].body if stream else reply.json
    assert body is not None
    assert take(path_of(body)) == PROMPT
    assert take(path_of(again.json)) == PROMPT


def num_discarded(served: Stack) -> int:
    """Return how many files the workers were told to delete."""
    keepers = [one.captures for one in served.workers if one.captures is not None]
    return sum(one.usage.num_discarded for one in keepers)


async def test_what_nobody_takes_is_swept(tiny_model: Path, folder: Path) -> None:
    """When it is old enough, with its lock."""
    capture = settings(folder, ttl_s=0.4)
    async with stack(tiny_model, capture=capture) as served:
        for _ in range(5):
            reply = await served.complete(prompt=PROMPT, max_tokens=1, **ALIAS)
            assert path_of(reply.json).parent == folder
        await eventually(lambda: os.listdir(folder) == [])
        [worker] = served.workers
        assert worker.captures is not None
        await eventually(lambda: worker.captures.usage.num_files == 0)  # type: ignore[union-attr]
        assert worker.captures.usage.num_swept[Sweep.AGE] == 5


async def test_a_file_does_not_age_before_its_client_is_told(
    tiny_model: Path, folder: Path
) -> None:
    """In a pair: it is written before the output, whose end may be long after."""
    capture = settings(folder, ttl_s=0.4)
    async with stack(tiny_model, PAIR, capture=capture) as served:
        held: list[tuple[Any, Any]] = []
        [decode] = [one for one in served.workers if one.role is Role.DECODE]
        outputs = decode.service.outputs
        decode.service.outputs = lambda *step: held.append(step)  # type: ignore[method-assign]
        request = asyncio.create_task(
            served.complete(prompt=PROMPT, max_tokens=2, **TRIO)
        )
        await eventually(lambda: any(ends for _, ends in held))
        [name] = [one for one in os.listdir(folder) if one.endswith("tensors")]

        younger = folder / capture_files.new_name()
        younger.touch()
        await eventually(lambda: not younger.exists())  # swept for its age
        assert (folder / name).exists()

        for step in held:
            outputs(*step)
        assert path_of((await request).json) == folder / name
        await eventually(lambda: os.listdir(folder) == [])  # it ages now


async def test_a_disk_that_fails_fails_its_requests_alone(
    served: Stack, folder: Path
) -> None:
    """By a sentence with the folder and the cause; others are served meanwhile."""
    shutil.rmtree(folder)
    broken, fine = await asyncio.gather(
        served.complete(prompt=PROMPT, max_tokens=1, **ALIAS),
        served.complete(prompt=PROMPT, max_tokens=1),
    )
    assert fine.status == 200
    assert broken.status == 502
    assert broken.error["code"] == "capture_failed"
    sentence = f"hidden states cannot be saved in {folder}: No such file or directory"
    assert sentence in broken.error["message"]

    os.mkdir(folder)
    again = await served.complete(prompt=PROMPT, max_tokens=1, **ALIAS)
    assert take(path_of(again.json)) == PROMPT


@contextlib.asynccontextmanager
async def on_folders(model: Path, *folders: Path) -> AsyncGenerator[Stack]:
    """Run a worker for each folder, alike else."""
    workers = [
        SimWorker(model, Role.AGGREGATED, one.name, STEPS, capture=settings(one))
        for one in folders
    ]
    try:
        async with frontend(model) as served:
            for worker in workers:
                await worker.start()
            await served.know(workers)
            yield served
    finally:
        for worker in workers:
            await worker.stop()


def num_failed(served: Stack) -> int:
    """Return how many files could not be written."""
    keepers = [one.captures for one in served.workers if one.captures is not None]
    return sum(one.usage.num_failed for one in keepers)


@pytest.mark.parametrize("stream", [False, True])
async def test_no_output_is_drawn_again_for_its_file(
    tiny_model: Path, tmp_path: Path, stream: bool
) -> None:
    """One that was begun fails; one token alone is tried elsewhere, once."""
    folders = [tmp_path / name for name in ("a", "b", "c")]
    async with on_folders(tiny_model, *folders) as served:
        for one in folders:
            shutil.rmtree(one)
        sampled = {"temperature": 1.0, "ignore_eos": True, "stream": stream, **TRIO}
        reply = await served.complete(prompt=PROMPT, max_tokens=9, **sampled)
        assert num_failed(served) == 1
        if stream:
            bodies = [event.body or {} for event in reply.events]
            errors = [body["error"] for body in bodies if "error" in body]
            ids = [
                event.nvext.get("completion_token_ids", []) for event in reply.events
            ]
            assert sum(map(len, ids)) == 8
            assert reply.events[-1].body is None
        else:
            assert reply.status == 502
            errors = [reply.error]
        assert [one["code"] for one in errors] == ["capture_failed"]
        assert "No such file or directory" in errors[0]["message"]

        alone = await served.complete(prompt=PROMPT, max_tokens=1, **sampled)
        assert (alone.status, alone.error["code"]) == (502, "capture_failed")
        assert num_failed(served) == 3


async def test_another_disk_saves_what_one_could_not(
    tiny_model: Path, tmp_path: Path
) -> None:
    """A client that wants the states alone does not notice."""
    folders = [tmp_path / "a", tmp_path / "b"]
    async with on_folders(tiny_model, *folders) as served:
        shutil.rmtree(folders[0])
        for _ in range(8):  # some of them are sent to the worker that cannot
            reply = await served.complete(prompt=PROMPT, max_tokens=1, **ALIAS)
            path = path_of(reply.json)
            assert path.parent == folders[1]
            assert take(path) == PROMPT
        assert num_failed(served)


async def test_a_full_folder_refuses_until_it_is_empty(
    tiny_model: Path, folder: Path
) -> None:
    """Before anything is computed, and others are served."""
    capture = CaptureSettings(str(folder), LAYERS, Access(0o600), 600.0, 100)
    async with stack(tiny_model, capture=capture) as served:
        first = await served.complete(prompt=PROMPT, max_tokens=1, **ALIAS)
        full = await served.complete(prompt=PROMPT, max_tokens=1, **ALIAS)
        fine = await served.complete(prompt=PROMPT, max_tokens=1)
        assert (full.status, fine.status) == (503, 200)
        assert "the limit is 100" in full.error["message"]
        assert full.headers["Retry-After"]
        take(path_of(first.json))
        captures = served.workers[0].captures
        assert captures is not None
        await eventually(lambda: not captures.refusal)
        assert (
            await served.complete(prompt=PROMPT, max_tokens=1, **ALIAS)
        ).status == 200


async def test_a_worker_with_other_layers_is_refused(
    tiny_model: Path, folder: Path
) -> None:
    """Its KV has another shape: a sentence says so, the others serve."""
    workers = [
        SimWorker(tiny_model, Role.PREFILL, "p", (), capture=settings(folder)),
        SimWorker(tiny_model, Role.DECODE, "d", (), capture=settings(folder)),
        SimWorker(tiny_model, Role.DECODE, "bare", ()),
    ]
    try:
        async with frontend(tiny_model) as served:
            for worker in workers:
                await worker.start()
            await served.know(workers[:2])
            served.pool.set_endpoints([one.link.endpoint for one in workers])
            links = {one.endpoint: one for one in served.pool.links}
            bare = links[workers[2].link.endpoint]
            await eventually(lambda: bare.state is LinkState.REFUSED)
            assert bare.reason == (
                "prefill worker p keeps hidden states of layers 2,15,28,30 and decode "
                "worker bare no hidden states: they exchange KV with the same "
                "--capture-layers alone"
            )
            reply = await served.complete(prompt=PROMPT, max_tokens=3, **ALIAS)
            assert take(path_of(reply.json)) == PROMPT
    finally:
        for worker in workers:
            await worker.stop()


MANIFEST: dict[str, Any] = {
    "blocks": [[1, [2, -3]], [], ["a", None, True]],
    "nested": {"id": "x/../y", "n": 1 << 40, "f": 0.5, "": {}},
    "remote_host": "this connector's own",
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["completions", "chat", "generate"])
async def test_an_unknown_connector_s_manifest_passes_unchanged(
    tiny_model: Path, tmp_path: Path, path: str, stream: bool
) -> None:
    """Nested lists, numbers and strings: not a value of it is looked at."""
    script = tmp_path / "script.json"
    entry = {"output_token_ids": [9, 10], "kv_transfer_params": MANIFEST}
    script.write_text(json.dumps([entry]))
    options = ("--step-ms", "0", "--script", str(script))
    async with stack(tiny_model, options=options) as served:
        reply = await ask(served, path, stream)
        body = reply.json if not stream else reply.events[-2].body
        assert body is not None
        assert body["kv_transfer_params"] == MANIFEST
        if path != "generate":
            assert body["nvext"]["kv_transfer_params"] == MANIFEST
        if stream:
            texts = reply.text.count('"remote_host"')
            assert texts == (1 if path == "generate" else 2)


async def ask(served: Stack, path: str, stream: bool) -> Reply:
    """Ask for what a connector has to say."""
    if path == "generate":
        sampling = {"max_tokens": 8}
        body = {"token_ids": PROMPT, "sampling_params": sampling, "stream": stream}
        return await served.post("/inference/v1/generate", body)
    if path == "chat":
        nvext = {"token_data": PROMPT}
        return await served.chat(
            max_tokens=8, stream=stream, nvext=nvext, return_token_ids=True
        )
    return await served.complete(prompt=PROMPT, max_tokens=8, stream=stream, **ALIAS)
