"""The stacks that are compared: started, hurt and restarted in the same way.

Each is one prefill and two decode workers on this machine, loopback only, set up as its
documents say for surviving faults. ``tokenwire-up`` restarts its own workers; those of
the others are restarted here, when a scenario waits for the stack to be whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ports import free_port
from survive_processes import TokenwireStack, below, read, signal_part, vllm_counts
from survive_scenarios import Stack, until
from waiting import status

__all__ = ["STACKS", "running"]

ROOT = Path(__file__).parents[1]
NAME = "smollm2"
PREFILL, DECODE = ("prefill-0",), ("decode-0", "decode-1")
STOP_S = 30.0
"""From SIGTERM to SIGKILL: what Kubernetes gives by default."""

START_S = 300.0
RETURN_S = 30.0
"""For a worker that was frozen to be used again."""

NUM_PROBES = 8
"""Requests in a row that must succeed before a stack counts as whole: with two decode
workers a router that still avoids one, or still asks a dead one, fails some of them."""

ENGINE = (
    *("--dtype", "float32", "--max-model-len", "2048"),
    *("--max-num-batched-tokens", "256"),
)
ENGINE_CORES = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


class Fleet(ABC):
    """Servers of another stack: a front and three workers.

    Args:
        model: A model's folder.
        folder: Where logs go.
    """

    model = NAME
    selector: Mapping[str, Any]
    repeatable = True
    shows_counts = True

    def __init__(self, model: str, folder: Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self.remarks: list[str] = []
        self._frozen: set[str] = set()
        self._model = model
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def front_port(self) -> int:
        """Where the front listens."""
        return int(self.url.rpartition(":")[2])

    @abstractmethod
    def command(self, name: str) -> tuple[list[str], dict[str, str]]:
        """Return the arguments of a server, and what its environment has besides."""

    @abstractmethod
    def counts(self, name: str) -> Mapping[str, float]:
        """Return what a worker's engine has now and has had."""

    @abstractmethod
    def serves(self, name: str) -> bool:
        """Return whether a server says that it does."""

    def workers(self, role: str) -> Sequence[str]:
        """Return their names."""
        return PREFILL if role == "prefill" else DECODE

    def signal(self, name: str, number: signal.Signals, part: str = "all") -> None:
        """Send a signal."""
        if number is signal.SIGSTOP:
            self._frozen.add(name)
        signal_part(self._processes[name].pid, number, part)

    async def whole(self, *but: str) -> None:
        """Start what has ended, and wait until requests succeed again and again.

        A worker that was frozen and does not come back is started anew.
        """
        names = [name for name in (*PREFILL, *DECODE, "front") if name not in but]
        for name in names:
            self._start(name)
        try:
            for name in names:
                limit_s = RETURN_S if self._frozen else START_S
                await until(partial(self.serves, name), f"{name} serves", limit_s)
        except TimeoutError:
            if not self._frozen:
                raise
            frozen, self._frozen = self._frozen, set()
            for name in frozen:
                self.remarks.append(f"{name} did not come back, was started anew")
                self._kill(name)
            await self.whole(*but)
        self._frozen.clear()
        good = 0

        def probe() -> bool:
            nonlocal good
            good = good + 1 if self._answers() else 0
            return good >= NUM_PROBES

        await until(probe, f"{NUM_PROBES} requests in a row succeed")

    async def restart(self, name: str) -> None:
        """SIGTERM, as a supervisor does, and SIGKILL if need be; then start another."""
        process = self._processes[name]
        process.send_signal(signal.SIGTERM)
        try:
            await until(lambda: process.poll() is not None, "ended", STOP_S)
        except TimeoutError:
            self.remarks.append(f"{name} did not end within {STOP_S:.0f} s, was killed")
            self._kill(name)
        await self.whole()

    def stop(self) -> None:
        """Kill all of it."""
        for name in self._processes:
            self._kill(name)

    def _kill(self, name: str) -> None:
        process = self._processes[name]
        for pid in (*below(process.pid), process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def _start(self, name: str) -> None:
        process = self._processes.get(name)
        if process is not None and process.poll() is None:
            return
        arguments, environment = self.command(name)
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                arguments, stdout=log, stderr=log, env=os.environ | environment
            )

    def _answers(self) -> bool:
        body = {"model": NAME, "prompt": [5, 6, 7], "max_tokens": 2}
        return status(self.url + "/v1/completions", body) == 200


