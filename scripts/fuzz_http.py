"""One request as bytes on a socket, delivered in odd ways, and what came back."""

from __future__ import annotations

import http.client
import socket
import time
from dataclasses import dataclass, field

__all__ = ["DEADLINE_S", "Answer", "Case", "send"]

DEADLINE_S = 80.0
"""Any one answer. A whole output takes the simulated engine below two seconds, but the
machine may stand still for a minute."""

PAUSE_S = 0.002
"""Between the pieces of a body that comes slowly."""

READ_BYTES = 65_536


@dataclass(frozen=True)
class Case:
    """A request, and how it is sent."""

    method: str
    path: str
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    chunked: bool = False
    num_pieces: int = 1
    missing_bytes: int = 0  # promised in Content-Length and never sent
    leave_after_sent: int | None = None  # bytes, then the connection is reset
    leave_after_read: int | None = None  # bytes of the answer, then the same

    @property
    def is_whole(self) -> bool:
        """Whether an answer is owed: all was sent, and somebody waits for it."""
        left = (self.leave_after_sent, self.leave_after_read)
        return not self.missing_bytes and left == (None, None)

    def head(self) -> bytes:
        """Return the request's line and headers."""
        given = {name.lower() for name, _ in self.headers}
        lines = [f"{self.method} {self.path} HTTP/1.1"]
        if "host" not in given:
            lines.append("Host: localhost")
        lines += [f"{name}: {value}" for name, value in self.headers]
        if self.chunked:
            lines.append("Transfer-Encoding: chunked")
        elif self.body or self.missing_bytes or self.method == "POST":
            lines.append(f"Content-Length: {len(self.body) + self.missing_bytes}")
        text = "\r\n".join([*lines, "Connection: close", "", ""])
        return text.encode("utf-8", "surrogateescape")

    def pieces(self) -> list[bytes]:
        """Return the body as it goes over the wire, in pieces."""
        size = -(-len(self.body) // self.num_pieces) or 1
        parts = [
            self.body[start : start + size] for start in range(0, len(self.body), size)
        ]
        if self.chunked:
            parts = [b"%x\r\n%s\r\n" % (len(part), part) for part in parts]
            parts.append(b"0\r\n\r\n")
        return parts


@dataclass
class Answer:
    """What came back, and in how long."""

    status: int = 0  # 0: nothing came
    headers: dict[str, str] = field(default_factory=dict[str, str])  # lower-case names
    text: str = ""
    seconds: float = 0.0
    failure: str = ""  # of the connection


def send(port: int, case: Case) -> Answer:
    """Send *case* to a frontend on this machine, and return what came back."""
    began = time.monotonic()
    answer = Answer()
    try:
        with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as connection:
            _exchange(connection, case, answer)
    except (OSError, http.client.HTTPException) as error:
        answer.failure = f"{type(error).__name__}: {error}"
    answer.seconds = time.monotonic() - began
    return answer


def _exchange(connection: socket.socket, case: Case, answer: Answer) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    left = case.leave_after_sent
    for number, piece in enumerate([case.head(), *case.pieces()]):
        if left is not None and len(piece) >= left:
            connection.sendall(piece[:left])
            _reset(connection)
            return
        if left is not None:
            left -= len(piece)
        if number > 1:
            time.sleep(PAUSE_S)
        try:
            connection.sendall(piece)
        except (BrokenPipeError, ConnectionResetError):
            break  # answered early, as a 413 or 415 is; the answer can be read
    if case.missing_bytes:
        connection.shutdown(socket.SHUT_WR)
    if case.leave_after_read is not None:
        _read_some(connection, case.leave_after_read)
        _reset(connection)
        return
    response = http.client.HTTPResponse(connection, method=case.method)
    response.begin()
    answer.status = response.status
    answer.headers = {name.lower(): value for name, value in response.getheaders()}
    answer.text = response.read().decode("utf-8", "surrogateescape")


def _read_some(connection: socket.socket, num_bytes: int) -> None:
    while num_bytes > 0:
        data = connection.recv(min(num_bytes, READ_BYTES))
        if not data:
            return
        num_bytes -= len(data)


def _reset(connection: socket.socket) -> None:
    """End the connection at once, without a word."""
    linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
