"""``/metrics``: this frontend's own families, and the workers' ``vllm:*``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from support.stack import SimWorker, Stack, frontend, stack
from tokenwire.frontend import engine_metrics, intake
from tokenwire.frontend.engine_metrics import WAIT_S
from tokenwire.frontend.visit import Visit
from tokenwire.protocol.messages import ORPHANED_KV, Role
from tokenwire.worker.exposition import Exposition

PAIR = (Role.PREFILL, Role.DECODE)


@pytest.fixture(autouse=True)
def _one_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the workers asked once in a test, and waited for, however slow it all is."""
    monkeypatch.setattr(engine_metrics, "FRESH_S", 3600.0)
    monkeypatch.setattr(engine_metrics, "WAIT_S", 3600.0)


@pytest_asyncio.fixture
async def pair(tiny_model: Path) -> AsyncIterator[Stack]:
    """A prefill and a decode worker."""
    async with stack(tiny_model, PAIR) as running:
        yield running


async def values(served: Stack) -> dict[str, dict[str, float]]:
    """Return the page's samples that have an engine: by name, then by engine."""
    reply = await served.get("/metrics")
    assert reply.status == 200
    result: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(reply.text):
        for sample in family.samples:
            if "engine" in sample.labels and "le" not in sample.labels:
                by_engine = result.setdefault(sample.name, {})
                assert sample.labels["engine"] not in by_engine
                by_engine[sample.labels["engine"]] = sample.value
    return result


async def own(served: Stack, name: str) -> float:
    """Return one of the frontend's own samples."""
    text = (await served.get("/metrics")).text
    [line] = [one for one in text.splitlines() if one.startswith(name + " ")]
    return float(line.split()[1])


