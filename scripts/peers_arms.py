"""The arms: servers that stream tokens, each before a simulated engine.

The server under test has the first core; its engine shares the last one with the client.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path

from peers_control import Control
from peers_proc import cpu_s, end, family, rss_mib, start
from ports import free_port
from waiting import comes_true, status

__all__ = [
    "ARMS",
    "MOCKERS_STEP_S",
    "MODEL_NAME",
    "PACED_STEP_S",
    "Arm",
    "model_folder",
]

ROOT = Path(__file__).parents[1]
PEERS = ROOT / "build/peers"
MODEL_NAME = "bench"
PACED_STEP_S = 0.010
MOCKERS_STEP_S = 0.006
"""Near what Dynamo's mocker takes at its own speed."""
START_S = 120.0
"""vLLM imports for half a minute on one busy core."""

SETTLE_S, REST_S, REST_SHARE = 15.0, 0.25, 0.05
"""A server rests when it takes less than a twentieth of its core."""

MAX_MODEL_LEN = 131_072
"""For prompts of 100k tokens."""

MAX_NUM_SEQS = 8_192
"""Above 5,000 open streams: no engine here makes one wait."""


class Arm(ABC):
    """A server and its engine.

    Args:
        model: A model's folder.
        folder: For logs, and what else the processes leave.
        cores: The server's, and that of its engine and the client.
    """

    name: str
    note: str
    ids: Mapping[str, object] | None = {"return_token_ids": True}
    """What a request asks for token ids with; ``None``: the arm has none."""
    keeps_up = True
    """With 48 streams and a step of 1 ms."""

    def __init__(self, model: Path, folder: Path, cores: tuple[int, int]) -> None:
        self.model = model
        self.folder = folder
        self.port = 0
        self._server_core, self._engine_core = cores
        self._processes: list[subprocess.Popen[bytes]] = []
        self._servers: list[subprocess.Popen[bytes]] = []
        self.control: Control | None = None

    @abstractmethod
    def start(self, step_s: float) -> None:
        """Start, with an engine of that step; return when it serves.

        Raises:
            RuntimeError: It does not come up.
        """

    def pace(self, step_s: float) -> None:
        """Change the engine's step: here, by starting anew."""
        self.stop()
        self.start(step_s)

    def stop(self) -> None:
        """End all processes."""
        for process in reversed(self._processes):
            end(process)
        self._processes.clear()
        self._servers.clear()

    def pids(self) -> list[int]:
        """Return the processes under test, as they are now."""
        return [pid for one in self._servers for pid in family(one.pid)]

    def cpu_s(self) -> float:
        """Return the CPU time of the processes under test."""
        return cpu_s(self.pids())

    def rss_mib(self) -> float:
        """Return the memory of the processes under test."""
        return rss_mib(self.pids())

    def _run(
        self,
        what: str,
        command: list[str],
        *,
        server: bool,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        core = self._server_core if server else self._engine_core
        log = self.folder / f"{self.name}-{what}.log"
        process = start(command, core, log, dict(environment or {}))
        self._processes.append(process)
        if server:
            self._servers.append(process)
        return process

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        if not comes_true(condition, START_S, self._processes):
            msg = f"{self.name}: {what} did not come up, see {self.folder}"
            raise RuntimeError(msg)

    def _settle(self) -> None:
        """Wait until the server rests: a second process of it may still be starting."""
        deadline = time.monotonic() + SETTLE_S
        before = self.cpu_s()
        while time.monotonic() < deadline:
            time.sleep(REST_S)
            now = self.cpu_s()
            if now - before < REST_SHARE * REST_S:
                return
            before = now

    def _serves(self) -> bool:
        return answers(self.port, "/health") and completes(self.port)


class Ours(Arm):
    """Our frontend before our simulated worker."""

    name = "tokenwire"
    note = "our frontend, one process, before our simulated worker over ZeroMQ"
    num_processes = 1

    def start(self, step_s: float) -> None:
        """Start a worker and the frontend."""
        self.port = free_port()
        announce = self.folder / f"{self.name}.json"
        announce.unlink(missing_ok=True)
        worker = [
            *(sys.executable, "-m", "tokenwire.worker", "--engine", "sim"),
            *("--role", "aggregated", "--model", str(self.model)),
            *("--served-model-name", MODEL_NAME, "--listen", "tcp://127.0.0.1:0"),
            *("--announce", str(announce), "--", "--step-ms", f"{step_s * 1000:g}"),
            *("--prefill-tokens-per-s", "0", "--num-blocks", "1048576"),
            *("--max-num-seqs", str(MAX_NUM_SEQS)),
            *("--max-num-batched-tokens", "1000000"),
        ]
        self._run("worker", worker, server=False)
        self._wait(announce.exists, "the worker")
        endpoint = json.loads(announce.read_text())["endpoint"]
        frontend = [
            *(sys.executable, "-m", "tokenwire.frontend", "--model", str(self.model)),
            *("--served-model-name", MODEL_NAME, "--port", str(self.port)),
            *("--worker", endpoint, "--log-level", "warning"),
            *("--max-inflight-requests", str(MAX_NUM_SEQS)),
        ]
        for options in self._options():
            self._run("frontend", frontend + options, server=True)
        self._wait(self._serves, "the frontend")
        self._settle()

    def _options(self) -> list[list[str]]:
        return [[]]

    def _serves(self) -> bool:
        return answers(self.port, "/ready") and completes(self.port)


class OursTwo(Ours):
    """Two processes on one port."""

    name = "tokenwire-2"
    note = "the same, two processes on one port, both on the one core of the server"

    def _options(self) -> list[list[str]]:
        told = subprocess.run(
            [sys.executable, "-m", "tokenwire.frontend", "--help"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        if "--processes" in told:
            return [["--processes", "2"]]
        return [["--reuse-port"], ["--reuse-port"]]


class VllmServe(Arm):
    """vLLM's own API server before an engine core of ours."""

    name = "vllm-serve"
    note = (
        "vLLM 0.32's API server process, unchanged, its engine core replaced by a stub of ours that "
        "speaks the same ZeroMQ protocol (`scripts/peers_vllm.py`); the stub is not counted"
    )
    keeps_up = False

    def start(self, step_s: float) -> None:
        """Start the API server, which starts the engine core."""
        self.port = free_port()
        self.control = Control(self.folder / f"{self.name}.control")
        self.control.begin(step_s)
        command = [
            *(sys.executable, str(Path(__file__).with_name("peers_vllm.py"))),
            *(str(self.control.path), str(self._engine_core)),
            *("--model", str(self.model), "--served-model-name", MODEL_NAME),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--max-model-len", str(MAX_MODEL_LEN), "--disable-uvicorn-access-log"),
            *("--max-num-seqs", str(MAX_NUM_SEQS)),
            *("--max-num-batched-tokens", str(MAX_MODEL_LEN)),
        ]
        environment = {
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # the child is told apart by that
            "HF_HUB_OFFLINE": "1",
        }
        self._run("api", command, server=True, environment=environment)
        self._wait(self._serves, "the API server")
        self._settle()

    def pace(self, step_s: float) -> None:
        """Tell the engine core."""
        assert self.control is not None
        self.control.begin(step_s)

    def pids(self) -> list[int]:
        """Return the API server alone: the engine core is its child."""
        return [one.pid for one in self._servers]


class Backend(Arm):
    """A client against the simulated server itself: no server under test."""

    name = "direct"
    note = "the client on the simulated OpenAI server itself, both on one core: what they can do"

    def start(self, step_s: float) -> None:
        """Start the simulated server."""
        self._start_backend(step_s)
        self.port = self.backend_port
        self._wait(self._serves, "the simulated server")

    def _start_backend(self, step_s: float) -> None:
        self.backend_port = free_port()
        self.control = Control(self.folder / f"{self.name}.control")
        self.control.begin(step_s)
        script = str(Path(__file__).with_name("peers_backend.py"))
        command = [
            sys.executable,
            script,
            str(self.backend_port),
            str(self.control.path),
        ]
        self._run("backend", command, server=False)
        self._wait(lambda: answers(self.backend_port, "/health"), "the backend")

    def pace(self, step_s: float) -> None:
        """Tell the simulated server."""
        assert self.control is not None
        self.control.begin(step_s)


class VllmRouter(Backend):
    """``vllm-router`` before a simulated OpenAI server."""

    name = "vllm-router"
    note = (
        "0.1.17 before one simulated OpenAI server: it carries bytes, and neither tokenizes "
        "nor detokenizes"
    )

    def start(self, step_s: float) -> None:
        """Start the simulated server and the router."""
        self._start_backend(step_s)
        self.port = free_port()
        self._run("router", self._command(), server=True)
        self._wait(self._serves, "the router")
        self._settle()

    def _command(self) -> list[str]:
        return [
            *(str(PEERS / "router/bin/vllm-router"), "--host", "127.0.0.1"),
            *("--port", str(self.port), *self._options()),
        ]

    def _options(self) -> list[str]:
        return [
            *("--worker-urls", f"http://127.0.0.1:{self.backend_port}"),
            *("--policy", "round_robin", "--log-level", "warning"),
            *("--prometheus-port", str(free_port())),
            *("--max-concurrent-requests", str(MAX_NUM_SEQS)),
        ]


class SglangRouter(VllmRouter):
    """``sglang-router`` before a simulated OpenAI server."""

    name = "sglang-router"
    note = "0.3.2, as vllm-router"

    def _command(self) -> list[str]:
        python = str(PEERS / "sglang/bin/python")
        return [
            *(python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1"),
            *("--port", str(self.port), *self._options()),
        ]

    def _options(self) -> list[str]:
        return ["warn" if one == "warning" else one for one in super()._options()]


class Dynamo(Arm):
    """Dynamo's frontend before its simulated worker."""

    name = "dynamo"
    note = "1.6.1's frontend before its own simulated worker (mocker)"
    ids: Mapping[str, object] | None = {
        "nvext": {"extra_fields": ["completion_token_ids"]}
    }

    def start(self, step_s: float) -> None:
        """Start the mocker and the frontend."""
        self.port = free_port()
        discovery = self.folder / f"{self.name}-discovery"
        shutil.rmtree(discovery, ignore_errors=True)
        python = str(PEERS / "dynamo/bin/python")
        planes = (
            *("--discovery-backend", "file", "--request-plane", "tcp"),
            *("--event-plane", "zmq"),
        )
        environment = {
            "DYN_FILE_KV": str(discovery),
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_EVENT_PLANE_HOST": "127.0.0.1",
            "DYN_LOG": "warn",
        }
        mocker = [
            *(python, "-m", "dynamo.mocker", "--model-path", str(self.model)),
            *("--model-name", MODEL_NAME, "--max-model-len", str(MAX_MODEL_LEN)),
            *("--block-size", "16", "--max-num-seqs", str(MAX_NUM_SEQS), *planes),
            *("--num-gpu-blocks-override", "1048576"),
            *("--max-num-batched-tokens", "1000000", *speed(step_s)),
        ]
        frontend = [
            *(python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1"),
            *("--http-port", str(self.port), "--router-mode", "round-robin", *planes),
        ]
        self._run("mocker", mocker, server=False, environment=environment)
        self._run("frontend", frontend, server=True, environment=environment)
        self._wait(self._serves, "the frontend")
        self._settle()


MOCKER_DECODE_S = 0.00578
"""Of a step of Dynamo's mocker at speed 1, with 48 streams (measured)."""


def speed(step_s: float) -> list[str]:
    """Return the mocker's options for a step; in place of 6 ms it is the mocker's own."""
    if not step_s:
        return ["--speedup-ratio", "1000000"]
    if step_s == MOCKERS_STEP_S:
        return ["--speedup-ratio", "1"]
    decode = MOCKER_DECODE_S / step_s / 1_000_000
    return ["--speedup-ratio", "1000000", "--decode-speedup-ratio", f"{decode:.3e}"]


ARMS: dict[str, type[Arm]] = {
    arm.name: arm
    for arm in (Ours, OursTwo, VllmServe, VllmRouter, SglangRouter, Dynamo, Backend)
}


def answers(port: int, path: str) -> bool:
    """Return whether a page is there."""
    return status(f"http://127.0.0.1:{port}{path}", timeout_s=2.0) == 200


def completes(port: int) -> bool:
    """Return whether a request succeeds."""
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 1,
    }
    return status(f"http://127.0.0.1:{port}/v1/chat/completions", body) == 200


def model_folder(model: Path, folder: Path) -> Path:
    """Return *model* with a context of 131,072 tokens; no engine here reads its weights."""
    made = folder / "model"
    made.mkdir()
    for file in model.iterdir():
        if file.name not in {"config.json", "tokenizer_config.json"}:
            (made / file.name).symlink_to(file)
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = MAX_MODEL_LEN
    (made / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    tokenizer["model_max_length"] = MAX_MODEL_LEN
    (made / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return made
