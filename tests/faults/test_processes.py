"""Kill, freeze and stop real processes, with the simulated engine behind them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from support.awake import within
from support.samples import total
from support.up import Up, alive, children, until, up

READY_S = 60.0
"""A start takes two seconds; traced, on busy cores, several times that."""
GONE_S = 30.0
SLEEP_S = 3.5
STEP = ("--step-ms", "20")
PAIR = {"prefill": 1, "decode": 1}


@pytest_asyncio.fixture
async def pair(tiny_model: Path, tmp_path: Path) -> AsyncIterator[Up]:
    """A prefill and a decode worker under ``tokenwire-up``."""
    async with up(
        tiny_model,
        tmp_path,
        engine="sim",
        workers=PAIR,
        timeout_s=READY_S,
        engine_arguments=STEP,
        # A killed worker is missed until another one has started.
        settings={"TOKENWIRE_WORKER_WAIT_S": f"{READY_S}"},
    ) as running:
        yield running


def body(max_tokens: int, *, stream: bool = True) -> dict[str, Any]:
    """Return a completion request."""
    return {"prompt": [5] * 40, "max_tokens": max_tokens, "stream": stream}


async def post(running: Up, **fields: Any) -> tuple[int, str]:
    """POST a completion; return status and body."""
    async with (
        aiohttp.ClientSession() as client,
        client.post(
            running.url + "/v1/completions", json=body(3, stream=False) | fields
        ) as answer,
    ):
        return answer.status, await answer.text()


def ids(events: str) -> list[int]:
    """Return the token ids of a stream, joined."""
    blocks = [block.removeprefix("data: ") for block in events.strip().split("\n\n")]
    return [
        token_id
        for block in blocks
        if block and block != "[DONE]"
        for token_id in json.loads(block)
        .get("nvext", {})
        .get("completion_token_ids", [])
    ]


async def test_the_only_decode_worker_dies_under_a_stream(pair: Up) -> None:
    """The stream pauses until ``tokenwire-up`` has started another, and goes on exactly."""
    asked = body(300) | {"return_token_ids": True, "temperature": 0}
    async with aiohttp.ClientSession() as client:
        async with client.post(pair.url + "/v1/completions", json=asked) as answer:
            undisturbed = await answer.text()
        async with client.post(pair.url + "/v1/completions", json=asked) as answer:
            first = await answer.content.readline()
            pair.kill("decode-0")
            rest = await answer.text()

    assert rest.endswith("data: [DONE]\n\n")
    assert len(ids(undisturbed)) == 300
    assert ids(first.decode() + rest) == ids(undisturbed)


@pytest.mark.pitfall(12)
async def test_the_only_decode_worker_freezes_under_a_stream(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Nobody restarts it: after the wait comes an error event and [DONE]."""
    async with up(
        tiny_model,
        tmp_path,
        engine="sim",
        workers=PAIR,
        timeout_s=READY_S,
        engine_arguments=STEP,
        settings={"TOKENWIRE_WORKER_WAIT_S": "0.5"},
    ) as pair:
        async with (
            aiohttp.ClientSession() as client,
            client.post(pair.url + "/v1/completions", json=body(1_000)) as answer,
        ):
            assert b"data:" in await answer.content.readline()
            pid = pair.kill("decode-0", signal.SIGSTOP)
            rest = await answer.text()

        *_, error, done = rest.strip().split("\n\n")
        assert done == "data: [DONE]"
        parsed = json.loads(error.removeprefix("data: "))["error"]
        assert parsed["code"] == "worker_failed"
        # By its silence, or ZeroMQ's pings; no stall, which is seen later.
        assert "worker decode-0 was lost" in parsed["message"]
        assert "no token" not in parsed["message"]
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not alive(pid), GONE_S, "the old worker is gone")
        await until(lambda: pair.ready(**PAIR), READY_S, "a new worker serves")
        assert (await post(pair))[0] == 200


