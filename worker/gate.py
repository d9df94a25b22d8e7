"""Who may connect to a worker: CURVE on its socket, and an allow-list of public keys.

ZeroMQ asks for each connection whether its key may come (ZAP, RFC 27): this answers from
the list, on the event loop. ``zmq.auth`` would answer too, but says neither where a
refused peer came from nor, later, whose message it is, and without that a key that is
struck off the list stays connected for as long as it likes.

Laws:
- Without an answer nobody comes in.
- Each message is its sender's key's, looked up in the list as it is now.
- Strangers cannot fill the log.
"""

from __future__ import annotations

import asyncio
import logging
import time

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from tokenwire.protocol.keys import KeyFiles, KeyList, abbreviated, read_secret_key

__all__ = ["Complaints", "Gate"]

logger = logging.getLogger(__name__)

DOMAIN = b"tokenwire"
"""ZAP's name for a group of sockets; ours has one. It must not be empty: else ZeroMQ
lets everyone in when there is no handler."""

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"
_ZAP_FRAMES = 7  # version, request, domain, address, identity, mechanism, key

WINDOW_S = 60.0
MAX_LINES = 10
"""Lines about refused peers in a window; the same one once. A misconfigured frontend
tries again every 2 s, and a stranger may try as often as it wants."""


class Complaints:
    """Warnings that strangers can cause, so that these cannot fill the log."""

    def __init__(self) -> None:
        self._began_at = -WINDOW_S
        self._said: set[str] = set()
        self._num_held = 0

    def say(self, text: str, now: float) -> None:
        """Log *text*, unless it, or too much, has been said lately."""
        if now - self._began_at >= WINDOW_S:
            if self._num_held:
                logger.warning(
                    "%d more connections were refused in %.0f s",
                    self._num_held,
                    now - self._began_at,
                )
            self._began_at, self._num_held = now, 0
            self._said.clear()
        if text in self._said or len(self._said) >= MAX_LINES:
            self._num_held += 1
            return
        self._said.add(text)
        logger.warning("%s", text)


class Gate:
    """Lets those in whose keys are on a list."""

    def __init__(self, files: KeyFiles) -> None:
        """Read the keys.

        Raises:
            UnusableFile: A file cannot be used.
        """
        self._secret_key = read_secret_key(files.secret_key).encode()
        self._public_key = zmq.curve_public(self._secret_key).decode()
        self._list = KeyList(files.peer_keys)
        self._allowed = frozenset(key.z85 for key in self._list.keys)
        self._complaints = Complaints()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._zap: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        if not self._allowed:
            logger.warning("%s is empty: no frontend may connect", self._list.path)

    def guard(
        self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes]
    ) -> None:
        """Make *socket* ask for CURVE, before it is bound."""
        self._zap = context.socket(zmq.REP)
        self._zap.bind(_ZAP_ENDPOINT)
        socket.curve_server = True
        socket.curve_secretkey = self._secret_key
        socket.zap_domain = DOMAIN
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)

    def start(self) -> None:
        """Answer from now on, on the running event loop."""
        if self._zap is None or self._monitor is None:
            return
        loop = self._loop = asyncio.get_running_loop()
        loop.add_reader(self._zap.fileno(), self._answer)
        loop.add_reader(self._monitor.fileno(), self._hear)
        # Who came before leaves no edge.
        loop.call_soon(self._answer)
        loop.call_soon(self._hear)

    def refresh(self) -> None:
        """Look at the list; several times a second."""
        if self._list.refresh():
            self._allowed = frozenset(key.z85 for key in self._list.keys)

    def admits(self, frame: zmq.Frame) -> bool:
        """Return whether the sender of *frame* is on the list."""
        return frame.get("User-Id") in self._allowed

    def close(self, socket: zmq.Socket[bytes]) -> None:
        """Stop answering; before *socket* is closed."""
        if self._zap is None or self._monitor is None:
            return
        if self._loop is not None:
            self._loop.remove_reader(self._zap.fileno())
            self._loop.remove_reader(self._monitor.fileno())
        socket.disable_monitor()
        self._monitor.close(0)
        self._zap.close(0)
        self._zap = self._monitor = None

    def _answer(self) -> None:
        while self._zap is not None:
            try:
                question = self._zap.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._zap.send_multipart(self._reply(question))

    def _reply(self, question: list[bytes]) -> list[bytes]:
        request = question[1] if len(question) > 1 else b""
        refused = [_ZAP_VERSION, request, b"400", b"not allowed", b"", b""]
        if len(question) != _ZAP_FRAMES or question[5] != b"CURVE":
            return refused
        self.refresh()
        key = z85.encode(question[6]).decode()
        if key in self._allowed:
            return [_ZAP_VERSION, request, b"200", b"", key.encode(), b""]
        address = question[3].decode(errors="replace")
        self._complain(
            f"a frontend at {address} is refused: its key {abbreviated(key)} is not in "
            f"{self._list.path}"
        )
        return refused

    def _hear(self) -> None:
        while self._monitor is not None:
            try:
                frames = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if parse_monitor_message(frames)["value"] == (
                zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
            ):
                self._complain(
                    "a frontend is refused: it speaks plain text, this worker CURVE "
                    "(give it --curve-secret-key and --curve-worker-keys)"
                )
            else:
                self._complain(
                    "a peer is refused: it takes this worker for the owner of another "
                    f"key than {abbreviated(self._public_key)}, or is no frontend"
                )

    def _complain(self, text: str) -> None:
        self._complaints.say(text, time.monotonic())
