"""Capture through tokenwire beside bare vLLM: prompts whose hidden states are taken, per s.

`bench_capture.py [--prompts 64] [--tokens 512] [--rounds 3]` loads an aggregated
tokenwire and vLLM's own server, both with tokenwire's connector and the same engine
arguments, and gives the rounds to them in turn, so that what else the machine does hits
both. Each client takes its file as speculators does: lock, read, delete. Needs the real
engine; TOKENWIRE_DEMO_MODEL is the model's folder.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import os
import random
import secrets
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from ports import free_port
from waiting import comes_true

from tokenwire.worker.capture_files import new_name

MODEL_NAME = "bench"
LAYERS = "2,15,28,30"
CONCURRENCY = 32
"""What `speculators generate-offline-data` has under way by default."""

WARM_UP = 8
"""Prompts of a round that does not count."""

READY_S = 300.0
FILE_S = 30.0
POLL_S = 0.005

ENGINE_ARGUMENTS = [
    *("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "64"),
    *("--max-num-batched-tokens", "2048", "--enforce-eager"),
    *("--kv-cache-memory-bytes", str(1 << 30)),
]
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) - 1)),
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENWIRE_WORKER_WAIT_S": "300",
}


def tokenwire(model: str, port: int, folder: Path) -> list[str]:
    """Return the command of an aggregated tokenwire."""
    return [
        *(sys.executable, "-m", "tokenwire.deploy.up", "--aggregated", "1"),
        *("--model", model, "--served-model-name", MODEL_NAME, "--port", str(port)),
        *("--capture-hidden-states", str(folder), "--capture-layers", LAYERS),
        *("--", *ENGINE_ARGUMENTS),
    ]


def bare(model: str, port: int, folder: Path, notify: str) -> list[str]:
    """Return the command of vLLM's own server with the same connector."""
    layers = [int(one) for one in LAYERS.split(",")]
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {
            "hf_config": {"eagle_aux_hidden_state_layer_ids": layers}
        },
    }
    transfer = {
        "kv_connector": "CaptureConnector",
        "kv_connector_module_path": "tokenwire.worker.vllm.capture_connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {
            "shared_storage_path": str(folder),
            "use_synchronization_lock": False,
            "notify": notify,
        },
    }
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", model, "--served-model-name", MODEL_NAME),
        *("--host", "127.0.0.1", "--port", str(port), "--disable-log-stats"),
        *("--speculative-config", json.dumps(speculative)),
        *("--kv-transfer-config", json.dumps(transfer), *ENGINE_ARGUMENTS),
    ]


class Server(NamedTuple):
    """One that serves."""

    url: str
    pid: int  # of its first process


@contextlib.asynccontextmanager
async def running(command: list[str], port: int, log: Path) -> AsyncGenerator[Server]:
    """Run a server; yield it once it lists its model."""
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=file, stderr=file, env={**os.environ, **ENVIRONMENT}
        )
    try:
        async with aiohttp.ClientSession() as http, asyncio.timeout(READY_S):
            while not await is_up(http, url):
                if process.returncode is not None:
                    sys.exit(f"{command[2]} ended: see {log}")
                await asyncio.sleep(0.5)
        yield Server(url, process.pid)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        async with asyncio.timeout(60):
            await process.wait()


async def is_up(http: aiohttp.ClientSession, url: str) -> bool:
    """Return whether a server lists its model."""
    try:
        async with http.get(url + "/v1/models") as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


def take(path: str) -> int:
    """Take a file as speculators does; return its size. A bare server's comes late."""
    if not comes_true(Path(path).exists, FILE_S, look_s=POLL_S):
        sys.exit(f"{path} never came")
    with open(path + ".lock", "r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
    os.remove(path + ".lock")
    size = len(Path(path).read_bytes())
    os.remove(path)
    return size


async def round_s(
    http: aiohttp.ClientSession, url: str, prompts: list[list[int]], folder: Path | None
) -> float:
    """Return how long *prompts* took, from the first request to the last file.

    Args:
        http: The client.
        url: The server.
        prompts: Their ids.
        folder: Where a bare server is told to save; None: tokenwire knows.
    """
    slots = asyncio.Semaphore(CONCURRENCY)

    async def one(prompt: list[int]) -> None:
        body: dict[str, Any] = {
            "model": MODEL_NAME, "prompt": prompt, "max_tokens": 1,
            "return_token_ids": True,
        }  # fmt: skip
        if folder is not None:
            wish = {"path": str(folder / new_name()), "num_tokens": len(prompt)}
            body["kv_transfer_params"] = {"tokenwire_capture": wish}
        async with slots:
            async with http.post(url + "/v1/completions", json=body) as answer:
                text = await answer.text()
                assert answer.status == 200, text
            path = json.loads(text)["kv_transfer_params"]["hidden_states_path"]
            await asyncio.to_thread(take, path)

    began = time.perf_counter()
    await asyncio.gather(*map(one, prompts))
    return time.perf_counter() - began


async def measure(arguments: argparse.Namespace, folder: Path) -> None:
    """Run both and print what each did."""
    model = os.environ["TOKENWIRE_DEMO_MODEL"]
    ports = free_port(), free_port()
    states = folder / "tokenwire", folder / "bare"
    states[1].mkdir()
    notify = f"bench-{secrets.token_hex(8)}"
    random.seed(1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as news:
        news.bind(f"\0{notify}")
        news.setblocking(False)
        asyncio.get_running_loop().add_reader(news, news.recv, 4_096)
        async with (
            running(
                tokenwire(model, ports[0], states[0]), ports[0], folder / "up.log"
            ) as ours,
            running(
                bare(model, ports[1], states[1], notify), ports[1], folder / "bare.log"
            ) as theirs,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
        ):
            rates: dict[str, list[float]] = {"tokenwire": [], "vLLM": []}
            for number in range(arguments.rounds + 1):
                turns = [("tokenwire", ours.url, None), ("vLLM", theirs.url, states[1])]
                if number % 2:
                    turns.reverse()  # whoever is first may find a warmer machine
                for name, url, where in turns:
                    prompts = [
                        [
                            random.randrange(1_000, 40_000)
                            for _ in range(arguments.tokens)
                        ]
                        for _ in range(arguments.prompts if number else WARM_UP)
                    ]
                    took_s = await round_s(http, url, prompts, where)
                    rate = len(prompts) / took_s
                    if number:  # the first warms up
                        rates[name].append(rate)
                    print(
                        f"{name:>10} round {number}: {rate:.2f} prompts/s", flush=True
                    )
        asyncio.get_running_loop().remove_reader(news)
    middle = {name: statistics.median(one) for name, one in rates.items()}
    for name, rate in middle.items():
        print(f"{name:>10} median: {rate:.2f} prompts/s of {arguments.tokens} tokens")
    print(f"tokenwire has {middle['tokenwire'] / middle['vLLM']:.1%} of bare vLLM")


def main() -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tokenwire-bench-") as name:
        asyncio.run(measure(arguments, Path(name)))


if __name__ == "__main__":
    main()
