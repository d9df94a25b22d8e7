"""The life of a worker process, from its first line to its exit code."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import zmq

from support.worker_process import PATHS, Client, worker
from tokenwire.protocol.messages import (
    KV_EVENTS,
    ErrorKind,
    FinishReason,
    Leg,
    Role,
)

_PHASE = re.compile(r"tokenwire-worker: ")
_LOGGED = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO tokenwire\.worker\.\w+: "
)


async def probed(metrics_url: str) -> dict[str, int]:
    """Return the status that each probe of a worker gets."""
    url = urlsplit(metrics_url)

    def ask(path: str) -> int:
        connection = HTTPConnection(str(url.hostname), url.port, timeout=60)
        with closing(connection):
            connection.request("GET", path)
            return connection.getresponse().status

    return {path: await asyncio.to_thread(ask, path) for path in ("/live", "/ready")}


async def test_a_worker_announces_itself_serves_and_leaves(tmp_path: Path) -> None:
    """SIGTERM with nothing running: exit code 0, and the announcement is gone."""
    options = ("--metrics-port", "0", "--weight-version", "step-7")
    async with worker(tmp_path, *options) as running:
        await running.until_line("serving m at tcp://127.0.0.1:")
        announced = json.loads(running.announce.read_text())
        assert announced["worker_id"] == "w"
        assert announced["role"] == "aggregated"
        assert announced["model"] == "m"
        assert announced["pid"] == running.process.pid
        assert announced["metrics"].startswith("http://127.0.0.1:")
        assert await probed(announced["metrics"]) == {"/live": 200, "/ready": 200}
        with Client(announced["endpoint"]) as client:
            card = client.hello()
            assert (card.worker_id, card.engine, card.role) == (
                "w",
                "sim",
                Role.AGGREGATED,
            )
            assert card.weight_version == "step-7"
            assert card.exactness == "same_rng"
            assert KV_EVENTS in card.capabilities
            client.submit("r", 3)
            assert client.end().reason is FinishReason.LENGTH
        running.process.send_signal(signal.SIGTERM)
        assert await running.exit_code() == 0
        assert os.listdir(tmp_path) == []
        said = [line for line in running.lines if not _PHASE.match(line)]
        assert said
        assert all(_LOGGED.match(line) for line in said)
        assert running.lines[0].startswith("tokenwire-worker: starting (")


@pytest.mark.parametrize("is_option_of_engine", [False, True])
async def test_who_does_not_tell_what_is_cached_does_not_promise_it(
    tmp_path: Path, *, is_option_of_engine: bool
) -> None:
    """By an option, or since nothing is cached."""
    off, uncached = ("--no-kv-events",), ("--no-enable-prefix-caching",)
    options, of_engine = ((), uncached) if is_option_of_engine else (off, ())
    async with worker(tmp_path, *options, engine_args=of_engine) as running:
        await running.until_line("serving m at tcp://127.0.0.1:")
        endpoint = json.loads(running.announce.read_text())["endpoint"]
        with Client(endpoint) as client:
            assert KV_EVENTS not in client.hello().capabilities


@pytest.mark.parametrize("is_option_of_engine", [False, True])
async def test_who_does_not_go_on_exactly_says_so(
    tmp_path: Path, *, is_option_of_engine: bool
) -> None:
    """Whether the worker is told or the simulated engine."""
    flag = ("--no-exact-resume",)
    options, of_engine = ((), flag) if is_option_of_engine else (flag, ())
    async with worker(tmp_path, *options, engine_args=of_engine) as running:
        await running.until_line("serving m at tcp://127.0.0.1:")
        endpoint = json.loads(running.announce.read_text())["endpoint"]
        with Client(endpoint) as client:
            assert client.hello().exactness == ""


async def test_the_simulated_engine_needs_neither_torch_nor_vllm(
    tmp_path: Path,
) -> None:
    """Nothing of them is imported."""
    code = (
        "import sys; import tokenwire.worker.app\n"
        "from tokenwire.worker.engine_factory import make_engine\n"
        "from tokenwire.worker.config import parse_config\n"
        "make_engine(parse_config(['--engine=sim', '--role=decode', '--model=m']))\n"
        "print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code,
        stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": PATHS},
    )  # fmt: skip
    said, _ = await process.communicate()
    assert said.decode().strip() == "[]"


async def test_what_runs_may_end_before_the_exit(tmp_path: Path) -> None:
    """Graceful: the request that was running is finished, a new one is refused."""
    args = ("--step-ms", "20")
    async with worker(tmp_path, engine_args=args) as running:
        await running.until_line("serving")
        with Client(json.loads(running.announce.read_text())["endpoint"]) as client:
            client.hello()
            client.submit("r", 50)
            client.until_tokens()
            running.process.send_signal(signal.SIGINT)
            await running.until_line("draining 1 requests")
            client.submit("late", 3)
            assert client.end().error_kind is ErrorKind.DRAINING
            assert client.end().reason is FinishReason.LENGTH
            assert await running.exit_code() == 0


@pytest.mark.parametrize("second_signal", [False, True])
@pytest.mark.pitfall(26)
async def test_what_does_not_end_goes_on_elsewhere(
    tmp_path: Path, *, second_signal: bool
) -> None:
    """After the bound, or at a second signal; its frontend is told."""
    options = ("--shutdown-timeout-s", "3600" if second_signal else "0.1")
    args = ("--step-ms", "100")
    async with worker(tmp_path, *options, engine_args=args) as running:
        await running.until_line("serving")
        with Client(json.loads(running.announce.read_text())["endpoint"]) as client:
            client.hello()
            client.submit("r", 5000)
            client.until_tokens()
            running.process.send_signal(signal.SIGTERM)
            await running.until_line("draining 1 requests")
            if second_signal:
                running.process.send_signal(signal.SIGTERM)
            assert client.end().error_kind is ErrorKind.DRAINING
            assert await running.exit_code() == 0


async def test_kv_that_was_handed_over_may_be_read_before_the_exit(
    tmp_path: Path,
) -> None:
    """No request runs, but a decode worker has not read yet; a second signal forces."""
    async with worker(tmp_path, role=Role.PREFILL) as running:
        await running.until_line("serving")
        with Client(json.loads(running.announce.read_text())["endpoint"]) as client:
            client.hello()
            client.submit("r", 3, Leg.PREFILL)
            assert client.end().handover is not None
            running.process.send_signal(signal.SIGTERM)
            await running.until_line("waiting for KV that was handed over")
            running.process.send_signal(signal.SIGTERM)
            assert await running.exit_code() == 0


async def test_a_dead_engine_is_exit_code_1(tmp_path: Path) -> None:
    """After the request has ended with an error and the frontend was told."""
    args = ("--fault", "die@3")
    async with worker(tmp_path, engine_args=args) as running:
        await running.until_line("serving")
        with Client(json.loads(running.announce.read_text())["endpoint"]) as client:
            client.hello()
            client.submit("r", 50)
            assert client.end().error_kind is ErrorKind.ENGINE
            assert "injected fault" in client.until_dead().reason
        assert await running.exit_code() == 1
        assert not running.announce.exists()


async def test_a_signal_during_the_start_ends_it(tmp_path: Path) -> None:
    """An engine that loads for minutes need not be waited for."""
    async with worker(tmp_path, engine_args=("--load-ms", "600000")) as running:
        await running.until_line("loading no weights")
        running.process.send_signal(signal.SIGTERM)
        assert await running.exit_code() == 0
        assert not running.announce.exists()


NO_KEYS = ("--curve-secret-key", "/nowhere", "--curve-allowed-keys", "/nowhere")


@pytest.mark.parametrize(
    ("options", "engine_args", "code", "text"),
    [
        ((), ("--num-blocks", "1"), 1, "failed: a context of 8192 tokens"),
        ((), ("--script", "/nonexistent"), 1, "failed: script /nonexistent cannot"),
        (("--listen", "tcp://127.0.0.1:1"), (), 1, "failed: cannot listen on"),
        ((), ("--step-ms", "x"), 2, "tokenwire-worker --engine sim --: argument"),
        (("--metrics-port", "x"), (), 2, "tokenwire-worker: argument --metrics-port"),
        (NO_KEYS, (), 2, "failed: cannot read the key file /nowhere: No such file"),
    ],
)
async def test_what_cannot_start_says_why(
    tmp_path: Path,
    options: tuple[str, ...],
    engine_args: tuple[str, ...],
    code: int,
    text: str,
) -> None:
    """One sentence, and 1 or, for a bad setting, 2."""
    if "tcp://127.0.0.1:1" in options:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as taken:
            taken.bind("tcp://127.0.0.1:0")
            endpoint = taken.getsockopt_string(zmq.LAST_ENDPOINT)
            async with worker(tmp_path, "--listen", endpoint) as running:
                assert await running.exit_code() == code
    else:
        async with worker(tmp_path, *options, engine_args=engine_args) as running:
            assert await running.exit_code() == code
    assert any(text in line for line in running.lines), running.lines
