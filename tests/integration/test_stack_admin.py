"""The admin sequence of an RL trainer on the real pair: weights and adapters change.

It runs behind all others on this pair, see ``conftest``.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from support.awake import within
from support.real_stack import NAME
from support.up import Up
from support.vllm_engine import MODEL, prompt

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
session = pytest.mark.asyncio(loop_scope="session")

PROMPT = prompt(40)
NUM_TOKENS = 16
ASKS = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True}
SELECTED = {"extra_fields": ["completion_token_ids", "weight_version"]}
STREAM_TOKENS = 120
LAYER = "model.layers.12"


class Trainer:
    """A client of both listeners."""

    def __init__(self, running: Up, http: aiohttp.ClientSession) -> None:
        self._http = http
        self._url = running.url
        log = (running.log.parent / "logs" / "frontend-0.log").read_text()
        self._admin: str = re.findall(r"admin plane on (http://\S+)", log)[-1]

    async def admin(self, path: str, body: Any = None) -> tuple[int, Any]:
        """POST to the admin plane; return the status, and the JSON or text."""
        async with self._http.post(self._admin + path, json=body) as answer:
            text = await answer.text()
            is_json = answer.content_type == "application/json"
            return answer.status, json.loads(text) if is_json else text

    async def ids(self, model: str = NAME) -> list[int]:
        """Return the greedy ids of the prompt."""
        body = {**ASKS, "model": model, "max_tokens": NUM_TOKENS, "nvext": SELECTED}
        async with self._http.post(self._url + "/v1/completions", json=body) as answer:
            whole = await answer.json()
            assert answer.status == 200, whole
            return list(whole["nvext"]["completion_token_ids"])

    async def stream(
        self, nvexts: list[dict[str, Any]], model: str = NAME
    ) -> dict[str, Any] | None:
        """Stream a long answer into *nvexts*; return the error that ended it, if any."""
        body = {**ASKS, "model": model, "max_tokens": STREAM_TOKENS, "stream": True}
        url = self._url + "/v1/completions"
        async with self._http.post(url, json={**body, "nvext": SELECTED}) as answer:
            async for line in answer.content:
                data = line.decode().strip().removeprefix("data: ")
                if data and data != "[DONE]":
                    chunk = json.loads(data)
                    if "error" in chunk:
                        return dict(chunk["error"])
                    nvexts.append(chunk["nvext"])
        return None


async def begun(streams: list[list[dict[str, Any]]]) -> None:
    """Wait until all have brought some ids."""
    async with within(60):
        while not all(len(ids_of(one)) > NUM_TOKENS for one in streams):
            await asyncio.sleep(0.02)


def ids_of(nvexts: list[dict[str, Any]]) -> list[int]:
    """Return the ids of a stream."""
    return [i for one in nvexts for i in one.get("completion_token_ids", [])]


@asynccontextmanager
async def trainer(running: Up) -> AsyncGenerator[Trainer]:
    """Give a trainer that leaves the pair as it was."""
    async with aiohttp.ClientSession() as http:
        made = Trainer(running, http)
        try:
            yield made
        finally:
            await made.admin("/resume")
            await made.admin("/update_weights", {"weight_dir": str(MODEL)})
            await made.admin("/unload_lora_adapter", {"lora_name": "run-1"})


def make_weights(folder: Path) -> dict[str, Any]:
    """Write the model with one matrix changed; return all its weights."""
    files: Any = import_module("safetensors.torch")
    tensors: dict[str, Any] = files.load_file(MODEL / "model.safetensors")
    name = f"{LAYER}.mlp.down_proj.weight"
    tensors[name] = -tensors[name]
    folder.mkdir()
    files.save_file(tensors, folder / "model.safetensors")
    return tensors


def make_adapter(folder: Path, scale: float) -> dict[str, Any]:
    """Write a LoRA adapter of one projection; return what it adds to the weights."""
    torch: Any = import_module("torch")
    files: Any = import_module("safetensors.torch")
    config = json.loads((MODEL / "config.json").read_text())
    size, rank = config["hidden_size"], 4
    generator = torch.Generator().manual_seed(7)
    a = torch.randn(rank, size, generator=generator)
    b = torch.randn(size, rank, generator=generator) * scale
    path = f"{LAYER}.self_attn.q_proj"
    folder.mkdir()
    files.save_file(
        {
            f"base_model.model.{path}.lora_A.weight": a,
            f"base_model.model.{path}.lora_B.weight": b,
        },
        folder / "adapter_model.safetensors",
    )
    settings = {
        "peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none",
        "target_modules": ["q_proj"], "base_model_name_or_path": str(MODEL),
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return {f"{path}.weight": 2 * (b @ a)}


def plain_ids(change: Callable[[dict[str, Any]], None]) -> list[int]:
    """Return the greedy ids of plain transformers, with the weights changed."""
    torch: Any = import_module("torch")
    kind: Any = import_module("transformers").AutoModelForCausalLM
    model = kind.from_pretrained(MODEL, dtype=torch.float32)
    with torch.no_grad():
        change(model.state_dict())  # whose tensors are the model's own
        given = torch.tensor([PROMPT])
        whole = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
    ids: list[int] = whole[0, len(PROMPT) :].tolist()
    return ids


@session
async def test_weights_and_adapters_change_under_streams(
    pair: Up, tmp_path: Path
) -> None:
    """Pause, update, resume; the ids are those of plain transformers with each."""
    new = make_weights(tmp_path / "step_1")
    added = make_adapter(tmp_path / "lora", 0.05)
    make_adapter(tmp_path / "lora_2", 0.2)

    def be_new(state: dict[str, Any]) -> None:
        for name, tensor in new.items():
            state[name].copy_(tensor)

    def be_adapted(state: dict[str, Any]) -> None:
        for name, tensor in added.items():
            state[name].add_(tensor)

    expected = {
        "old": await asyncio.to_thread(plain_ids, lambda _: None),
        "new": await asyncio.to_thread(plain_ids, be_new),
        "adapted": await asyncio.to_thread(plain_ids, be_adapted),
    }
    assert len({tuple(ids) for ids in expected.values()}) == 3

    async with trainer(pair) as at:
        assert await at.ids() == expected["old"]
        unchanged: list[dict[str, Any]] = []
        assert await at.stream(unchanged) is None

        # As Prime-RL: pause, update, resume, while requests run.
        streams: list[list[dict[str, Any]]] = [[] for _ in range(3)]
        tasks = [asyncio.create_task(at.stream(one)) for one in streams]
        await begun(streams)
        paused = await at.admin("/pause?mode=keep&clear_cache=false")
        assert paused == (200, {"status": "paused"})
        body = {"weight_dir": str(tmp_path / "step_1")}
        assert await at.admin("/update_weights", body) == (200, {"status": "ok"})
        assert await at.admin("/resume") == (200, {"status": "resumed"})
        async with within(120):
            assert await asyncio.gather(*tasks) == [None] * 3
        for stream in streams:
            assert len(ids_of(stream)) == STREAM_TOKENS
            first, second = stream[-1]["weight_versions"]
            assert first == {"version": "default", "first_index": 0}
            assert second["version"] == stream[-1]["weight_version"] == "step_1"
            at_index = second["first_index"]
            assert NUM_TOKENS < at_index < STREAM_TOKENS
            assert ids_of(stream)[:at_index] == ids_of(unchanged)[:at_index]
            assert ids_of(stream) != ids_of(unchanged)
        for _ in range(2):  # computed, and from the cache
            assert await at.ids() == expected["new"]

        # Back, without a pause of the trainer's own.
        body = {"weight_dir": str(MODEL), "weight_version": "first"}
        assert (await at.admin("/update_weights", body))[0] == 200
        assert await at.ids() == expected["old"]

        # An adapter, another in its place, and none.
        lora = {"lora_name": "run-1", "lora_path": str(tmp_path / "lora")}
        assert await at.admin("/load_lora_adapter", lora) == (200, {"status": "ok"})
        for _ in range(2):
            assert await at.ids("run-1") == expected["adapted"]
        assert await at.ids() == expected["old"]
        lora["lora_path"] = str(tmp_path / "lora_2")
        streams = [[]]
        tasks = [asyncio.create_task(at.stream(streams[0], "run-1"))]
        await begun(streams)
        assert (await at.admin("/load_lora_adapter", lora))[0] == 200
        second = await at.ids("run-1")
        assert second not in expected.values()

        # Its folders go, and an update has the engines read it again: as it was.
        for name in ("lora", "lora_2"):
            shutil.rmtree(tmp_path / name)
        assert (await at.admin("/update_weights", body))[0] == 200
        assert await at.ids("run-1") == second
        async with within(120):
            assert await asyncio.gather(*tasks) == [None]
        assert len(ids_of(streams[0])) == STREAM_TOKENS

        # It goes itself, under a stream, which ends; one of the model goes on.
        streams = [[], []]
        tasks = [
            asyncio.create_task(at.stream(one, model))
            for one, model in zip(streams, ("run-1", NAME), strict=True)
        ]
        await begun(streams)
        gone = await at.admin("/v1/unload_lora_adapter", {"lora_name": "run-1"})
        assert gone[0] == 200
        async with within(120):
            error, no_error = await asyncio.gather(*tasks)
        assert error is not None
        assert error["code"] == "model_not_found"
        assert NUM_TOKENS < len(ids_of(streams[0])) < STREAM_TOKENS
        assert no_error is None
        assert ids_of(streams[1]) == ids_of(unchanged)
        assert await at.ids() == expected["old"]

        # What a CPU cannot, and what is not there, is said.
        status, failed = await at.admin("/sleep")
        assert (status, failed["error"]["code"]) == (501, "worker_failed")
        assert "no sleep mode on a CPU" in failed["error"]["message"]
        cut = tmp_path / "cut"
        cut.mkdir()
        whole = (tmp_path / "step_1" / "model.safetensors").read_bytes()
        (cut / "model.safetensors").write_bytes(whole[:-1])
        status, failed = await at.admin("/update_weights", {"weight_dir": str(cut)})
        assert status == 400
        assert "bytes" in failed["error"]["message"]
        assert await at.ids() == expected["old"]
