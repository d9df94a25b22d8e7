"""``tokenwire-frontend --processes 2``: killed, stopped, and without its parent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from resume_client import ResumableStream

from support.awake import within
from support.frontend_process import started
from support.stack import MODEL_NAME, SimWorker, eventually
from support.two_frontends import QUICK
from support.up import alive
from support.worker_process import WAIT_S, Process
from tokenwire.protocol.messages import Role

LONG = 1_800
"""Tokens of an output that is to be ended: 9 s."""


@dataclass
class Frontend:
    """A running parent."""

    parent: Process
    url: str
    port: int
    client: aiohttp.ClientSession
    known: set[int] = field(default_factory=set[int])  # processes, for the end

    async def stream(self, max_tokens: int) -> aiohttp.ClientResponse:
        """Begin a stream, on a connection of its own."""
        body = {"prompt": [5] * 9, "max_tokens": max_tokens, "stream": True}
        answer = await self.client.post(self.url + "/v1/completions", json=body)
        assert answer.status == 200
        await answer.content.readline()
        return answer

    async def get(self, path: str) -> tuple[int, Any]:
        """GET JSON."""
        async with self.client.get(self.url + path) as answer:
            return answer.status, await answer.json()

    async def pids(self) -> list[int]:
        """Return the processes by their numbers, once both are ready."""
        seats: list[dict[str, Any]] = []

        async def both() -> bool:
            nonlocal seats
            seats = (await self.get("/health"))[1]["processes"]
            return [seat["ready"] for seat in seats] == [True, True]

        async with within(WAIT_S):
            while not await both():
                await asyncio.sleep(0.01)
        self.known |= {seat["pid"] for seat in seats}
        return [seat["pid"] for seat in seats]

    async def counted(self) -> dict[str, float]:
        """Return the samples of ``/metrics``."""
        async with self.client.get(self.url + "/metrics") as answer:
            assert answer.status == 200
            lines = (await answer.text()).splitlines()
        pairs = [line.rpartition(" ") for line in lines if not line.startswith("#")]
        return {name: float(value) for name, _, value in pairs}

    def holders(self, pids: list[int]) -> dict[int, int]:
        """Return which process has which client's connection, by the client's port."""
        inodes: dict[str, int] = {}
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if int(fields[1].partition(":")[2], 16) == self.port:
                client = int(fields[2].partition(":")[2], 16)
                inodes[f"socket:[{fields[9]}]"] = client
        found: dict[int, int] = {}
        for pid in pids:
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    client = inodes.get(os.readlink(descriptor), 0)
                    found[client] = pid
        found.pop(0, None)
        return found


def port_of(answer: aiohttp.ClientResponse) -> int:
    """Return the client's port of a response that is not read to its end."""
    assert answer.connection is not None
    assert answer.connection.transport is not None
    return int(answer.connection.transport.get_extra_info("sockname")[1])


def end(pids: set[int]) -> None:
    """End those whose parent was killed, and who did not end with it."""
    for pid in pids:
        with contextlib.suppress(OSError):
            if b"frontend.child" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


@asynccontextmanager
async def frontend(model: Path) -> AsyncGenerator[Frontend]:
    """Run two processes before a worker."""
    worker = SimWorker(model, Role.AGGREGATED, "w", ("--step-ms", "5"))
    await worker.start()
    parent = await started(
        *("--model", str(model), "--served-model-name", MODEL_NAME),
        *("--port", "0", "--worker", worker.link.endpoint),
    )
    known: set[int] = set()
    try:
        await parent.until_line("listening on ")
        [url] = re.findall("listening on (.*)", parent.lines[-1])
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as client:
            yield Frontend(parent, url, int(url.rpartition(":")[2]), client, known)
    finally:
        if parent.process.returncode is None:
            parent.process.kill()
        end(known)
        await parent.exit_code()  # reads all there is: pipes are closed behind it
        await worker.stop()


async def ended(answer: aiohttp.ClientResponse) -> bool:
    """Read a stream; return whether it came to its end by itself."""
    try:
        text = await answer.text()
    except aiohttp.ClientError:
        return False
    return text.endswith("data: [DONE]\n\n") and '"error"' not in text


async def was_cut(answer: aiohttp.ClientResponse) -> bool:
    """Read a stream; return whether it was ended early, by an event that says so."""
    *_, error, done = (await answer.text()).strip().split("\n\n")
    assert done == "data: [DONE]"
    return '"code":"draining"' in error


