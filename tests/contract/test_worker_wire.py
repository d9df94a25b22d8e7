"""The worker's socket, with real ZeroMQ peers: what a frontend meets on the wire."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Generator
from contextlib import contextmanager

import msgspec
import pytest
import zmq

from support.awake import STANDSTILL_S, within
from tokenwire.protocol.codec import decode_from_worker, encode
from tokenwire.protocol.limits import MAX_MESSAGE_BYTES
from tokenwire.protocol.messages import (
    Bye,
    Cancel,
    EngineDead,
    FromFrontend,
    FromWorker,
    Hello,
    Ping,
    Refused,
    Sampling,
    Submit,
)
from tokenwire.protocol.tokens import pack_ids
from tokenwire.worker.link import MAX_RECEIVES_PER_WAKEUP, Link, LinkError

WAIT_S = 20.0


class Peer:
    """A frontend's socket."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        name: str,
        queue: int = 1000,
    ) -> None:
        self.identity = name.encode()
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RCVHWM, queue)
        self.socket.setsockopt(zmq.ROUTING_ID, self.identity)
        self.socket.setsockopt(zmq.RCVTIMEO, int((WAIT_S + STANDSTILL_S) * 1000))
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)

    def send(self, *messages: FromFrontend) -> None:
        """Send messages as they are."""
        for message in messages:
            self.socket.send(encode(message))

    async def receive(self) -> FromWorker:
        """Return the next message without blocking the loop."""
        data = await asyncio.to_thread(self.socket.recv)
        return decode_from_worker(data)


class Desk:
    """A ``Receiver`` that records, and answers every Cancel."""

    def __init__(self) -> None:
        self.link: Link | None = None
        self.messages: list[tuple[bytes, FromFrontend]] = []
        self.broken_peers: list[tuple[bytes, str]] = []
        self.changed = asyncio.Event()

    def received(self, identity: bytes, message: FromFrontend) -> None:
        """Record a message, and answer a Cancel."""
        self.messages.append((identity, message))
        self.changed.set()
        if isinstance(message, Cancel) and self.link is not None:
            assert self.link.send(identity, EngineDead(message.request_id))

    def broken(self, identity: bytes, reason: str) -> None:
        """Record who broke the protocol."""
        self.broken_peers.append((identity, reason))
        self.changed.set()

    def expelled(self, identity: bytes, reason: str) -> None:
        """Not used: there is no gate."""

    async def until(self, num_messages: int = 0, num_broken: int = 0) -> None:
        """Wait until so much has been recorded."""
        async with within(WAIT_S):
            while (
                len(self.messages) < num_messages or len(self.broken_peers) < num_broken
            ):
                self.changed.clear()
                await self.changed.wait()


@contextmanager
def wire(*names: str) -> Generator[tuple[Link, Desk, list[Peer]]]:
    """Give a started link, its desk, and peers that are connected to it."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    link = Link("tcp://127.0.0.1:0")
    peers = [Peer(context, link.endpoint, name) for name in names]
    desk = Desk()
    desk.link = link
    try:
        link.start(desk)
        yield link, desk, peers
    finally:
        link.close()
        context.destroy(linger=0)


def test_an_endpoint_that_is_taken_or_none_is_one_sentence() -> None:
    """With the endpoint; and port 0 becomes a real one."""
    link = Link("tcp://127.0.0.1:0")
    try:
        assert not link.endpoint.endswith(":0")
        with pytest.raises(LinkError, match="cannot listen on tcp://127"):
            Link(link.endpoint)
    finally:
        link.close()
    with pytest.raises(LinkError, match="cannot listen on tcp://nowhere"):
        Link("tcp://nowhere.invalid:x")


async def test_messages_arrive_typed_and_in_order() -> None:
    """With the identity of their sender."""
    sent: list[FromFrontend] = [
        Hello(1, "f", "1"),
        Submit("r", pack_ids([1, 2]), Sampling(max_tokens=1)),
        Cancel("x"),
        Bye(),
    ]
    with wire("a") as (_, desk, (peer,)):
        peer.send(*sent)
        await desk.until(4)
        assert desk.messages == [(b"a", message) for message in sent]
        assert await peer.receive() == EngineDead("x")


async def test_what_came_before_the_start_is_not_lost() -> None:
    """Frontends may be there before the engine has loaded."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    link, desk = Link("tcp://127.0.0.1:0"), Desk()
    try:
        peer = Peer(context, link.endpoint, "early")
        peer.send(Hello(1, "f", "1"))
        link.start(desk)
        await desk.until(1)
    finally:
        link.close()
        context.destroy(linger=0)


async def test_an_unknown_peer_is_lost_and_not_silence() -> None:
    """``send`` says so."""
    with wire() as (link, _, _peers):
        assert not link.send(b"nobody", Refused("x"))


