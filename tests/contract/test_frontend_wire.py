"""The frontend's link against a worker that breaks, in every way, what it promised."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import pytest
import pytest_asyncio
import zmq
import zmq.asyncio

from support.awake import within
from support.clock import move_clock
from support.stack import eventually
from tokenwire.frontend.conversation import (
    BREACH_MEMORY_S,
    FIRST_PAUSE_S,
    HELLO_AGAIN_S,
)
from tokenwire.frontend.dealer import open_context
from tokenwire.frontend.link import Link, LinkState
from tokenwire.frontend.stall import (
    FIRST_TOKEN_TIMEOUT_S,
    STALL_TIMEOUT_S,
    SUSPECT_S,
)
from tokenwire.protocol.codec import decode_from_frontend, encode
from tokenwire.protocol.errors import Incompatible
from tokenwire.protocol.handshake import check_card
from tokenwire.protocol.limits import HEARTBEAT_TIMEOUT_S
from tokenwire.protocol.logs import ABOUT
from tokenwire.protocol.messages import (
    ADMIN,
    CAPTURE,
    CAPTURE_TOLD,
    JOURNAL,
    METRICS,
    ORPHANED_KV,
    PROTOCOL_VERSION,
    STATUS,
    Adapter,
    Admin,
    AdminDone,
    Batch,
    Bye,
    Cancel,
    Card,
    Discard,
    EngineDead,
    Finished,
    FinishReason,
    FromFrontend,
    FromWorker,
    Hello,
    Load,
    MetricsText,
    OrphanedKV,
    Recall,
    Recalled,
    Refused,
    Role,
    Sampling,
    ScrapeMetrics,
    Settled,
    Status,
    Submit,
    Tokens,
    Told,
)
from tokenwire.protocol.tokens import pack_ids

CARD = Card(
    protocol_version=PROTOCOL_VERSION,
    worker_id="fake",
    incarnation="1",
    role=Role.AGGREGATED,
    model="tiny",
    max_model_len=100,
    vocab_size=264,
    block_size=16,
    engine="sim",
    engine_version="1",
)


class FakeWorker:
    """A ROUTER that says what the test tells it to."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.peer = b""

    async def receive(self, kind: type[FromFrontend]) -> FromFrontend:
        """Return the next message of *kind*, from whoever sends it."""
        async with within(60):
            while True:
                peer, data = await self._socket.recv_multipart()
                message = decode_from_frontend(data)
                if isinstance(message, kind):
                    self.peer = peer
                    return message

    async def send(self, *messages: FromWorker | bytes) -> None:
        """Send messages, or bytes that are none."""
        for message in messages:
            data = message if isinstance(message, bytes) else encode(message)
            await cast("Any", self._socket).send_multipart([self.peer, data])

    def close(self) -> None:
        """Vanish."""
        self._socket.close()
        self._context.term()


@dataclass
class Recorder:
    """A reply that keeps what it hears."""

    ids: list[int] = field(default_factory=list[int])
    ends: list[Finished] = field(default_factory=list[Finished])
    losses: list[str] = field(default_factory=list[str])

    def tokens(self, item: Tokens, end: Finished | None) -> None:
        """Keep ids, and the end."""
        self.ids += list(memoryview(item.token_ids).cast("I"))
        if end is not None:
            self.ends.append(end)

    def finished(self, end: Finished) -> None:
        """Keep the end."""
        self.ends.append(end)

    def lost(self, reason: str) -> None:
        """Keep the reason."""
        self.losses.append(reason)


@dataclass
class Pair:
    """A worker and a link to it."""

    worker: FakeWorker
    link: Link

    async def ready(self) -> None:
        """Shake hands."""
        await self.worker.receive(Hello)
        await self.worker.send(CARD)
        await eventually(lambda: self.link.state is LinkState.READY)

    async def submit(self) -> Recorder:
        """Submit request ``r`` and wait until the worker has it."""
        recorder = Recorder()
        submit = Submit("r", pack_ids([1]), Sampling(max_tokens=9))
        self.link.submit(submit, recorder)
        await self.worker.receive(Submit)
        return recorder


