"""Workers that come, go, change their address, or are not what they seem."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from ports import free_port

from support.held import brake
from support.samples import total
from support.stack import SimWorker, Stack, eventually, frontend
from tokenwire.frontend import discovery
from tokenwire.frontend.config import parse_config
from tokenwire.frontend.discovery import discover
from tokenwire.frontend.link import Link, LinkState
from tokenwire.frontend.pool import MAX_WORKERS, Pool
from tokenwire.protocol.messages import PROTOCOL_VERSION, Role

STEP = ("--step-ms", "2")
ASKED = {"prompt": [5] * 20, "return_token_ids": True, "temperature": 0}


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenwire.frontend.pool.TICK_S", 0.02)
    monkeypatch.setattr(discovery, "DNS_POLL_S", 0.01)


@asynccontextmanager
async def working(
    folder: Path, name: str, role: Role = Role.AGGREGATED, **card: Any
) -> AsyncGenerator[SimWorker]:
    """Run a worker whose card says *card*."""
    listen = f"tcp://127.0.0.1:{free_port()}"  # for a successor, too
    worker = SimWorker(folder, role, name, STEP, listen=listen)
    try:
        await worker.start(**card)
        yield worker
    finally:
        await worker.stop()


def link_at(pool: Pool, endpoint: str) -> Link:
    """Return the link to *endpoint*."""
    return next(link for link in pool.links if link.endpoint == endpoint)


async def ids(running: Stack, max_tokens: int) -> list[int]:
    """Return the ids of a completion."""
    reply = await running.complete(**ASKED, max_tokens=max_tokens)
    assert reply.status == 200, reply.text
    return list(reply.json["nvext"]["completion_token_ids"])


async def all_used(pool: Pool, num_workers: int) -> None:
    """Wait until so many workers get requests."""
    await eventually(lambda: sum(one.usable for one in pool.links) == num_workers)


async def test_what_runs_on_a_worker_that_leaves_the_list_goes_on(
    tiny_model: Path,
) -> None:
    """It gets nothing new, its requests end there, then its link is closed."""
    async with (
        working(tiny_model, "stays") as stays,
        working(tiny_model, "leaves") as leaves,
        frontend(tiny_model) as running,
    ):
        await running.know([leaves])
        held = brake(leaves.engine)
        asked = asyncio.create_task(ids(running, 300))
        await eventually(lambda: leaves.service.num_requests == 1)
        running.pool.set_endpoints([stays.link.endpoint])
        await eventually(lambda: running.pool.ready)
        left = link_at(running.pool, leaves.link.endpoint)
        assert not left.usable
        assert [one.leaving for one in running.pool.instances()] == [True, False]

        assert len(await ids(running, 3)) == 3
        held.release()
        assert len(await asked) == 300
        assert left.worker_id == "leaves"
        await eventually(lambda: left.state is LinkState.CLOSED)
        assert stays.service.num_requests == leaves.service.num_requests == 0
        metrics = (await running.get("/metrics")).text
        assert total(metrics, "tokenwire_migrations_total") == 0


async def test_a_worker_that_comes_back_into_the_list_is_used_again(
    tiny_model: Path,
) -> None:
    """Its link was never closed, as it was still needed."""
    async with working(tiny_model, "w") as worker, frontend(tiny_model) as running:
        await running.know([worker])
        link = link_at(running.pool, worker.link.endpoint)
        asked = asyncio.create_task(ids(running, 300))
        await eventually(lambda: worker.service.num_requests == 1)
        running.pool.set_endpoints([])
        assert not running.pool.ready
        running.pool.set_endpoints([worker.link.endpoint])
        assert link.usable
        assert len(await ids(running, 3)) == 3
        assert len(await asked) == 300


async def test_a_worker_that_left_the_list_and_dies_is_left(tiny_model: Path) -> None:
    """Its requests go on elsewhere, and nobody waits for it to come back."""
    async with (
        working(tiny_model, "stays") as stays,
        working(tiny_model, "dies") as dies,
        frontend(tiny_model) as running,
    ):
        await running.know([stays])
        undisturbed = await ids(running, 200)
        running.pool.set_endpoints([dies.link.endpoint])
        await eventually(lambda: running.pool.ready)
        asked = asyncio.create_task(ids(running, 200))
        await eventually(lambda: dies.service.num_requests == 1)
        running.pool.set_endpoints([stays.link.endpoint])
        await eventually(lambda: running.pool.ready)
        await dies.die()

        assert await asked == undisturbed
        await eventually(lambda: len(list(running.pool.links)) == 1)


async def test_workers_come_and_go_under_load(tiny_model: Path) -> None:
    """No request fails, and each is what it would have been."""
    async with (
        working(tiny_model, "a") as a,
        working(tiny_model, "b") as b,
        working(tiny_model, "c") as c,
        frontend(tiny_model) as running,
    ):
        await running.know([a])
        undisturbed = await ids(running, 60)
        asked = [asyncio.create_task(ids(running, 60)) for _ in range(20)]
        for workers in ([a, b], [b], [b, c], [c, a], [a], [a, b, c], [c]):
            running.pool.set_endpoints([one.link.endpoint for one in workers])
            # All of them, so that there is one also while the next list is looked at.
            await all_used(running.pool, len(workers))
            asked += [asyncio.create_task(ids(running, 60)) for _ in range(5)]
            await eventually(lambda: any(one.service.num_requests for one in (a, b, c)))
        assert all(one == undisturbed for one in await asyncio.gather(*asked))
        await eventually(lambda: len(list(running.pool.links)) == 1)


async def test_one_process_behind_two_addresses_is_used_once(tiny_model: Path) -> None:
    """Such as a name with an IPv4 and an IPv6 address."""
    async with working(tiny_model, "w") as worker, frontend(tiny_model) as running:
        await running.know([worker])
        other = worker.link.endpoint.replace("127.0.0.1", "localhost")
        running.pool.set_endpoints([worker.link.endpoint, other])
        await eventually(
            lambda: link_at(running.pool, other).state is LinkState.REFUSED
        )
        assert len(running.pool.usable(Role.AGGREGATED)) == 1
        assert link_at(running.pool, other).reason == (
            f"worker w is used already, by its address {worker.link.endpoint}"
        )

        running.pool.set_endpoints([other])
        await eventually(lambda: link_at(running.pool, other).usable, "moved")


async def test_two_workers_with_one_name(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The later is refused by a sentence, until the first is gone."""
    async with (
        working(tiny_model, "twin") as first,
        working(tiny_model, "twin", incarnation="another") as second,
        frontend(tiny_model) as running,
    ):
        await running.know([first])
        running.pool.set_endpoints([first.link.endpoint, second.link.endpoint])
        link = link_at(running.pool, second.link.endpoint)
        await eventually(lambda: link.state is LinkState.REFUSED)
        assert "has the name twin too: give each its own --worker-id" in link.reason
        assert len(await ids(running, 3)) == 3
        said = [text for text in caplog.messages if "has the name twin" in text]
        assert len(said) == 1

        await first.die()
        await eventually(lambda: link.usable, "the name is free")
        assert len(await ids(running, 3)) == 3


