"""The client: raw sockets that post and count events, so that it is not the limit.

It parses nothing but an answer's head and its end. One token is one event; what an
answer has besides (a role, a last chunk) is known from how many tokens were asked for.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable

__all__ = ["Client", "Connection"]

EVENT = b"data: {"
CUT = len(EVENT) - 1
END = b"0\r\n\r\n"  # of a chunked body
MAX_READ_BYTES = (
    1 << 16
)  # more is allocated anew each time, and costs more than it saves
CONNECTS_AT_ONCE = 64
"""Below every server's backlog of connections to accept."""


class Connection:
    """One connection with one request at a time."""

    __slots__ = (
        "began_at",
        "failed",
        "first_at",
        "fresh",
        "last_at",
        "length",
        "num_answers",
        "num_events",
        "socket",
        "tail",
    )

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.num_events = 0  # of this answer
        self.num_answers = 0
        self.began_at = self.first_at = self.last_at = 0.0
        self.fresh = True  # nothing of the answer has come
        self.length = -1  # bytes of the answer still to come; -1: until its end mark
        self.tail = b""
        self.failed = ""

    def post(self, request: bytes) -> None:
        """Send a request, all of it."""
        self.fresh, self.num_events, self.first_at = True, 0, 0.0
        self.length, self.tail = -1, b""
        self.began_at = time.perf_counter()
        try:
            sent = self.socket.send(request)
            if sent < len(request):  # a long prompt
                self.socket.settimeout(30)
                self.socket.sendall(request[sent:])
                self.socket.setblocking(False)
        except OSError as error:
            self.failed = f"sending: {error}"

    def take(self, data: bytes, now: float) -> tuple[int, bool]:
        """Return how many events *data* has, and whether it ends the answer."""
        if self.fresh:
            self.fresh, self.first_at, self.last_at = False, now, now
            if not data.startswith(b"HTTP/1.1 200"):
                self.failed = data[:200].decode(errors="replace")
            head, _, rest = data.partition(b"\r\n\r\n")
            at = head.lower().find(b"content-length:")
            if at >= 0:
                value = head[at + 15 :].partition(b"\r\n")[0]
                self.length = int(value) - len(rest)
                return 0, self.length <= 0
        elif self.length > 0:
            self.length -= len(data)
            return 0, self.length <= 0
        # What was cut in two begins in the tail of the read before.
        number = data.count(EVENT) + (self.tail + data[:CUT]).count(EVENT)
        self.num_events += number
        end = data if len(data) >= CUT else self.tail + data
        self.tail = end[-CUT:]
        return number, end.endswith(END)


class Client:
    """Connections to a server, each asking again as soon as it is answered.

    Args:
        port: Where the server listens.
        number: How many.
        request: What they ask.
        max_tokens: How many tokens an answer to it has.
        on_tokens: Called with how many tokens have arrived in all, after each look.

    ``num_events`` counts what came, ``num_tokens`` what it stands for.
    """

    def __init__(
        self,
        port: int,
        number: int,
        request: bytes,
        max_tokens: int,
        on_tokens: Callable[[int], None] | None = None,
    ) -> None:
        self._port = port
        self.next_request: Callable[[], bytes] = lambda: request
        self._max_tokens = max_tokens
        self._on_tokens = on_tokens
        self._number = number
        self._epoll = select.epoll()
        self.connections: dict[int, Connection] = {}
        self.num_tokens = 0
        self.num_events = 0
        self.num_answers = 0
        self.num_failed = 0
        self.failure = ""
        self.first_ms: list[float] = []
        """Times to the first byte of all answers."""
        self.event_counts: list[int] = []
        """Events of all whole answers."""
        self.gaps_ms: list[tuple[float, int]] | None = None
        """Set to a list, it gets the time between two reads of a stream, and the events
        of the second one."""

    def open(self, limit_s: float = 30.0) -> None:
        """Open all connections and ask on each."""
        deadline = time.monotonic() + limit_s
        for number in range(self._number):
            try:
                self._connect()
            except OSError as error:
                self._fail(f"connecting: {error}")
            if number % CONNECTS_AT_ONCE == CONNECTS_AT_ONCE - 1:
                self.run(0.02)
            if time.monotonic() > deadline:
                self._fail("connecting: too slow", self._number - number - 1)
                return

    def run(self, seconds: float, enough: Callable[[], bool] | None = None) -> float:
        """Read and ask for so long, or until it is enough; return how long it was."""
        began = now = time.perf_counter()
        end = began + seconds
        clock, poll = time.perf_counter, self._epoll.poll
        while now < end and not (enough is not None and enough()):
            for number, _ in poll(min(end - now, 0.05)):
                self._read(number)
            if self._on_tokens is not None:
                self._on_tokens(self.num_tokens)
            now = clock()
        return now - began

    def _read(self, number: int) -> None:
        connection = self.connections[number]
        try:
            data = connection.socket.recv(MAX_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            data, connection.failed = b"", f"reading: {error}"
        if not data:
            self._lost(number, connection)
            return
        now = time.perf_counter()
        before = connection.last_at
        num_events, ended = connection.take(data, now)
        if num_events:
            self.num_events += num_events
            self.num_tokens += num_events
            if self.gaps_ms is not None and before:
                self.gaps_ms.append((1e3 * (now - before), num_events))
            connection.last_at = now
        if ended:
            self._ended(connection)

    def _ended(self, connection: Connection) -> None:
        if connection.failed:
            self._fail(connection.failed)
            connection.failed = ""
        else:
            self.num_answers += 1
            connection.num_answers += 1
            self.first_ms.append(1e3 * (connection.first_at - connection.began_at))
            self.num_tokens += self._max_tokens - connection.num_events
            if connection.num_events:
                self.event_counts.append(connection.num_events)
        connection.last_at = 0.0
        connection.post(self.next_request())

    def _lost(self, number: int, connection: Connection) -> None:
        """Ask on another connection: a server may close one behind its answer."""
        if not connection.fresh or connection.failed or not connection.num_answers:
            self._fail(connection.failed or "the server closed the connection")
        self._drop(number)
        with contextlib.suppress(OSError):
            self._connect()

    def _connect(self) -> None:
        connection = Connection(self._port)
        self.connections[connection.socket.fileno()] = connection
        self._epoll.register(connection.socket, select.EPOLLIN)
        connection.post(self.next_request())

    def _drop(self, number: int) -> None:
        connection = self.connections.pop(number)
        self._epoll.unregister(number)
        connection.socket.close()

    def _fail(self, why: str, number: int = 1) -> None:
        self.num_failed += number
        self.failure = self.failure or why

    def close(self) -> None:
        """Leave."""
        for number in tuple(self.connections):
            self._drop(number)
        self._epoll.close()