@contextlib.asynccontextmanager
async def connected(
    accept: Callable[[Card], None] = lambda card: None,
    on_orphan: Callable[[OrphanedKV], bool] = lambda orphan: False,
) -> AsyncGenerator[Pair]:
    """Give a pair before its handshake."""
    worker = FakeWorker()
    context = open_context()
    link = Link(
        worker.endpoint,
        context=context,
        identity=("test", "1"),
        accept=accept,
        on_orphan=on_orphan,
    )
    try:
        yield Pair(worker, link)
    finally:
        link.close("the test is over")
        context.term()
        worker.close()


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Pair]:
    """A pair that has shaken hands."""
    async with connected() as made:
        await made.ready()
        yield made


def tokens(index: int, *token_ids: int) -> Tokens:
    """Return tokens of request ``r``."""
    return Tokens("r", index, pack_ids(token_ids))


def end(num_tokens: int) -> Finished:
    """Return the end of request ``r``."""
    return Finished("r", FinishReason.STOP, num_tokens)


async def test_tokens_and_their_end_arrive_together(pair: Pair) -> None:
    """An end in the batch of the last tokens is told with them, once."""
    recorder = await pair.submit()

    await pair.worker.send(Batch([tokens(0, 5, 6)]), Batch([tokens(2, 7)], [end(3)]))
    await eventually(lambda: bool(recorder.ends))

    assert recorder.ids == [5, 6, 7]
    assert recorder.ends == [end(3)]
    assert pair.link.num_open == 0


async def test_two_steps_of_a_request_in_one_batch_have_one_end(pair: Pair) -> None:
    """A worker that was late sends both at once: the end belongs to the last tokens.

    It was taken for that of the first, and the link reset with all its requests.
    """
    recorder = await pair.submit()

    await pair.worker.send(
        Batch([tokens(0, 5, 6), tokens(2, 7), tokens(3, 8)], [end(4)])
    )
    await eventually(lambda: bool(recorder.ends or recorder.losses))

    assert recorder.ids == [5, 6, 7, 8]
    assert recorder.ends == [end(4)]
    assert (pair.link.num_open, pair.link.num_protocol_errors) == (0, 0)


async def test_what_waits_is_what_others_sent_and_what_is_open_here(pair: Pair) -> None:
    """A Load is up to a second old; what ended here since waits no more.

    A burst whose clients left kept prompts away from an idle prefill worker.
    """
    recorder = await pair.submit()  # one token
    assert pair.link.num_queued_tokens == 1
    await pair.worker.send(Load("1", num_waiting_tokens=101))
    await eventually(lambda: pair.link.load.num_waiting_tokens == 101)
    assert pair.link.num_queued_tokens == 101
    await pair.worker.send(Batch([], [end(0)]))
    await eventually(lambda: bool(recorder.ends))

    assert pair.link.num_queued_tokens == 100


BREACHES: dict[str, tuple[Batch | bytes, ...]] = {
    "garbage": (b"\xc1garbage",),
    "empty": (b"",),
    "gap": (Batch([tokens(0, 5)]), Batch([tokens(2, 6)])),
    "repeat": (Batch([tokens(0, 5)]), Batch([tokens(0, 5)])),
    "end that counts other tokens": (Batch([tokens(0, 5)]), Batch([], [end(2)])),
    "end that counts other tokens than its batch": (Batch([tokens(0, 5)], [end(2)]),),
    "cut message": (encode(Batch([tokens(0, 5)]))[:-3],),
    "half an id": (
        encode(Batch([tokens(0, 5)])).replace(b"\xc4\x04\5\0\0\0", b"\xc4\x03\5\0\0"),
    ),
    "message of the other direction": (encode(Cancel("r")),),
}


@pytest.mark.parametrize("breach", BREACHES)
async def test_a_breach_loses_the_request_and_resets_the_link(
    pair: Pair, breach: str
) -> None:
    """The request ends once, as lost; a new handshake follows on a new identity."""
    recorder = await pair.submit()
    old_peer = pair.worker.peer

    await pair.worker.send(*BREACHES[breach])
    await eventually(lambda: bool(recorder.losses))

    assert len(recorder.losses) == 1
    assert recorder.ends == []
    assert pair.link.num_protocol_errors == 1
    await pair.ready()
    assert pair.worker.peer != old_peer