@pytest.mark.parametrize("name", ["time_to_first_token", "e2e_request_latency"])
async def test_a_request_s_time_counts_from_its_arrival(
    pair: Stack, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What reading its body and its tokenizing take is in it, as in the access log."""

    class Slow(Visit):
        def __init__(self, path: str) -> None:
            super().__init__(path)
            self.began_at -= 1_000.0

    monkeypatch.setattr(intake, "Visit", Slow)
    await pair.complete(prompt="a", max_tokens=2)

    assert await own(pair, f"tokenwire_{name}_seconds_count") == 1
    assert await own(pair, f"tokenwire_{name}_seconds_sum") > 1_000


def exposition_of(worker: SimWorker, make: Callable[[], str]) -> None:
    """Give a worker another source of its engine's metrics."""
    worker.service._scrapes.exposition = Exposition(make)  # pyright: ignore[reportPrivateUsage]


async def test_the_workers_families_have_an_engine_label(pair: Stack) -> None:
    """What each engine did is told under vLLM's names, one engine a worker."""
    reply = await pair.complete(prompt=[5] * 40, max_tokens=8)
    assert reply.status == 200

    page = await values(pair)
    assert page["vllm:prompt_tokens_total"] == {"prefill-0:0": 40, "decode-1:0": 40}
    assert page["vllm:generation_tokens_total"] == {"prefill-0:0": 1, "decode-1:0": 8}
    assert set(page["vllm:num_requests_running"]) == {"prefill-0:0", "decode-1:0"}
    assert set(page["vllm:time_to_first_token_seconds_count"]) == {
        "prefill-0:0",
        "decode-1:0",
    }
    assert await own(pair, 'tokenwire_engine_scrapes_total{outcome="ok"}') == 2


async def test_a_page_asked_for_often_asks_the_workers_once(pair: Stack) -> None:
    """Whoever may read the page cannot make work for the engines."""
    num_made = 0

    def make() -> str:
        nonlocal num_made
        num_made += 1
        return ""

    exposition_of(pair.workers[0], make)
    await asyncio.gather(*(pair.get("/metrics") for _ in range(50)))

    assert num_made == 1
    assert await own(pair, 'tokenwire_engine_scrapes_total{outcome="ok"}') == 2


async def test_a_worker_that_is_frozen_is_left_out(
    pair: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page comes without it after a second, and says that it was late."""
    monkeypatch.setattr(engine_metrics, "WAIT_S", WAIT_S)
    frozen = asyncio.Event()
    worker = pair.workers[0]

    def keep_quiet(asking: object) -> None:
        del asking
        frozen.set()

    scrapes = worker.service._scrapes  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(scrapes, "answer", keep_quiet)
    page = await values(pair)

    assert frozen.is_set()
    assert set(page["vllm:num_requests_running"]) == {"decode-1:0"}
    assert await own(pair, 'tokenwire_engine_scrapes_total{outcome="late"}') == 1


async def test_an_older_worker_is_not_waited_for(tiny_model: Path) -> None:
    """It does not know the question; the others' families are there."""
    workers = [
        SimWorker(tiny_model, Role.AGGREGATED, name, ("--step-ms", "0"))
        for name in ("old", "new")
    ]
    async with frontend(tiny_model) as served:
        try:
            await workers[0].start(capabilities=[ORPHANED_KV])
            await workers[1].start()
            await served.know(workers)
            page = await values(served)

            assert set(page["vllm:num_requests_running"]) == {"new:0"}
            assert (
                await own(served, 'tokenwire_engine_scrapes_total{outcome="late"}') == 0
            )
        finally:
            for worker in workers:
                await worker.stop()


async def test_without_workers_the_page_is_the_frontends(tiny_model: Path) -> None:
    """At once."""
    async with frontend(tiny_model) as served:
        assert not await values(served)
        assert "tokenwire_requests_inflight" in (await served.get("/metrics")).text


async def test_a_worker_cannot_speak_for_the_frontend(pair: Stack) -> None:
    """Whatever a worker says, only samples of vLLM's families get through."""
    text = (
        "# TYPE tokenwire_workers_ready gauge\ntokenwire_workers_ready 77.0\n"
        "# TYPE vllm:a gauge\nvllm:a 5.0\ntokenwire_workers_ready 78.0\n"
    )
    exposition_of(pair.workers[0], lambda: text)
    page = await values(pair)

    assert page["vllm:a"] == {"prefill-0:0": 5.0}
    lines = (await pair.get("/metrics")).text.splitlines()
    ready = [one for one in lines if one.startswith("tokenwire_workers_ready")]
    assert ready
    assert not [one for one in ready if one.endswith((" 77.0", " 78.0"))]


async def test_outputs_count_as_goodput_or_by_what_they_missed(
    tiny_model: Path,
) -> None:
    """Streamed or not; what a client had wrong counts nowhere."""
    strict = ("--goodput-ttft-s", "0.000001")
    for arguments, outcome in (((), "met"), (strict, "ttft")):
        lax = ("--goodput-tpot-s", "1000", "--goodput-ttft-s", "1000")
        async with stack(tiny_model, PAIR, arguments=(*lax, *arguments)) as served:
            for stream in (False, True):
                await served.complete(prompt=[5] * 40, max_tokens=8, stream=stream)
            await served.complete(prompt="", max_tokens=-1)

            page = (await served.get("/metrics")).text
            counts = {"met": 0, "ttft": 0, "tpot": 0, "failed": 0, outcome: 2}
            for name, number in counts.items():
                line = f'tokenwire_goodput_total{{outcome="{name}"}} {number}.0'
                assert line in page


async def test_an_output_that_fails_is_no_goodput(tiny_model: Path) -> None:
    """Its worker's engine dies, and there is no other."""
    options = ("--step-ms", "1", "--fault", "die@20")
    brief = ("--worker-wait-s", "0.01")
    async with stack(tiny_model, options=options, arguments=brief) as served:
        reply = await served.complete(prompt=[5] * 40, max_tokens=400)
        assert reply.status == 502
        assert await own(served, 'tokenwire_goodput_total{outcome="failed"}') == 1
        assert await own(served, 'tokenwire_goodput_total{outcome="met"}') == 0