@pytest.mark.parametrize(
    ("card", "words"),
    [
        ({"model": "other"}, "serves model 'other'"),
        ({"tokenizer_sha256": "b" * 64}, "has tokenizer bbbbbbbbbbbb"),
        ({"protocol_version": PROTOCOL_VERSION + 1}, "run the same tokenwire release"),
    ],
)
async def test_a_worker_that_does_not_fit_is_refused_and_the_rest_serves(
    tiny_model: Path,
    card: dict[str, Any],
    words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One sentence on both sides; and the worker is not asked to serve."""
    caplog.set_level("INFO")
    async with (
        working(tiny_model, "good") as good,
        working(tiny_model, "odd", **card) as odd,
        frontend(tiny_model) as running,
    ):
        await running.know([good])
        running.pool.set_endpoints([good.link.endpoint, odd.link.endpoint])
        link = link_at(running.pool, odd.link.endpoint)
        await eventually(lambda: link.state is LinkState.REFUSED)
        assert words in link.reason
        await eventually(
            lambda: any(
                text.startswith("frontend test is gone:") and words in text
                for text in caplog.messages
            )
        )
        for _ in range(4):
            assert len(await ids(running, 3)) == 3


async def test_a_worker_behind_the_same_address_may_become_another(
    tiny_model: Path,
) -> None:
    """It restarts with another model: refused, without a storm of greetings."""
    async with frontend(tiny_model) as running:
        async with working(tiny_model, "w") as worker:
            await running.know([worker])
            endpoint = worker.link.endpoint
            link = link_at(running.pool, endpoint)
        await eventually(lambda: link.state is LinkState.CONNECTING)
        again = SimWorker(tiny_model, Role.AGGREGATED, "w", STEP, listen=endpoint)
        try:
            await again.start(model="other", incarnation="2")
            await eventually(lambda: link.state is LinkState.REFUSED)
            frontends = again.service._frontends  # pyright: ignore[reportPrivateUsage]
            await eventually(lambda: not frontends)
            assert "serves model 'other'" in link.reason
        finally:
            await again.stop()


async def test_what_cannot_be_connected_to_is_refused_alone(tiny_model: Path) -> None:
    """An address that ZeroMQ does not take stops nothing else."""
    async with (
        working(tiny_model, "w") as worker,
        frontend(tiny_model, ["--insecure-plaintext"]) as running,
    ):
        await running.know([worker])
        bad = "tcp://no host:5"
        running.pool.set_endpoints([bad, worker.link.endpoint])
        assert len(await ids(running, 3)) == 3
        reason = link_at(running.pool, bad).reason
        assert reason.startswith("cannot connect: Invalid argument"), reason


async def test_a_list_has_a_bound(caplog: pytest.LogCaptureFixture) -> None:
    """Above it, the first ones are used, and that is said."""
    pool = Pool(model="m", tokenizer_sha256="", frontend_id="f")
    try:
        pool.set_endpoints(f"tcp://192.0.2.1:{n}" for n in range(1, MAX_WORKERS + 3))
        assert len(list(pool.links)) == MAX_WORKERS
        assert f"{MAX_WORKERS + 2} workers, of which" in caplog.messages[0]
    finally:
        pool.close()


Answer = list[str] | Exception


class Resolver:
    """A name server that says what the test wants; None so far."""

    def __init__(self, *answers: Answer) -> None:
        self.answer = answers[0]
        self.num_asked = 0

    async def getaddrinfo(self, *_: object, **__: object) -> list[tuple[Any, ...]]:
        """Return the addresses."""
        self.num_asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return [(0, 0, 0, "", (address, 5)) for address in self.answer]

    async def asked_again(self) -> None:
        """Return when what was set has been answered, and acted upon."""
        before = self.num_asked
        await eventually(lambda: self.num_asked >= before + 2)


@asynccontextmanager
async def resolving(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch, found: Callable[..., None]
) -> AsyncGenerator[None]:
    """Follow the name ``workers:5``."""
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "getaddrinfo", resolver.getaddrinfo, raising=False)
    config = parse_config(["--model", "m", "--workers-dns", "workers:5"])
    task = asyncio.create_task(discover(config, found))
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()


NAME_ERRORS = [
    socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
    socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
    UnicodeError("label too long"),
]


@pytest.mark.parametrize("failure", NAME_ERRORS, ids=lambda error: str(error))
async def test_a_name_that_does_not_resolve_for_a_while_changes_nothing(
    failure: Exception,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is said once, what was known stays, and the next answer counts."""
    reports: list[list[str]] = []
    resolver = Resolver(["10.0.0.1", "10.0.0.2"])
    async with resolving(resolver, monkeypatch, reports.append):
        await eventually(lambda: len(reports) == 1)
        resolver.answer = failure
        await resolver.asked_again()
        await resolver.asked_again()
        assert len(reports) == 1
        assert len(caplog.messages) == 1
        resolver.answer = ["10.0.0.2"]
        await eventually(lambda: len(reports) == 2)
    assert reports == [["tcp://10.0.0.1:5", "tcp://10.0.0.2:5"], ["tcp://10.0.0.2:5"]]


async def test_a_name_that_resolves_late_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A frontend may start before its workers' service exists."""
    reports: list[list[str]] = []
    resolver = Resolver(NAME_ERRORS[1])
    async with resolving(resolver, monkeypatch, reports.append):
        await resolver.asked_again()
        assert reports == []
        resolver.answer = [f"10.0.{n}.1" for n in range(200)]
        await eventually(lambda: len(reports) == 1)
    assert len(reports[0]) == 200