async def test_what_a_worker_says_is_no_requests_line() -> None:
    """Also where it is heard since a request has sent, or has had the link begin anew."""
    about: list[object] = []

    class Seen(Recorder):
        def tokens(self, item: Tokens, end: Finished | None) -> None:
            about.append(ABOUT.get())
            super().tokens(item, end)

    ABOUT.set({"request_id": "a-request"})
    async with connected() as pair:
        await pair.ready()
        submit = Submit("r", pack_ids([1]), Sampling(max_tokens=9))
        pair.link.submit(submit, Seen())
        await pair.worker.receive(Submit)
        await pair.worker.send(Batch([tokens(0, 1)], []))
        await eventually(lambda: bool(about))
    assert about == [None]


async def test_what_never_makes_sense_is_asked_less_and_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another release, or another program, kept the loop busy and filled the log."""
    garbage = b"\x81\xa4type\xa4cord"
    async with connected() as pair:
        for pause_s in (0.0, FIRST_PAUSE_S, 2 * FIRST_PAUSE_S):
            await pair.worker.receive(Hello)
            await pair.worker.send(garbage)
            if not pause_s:
                continue  # one message may be lost: it asks again at once
            await eventually(lambda: pair.link.state is LinkState.REFUSED)
            assert "of the same tokenwire release?" in pair.link.reason
            move_clock(monkeypatch, 0.9 * pause_s)
            pair.link.tick()
            assert pair.link.state is LinkState.REFUSED
            move_clock(monkeypatch, 0.1 * pause_s)
            pair.link.tick()
        assert pair.link.num_protocol_errors == 3
        await pair.ready()
        move_clock(monkeypatch, BREACH_MEMORY_S)
        await pair.worker.send(garbage)
        await pair.ready()  # at once


async def test_what_belongs_to_no_request_is_ignored(pair: Pair) -> None:
    """Tokens of a request that was given up do not break the link."""
    await pair.worker.send(Batch([tokens(0, 5)], [end(1)]))
    recorder = await pair.submit()
    await pair.worker.send(Batch([tokens(0, 5)], [end(1)]))
    await eventually(lambda: bool(recorder.ends))

    assert pair.link.num_protocol_errors == 0


async def test_a_cancel_reaches_the_worker_and_the_end_still_counts(pair: Pair) -> None:
    """Cancel asks; the one Finished still comes to the reply."""
    recorder = await pair.submit()
    pair.link.cancel("r")
    await pair.worker.receive(Cancel)
    await pair.worker.send(Batch([], [Finished("r", FinishReason.ABORT, 0)]))

    await eventually(lambda: bool(recorder.ends))
    assert recorder.ends[0].reason is FinishReason.ABORT


async def test_a_dead_engine_loses_what_is_open(pair: Pair) -> None:
    """EngineDead ends every request of that worker and stops routing to it."""
    recorder = await pair.submit()
    await pair.worker.send(EngineDead("out of memory"))

    await eventually(lambda: bool(recorder.losses))
    assert "out of memory" in recorder.losses[0]
    assert not pair.link.usable


async def test_a_restarted_worker_is_noticed_by_its_incarnation(pair: Pair) -> None:
    """Load from a new incarnation on an old link loses what the old one had."""
    recorder = await pair.submit()
    await pair.worker.send(Load("2"))

    await eventually(lambda: bool(recorder.losses))
    assert "restarted" in recorder.losses[0]


async def test_a_vanished_worker_is_noticed_by_its_connection(pair: Pair) -> None:
    """A closed connection is a loss at once, not after missed heartbeats."""
    recorder = await pair.submit()
    pair.worker.close()
    await eventually(lambda: bool(recorder.losses))

    assert recorder.losses == ["worker fake was lost: connection lost"]
    with pytest.raises(ConnectionError):
        pair.link.submit(Submit("s", pack_ids([1]), Sampling(max_tokens=1)), Recorder())


async def test_a_silent_worker_is_lost(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is connected and says nothing is given up after the timeout."""
    recorder = await pair.submit()
    await pair.worker.send(Load("1", num_running=7))
    while pair.link.load.num_running != 7:
        await asyncio.sleep(0)
    # Silent from here on; nothing is awaited.
    for _ in range(int(HEARTBEAT_TIMEOUT_S)):
        assert not recorder.losses
        move_clock(monkeypatch, 1.0)
        pair.link.tick()

    assert "silent" in recorder.losses[0]


