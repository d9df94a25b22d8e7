"""Subscribing to vLLM's KV events: where, of whom, and what is asked for again."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import pytest_asyncio
import zmq

from support.awake import within
from tokenwire.protocol.blocks import block_hashes, root_hash
from tokenwire.protocol.tokens import pack_ids
from tokenwire.worker.kv_blocks import BlockUsage, CachedBlocks
from tokenwire.worker.vllm import kv_subscriber
from tokenwire.worker.vllm.binding import Vllm
from tokenwire.worker.vllm.kv_events import BlockRemoved, KVEvent
from tokenwire.worker.vllm.kv_subscriber import Source, Subscription
from tokenwire.worker.vllm.telling import Telling

LAST = (-1).to_bytes(8, "big", signed=True)


def payload(*events: dict[str, Any]) -> bytes:
    """Return a step's message."""
    return msgspec.msgpack.encode([1.0, list(events), 0])


def removed(number: int) -> bytes:
    """Return the message of a step that has removed a block."""
    return payload({"type": "BlockRemoved", "block_hashes": [number]})


class Publisher:
    """vLLM's ``ZmqEventPublisher``, as far as its sockets go; the test says when."""

    def __init__(self, folder: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pub = self.context.socket(zmq.XPUB)
        self._replay = self.context.socket(zmq.ROUTER)
        self.endpoint = f"ipc://{folder}/events"
        self.replay_endpoint = f"ipc://{folder}/replay"
        self._pub.bind(self.endpoint)
        self._replay.bind(self.replay_endpoint)
        self.sent: list[bytes] = []

    async def heard(self) -> None:
        """Wait until somebody listens."""
        assert (await self._next(self._pub))[0] == b"\x01"

    def send(self, data: bytes, *, arrives: bool = True) -> None:
        """Send a step, which may be lost."""
        number = len(self.sent).to_bytes(8, "big")
        self.sent.append(data)
        if arrives:
            self._pub.send_multipart((b"", number, data))

    async def answer(self, *, has_topic: bool = True) -> int:
        """Answer the next question; return from which number on."""
        peer, empty, asked = await self._next(self._replay)
        assert empty == b""
        start = int.from_bytes(asked, "big")
        topic = (b"",) if has_topic else ()
        for number in range(start, len(self.sent)):
            self._replay.send_multipart(
                (peer, b"", *topic, number.to_bytes(8, "big"), self.sent[number])
            )
        self._replay.send_multipart((peer, b"", *topic, LAST, b""))
        return start

    async def _next(self, socket: zmq.Socket[bytes]) -> list[bytes]:
        async with within(60):
            while not socket.poll(0):
                await asyncio.sleep(0.001)
        return socket.recv_multipart()

    def close(self) -> None:
        """Close all."""
        self._pub.close(0)
        self._replay.close(0)
        self.context.term()


@pytest_asyncio.fixture
async def publisher(tmp_path: Path) -> AsyncIterator[Publisher]:
    """Somebody to listen to."""
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:  # short, for a socket
        made = Publisher(Path(folder))
        yield made
        made.close()


class Heard:
    """A subscription, and what it has brought."""

    def __init__(self, publisher: Publisher, *, has_replay: bool = True) -> None:
        self.numbers: list[int] = []
        self.num_forgotten = 0
        self.usage = BlockUsage()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        replay = publisher.replay_endpoint if has_replay else None
        self.subscription = Subscription(
            self.context,
            Source(publisher.endpoint, replay),
            self._take,
            self._forget,
            self.usage,
        )

    def _take(self, events: Iterable[KVEvent]) -> None:
        for event in events:
            assert isinstance(event, BlockRemoved)
            self.numbers += [int(one) for one in event.block_hashes]

    def _forget(self) -> None:
        self.num_forgotten += 1

    async def until(self, numbers: list[int]) -> None:
        """Wait until exactly these have come."""
        async with within(60):
            while self.numbers != numbers:
                await asyncio.sleep(0.001)

    def close(self) -> None:
        """Close all."""
        self.subscription.close()
        self.subscription.close()
        self.context.term()


@pytest.mark.parametrize("has_topic", [True, False])
async def test_what_was_missed_is_asked_for(
    publisher: Publisher, has_topic: bool
) -> None:
    """From before the subscription, and between two steps; older answers have no topic."""
    for number in range(3):
        publisher.send(removed(number))
    heard = Heard(publisher)
    assert await publisher.answer(has_topic=has_topic) == 0
    await heard.until([0, 1, 2])
    await publisher.heard()
    publisher.send(removed(3))
    publisher.send(removed(4), arrives=False)
    publisher.send(removed(5))
    assert await publisher.answer(has_topic=has_topic) == 4
    await heard.until([0, 1, 2, 3, 4, 5])
    assert (heard.usage.num_gaps, heard.num_forgotten) == (1, 0)
    heard.close()


async def test_many_steps_at_once_leave_the_loop_its_turn(publisher: Publisher) -> None:
    """More than one wake-up reads come all, in order."""
    heard = Heard(publisher)
    await publisher.answer()
    await publisher.heard()
    for number in range(300):
        publisher.send(removed(number))
    await heard.until(list(range(300)))
    heard.close()


async def test_a_question_that_nobody_answers_ends(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a while all is forgotten, and what comes counts."""
    monkeypatch.setattr(kv_subscriber, "REPLAY_WAIT_S", 0.01)
    heard = Heard(publisher)
    await publisher.heard()
    publisher.send(removed(0), arrives=False)
    publisher.send(removed(1))
    await heard.until([1])
    assert heard.num_forgotten == 1
    heard.close()


async def test_without_a_replay_endpoint_nobody_is_asked(publisher: Publisher) -> None:
    """An operator's own configuration may have none."""
    heard = Heard(publisher, has_replay=False)
    await publisher.heard()
    publisher.send(removed(0), arrives=False)
    publisher.send(removed(1))
    await heard.until([1])
    assert (heard.usage.num_gaps, heard.num_forgotten) == (1, 1)
    heard.close()


# -- the engine's configuration ---------------------------------------------------------


def arranged(
    telling: Telling, events: Any = None, *, caches: bool = True, **parallel: Any
) -> Any:
    """Return the configuration of an engine on one machine, once it is arranged."""
    on_one = {
        "data_parallel_backend": "mp",
        "data_parallel_size": 1,
        "data_parallel_size_local": 1,
        "local_engines_only": False,
        "nnodes": 1,
        "distributed_executor_backend": "mp",
    }
    config = SimpleNamespace(
        cache_config=SimpleNamespace(
            enable_prefix_caching=caches, block_size=4, num_gpu_blocks=8
        ),
        kv_events_config=events,
        parallel_config=SimpleNamespace(**on_one | parallel),
    )
    vllm = cast("Vllm", SimpleNamespace(KVEventsConfig=SimpleNamespace))
    telling.arrange(vllm, config)
    return config


def test_sockets_are_in_a_folder_of_this_user_alone() -> None:
    """Which goes with the worker; vLLM can tell its ranks apart there."""
    telling = Telling(CachedBlocks())
    events = arranged(telling).kv_events_config
    assert events.enable_kv_cache_events
    ends = (events.endpoint, events.replay_endpoint)
    paths = [Path(end.removeprefix("ipc://")) for end in ends]
    for path in paths:
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert "inproc" in path.name  # what vLLM 0.32 asks for, to add a rank
        assert len(str(path)) < 100
    telling.close()
    telling.close()
    assert not paths[0].parent.exists()


def test_sockets_of_killed_workers_are_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the next worker; those of a living one are not."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "tokenwire-kv-left").mkdir()
    living, telling = Telling(CachedBlocks()), Telling(CachedBlocks())
    arranged(living)
    [kept] = tmp_path.iterdir()
    arranged(telling)
    assert kept.exists()
    living.close()
    telling.close()
    assert not list(tmp_path.iterdir())


def test_without_a_folder_the_worker_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It says what is missing."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    telling = Telling(CachedBlocks())
    assert arranged(telling).kv_events_config is None
    assert "no folder for its sockets" in caplog.text
    telling.close()


@pytest.mark.parametrize(
    "parallel",
    [
        {"data_parallel_backend": "ray"},
        {"distributed_executor_backend": "ray"},
        {"nnodes": 2},
        {"data_parallel_size": 4, "data_parallel_size_local": 2},
    ],
)
def test_an_engine_on_several_machines_is_left_as_it_is(
    parallel: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """It would die of a folder that is not there; the log says so."""
    telling = Telling(CachedBlocks())
    assert arranged(telling, **parallel).kv_events_config is None
    assert "frontends are not told of cached KV" in caplog.text
    telling.close()


def test_ranks_that_are_all_here_are_heard() -> None:
    """Also where others, elsewhere, belong to another worker."""
    telling = Telling(CachedBlocks())
    ranks: dict[str, Any] = {"data_parallel_size": 4, "local_engines_only": True}
    assert arranged(telling, **ranks).kv_events_config is not None
    telling.close()


def test_nothing_is_published_for_nobody() -> None:
    """Where it is off, or nothing is cached, or the operator has a wish."""
    assert arranged(Telling(None)).kv_events_config is None
    assert arranged(Telling(CachedBlocks()), caches=False).kv_events_config is None
    theirs = object()
    assert arranged(Telling(CachedBlocks()), theirs).kv_events_config is theirs


def test_a_path_that_is_too_long_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker serves, and says what is missing."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    telling = Telling(CachedBlocks())
    assert arranged(telling).kv_events_config is None
    assert "too long for a socket" in caplog.text
    telling.close()
    assert not list(long.iterdir())


async def test_what_the_operator_configured_is_used(publisher: Publisher) -> None:
    """From the engine's cores to the blocks, until they are forgotten."""
    events = SimpleNamespace(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=publisher.endpoint,
        replay_endpoint=publisher.replay_endpoint,
        topic="",
    )
    blocks = CachedBlocks()
    telling = Telling(blocks)
    config = arranged(telling, events)
    llm = SimpleNamespace(get_kv_event_sources=lambda: {0: events})
    publisher.send(
        payload(
            {
                "type": "BlockStored",
                "block_hashes": [7],
                "parent_block_hash": None,
                "token_ids": [1, 2, 3, 4],
                "block_size": 4,
                "medium": "GPU",
            }
        )
    )
    telling.begin(llm, config, lambda _lora, salt: salt)
    assert telling.tells
    await publisher.answer()
    async with within(60):
        while not len(blocks):
            await asyncio.sleep(0.001)
    assert set(blocks) == set(block_hashes(pack_ids([1, 2, 3, 4]), 4, root_hash()))
    telling.forget()
    assert not len(blocks)
    telling.close()


@pytest.mark.parametrize("how", ["off", "null", "connects"])
async def test_what_cannot_be_heard_is_not_told(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The card does not promise it."""
    events = SimpleNamespace(
        enable_kv_cache_events=how != "off",
        publisher="null" if how == "null" else "zmq",
        endpoint="tcp://collector:5557",
        replay_endpoint=None,
        topic="",
    )
    telling = Telling(CachedBlocks())
    config = arranged(telling, events)
    llm = SimpleNamespace(get_kv_event_sources=dict[int, Any])
    telling.begin(llm, config, lambda _lora, salt: salt)
    assert not telling.tells
    assert ("which vLLM connects to" in caplog.text) == (how == "connects")
    telling.close()