@pytest.mark.pitfall(25)
async def test_a_machine_that_sleeps_loses_nothing(
    tiny_model: Path, tmp_path: Path
) -> None:
    """All stand still beyond the heartbeat timeout, twice; nothing goes on elsewhere.

    A timer of ZeroMQ's, due when they woke, closed connections whose pings were there.
    """
    settings = {"TOKENWIRE_HEARTBEAT_TIMEOUT_S": "2.5"}
    async with up(
        tiny_model,
        tmp_path,
        engine="sim",
        workers={"prefill": 3, "decode": 1},  # idle links are those in danger
        timeout_s=READY_S,
        engine_arguments=STEP,
        settings=settings,
    ) as pair:
        everything = children(pair.process.pid)
        asked = body(120) | {"return_token_ids": True}
        url = pair.url + "/v1/completions"
        async with (
            aiohttp.ClientSession() as client,
            client.post(url, json=asked) as answer,
        ):
            lines: list[bytes] = []
            for num_lines in (2, 120):  # a token is two of them
                while len(lines) < num_lines:
                    lines.append(await answer.content.readline())
                for number in (signal.SIGSTOP, signal.SIGCONT):
                    for pid in everything:
                        os.kill(pid, number)
                    if number is signal.SIGSTOP:
                        await asyncio.sleep(SLEEP_S)
            text = b"".join(lines).decode() + await answer.text()
            async with client.get(pair.url + "/metrics") as page:
                assert total(await page.text(), "tokenwire_migrations_total") == 0

        assert len(ids(text)) == 120
        assert " is lost" not in (tmp_path / "logs" / "frontend-0.log").read_text()


async def test_without_its_prefill_worker_a_pair_still_serves(pair: Up) -> None:
    """The decode worker prefills what the dead prefill worker cannot."""
    pair.kill("prefill-0")
    await until(lambda: pair.ready(decode=1), GONE_S, "the loss is seen")

    assert (await post(pair))[0] == 200


async def test_a_frontend_dies_and_its_requests_with_it(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The workers abort what a killed frontend had open."""
    async with up(
        tiny_model,
        tmp_path,
        engine="sim",
        workers={"aggregated": 1},
        timeout_s=READY_S,
        engine_arguments=("--step-ms", "100"),
    ) as running:

        def running_requests() -> int:
            _, health = running.get("/health")
            if not health or not health["instances"]:
                return -1
            return int(health["instances"][0].get("num_running", 0))

        async with aiohttp.ClientSession() as client:
            calls = [
                asyncio.create_task(
                    client.post(running.url + "/v1/completions", json=body(2_000))
                )
                for _ in range(4)
            ]
            await until(lambda: running_requests() == 4, GONE_S, "four requests run")
            running.kill("frontend")
            await until(lambda: running.ready(aggregated=1), READY_S, "a new frontend")
            # Well before their 2,000 steps of 0.1 s would be over.
            await until(
                lambda: running_requests() == 0, GONE_S, "the requests are aborted"
            )
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
async def test_up_leaves_no_process_behind(
    tiny_model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """Ctrl-C and SIGTERM end with code 0; even after kill -9 nothing is left."""
    async with up(
        tiny_model, tmp_path, engine="sim", workers=PAIR, timeout_s=READY_S
    ) as running:
        everything = children(running.process.pid)
        assert len(everything) >= 3
        running.process.send_signal(number)
        async with within(80):
            code = await running.process.wait()
        await until(lambda: not any(map(alive, everything)), GONE_S, "all are gone")

        assert code == (-signal.SIGKILL if number is signal.SIGKILL else 0)


async def test_sigterm_lets_a_stream_end(pair: Up) -> None:
    """A frontend that is asked to stop finishes what it streams."""
    async with (
        aiohttp.ClientSession() as client,
        client.post(pair.url + "/v1/completions", json=body(60)) as answer,
    ):
        assert b"data:" in await answer.content.readline()
        pair.kill("frontend", signal.SIGTERM)
        rest = await answer.text()

    assert '"finish_reason":"length"' in rest
    assert rest.endswith("data: [DONE]\n\n")


async def test_up_with_curve_serves_and_leaves_no_keys(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Throw-away keys wire everything, and are gone in the end."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    settings = {"TOKENWIRE_CURVE": "1", "TMPDIR": str(folder)}
    async with up(
        tiny_model,
        tmp_path,
        engine="sim",
        workers=PAIR,
        timeout_s=READY_S,
        settings=settings,
    ) as running:
        assert (await post(running))[0] == 200
        (keys,) = folder.glob("tokenwire-keys-*")
        assert keys.stat().st_mode & 0o777 == 0o700
    assert not list(folder.glob("tokenwire-keys-*"))