async def test_a_frontend_that_slept_gives_no_worker_up(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gave up all of them at once, and its requests had nowhere to go."""
    recorder = await pair.submit()
    await pair.worker.send(Batch([tokens(0, 5)]))
    await eventually(lambda: recorder.ids == [5])
    move_clock(monkeypatch, 5 * STALL_TIMEOUT_S)
    pair.link.tick()

    assert pair.link.usable
    assert not recorder.losses


async def beating(pair: Pair, later_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let time pass, second by second, in which the worker beats."""
    for beat in range(1, int(later_s) + 1):
        move_clock(monkeypatch, 1.0)
        await pair.worker.send(Load("1", num_running=beat))
        while pair.link.load.num_running != beat:
            await asyncio.sleep(0)
        pair.link.tick()
        if pair.link.state is not LinkState.READY:
            return


async def test_a_worker_that_beats_but_brings_nothing_is_stalled(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its outputs are lost for others to go on with, and it gets nothing new for a while."""
    recorder = await pair.submit()
    await pair.worker.send(Batch([tokens(0, 5)]))
    await eventually(lambda: recorder.ids == [5])
    await beating(pair, 2 * STALL_TIMEOUT_S, monkeypatch)

    assert "no token for" in recorder.losses[0]
    await pair.ready()
    assert not pair.link.usable
    move_clock(monkeypatch, SUSPECT_S)
    assert pair.link.usable


async def test_waiting_for_a_first_token_is_no_stall(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue may be long; the worker beats, so nothing is lost."""
    done = await pair.submit()
    await pair.worker.send(Batch([tokens(0, 5)], [end(1)]))
    await eventually(lambda: bool(done.ends))
    waiting = await pair.submit()
    await beating(pair, 2 * STALL_TIMEOUT_S, monkeypatch)

    assert waiting.losses == []
    assert pair.link.usable


async def test_a_request_that_its_engine_has_forgotten_is_lost(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end never came while others got tokens, and its client waited for ever."""
    forgotten, served = await pair.submit(), Recorder()
    pair.link.submit(Submit("s", pack_ids([1]), Sampling(max_tokens=999)), served)
    await pair.worker.send(Batch([tokens(0, 5)]))
    for index in range(int(FIRST_TOKEN_TIMEOUT_S * 1.25)):
        move_clock(monkeypatch, 1.0)
        await pair.worker.send(Batch([Tokens("s", index, pack_ids([7]))]))
        while len(served.ids) <= index:
            await asyncio.sleep(0)
        pair.link.tick()

    assert "brought no token for 120 s, only for others" in forgotten.losses[0]
    await pair.worker.receive(Cancel)
    assert not served.losses
    assert pair.link.usable


async def test_a_worker_that_never_brings_a_first_token_is_stalled(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a prefill worker, whose requests end with their first token."""
    recorder = await pair.submit()
    await beating(pair, FIRST_TOKEN_TIMEOUT_S + 2, monkeypatch)

    assert "no token for" in recorder.losses[0]


async def test_a_worker_that_stands_still_behind_a_follow_is_stalled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is followed is open from the answer on, also where nothing else is."""
    recorder = Recorder()
    async with connected() as pair:
        await pair.worker.receive(Hello)
        card = msgspec.structs.replace(CARD, capabilities=[JOURNAL])
        await pair.worker.send(card)
        await eventually(lambda: pair.link.state is LinkState.READY)
        recall = Recall("r", "generation", b"", "follow")
        assert pair.link.recall(recall, lambda answer: recorder)
        await pair.worker.receive(Recall)
        await pair.worker.send(Recalled("r", "running", 1, num_new_tokens=5))
        await eventually(lambda: bool(pair.link.num_open))
        await beating(pair, 2 * STALL_TIMEOUT_S, monkeypatch)

    assert "no token for" in recorder.losses[0]


async def test_a_worker_without_requests_is_never_stalled(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has nothing to bring."""
    done = await pair.submit()
    await pair.worker.send(Batch([tokens(0, 5)], [end(1)]))
    await eventually(lambda: bool(done.ends))
    await beating(pair, 10 * FIRST_TOKEN_TIMEOUT_S, monkeypatch)

    assert pair.link.usable


async def test_draining_takes_nothing_new(pair: Pair) -> None:
    """A worker that says it drains is not routed to; what runs there goes on."""
    recorder = await pair.submit()
    await pair.worker.send(Load("1", draining=True))
    await eventually(lambda: not pair.link.usable)

    await pair.worker.send(Batch([tokens(0, 5)], [end(1)]))
    await eventually(lambda: bool(recorder.ends))


async def test_close_says_goodbye_and_ends_what_is_open(pair: Pair) -> None:
    """The worker hears Bye, the request hears its loss."""
    recorder = await pair.submit()
    pair.link.close("over")

    assert await pair.worker.receive(Bye) == Bye("over", seq=2)
    assert recorder.losses == ["worker fake was lost: over"]


async def test_a_refusal_is_kept_for_the_operator() -> None:
    """What the worker says against our hello stands in the link's reason."""
    async with connected() as pair:
        await pair.worker.receive(Hello)
        await pair.worker.send(Refused("frontend speaks protocol 0"))
        await eventually(lambda: pair.link.state is LinkState.REFUSED)

        assert pair.link.reason == "frontend speaks protocol 0"


async def test_after_a_refusal_it_asks_again_under_a_new_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that got a torn Hello hears that name no more: the link stayed refused."""
    async with connected() as pair:
        await pair.worker.receive(Hello)
        refused = pair.worker.peer
        await pair.worker.send(Refused("the protocol was broken"))
        await eventually(lambda: pair.link.state is LinkState.REFUSED)
        move_clock(monkeypatch, HELLO_AGAIN_S)
        pair.link.tick()
        await pair.ready()

        assert pair.worker.peer != refused


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"protocol_version": 99}, "speaks protocol 99"),
        ({"model": "other"}, "serves model 'other'"),
        ({"tokenizer_sha256": "b" * 64}, "has tokenizer bbbbbbbbbbbb"),
    ],
)
async def test_an_incompatible_worker_is_refused_in_a_sentence(
    change: dict[str, object], words: str
) -> None:
    """Another version, model or tokenizer is never routed to."""

    def accept(card: Card) -> None:
        check_card(card, model="tiny", tokenizer_sha256="a" * 64)

    with pytest.raises(Incompatible, match=words):
        accept(msgspec.structs.replace(CARD, **change))
    async with connected(accept) as pair:
        await pair.worker.receive(Hello)
        await pair.worker.send(msgspec.structs.replace(CARD, **change))
        await eventually(lambda: pair.link.state is LinkState.REFUSED)

        assert words in pair.link.reason
        assert not pair.link.usable


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        ((Load("1", seq=2),), "1 messages are missing before Load 2"),
        ((Load("1", seq=1), Load("1", seq=1)), "Load 1 came where number 2 was due"),
        ((CARD,), "a card that was not asked for"),
    ],
    ids=["lost", "repeated", "card"],
)
async def test_a_message_out_of_its_place_resets_the_link(
    pair: Pair, messages: tuple[FromWorker, ...], fault: str
) -> None:
    """What was lost may have been an end: its request must not wait for ever."""
    recorder = await pair.submit()
    await pair.worker.send(*messages)
    await eventually(lambda: bool(recorder.losses))

    assert fault in recorder.losses[0]
    assert pair.link.num_protocol_errors == 1
    bye = await pair.worker.receive(Bye)  # nobody waits for what is open there
    assert isinstance(bye, Bye)
    assert fault in bye.reason
    await pair.ready()


async def test_a_lost_card_is_asked_for_again() -> None:
    """The worker's beat says that it has heard the Hello."""
    async with connected() as pair:
        await pair.worker.receive(Hello)
        await pair.worker.send(Load("1", seq=1))
        await pair.worker.receive(Hello)
        await pair.worker.send(CARD, Load("1", seq=1), CARD, Load("1", seq=1))
        await eventually(lambda: pair.link.state is LinkState.READY)
        await pair.submit()

        assert not pair.link.num_protocol_errors


async def test_what_a_link_sends_is_numbered(pair: Pair) -> None:
    """From 1 on, behind each Hello."""
    pair.link.submit(Submit("r", pack_ids([1]), Sampling(9)), Recorder())
    pair.link.cancel("r")
    submit = await pair.worker.receive(Submit)
    cancel = await pair.worker.receive(Cancel)

    assert isinstance(submit, Submit)
    assert isinstance(cancel, Cancel)
    assert (submit.seq, cancel.seq) == (1, 2)


async def test_a_worker_is_asked_for_its_metrics() -> None:
    """Each question hears one answer; what nobody asked for is passed over."""
    async with connected() as pair:
        taken: list[str] = []
        assert not pair.link.scrape(taken.append)  # it is not ready
        await pair.worker.receive(Hello)
        card = msgspec.structs.replace(CARD, capabilities=[METRICS])
        await pair.worker.send(card)
        await eventually(lambda: pair.link.state is LinkState.READY)
        assert pair.link.scrape(taken.append)
        await pair.worker.receive(ScrapeMetrics)
        await pair.worker.send(MetricsText("a", seq=1), MetricsText("b", seq=2))
        recorder = await pair.submit()
        await pair.worker.send(Batch([], [end(0)], seq=3))
        await eventually(lambda: bool(recorder.ends))

        assert taken == ["a"]
        assert not pair.link.num_protocol_errors


async def test_an_older_worker_is_not_asked_for_its_metrics(pair: Pair) -> None:
    """It would take the question for a breach of the protocol."""
    assert not pair.link.scrape(lambda text: None)
    pair.link.submit(Submit("r", pack_ids([1]), Sampling(9)), Recorder())
    submit = await pair.worker.receive(Submit)
    assert isinstance(submit, Submit)
    assert submit.seq == 1  # nothing was sent before it


@pytest.mark.parametrize("capabilities", [[], [ORPHANED_KV]])
async def test_a_worker_hears_that_a_hand_over_is_seen_to(
    capabilities: list[str],
) -> None:
    """When its reply has heard of it; an older worker would not understand."""
    async with connected() as pair:
        hello = await pair.worker.receive(Hello)
        assert isinstance(hello, Hello)
        assert hello.capabilities == [ORPHANED_KV, STATUS, CAPTURE, CAPTURE_TOLD]
        card = msgspec.structs.replace(CARD, capabilities=capabilities)
        await pair.worker.send(card)
        await eventually(lambda: pair.link.state is LinkState.READY)
        recorder = await pair.submit()
        ended = msgspec.structs.replace(end(1), handover={"e": 1})
        await pair.worker.send(Batch([tokens(0, 5)], [ended]))
        await eventually(lambda: bool(recorder.ends))
        pair.link.close("over")
        expected: list[type] = [Settled, Bye] if capabilities else [Bye]
        for kind in expected:
            message = await pair.worker.receive(Settled | Bye)  # type: ignore[arg-type]
            assert type(message) is kind


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [([], Bye), ([CAPTURE], Bye), ([CAPTURE, CAPTURE_TOLD], Told)],
)
async def test_a_worker_hears_that_a_client_was_told(
    capabilities: list[str], expected: type
) -> None:
    """An older one would take that for a breach of the protocol."""
    async with connected() as pair:
        await pair.worker.receive(Hello)
        card = msgspec.structs.replace(CARD, capabilities=capabilities)
        await pair.worker.send(card)
        await eventually(lambda: pair.link.state is LinkState.READY)
        pair.link.client_knows("/d/capture-0.safetensors")
        pair.link.close("over")
        message = await pair.worker.receive(Told | Bye)  # type: ignore[arg-type]
        assert type(message) is expected


async def test_a_late_file_of_a_leg_that_was_given_up_is_deleted() -> None:
    """Nobody is left to be told of it, and its worker would keep it."""
    async with connected() as pair:
        await pair.worker.receive(Hello)
        await pair.worker.send(msgspec.structs.replace(CARD, capabilities=[CAPTURE]))
        await eventually(lambda: pair.link.state is LinkState.READY)
        saved = {"hidden_states_path": "/d/capture-0.safetensors"}
        known = await pair.submit()
        ended = msgspec.structs.replace(end(1), kv_transfer_params=saved)
        late = Finished("late", FinishReason.LENGTH, 1, kv_transfer_params=saved)
        manifest = Finished("m", FinishReason.LENGTH, 1, kv_transfer_params={"a": 1})
        await pair.worker.send(Batch([tokens(0, 5)], [ended, manifest]))
        await eventually(lambda: bool(known.ends))  # which is for its reply to see to
        await pair.worker.send(Batch([], [late]))
        message = await pair.worker.receive(Discard)
        assert isinstance(message, Discard)
        assert message.hidden_states_path == saved["hidden_states_path"]
        assert message.seq == 2  # the first it says since the request


@pytest.mark.parametrize("is_seen_to", [True, False])
async def test_a_late_hand_over_of_a_leg_that_was_given_up_is_released(
    is_seen_to: bool,
) -> None:
    """Nobody waits for it here, and its KV would be held until the lease is over."""
    orphans: list[OrphanedKV] = []

    def take(orphan: OrphanedKV) -> bool:
        orphans.append(orphan)
        return is_seen_to

    async with connected(on_orphan=take) as pair:
        await pair.worker.receive(Hello)
        await pair.worker.send(
            msgspec.structs.replace(CARD, capabilities=[ORPHANED_KV])
        )
        await eventually(lambda: pair.link.state is LinkState.READY)
        late = msgspec.structs.replace(end(1), handover={"e": 1})
        await pair.worker.send(Batch([tokens(0, 5)], [late]))
        await eventually(lambda: bool(orphans))
        assert orphans == [OrphanedKV("r", {"e": 1})]
        pair.link.close("over")
        message = await pair.worker.receive(Settled | Bye)  # type: ignore[arg-type]
        assert type(message) is (Settled if is_seen_to else Bye)


async def test_an_older_worker_is_asked_nothing_that_it_does_not_know() -> None:
    """It has no admin plane: the answer says so, and nothing is sent."""
    async with connected() as pair:
        await pair.ready()
        done = await pair.link.administer(Admin("a", "resume"))
        assert done.error_kind == "unsupported"
        assert "older release" in done.error
        assert pair.link.weight_version == "default"
        pair.link.close("over")
        assert isinstance(await pair.worker.receive(Admin | Bye), Bye)  # type: ignore[arg-type]


async def test_an_admin_call_ends_with_its_answer_or_its_worker() -> None:
    """Each once; an answer that nobody waits for is passed over."""
    async with connected() as pair:
        hello = await pair.worker.receive(Hello)
        assert isinstance(hello, Hello)
        await pair.worker.send(msgspec.structs.replace(CARD, capabilities=[ADMIN]))
        await eventually(lambda: pair.link.state is LinkState.READY)
        first = pair.link.administer(Admin("a", "resume"))
        second = pair.link.administer(Admin("b", "resume"))
        third = pair.link.administer(Admin("c", "resume"))
        third.cancel()
        assert await pair.worker.receive(Admin) == Admin("a", "resume", seq=1)
        await pair.worker.send(AdminDone("a", result={"x": 1}), AdminDone("c"))
        assert (await first).result == {"x": 1}
        pair.link.close("the test is over")
        assert (await second).error_kind == "lost"


async def test_a_status_is_taken_over(pair: Pair) -> None:
    """The weights' name for what comes from now on; a fault keeps the worker out."""
    assert pair.link.usable
    await pair.worker.send(Status("v", 3, paused=True, cache_epoch=1))
    await eventually(lambda: pair.link.weight_version == "v")
    assert (pair.link.usable, pair.link.stands) == (True, True)
    await pair.worker.send(Status("v", 3, fault="half loaded"))
    await eventually(lambda: not pair.link.usable)
    assert pair.link.obstacle == "serves nobody: half loaded"


async def test_a_worker_is_ready_when_its_status_is_there() -> None:
    """A blank one between would take its adapters and its pause away."""
    card = msgspec.structs.replace(CARD, capabilities=[STATUS])
    told = Status("v", 3, [Adapter("a", 2)], paused=True)
    async with connected() as pair:
        for _ in range(2):
            await pair.worker.receive(Hello)
            await pair.worker.send(card)
            await eventually(lambda: pair.link.state is LinkState.READY)
            assert not pair.link.is_ready
            assert not pair.link.usable
            assert "Status" in pair.link.obstacle
            await pair.worker.send(told)
            await eventually(lambda: pair.link.usable)
            pair.link.disconnected()
            assert pair.link.status == told
            pair.link.connected()
        await pair.worker.receive(Hello)
        await pair.worker.send(card)
        await eventually(lambda: pair.link.state is LinkState.READY)
        assert pair.link.status == told