async def test_a_peer_that_does_not_read_is_lost_when_its_queue_is_full() -> None:
    """``send`` never waits."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    link, desk = Link("tcp://127.0.0.1:0", send_queue_messages=5), Desk()
    try:
        peer = Peer(context, link.endpoint, "slow", queue=1)
        link.start(desk)
        peer.send(Ping("1"))
        await desk.until(1)
        big = Refused("x" * 60_000)
        # The kernel's buffers for loopback take some MB before the queue fills.
        assert not all(link.send(b"slow", big) for _ in range(5_000))
    finally:
        link.close()
        context.destroy(linger=0)


BAD_ID = (
    encode(Cancel("x" * 64))
    .replace(b"\xd9\x40", b"\xd9\x41")
    .replace(b"x" * 64, b"x" * 65)
)


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"garbage"],
        [msgspec.msgpack.encode({"type": "unheard_of"})],
        [BAD_ID],
        [encode(Ping("1")), b"more"],
        [encode(Submit("r", b"123", Sampling(max_tokens=1)))],
    ],
)
async def test_a_peer_that_breaks_the_protocol_is_heard_no_more(
    frames: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """It is told why, reported once and logged once; others are not disturbed."""
    caplog.set_level(logging.WARNING)
    with wire("bad", "good") as (_, desk, (bad, good)):
        bad.socket.send_multipart(frames)
        bad.send(Hello(1, "f", "1"))
        bad.socket.send(b"more garbage")
        answer = await bad.receive()
        assert isinstance(answer, Refused)
        assert answer.reason.startswith("the protocol was broken: ")
        good.send(Cancel("sync"))
        assert await good.receive() == EngineDead("sync")
        assert desk.messages == [(b"good", Cancel("sync"))]
        assert [peer for peer, _ in desk.broken_peers] == [b"bad"]
        assert len(caplog.messages) == 1


async def test_a_message_above_the_limit_cuts_the_connection() -> None:
    """It is never in memory as a whole; the peer comes back, and is heard."""
    with wire("big") as (_, desk, (peer,)):
        peer.socket.send(bytes(MAX_MESSAGE_BYTES + 1))
        peer.send(Cancel("after"))
        assert await peer.receive() == EngineDead("after")
        assert [message for _, message in desk.messages] == [Cancel("after")]
        assert not desk.broken_peers


async def test_a_peer_that_reconnects_under_its_identity_is_answered() -> None:
    """It need not wait until the old connection is known to be dead."""
    with wire("same") as (link, desk, (old,)):
        old.send(Ping("1"))
        await desk.until(1)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            new = Peer(context, link.endpoint, "same")
            new.send(Cancel("r"))
            assert await new.receive() == EngineDead("r")
        finally:
            context.destroy(linger=0)


async def test_a_bug_in_the_receiver_does_not_deafen_the_link() -> None:
    """It is seen by the loop's handler, and the next message is read."""
    seen: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: seen.append(context["exception"]))
    with wire("a") as (_, desk, (peer,)):
        receive = desk.received

        def fail_once(identity: bytes, message: FromFrontend) -> None:
            desk.received = receive  # type: ignore[method-assign]
            msg = "a bug"
            raise RuntimeError(msg)

        desk.received = fail_once  # type: ignore[method-assign]
        peer.send(Ping("1"), Cancel("next"))
        assert await peer.receive() == EngineDead("next")
        assert [str(error) for error in seen] == ["a bug"]


async def test_nothing_is_left_unread_under_load_in_both_directions() -> None:
    """Sends consume ZeroMQ's edge; no message may wait for another one to be seen.

    Every peer sends one Cancel at a time and waits for its answer, so a single message
    that is not noticed stops that peer; meanwhile the link sends all the time.
    """
    num_peers, num_rounds = 4, 300
    names = [f"peer-{n}" for n in range(num_peers)]

    def play(peer: Peer) -> None:
        for n in range(num_rounds):
            peer.socket.send(encode(Cancel(f"r{n}")))
            while decode_from_worker(peer.socket.recv()) != EngineDead(f"r{n}"):
                pass

    with wire(*names) as (link, desk, peers):
        for peer in peers:
            peer.send(Ping("1"))
        await desk.until(num_peers)
        threads = [threading.Thread(target=play, args=(peer,)) for peer in peers]
        for thread in threads:
            thread.start()
        async with within(WAIT_S):
            while any(thread.is_alive() for thread in threads):
                for peer in peers:
                    link.send(peer.identity, Refused("noise"))
                await asyncio.sleep(0)
        for thread in threads:
            thread.join()
        assert len(desk.messages) == num_peers * (num_rounds + 1)


async def test_a_burst_is_read_to_its_end() -> None:
    """More than one wake-up takes, and no edge comes for the rest."""
    num_messages = 10 * MAX_RECEIVES_PER_WAKEUP + 7
    with wire("a") as (_, desk, (peer,)):
        peer.send(*[Ping(str(n)) for n in range(num_messages)])
        await desk.until(num_messages)
        assert [message for _, message in desk.messages] == [
            Ping(str(n)) for n in range(num_messages)
        ]


async def test_the_last_words_leave_before_the_socket_closes() -> None:
    """EngineDead reaches a frontend although the worker exits right after it."""
    with wire("a") as (link, desk, (peer,)):
        peer.send(Ping("1"))
        await desk.until(1)
        link.send(b"a", EngineDead("bye"))
        link.close()
        assert await peer.receive() == EngineDead("bye")
