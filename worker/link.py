"""The worker's socket: one bound ROUTER, behind a gate where it can be reached.

Laws:
- Nothing here waits: a send that cannot be queued means that the peer is lost.
- ZeroMQ's file descriptor is edge-triggered. So a read goes on until there is nothing
  left, and after every send, which may have consumed the edge, what is readable is
  asked for again.
- A peer that breaks the protocol is heard no more under that identity.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from typing import Protocol

import zmq

from tokenwire.protocol.codec import decode_from_frontend, encode
from tokenwire.protocol.errors import MessageTooLarge, RemoteProtocolError
from tokenwire.protocol.limits import (
    HEARTBEAT_INTERVAL_S,
    HEARTBEAT_TIMEOUT_S,
    MAX_ERROR_CHARS,
    MAX_MESSAGE_BYTES,
    SEND_QUEUE_MESSAGES,
)
from tokenwire.protocol.messages import FromFrontend, FromWorker, Refused

from .gate import Gate

__all__ = ["Link", "LinkError", "Receiver"]

logger = logging.getLogger(__name__)

MAX_RECEIVES_PER_WAKEUP = 256
"""Then other callbacks have their turn: 256 Submits take about as long as one step."""

MAX_BANNED_PEERS = 1_024
"""Identities are random, so an honest frontend never meets its own ban again; the
oldest is forgotten first."""

LINGER_MS = 500
"""How long the last messages may take to leave at exit; on loopback and in a cluster
network they are gone at once, and a dead peer must not hold the process."""

_NUM_FRAMES = 2
"""The identity, which ZeroMQ puts first, and the message."""

BACKLOG = 256
"""Connections not yet accepted: every frontend of a large deployment at once."""


class LinkError(Exception):
    """The socket cannot be bound; the text is one sentence for the operator."""


class Receiver(Protocol):
    """Who takes what the frontends send; called on the event loop."""

    def received(self, identity: bytes, message: FromFrontend) -> None:
        """Take a message.

        Raises:
            RemoteProtocolError: It is not in its place.
        """

    def broken(self, identity: bytes, reason: str) -> None:
        """Take note that this peer broke the protocol, and is heard no more."""

    def expelled(self, identity: bytes, reason: str) -> None:
        """Take note that this peer is no longer allowed, and is heard no more."""


class Link:
    """A ROUTER on an endpoint, from its creation to ``close``."""

    def __init__(
        self,
        listen: str,
        *,
        send_queue_messages: int = SEND_QUEUE_MESSAGES,
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
        gate: Gate | None = None,
    ) -> None:
        """Bind.

        Args:
            listen: ``tcp://HOST:PORT``, port 0 for any free one, or ``ipc://PATH``.
            send_queue_messages: What one peer may have unsent before it is lost.
            heartbeat_timeout_s: Silence of ZeroMQ's own ping that closes a connection.
            gate: Who may connect; None: everyone, in plain text.

        Raises:
            LinkError: *listen* is not an endpoint, or is taken.
        """
        self._context = zmq.Context(io_threads=1)
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._banned: OrderedDict[bytes, None] = OrderedDict()
        self._receiver: Receiver | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scheduled = False
        self._gate = gate
        self._socket.ipv6 = "[" in listen
        if gate is not None:
            gate.guard(self._context, self._socket)
        self._configure(send_queue_messages, heartbeat_timeout_s)
        try:
            self._socket.bind(listen)
        except zmq.ZMQError as error:
            self.close()
            reason = str(error.strerror).partition(" (addr=")[0]  # said already
            msg = f"cannot listen on {listen}: {reason}"
            raise LinkError(msg) from error
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def start(self, receiver: Receiver) -> None:
        """Give what comes to *receiver*, on the running event loop."""
        self._receiver = receiver
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._drain)
        if self._gate is not None:
            self._gate.start()
        self._drain_soon()  # what came before the reader leaves no edge

    def send(self, identity: bytes, message: FromWorker) -> bool:
        """Queue *message*; return False if the peer is lost.

        Raises:
            MessageTooLarge: It is above ``MAX_MESSAGE_BYTES``.
        """
        if self._socket.closed:
            return False  # a timer that was set before
        data = encode(message)
        try:
            self._socket.send_multipart((identity, data), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in {zmq.EAGAIN, zmq.EHOSTUNREACH}:
                raise
            return False
        finally:
            if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self._drain_soon()
        return True

    def tick(self) -> None:
        """Do what time asks for; several times a second."""
        if self._gate is not None:
            self._gate.refresh()

    def close(self) -> None:
        """Send what is queued, within ``LINGER_MS``, and close the socket."""
        if self._loop is not None and not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._receiver = None
        if self._gate is not None:
            self._gate.close(self._socket)
        self._socket.close(LINGER_MS)
        self._context.term()

    def _configure(self, send_queue_messages: int, heartbeat_timeout_s: float) -> None:
        socket = self._socket
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else unknown peers are dropped
        # The same identity is the same start of the same process: it has reconnected
        # before this side noticed that the old connection is dead.
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.SNDHWM, send_queue_messages)
        socket.setsockopt(zmq.RCVHWM, SEND_QUEUE_MESSAGES)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.BACKLOG, BACKLOG)
        socket.setsockopt(zmq.HEARTBEAT_IVL, int(HEARTBEAT_INTERVAL_S * 1000))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(heartbeat_timeout_s * 1000))
        # No HEARTBEAT_TTL: frontends ping by themselves, and one whose machine has slept
        # would find that timer due before it reads what has come.

    def _drain_soon(self) -> None:
        if (
            not self._scheduled
            and self._loop is not None
            and self._receiver is not None
        ):
            self._scheduled = True
            self._loop.call_soon(self._drain_scheduled)

    def _drain_scheduled(self) -> None:
        self._scheduled = False
        self._drain()

    def _drain(self) -> None:
        is_empty = False
        try:
            for _ in range(MAX_RECEIVES_PER_WAKEUP):
                if self._receiver is None:  # closed by what a message led to
                    return
                try:
                    frames = self._receive(self._receiver)
                except zmq.Again:
                    is_empty = True
                    return
                if frames is not None:
                    self._take(self._receiver, frames)
        finally:
            if not is_empty:  # no new edge comes for what is left
                self._drain_soon()

    def _receive(self, receiver: Receiver) -> list[bytes] | None:
        """Return the frames of the next message; None if its sender must not send.

        Raises:
            zmq.Again: There is none.
        """
        if self._gate is None:
            return self._socket.recv_multipart(zmq.NOBLOCK)
        # A frame knows whose key it came with, its bytes do not.
        frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        identity = frames[0].bytes
        if not self._gate.admits(frames[-1]):
            if identity not in self._banned:
                self._expel(receiver, identity)
            return None
        return [frame.bytes for frame in frames]

    def _take(self, receiver: Receiver, frames: list[bytes]) -> None:
        identity = frames[0]
        if identity in self._banned:
            return
        if len(frames) != _NUM_FRAMES:
            self._ban(receiver, identity, f"{len(frames) - 1} frames, a message is one")
            return
        try:
            message = decode_from_frontend(frames[1])
        except (RemoteProtocolError, MessageTooLarge) as error:
            self._ban(receiver, identity, str(error))
            return
        try:
            receiver.received(identity, message)
        except RemoteProtocolError as error:
            self._ban(receiver, identity, str(error))

    def _ban(self, receiver: Receiver, identity: bytes, reason: str) -> None:
        logger.warning("peer %s broke the protocol: %s", identity.hex(), reason)
        self._hear_no_more(identity)
        receiver.broken(identity, reason)
        told = f"the protocol was broken: {reason}"[:MAX_ERROR_CHARS]
        self.send(identity, Refused(told))

    def _expel(self, receiver: Receiver, identity: bytes) -> None:
        reason = "its key is no longer allowed"
        self._hear_no_more(identity)
        receiver.expelled(identity, reason)
        self.send(identity, Refused(reason))

    def _hear_no_more(self, identity: bytes) -> None:
        self._banned[identity] = None
        if len(self._banned) > MAX_BANNED_PEERS:
            self._banned.popitem(last=False)