async def test_one_of_two_processes_is_killed(tiny_model: Path) -> None:
    """Its streams break, a resumable one goes on; the others, and the sums, are whole."""
    async with frontend(tiny_model) as served:
        pids = await served.pids()
        ask = {"prompt": [5] * 9, "max_tokens": 300, "temperature": 0}
        async with ResumableStream(
            [served.url], "/v1/completions", dict(ask), patience=QUICK
        ) as stream:
            idle = served.holders(pids)
            async for _ in stream:
                if stream.progress.token_ids:
                    break
            [holder] = {
                pid for port, pid in served.holders(pids).items() if port not in idle
            }
            streams: list[aiohttp.ClientResponse] = []
            held: dict[int, int] = {}
            while len(set(held.values())) < 2:  # both have some of them
                streams.append(await served.stream(200))
                held = served.holders(pids)
                held = {port_of(one): held[port_of(one)] for one in streams}
            before = await served.counted()
            assert before["tokenwire_requests_inflight"] == len(streams) + 1
            assert before["tokenwire_prompt_tokens_total"] == 9 * (len(streams) + 1)
            assert before["tokenwire_frontend_processes_answering"] == 2
            _, moment = await served.get("/ui/state")
            assert sorted(moment["processes"]) == [0, 1]
            assert moment["inflight"] == len(streams) + 1
            assert {one.get("process", 0) for one in moment["requests"]} == {0, 1}
            assert moment["workers"][0]["open"] == len(streams) + 1

            survives = {one: held[port_of(one)] != holder for one in streams}
            os.kill(holder, signal.SIGKILL)

            for one in streams:
                assert await ended(one) == survives[one]
            outcome = await stream.complete()
            assert len(outcome.token_ids) == 300
            # By what the worker has kept, or by a checkpoint.
            how = outcome.num_reconnects, outcome.num_resumes
            assert how in {(1, 0), (1, 1)}, outcome.log

        assert set(await served.pids()) - set(pids)  # another one is there
        after = await served.counted()
        assert after["tokenwire_frontend_processes_answering"] == 2
        assert after["tokenwire_frontend_process_restarts_total"] == 1
        sums = [name for name in before if name.endswith(("_total", "_count"))]
        fallen = [
            name
            for name in sums
            if not name.startswith("process_") and after[name] < before[name]
        ]
        assert not fallen

        # All are told to end, as systemd does it, who tells each: what runs may go on,
        # until the parent is told once more.
        short, long = await served.stream(200), await served.stream(LONG)
        for pid in await served.pids():
            os.kill(pid, signal.SIGTERM)
        for _ in range(2):
            await served.parent.until_line(" requests may go on for ")
        served.parent.process.send_signal(signal.SIGTERM)
        assert await ended(short)
        served.parent.process.send_signal(signal.SIGTERM)
        assert await was_cut(long)
        assert await served.parent.exit_code() == 0
        lines = "\n".join(served.parent.lines)
        assert f"(pid {holder}) has ended with signal 9 (SIGKILL)" in lines
        assert "it is started again" in lines


async def test_no_process_outlives_its_parent(tiny_model: Path) -> None:
    """Where that is killed, clients hear of it, and nobody is left."""
    async with frontend(tiny_model) as served:
        pids = await served.pids()
        answer = await served.stream(LONG)
        served.parent.process.kill()
        assert await was_cut(answer)
        await eventually(lambda: not any(map(alive, pids)), "processes are gone")


@pytest.mark.parametrize("fault", ["option", "model", "keys", "port"])
async def test_what_cannot_start_is_said_once(tiny_model: Path, fault: str) -> None:
    """The parent ends with one line, whatever is wrong with all processes.

    What another start does not mend has the code that says so to who would try.
    """
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    port = taken.getsockname()[1] if fault == "port" else 0
    model = "/nowhere" if fault == "model" else str(tiny_model)
    more = {
        "option": ["--worker-wait-s", "never"],
        "keys": ["--api-keys", "/nowhere"],
    }.get(fault, [])
    parent = await started(
        *("--model", model, "--port", str(port), "--worker", "tcp://127.0.0.1:1"),
        *more,
    )
    assert await parent.exit_code() == (1 if fault == "port" else 2)
    said = {
        "option": "'never' is not a number of seconds",
        "model": "/nowhere",
        "keys": "--api-keys: cannot read the API key file /nowhere: No such file",
        "port": f"cannot listen on 127.0.0.1:{port}",
    }[fault]
    lines = [line for line in parent.lines if said in line]
    assert len(lines) == 1, parent.lines
    assert not [line for line in parent.lines if "Traceback" in line]
    taken.close()
