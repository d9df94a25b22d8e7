"""One DEALER socket and its monitor, driven by their descriptors; the only zmq here.

Not by ``zmq.asyncio``, which costs a task wake-up per message. A ZeroMQ descriptor is
edge-triggered: after every receive loop and every send the socket's events must be
looked at again.
"""

from __future__ import annotations

import asyncio
import contextvars
from typing import Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

from tokenwire.protocol.errors import Incompatible
from tokenwire.protocol.keys import abbreviated
from tokenwire.protocol.limits import (
    HEARTBEAT_INTERVAL_S,
    MAX_MESSAGE_BYTES,
    SEND_QUEUE_MESSAGES,
)

from .keyring import Curve

__all__ = ["Context", "Dealer", "Listener", "open_context"]

Context = zmq.Context[zmq.Socket[bytes]]

LINGER_MS = 200
"""What a closing socket may still send: the Bye, not the backlog of a dead peer."""

RECONNECT_MS = (100, 2_000)
"""First and longest pause between connection attempts; a restarted worker is seen
within 2 s."""

MAX_READS_PER_WAKE = 16
"""Messages taken before other callbacks run: keeps the loop fair under a flood. So many
steps' events wait for each other at most, to leave in one write (``sse.py``)."""

MAX_SOCKETS = 8_192
"""Three per worker (its DEALER and the monitor's pair): over 2,000 workers."""

_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_MONITORED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _FAILED


def open_context() -> Context:
    """Return the process's ZeroMQ context; make it after any fork."""
    context: Context = zmq.Context()
    context.max_sockets = MAX_SOCKETS
    return context


class Listener(Protocol):
    """Who hears what happens on a socket; called on the event loop."""

    def connected(self) -> None:
        """The peer is there, and is who it should be."""

    def disconnected(self) -> None:
        """It is gone; ZeroMQ goes on trying."""

    def handshake_failed(self, reason: str) -> None:
        """The peer is another, or wants us not; ZeroMQ may not try again."""

    def received(self, data: bytes) -> None:
        """A message has come."""


class Dealer:
    """A socket to one endpoint, from its creation to ``close``.

    Args:
        endpoint: ``tcp://host:port``.
        context: The process's.
        identity: Must be new: a ROUTER ignores a second peer with a known one.
        curve: The connection's keys; None: plain text.
        timeout_s: Silence of ZeroMQ's own ping that closes a connection.
        listener: Hears all.

    Raises:
        Incompatible: It cannot be connected to.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        context: Context,
        identity: bytes,
        curve: Curve | None,
        timeout_s: float,
        listener: Listener,
    ) -> None:
        self._curve = curve
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._closed = False
        try:
            socket = context.socket(zmq.DEALER)
        except zmq.ZMQError as error:  # too many
            msg = f"cannot open a socket: {error.strerror}"
            raise Incompatible(msg) from error
        socket.identity = identity
        socket.linger = LINGER_MS
        socket.ipv6 = "[" in endpoint  # for names too, it would prefer those addresses
        socket.immediate = True  # nothing queues for a worker that is not there
        socket.sndhwm = socket.rcvhwm = SEND_QUEUE_MESSAGES
        socket.maxmsgsize = MAX_MESSAGE_BYTES
        socket.reconnect_ivl, socket.reconnect_ivl_max = RECONNECT_MS
        # ZeroMQ's own ping closes a half-open connection; not before we would.
        socket.heartbeat_ivl = int(1_000 * HEARTBEAT_INTERVAL_S)
        socket.heartbeat_timeout = int(1_000 * timeout_s)
        if curve is not None:
            secret_key = curve.secret_key.encode()
            socket.curve_secretkey = secret_key
            socket.curve_publickey = zmq.curve_public(secret_key)
            socket.curve_serverkey = curve.worker_key.encode()
        self._socket = socket
        self._polled = [(socket, int(zmq.POLLIN))]
        try:
            self._monitor = socket.get_monitor_socket(_MONITORED)
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            socket.disable_monitor()
            socket.close(0)
            msg = f"cannot connect: {error.strerror}"
            raise Incompatible(msg) from error
        # What comes is no request's, though one may have sent or connected: lines of the
        # log would be taken for being about it.
        self._nobodys = nobodys = contextvars.Context()
        nobodys.run(self._loop.add_reader, socket.fileno(), self._woken)
        nobodys.run(self._loop.add_reader, self._monitor.fileno(), self._read_monitor)
        # What came before the reader was there raises no edge.
        self._loop.call_soon(self._read_monitor, context=nobodys)

    def send(self, data: bytes) -> bool:
        """Queue a message; returns whether the peer takes it."""
        if self._closed:
            return False
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return False
        finally:
            # A send, failed or not, can swallow the edge of a message that has arrived.
            if self._has_more():
                self._loop.call_soon(self.read, context=self._nobodys)
        return True

    def read(self) -> None:
        """Give the listener what has come."""
        for _ in range(MAX_READS_PER_WAKE):
            if self._closed:
                return
            if not self._has_more():  # to try and fail costs four times as much
                return
            self._listener.received(self._socket.recv(zmq.NOBLOCK))
        self._loop.call_soon(self.read, context=self._nobodys)

    def _woken(self) -> None:
        """Take what has woken the loop: nearly always a message, so it is not asked for."""
        if self._closed:
            return
        try:
            data = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return
        self._listener.received(data)
        self.read()

    def close(self) -> None:
        """Send what is queued, within ``LINGER_MS``, and hear nothing more."""
        self._closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_reader(self._monitor.fileno())
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()

    def _has_more(self) -> bool:
        # Not by the socket's option: that is looked up among pyzmq's enums, in Python.
        return bool(zmq.zmq_poll(self._polled, 0))

    def _read_monitor(self) -> None:
        while not self._closed:
            try:
                frames = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = parse_monitor_message(frames)
            event = int(message["event"])
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._listener.connected()
            elif event == zmq.EVENT_DISCONNECTED:
                self._listener.disconnected()
            else:
                reason = self._reason(event, int(message["value"]))
                if reason:
                    self._listener.handshake_failed(reason)

    def _reason(self, event: int, value: int) -> str:
        """Return what a failed handshake says to the operator; nothing: it is none."""
        curve = self._curve
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and curve is not None:
            own = zmq.curve_public(curve.secret_key.encode()).decode()
            return (
                f"the worker does not allow this frontend's key {abbreviated(own)}: "
                "add it to the worker's --curve-allowed-keys"
            )
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            if value != zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
                return (
                    f"what listens there does not speak ZeroMQ's protocol ({value:#x})"
                )
            if curve is None:
                return (
                    "the worker wants CURVE: give this frontend --curve-secret-key and "
                    "--curve-worker-keys"
                )
            return (
                "the worker speaks plain text, this frontend CURVE: give the worker "
                "--curve-secret-key and --curve-allowed-keys"
            )
        if curve is not None:
            return (
                "the worker broke the CURVE handshake off: its key is not "
                f"{abbreviated(curve.worker_key)} (--curve-worker-keys), or it has none "
                "and speaks plain text"
            )
        return ""  # the worker went away in it: ZeroMQ tries again
