"""Generations under random orders of tokens, follows, losses and ends.

An id says which Submit it is of and which of its ids it is, so that each can be checked
by itself.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import msgspec
import pytest

from support.worker_desk import Desk, submit
from tokenwire.protocol.messages import (
    GOES_ON,
    PROTOCOL_VERSION,
    Batch,
    Bye,
    Cancel,
    Finished,
    FinishReason,
    Hello,
    Keep,
    LetGo,
    Logprobs,
    Ping,
    Recall,
    Recalled,
)
from tokenwire.protocol.tokens import pack_floats, pack_ids, unpack_floats, unpack_ids
from tokenwire.worker.engine import EngineFinished, EngineTokens
from tokenwire.worker.entry import ENTRY_BYTES
from tokenwire.worker.journal import Journal

OWNER = b"owner"
PEERS = [b"a", b"b", b"c"]
GENERATIONS = ["g", "h", "i"]
NUM_STEPS = 200
NUM_IDS = 1_000  # of one Submit, at most: the n-th has those from n times that on
GOOD = [FinishReason.STOP, FinishReason.LENGTH]


@dataclass
class Stream:
    """What one request of a frontend has been told."""

    ids: list[int] = field(default_factory=list[int])
    end: Finished | None = None
    is_lost: bool = False  # its frontend is gone


class Play:
    """One random order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311 - a test's seed
        room = self.random.choice([1_000_000, 4 * ENTRY_BYTES])
        self.journal = Journal(room, 600.0)
        self.desk = Desk(journal=self.journal)
        self.made: Counter[str] = Counter()  # ids, by the engine's id
        self.ends: dict[str, FinishReason] = {}
        self.streams: dict[tuple[bytes, str], Stream] = {}
        self.asked: dict[str, Recall] = {}
        self.num_names = 0
        self.seen: Counter[str] = Counter()  # what has happened at all
        for peer in PEERS:
            self.hello(peer, "1")

    def name(self) -> str:
        """Return a new name."""
        self.num_names += 1
        return f"n{self.num_names}"

    def running(self) -> list[str]:
        """Return what the engine has not ended."""
        submitted = [one.request_id for one in self.desk.engine.submitted]
        return [name for name in submitted if name not in self.ends]

    # -- what may happen ------------------------------------------------------------

    def begin(self) -> None:
        """Submit."""
        peer, name = self.random.choice(PEERS), self.name()
        keep = Keep(
            self.random.choice(GENERATIONS),
            OWNER,
            b"c",
            self.random.choice([5.0, 60.0]),
            self.random.random() < 0.7,
            self.random.randrange(3),
        )
        self.streams[peer, name] = Stream()
        self.desk.say(peer, msgspec.structs.replace(submit(name), keep=keep))

    def tokens(self) -> None:
        """Bring tokens of some."""
        new: list[EngineTokens] = []
        for engine_id in self.running():
            number = self.random.choice([0, 1, 1, 3])
            if number:
                first = int(engine_id.split("-")[1]) * NUM_IDS + self.made[engine_id]
                ids = list(range(first, first + number))
                rows = Logprobs(1, pack_ids(ids), pack_floats(ids), pack_ids(ids))
                self.made[engine_id] += number
                new.append(EngineTokens(engine_id, ids, rows))
        self.desk.service.outputs(new, [])

    def end(self) -> None:
        """End one: as it was asked to, or by itself."""
        if running := self.running():
            engine_id = self.random.choice(running)
            reasons = [*GOOD, FinishReason.ERROR]
            if engine_id in self.desk.engine.aborted:
                reasons += [FinishReason.ABORT] * 5
            self.finish(engine_id, self.random.choice(reasons))

    def finish(self, engine_id: str, reason: FinishReason) -> None:
        """End one."""
        self.ends[engine_id] = reason
        self.desk.service.outputs([], [EngineFinished(engine_id, reason)])

    def recall(self) -> None:
        """Ask for a generation."""
        peer, name = self.random.choice(PEERS), self.name()
        actions = ["follow"] * 9 + ["look", "read", "cancel", "delete"]
        message = Recall(
            name, self.random.choice(GENERATIONS), OWNER, self.random.choice(actions)
        )
        self.asked[name] = message
        self.desk.say(peer, message)

    def leave(self) -> None:
        """Let go of something, or cancel it, also if it has just ended."""
        peer = self.random.choice(PEERS)
        names = [
            name
            for (of, name), stream in self.streams.items()
            if of == peer and stream.end is None and not stream.is_lost
        ]
        if names:
            name = self.random.choice(names)
            stays = self.random.random() < 0.7
            self.desk.say(peer, LetGo(name) if stays else Cancel(name))

    def lose(self) -> None:
        """Lose a frontend in one of several ways; it comes back."""
        peer = self.random.choice(PEERS)
        way = self.random.choice(["broken", "send", "bye", "hello", "start"])
        self.deliver()
        if way == "broken":
            self.desk.service.broken(peer, way)
        elif way == "bye":
            self.desk.say(peer, Bye())
        elif way == "send":
            self.desk.sender.unreachable.add(peer)
            self.tokens()
            self.deliver()
            self.desk.sender.unreachable.clear()
        self.hello(peer, self.name() if way == "start" else "1")

    def hello(self, peer: bytes, incarnation: str) -> None:
        """Say hello; nothing more comes on what *peer* had."""
        self.desk.say(peer, Hello(PROTOCOL_VERSION, peer.decode(), incarnation))
        self.deliver()
        for (of, _), stream in self.streams.items():
            stream.is_lost |= of == peer and stream.end is None

    def pass_time(self) -> None:
        """Let some pass."""
        self.desk.timers.advance(self.random.choice([0.5, 3.0]))
        for peer in PEERS:
            self.desk.say(peer, Ping("1"))
        self.desk.service.tick()

    # -- what must be so ------------------------------------------------------------

    def deliver(self) -> None:
        """Let the iteration end, and look at what was sent."""
        self.desk.timers.settle()
        sent, self.desk.sender.sent = self.desk.sender.sent, []
        for peer, message in sent:
            if isinstance(message, Recalled):
                self.take_recalled(peer, message)
            elif isinstance(message, Batch):
                self.take_batch(peer, message)

    def take_recalled(self, peer: bytes, told: Recalled) -> None:
        """Check an answer; begin the stream that follows it."""
        action = self.asked.pop(told.request_id).action
        self.seen[f"{action} {told.state}"] += 1
        ids = unpack_ids(told.token_ids)[3:]
        assert told.num_new_tokens == len(ids)
        if ids:
            assert told.logprobs is not None
            assert unpack_floats(told.logprobs.logprobs) == ids
        if told.finished is not None:
            assert told.finished.num_output_tokens == len(ids)
        if action == "follow" and told.state == "running":
            self.streams[peer, told.request_id] = Stream(ids)

    def take_batch(self, peer: bytes, batch: Batch) -> None:
        """Check tokens and ends."""
        for item in batch.tokens:
            stream = self.streams[peer, item.request_id]
            assert stream.end is None, "tokens behind the end"
            assert item.index == len(stream.ids), "a gap or a repeat"
            stream.ids += unpack_ids(item.token_ids)
        for end in batch.finished:
            stream = self.streams[peer, end.request_id]
            assert stream.end is None, "a second end"
            assert end.num_output_tokens == len(stream.ids)
            stream.end = end
            self.seen[f"{end.reason.value} {end.stop_reason}"] += 1

    def check(self) -> None:
        """Nothing runs for nobody, and the journal counts right."""
        requests = self.desk.service._requests.by_engine_id  # pyright: ignore[reportPrivateUsage]
        assert requests.keys() <= {*self.running()}
        forgotten = {*self.running()} - requests.keys()
        assert forgotten <= {*self.desk.engine.aborted}
        for request in requests.values():
            assert request.is_followed or request.entry is not None
        entries = self.journal._entries.values()  # pyright: ignore[reportPrivateUsage]
        assert self.journal.num_bytes == sum(one.num_bytes for one in entries)
        assert not self.journal.is_over

    def run(self) -> None:
        """Play to the end."""
        actions = [
            *[self.tokens] * 5, *[self.begin] * 2, *[self.recall] * 5, *[self.leave] * 2,
            self.end, self.lose, self.pass_time, self.deliver,
        ]  # fmt: skip
        for _ in range(NUM_STEPS):
            self.random.choice(actions)()
            self.check()
        for engine_id in self.running():
            self.finish(engine_id, FinishReason.STOP)
        self.deliver()
        for stream in self.streams.values():
            self.check_stream(stream)
        assert self.desk.service.num_requests == 0
        load = self.desk.service._load()  # pyright: ignore[reportPrivateUsage]
        assert load.num_waiting_tokens == 0

    def check_stream(self, stream: Stream) -> None:
        """It has the first ids of one Submit, all of them if it came to a good end."""
        first = stream.ids[0] if stream.ids else 0
        assert stream.ids == list(range(first, first + len(stream.ids)))
        assert first % NUM_IDS == 0
        assert (stream.end is None) == stream.is_lost
        if stream.ids and stream.end is not None and stream.end.reason in GOOD:
            engine_id = f"{self.desk.card.incarnation}-{first // NUM_IDS}"
            assert len(stream.ids) == self.made[engine_id]
            assert self.ends[engine_id] is stream.end.reason


@pytest.mark.parametrize("seed", range(40))
def test_each_follower_has_each_id_once_and_one_end(seed: int) -> None:
    """What it was told at first and what it was sent are the engine's ids, in order."""
    play = Play(seed)
    play.run()
    assert play.seen["follow running"]


def test_the_orders_have_everything_in_them() -> None:
    """Else they would show little."""
    seen: Counter[str] = Counter()
    for seed in range(40):
        play = Play(seed)
        play.run()
        seen += play.seen
    kinds = {"stop None", "abort None", f"abort {GOES_ON}", "abort cancelled"}
    states = {f"follow {state}" for state in ("running", "ended", "lost", "unknown")}
    assert kinds | states <= seen.keys()