class RouterStack(Fleet):
    """``vllm-router`` before ``vllm serve``, prefill and decode over NIXL.

    The engines have what our workers give theirs on a CPU; without it, both sides of a
    hand-over run on one core.
    """

    selector: Mapping[str, Any] = {"return_token_ids": True}

    def __init__(self, model: str, folder: Path) -> None:
        super().__init__(model, folder)
        self._ports = {name: free_port() for name in (*PREFILL, *DECODE)}

    def command(self, name: str) -> tuple[list[str], dict[str, str]]:
        """Return a server's command."""
        if name == "front":
            peer = ROOT / "build/peers/router/bin"
            urls = [("--prefill", PREFILL), ("--decode", DECODE)]
            workers = [
                word
                for option, names in urls
                for one in names
                for word in (option, self._worker_url(one))
            ]
            return [
                *(str(peer / "vllm-router"), "--vllm-pd-disaggregation", *workers),
                *("--host", "127.0.0.1", "--port", str(self.front_port)),
                *("--kv-connector", "nixl", "--policy", "round_robin"),
                *("--health-check-interval-secs", "1"),
                *("--health-failure-threshold", "1"),
                *("--prometheus-port", str(free_port())),
            ], {}
        transfer = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "kv_buffer_device": "cpu",
        }
        return [
            # As ``vllm serve``, which asks for the version of a package named vllm.
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", self._model),
            *("--served-model-name", NAME, "--host", "127.0.0.1"),
            *("--port", str(self._ports[name]), "--enforce-eager", *ENGINE),
            *("--kv-cache-memory-bytes", str(1 << 30)),
            *("--worker-cls", "tokenwire.worker.vllm.cpu_worker.CpuWorker"),
            *("--kv-transfer-config", json.dumps(transfer)),
        ], {
            **ENGINE_CORES,
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        }

    def serves(self, name: str) -> bool:
        """Ask for its health."""
        url = self.url if name == "front" else self._worker_url(name)
        try:
            read(url + "/health")
        except OSError:
            return False
        return True

    def counts(self, name: str) -> Mapping[str, float]:
        """Return what its engine says."""
        return vllm_counts(self._worker_url(name) + "/metrics")

    def _worker_url(self, name: str) -> str:
        return f"http://127.0.0.1:{self._ports[name]}"


class DynamoStack(Fleet):
    """Dynamo's frontend before its simulated workers, with migration switched on."""

    selector: Mapping[str, Any] = {
        "nvext": {"extra_fields": ["completion_token_ids", "worker_id"]}
    }
    repeatable = False
    shows_counts = False

    def command(self, name: str) -> tuple[list[str], dict[str, str]]:
        """Return a server's command."""
        python = str(ROOT / "build/peers/dynamo/bin/python")
        planes = (
            *("--discovery-backend", "file", "--request-plane", "tcp"),
            *("--event-plane", "zmq"),
        )
        environment = {
            "DYN_FILE_KV": str(self._folder / "discovery"),
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_EVENT_PLANE_HOST": "127.0.0.1",
        }
        if name == "front":
            return [
                *(python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1"),
                *("--http-port", str(self.front_port), *planes),
                *("--router-mode", "round-robin", "--migration-limit", "3"),
            ], environment
        return [
            *(python, "-m", "dynamo.mocker", "--model-path", self._model),
            *("--model-name", NAME, "--max-model-len", "2048", "--block-size", "16"),
            *("--disaggregation-mode", name.partition("-")[0], *planes),
        ], environment

    def serves(self, name: str) -> bool:
        """Return whether the frontend knows three workers; they say nothing themselves."""
        try:
            health = json.loads(read(self.url + "/health"))
        except OSError:
            return False
        known = [one for one in health["instances"] if one["endpoint"] == "generate"]
        return len(known) >= len(PREFILL) + len(DECODE)

    def counts(self, name: str) -> Mapping[str, float]:
        """Nothing: the simulated workers have no engine to ask."""
        raise NotImplementedError


STACKS = ("tokenwire", "vllm-router", "dynamo")


@contextlib.asynccontextmanager
async def running(kind: str, model: str, folder: Path) -> AsyncGenerator[Stack]:
    """Run a stack, whole, and end it."""
    if kind == "tokenwire":
        async with _tokenwire(model, folder) as ours:
            yield ours
        return
    fleet = {"vllm-router": RouterStack, "dynamo": DynamoStack}[kind](model, folder)
    try:
        await fleet.whole()
        yield fleet
    finally:
        fleet.stop()


@contextlib.asynccontextmanager
async def _tokenwire(model: str, folder: Path) -> AsyncGenerator[Stack]:
    port = free_port()
    log = folder / "up.log"
    with log.open("ab") as file:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tokenwire.deploy.up", "--engine", "vllm"),
            *("--model", model, "--served-model-name", NAME, "--port", str(port)),
            *("--prefill", "1", "--decode", "2"),
            *("--log-dir", str(folder / "logs"), "--", *ENGINE),
            stdout=file,
            stderr=file,
            # As with the others, every prompt goes through the prefill worker.
            env=os.environ | {"TOKENWIRE_REMOTE_PREFILL_MIN_TOKENS": "0"},
        )
    roles = {"prefill": 1, "decode": 2}
    stack = TokenwireStack(process.pid, f"http://127.0.0.1:{port}", log, roles)
    try:
        await stack.whole()
        yield stack
    finally:
        process.send_signal(signal.SIGINT)
        await process.wait()
