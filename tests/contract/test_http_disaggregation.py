"""Prompts go to a prefill worker when that pays, and the answer is the same."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from support.stack import Reply, Stack, eventually, stack
from tokenwire.protocol.messages import Role

PAIR = (Role.PREFILL, Role.DECODE)
LONG = list(range(40, 240))
FIELDS = ["completion_token_ids", "worker_id", "engine_data"]


@pytest_asyncio.fixture
async def pair(tiny_model: Path) -> AsyncIterator[Stack]:
    """A pair that hands over from 100 uncached tokens on."""
    arguments = ("--remote-prefill-min-tokens", "100")
    async with stack(tiny_model, PAIR, arguments=arguments) as running:
        yield running


async def complete(served: Stack, prompt: list[int], **fields: Any) -> Reply:
    """Complete *prompt* greedily."""
    body = {"max_tokens": 8, "temperature": 0, "nvext": {"extra_fields": FIELDS}}
    return await served.complete(prompt=prompt, **body, **fields)


async def placed(served: Stack) -> dict[str, int]:
    """Return the count of each place that had any."""
    text = (await served.get("/metrics")).text
    name = "tokenwire_prompts_placed_total{place="
    lines = [line for line in text.splitlines() if line.startswith(name)]
    counts = {line.split('"')[1]: int(float(line.split()[1])) for line in lines}
    return {place: count for place, count in counts.items() if count}


def prefill_worker(reply: Reply) -> str | None:
    """Return who computed the prompt apart; None: the decode worker did."""
    assert reply.status == 200, reply.text
    name = reply.json["nvext"]["worker_id"].get("prefill_worker_id")
    return None if name is None else str(name)


async def test_short_prompts_stay_on_the_decode_worker(pair: Stack) -> None:
    """Below the threshold nothing is handed over; from it on, all is."""
    assert prefill_worker(await complete(pair, LONG[:99])) is None
    assert prefill_worker(await complete(pair, LONG[100:])) == "prefill-0"
    assert await placed(pair) == {"local_short": 1, "remote": 1}
    await pair.idle()


async def test_what_is_cached_is_not_computed_elsewhere(pair: Stack) -> None:
    """The next turn of a conversation finds the last one, output included."""
    first = await complete(pair, LONG)
    turn = LONG + first.json["nvext"]["completion_token_ids"]
    # 208 tokens: three whole chunks, 192 tokens, are known to be cached.
    second = await complete(pair, turn + LONG[:83])
    third = await complete(pair, turn + LONG[:84] + LONG)
    other = await complete(pair, turn, cache_salt="other")

    assert prefill_worker(first) == "prefill-0"
    assert prefill_worker(second) is None
    assert second.json["usage"]["prompt_tokens_details"]["cached_tokens"] >= 192
    assert prefill_worker(third) == "prefill-0"
    assert prefill_worker(other) == "prefill-0"
    assert await placed(pair) == {"local_cached": 1, "remote": 3}
    await pair.idle()


async def test_a_long_queue_is_passed_by(tiny_model: Path) -> None:
    """While more waits at the prefill worker than the bound, decode workers help."""
    arguments = (
        *("--remote-prefill-min-tokens", "10"),
        *("--remote-prefill-max-queued-tokens", "150"),
    )
    options = ("--step-ms", "0", "--prefill-tokens-per-s", "400")
    async with stack(tiny_model, PAIR, options, arguments) as served:
        waiting = asyncio.create_task(complete(served, LONG))
        link = served.pool.usable(Role.PREFILL)[0]
        await eventually(lambda: link.num_queued_tokens == len(LONG))
        second = await complete(served, LONG[:20])
        first = await waiting

        assert prefill_worker(first) == "prefill-0"
        assert prefill_worker(second) is None
        assert await placed(served) == {"local_queue": 1, "remote": 1}
        await served.idle()


async def test_without_a_prefill_worker_decode_workers_do_it(tiny_model: Path) -> None:
    """And the metric says why; with it back, prompts go there again."""
    async with stack(tiny_model, PAIR) as served:
        endpoints = [link.endpoint for link in served.pool.links]
        expected = (await complete(served, LONG)).json["nvext"]["completion_token_ids"]
        served.pool.set_endpoints(endpoints[1:])
        alone = await complete(served, LONG)
        served.pool.set_endpoints(endpoints)
        await eventually(lambda: bool(served.pool.usable(Role.PREFILL)))
        back = await complete(served, LONG)

        assert [prefill_worker(one) for one in (alone, back)] == [None, "prefill-0"]
        for one in (alone, back):
            assert one.json["nvext"]["completion_token_ids"] == expected
        assert await placed(served) == {"local_no_worker": 1, "remote": 2}


async def test_aggregated_workers_hand_nothing_over(tiny_model: Path) -> None:
    """Their prompts are counted as theirs."""
    async with stack(tiny_model, (Role.AGGREGATED,)) as served:
        assert prefill_worker(await complete(served, LONG)) is None
        assert await placed(served) == {"aggregated": 1}


@pytest.mark.pitfall(27)
async def test_work_is_spread_evenly(tiny_model: Path) -> None:
    """Equal requests that come at once: every worker gets its share, give or take 20 %."""
    roles = (Role.PREFILL,) * 2 + (Role.DECODE,) * 3
    async with stack(tiny_model, roles, ("--step-ms", "5")) as served:
        calls = [complete(served, [40 + n, *LONG]) for n in range(60)]
        replies = await asyncio.gather(*calls)
        names = [reply.json["nvext"]["worker_id"] for reply in replies]
        by_prefill = Counter(name["prefill_worker_id"] for name in names)
        by_decode = Counter(name["decode_worker_id"] for name in names)

    assert sorted(by_prefill) == ["prefill-0", "prefill-1"]
    assert all(24 <= count <= 36 for count in by_prefill.values()), by_prefill
    assert len(by_decode) == 3
    assert all(16 <= count <= 24 for count in by_decode.values()), by_decode
