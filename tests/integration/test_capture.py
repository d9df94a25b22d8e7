"""Hidden states of a real pair: right, whole, and gone when they should be."""

from __future__ import annotations

import asyncio
import json
import os
import resource
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from support.clients import ROOT, run_client
from support.plain_model import PlainModel
from support.real_stack import LOAD_S, NAME, PAIR, prompt_of
from support.states import take_states
from support.up import Up, children, until, up
from support.vllm_engine import MODEL

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
session = pytest.mark.asyncio(loop_scope="session")

LAYERS = [2, 15, 28, 30]  # of 30
TTL_S = 60.0  # longer than a machine stands still; sweeps are 10 s apart
ALIAS = {"model": NAME, "max_tokens": 1, "return_token_ids": True}
CONVERSATIONS = [
    ["What is the capital of France?", "Paris.", "And of Italy?", "Rome."],
    ["Name three colours.", "Red, green and blue."],
]


@dataclass
class Capturing:
    """A running pair that saves hidden states, and a client of it."""

    up: Up
    folder: Path
    http: aiohttp.ClientSession

    async def post(
        self, body: dict[str, Any], path: str = "/v1/completions", **headers: str
    ) -> tuple[int, Any]:
        """Return status and JSON."""
        url = self.up.url + path
        async with self.http.post(url, json=body, headers=headers) as answer:
            return answer.status, await answer.json()

    async def capture(self, prompt: list[int], **fields: Any) -> str:
        """Return where the states of *prompt* are, as speculators asks and reads."""
        status, body = await self.post({"prompt": prompt, **ALIAS, **fields})
        assert status == 200, body
        assert body["choices"][0]["prompt_token_ids"] == prompt
        return str(body["kv_transfer_params"]["hidden_states_path"])

    async def empty(self, within_s: float) -> None:
        """Wait until nothing is in the folder."""
        await until(lambda: not os.listdir(self.folder), within_s, "an empty folder")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def capturing(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Capturing]:
    """A prefill and a decode worker over NIXL, in fp32."""
    run = tmp_path_factory.mktemp("capture")
    folder = run / "states"
    async with (
        up(
            MODEL,
            run,
            engine="vllm",
            workers=PAIR,
            timeout_s=LOAD_S,
            engine_arguments=("--dtype", "float32", "--max-model-len", "2048"),
            name=NAME,
            settings={
                "TOKENWIRE_CAPTURE_HIDDEN_STATES": str(folder),
                "TOKENWIRE_CAPTURE_LAYERS": ",".join(map(str, LAYERS)),
                "TOKENWIRE_CAPTURE_TTL_S": str(TTL_S),
            },
        ) as running,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
    ):
        yield Capturing(running, folder, http)


@session
async def test_states_are_the_plain_model_s(capturing: Capturing) -> None:
    """Each layer's, at each token, also those of blocks that the cache had."""
    model = await asyncio.to_thread(PlainModel, MODEL)
    prompt = prompt_of(300)
    expected = await asyncio.to_thread(model.hidden_states, prompt, LAYERS)
    for max_tokens in (1, 4):  # the second finds two blocks of the first in the cache
        path = await capturing.capture(prompt, max_tokens=max_tokens, temperature=0)
        arrays = await asyncio.to_thread(take_states, path)
        assert arrays["token_ids"].tolist() == prompt
        states = arrays["hidden_states"]
        assert states.shape == expected.shape
        assert states.dtype == expected.dtype
        norms = (states**2).sum(-1) ** 0.5 * (expected**2).sum(-1) ** 0.5
        cosines = (states * expected).sum(-1) / norms  # (num_tokens, num_layers)
        assert cosines.min() >= 0.99
        assert abs(states - expected).max() <= 1e-2 * abs(expected).max()


@session
async def test_draws_are_from_what_was_asked_for(capturing: Capturing) -> None:
    """One token left to draw from is the greedy output."""
    asked: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_p": 1e-6},
    ]
    body = {"model": NAME, "prompt": prompt_of(40), "max_tokens": 24}
    ids = {"ignore_eos": True, "nvext": {"extra_fields": ["completion_token_ids"]}}
    answers = [await capturing.post({**body, **ids, **one}) for one in asked]
    answers += await asyncio.gather(
        *(capturing.post({**body, **ids, **one}) for one in asked)
    )
    assert [status for status, _ in answers] == [200] * len(answers)
    outputs = [answer["nvext"]["completion_token_ids"] for _, answer in answers]
    assert outputs == [outputs[0]] * len(outputs)
    for _, answer in answers:
        path = answer["nvext"]["kv_transfer_params"]["hidden_states_path"]
        await asyncio.to_thread(take_states, path)


@session
async def test_fifty_at_once_are_whole_and_leave_nothing(capturing: Capturing) -> None:
    """Read while the others are computed and written; steps end inside of some prompts."""

    async def one(number: int) -> None:
        prompt = [1_000 + number, *prompt_of(191)]
        path = await capturing.capture(prompt)
        arrays = await asyncio.to_thread(take_states, path)
        assert arrays["token_ids"].tolist() == prompt
        assert arrays["hidden_states"].shape == (192, len(LAYERS), 576)
        assert abs(arrays["hidden_states"]).max(axis=(1, 2)).min() > 0

    await asyncio.gather(*(one(number) for number in range(50)))
    assert os.listdir(capturing.folder) == []


@session
async def test_what_clients_ignore_is_swept(capturing: Capturing) -> None:
    """When it is as old as the operator has set: here its age is made up."""
    prompts = [prompt_of(length) for length in (30, 31, 32)]
    paths = await asyncio.gather(*map(capturing.capture, prompts))
    assert sorted(os.listdir(capturing.folder)) == sorted(
        Path(path + suffix).name for path in paths for suffix in ("", ".lock")
    )
    for path in paths:
        for suffix in ("", ".lock"):
            os.utime(path + suffix, (0, 0))
    await capturing.empty(within_s=TTL_S)


@session
@pytest.mark.parametrize("name", ["a/../../evil", "/evil", "evil"])
async def test_no_name_comes_from_a_client(capturing: Capturing, name: str) -> None:
    """What vLLM's server makes file names of writes nothing outside, or of that name."""
    around = sorted(capturing.folder.parent.iterdir())
    headers = {"X-Request-Id": name}
    body = {"token_ids": prompt_of(20), "sampling_params": {"max_tokens": 1}}
    answers = [
        await capturing.post({"prompt": prompt_of(20), **ALIAS}, **headers),
        await capturing.post(
            {**body, "request_id": name}, "/inference/v1/generate", **headers
        ),
    ]
    for status, answer in answers:
        if status == 200:
            path = Path(answer["kv_transfer_params"]["hidden_states_path"])
            assert path.parent == capturing.folder
            assert "evil" not in path.name
            take_states(path)
    assert sorted(capturing.folder.parent.iterdir()) == around
    assert os.listdir(capturing.folder) == []


@session
async def test_clients_that_leave_leave_nothing(capturing: Capturing) -> None:
    """In the middle of a prefill, and in the middle of the output behind it."""
    body = {**ALIAS, "max_tokens": 1_000, "ignore_eos": True}
    streams = [capturing.post({"prompt": prompt_of(600 + n), **body}) for n in range(8)]
    clients = [asyncio.create_task(stream) for stream in streams]
    await until(lambda: bool(os.listdir(capturing.folder)), 60, "a first file")
    for client in clients:
        client.cancel()
    await asyncio.wait(clients)
    # Well before the sweep would find them: they are too young for that.
    await capturing.empty(within_s=TTL_S / 2)


@session
async def test_a_disk_that_is_full_fails_its_request_alone(
    capturing: Capturing,
) -> None:
    """As that of a file which may not grow: the engine lives, and others are served."""
    [writer] = writers(capturing.up.pid("prefill-0"))
    _, hard = resource.prlimit(writer, resource.RLIMIT_FSIZE)
    resource.prlimit(writer, resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        (status, failed), (fine, _) = await asyncio.gather(
            capturing.post({"prompt": prompt_of(200), **ALIAS}),
            capturing.post({"model": NAME, "prompt": prompt_of(201), "max_tokens": 2}),
        )
    finally:
        resource.prlimit(writer, resource.RLIMIT_FSIZE, (hard, hard))
    assert (status, fine) == (502, 200)
    assert failed["error"]["code"] == "capture_failed"
    message = failed["error"]["message"]
    sentence = f"hidden states cannot be saved in {capturing.folder}: File too large"
    assert sentence in message
    assert os.listdir(capturing.folder) == []
    take_states(await capturing.capture(prompt_of(200)))


def writers(worker: int) -> list[int]:
    """Return the processes of a worker that hold its model, and write the files."""
    found: list[int] = []
    for pid in children(worker):
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes()
        if arguments.startswith(b"VLLM::EngineCore"):
            found.append(pid)
    return found


@session
async def test_speculators_runs_as_its_page_says(
    capturing: Capturing, tmp_path: Path
) -> None:
    """Its commands, unmodified: regenerate, prepare, generate offline, train online."""
    (tmp_path / NAME).symlink_to(MODEL)
    roles = ["user", "assistant"] * 2
    rows = [
        {
            "id": f"row-{number}",
            "conversations": [
                {"role": role, "content": text}
                for role, text in zip(roles, texts, strict=False)
            ],
        }
        for number, texts in enumerate(CONVERSATIONS)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    for name in ("prompts.jsonl", "conversations.jsonl"):
        (tmp_path / name).write_text(lines)
    page = ROOT / "docs" / "capture.md"
    said: dict[str, Any] = await run_client(
        "speculators_jobs.py", capturing.up.url, str(page), cwd=tmp_path
    )

    commands = ["regenerate-responses", "prepare-data", "generate-offline-data"]
    assert said["commands"] == commands
    assert said["errors"] == ""
    # A first turn of each: 24 tokens with the prompt are its end of a conversation.
    answered = {row["primary_id"] for row in said["responses"]}
    assert answered == {"row-0", "row-1"}
    for row in said["responses"]:
        assert len(row["input_ids"]) == len(row["loss_mask"])
        assert row["metadata"]["usage"]["completion_tokens"] == sum(row["loss_mask"])
    assert len(said["rows"]) == 3  # one for each turn of the assistant
    sizes = [[len(row), len(LAYERS), 576] for row in said["rows"]]
    assert said["shapes"] == sizes
    assert said["online"] == [
        {"input_ids": row, "is_offline": True} for row in said["rows"]
    ]
    # All but what the first command asks for and does not take.
    assert len(os.listdir(capturing.folder)) <= 2 * len(said["responses"])
