"""A server with OpenAI's API and no model, for routers to stand before.

    python scripts/peers_backend.py PORT CONTROL

Streams one finished event per step and request, written at once; asked for no stream,
answers at once. Sockets without an event loop: what it costs, the client's core pays.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from pathlib import Path

from peers_control import Control, Pace

HEAD = b'{"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000,"model":"bench","choices":[{"index":0,'
TOKEN = HEAD + b'"delta":{"content":" colours"},"logprobs":null,"finish_reason":null}]}'
TOKEN_IDS = (
    HEAD
    + b'"delta":{"content":" colours"},"logprobs":null,"finish_reason":null,"token_ids":[12345]}]}'
)
LAST = HEAD + b'"delta":{},"logprobs":null,"finish_reason":"length"}]}'
ANSWER = (
    b'{"id":"chatcmpl-0123456789abcdef","object":"chat.completion","created":1700000000,"model":"bench","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":" colours"},"finish_reason":"length"}],"usage":{"prompt_tokens":40,"completion_tokens":1,"total_tokens":41}}'
)
MODELS = b'{"object":"list","data":[{"id":"bench","object":"model","created":0,"owned_by":"bench"}]}'
INFO = b'{"model_path":"bench","served_model_name":"bench","tokenizer_path":"bench","is_generation":true,"max_total_num_tokens":1000000,"tp_size":1,"dp_size":1,"version":"0"}'
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
IDLE_S = 0.5


def event(data: bytes) -> bytes:
    """Return an event as a chunk of the body."""
    text = b"data: " + data + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(text), text)


CHUNK, CHUNK_IDS = event(TOKEN), event(TOKEN_IDS)
END = event(LAST) + event(b"[DONE]") + b"0\r\n\r\n"


class Connection:
    """A connection, and the stream on it."""

    __slots__ = ("buffer", "chunk", "left", "pending", "send", "socket")

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.send = sock.send
        self.buffer = b""
        self.pending = b""  # what the socket has not taken
        self.chunk = CHUNK
        self.left = 0

    def write(self, data: bytes) -> None:
        """Write, as much as the socket takes now."""
        data = self.pending + data if self.pending else data
        try:
            taken = self.send(data)
        except BlockingIOError:
            taken = 0
        self.pending = data[taken:]

    def take(self) -> bytes | None:
        """Return the next whole request, if it is there."""
        head, found, rest = self.buffer.partition(b"\r\n\r\n")
        if not found:
            return None
        length = 0
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
            if name.lower() == b"transfer-encoding":
                return self._take_chunked(head, rest)
        if len(rest) < length:
            return None
        self.buffer = rest[length:]
        return head + b"\r\n\r\n" + rest[:length]

    def _take_chunked(self, head: bytes, rest: bytes) -> bytes | None:
        body = b""
        while True:
            size, found, rest = rest.partition(b"\r\n")
            if not found:
                return None
            number = int(size, 16)
            if len(rest) < number + 2:
                return None
            body, rest = body + rest[:number], rest[number + 2 :]
            if not number:
                self.buffer = rest
                return head + b"\r\n\r\n" + body


def asked(body: bytes) -> tuple[bool, int, bool]:
    """Return whether a stream is wanted, how many tokens, and whether with their ids."""
    try:
        request = json.loads(body)
    except ValueError:
        return False, 1, False
    limit = request.get("max_tokens") or request.get("max_completion_tokens") or 16
    return bool(request.get("stream")), limit, bool(request.get("return_token_ids"))


class Backend:
    """All connections."""

    def __init__(self, port: int, control: Control) -> None:
        self._pace = Pace(control)
        self._listener = socket.create_server(("127.0.0.1", port), backlog=4096)
        self._listener.setblocking(False)
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._all: dict[int, Connection] = {}
        self._streams: dict[int, Connection] = {}

    def serve(self) -> None:
        """Serve until killed."""
        while True:
            wait_s = self._pace.wait_s(len(self._streams)) if self._streams else IDLE_S
            # epoll waits in whole ms: what is shorter is slept away.
            if 0 < wait_s < 0.001:
                time.sleep(wait_s)
                wait_s = 0.0
            self._poll(wait_s)
            if self._streams and self._pace.wait_s(len(self._streams)) == 0:
                self._step()

    def _poll(self, wait_s: float) -> None:
        for number, _ in self._epoll.poll(wait_s):
            if number == self._listener.fileno():
                self._accept()
                continue
            connection = self._all[number]
            try:
                data = connection.socket.recv(1 << 16)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            if not data:
                self._forget(number)
                continue
            connection.buffer += data
            while number in self._all and (request := connection.take()):
                self._answer(number, connection, request)

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except BlockingIOError:
                return
            accepted.setblocking(False)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._all[accepted.fileno()] = Connection(accepted)
            self._epoll.register(accepted, select.EPOLLIN)

    def _answer(self, number: int, connection: Connection, request: bytes) -> None:
        head, _, body = request.partition(b"\r\n\r\n")
        if not head.startswith((b"GET ", b"POST ")):  # HTTP/2: is it gRPC?
            self._forget(number)
            return
        if head.startswith(b"GET"):
            path = head.split(b" ", 2)[1]
            text = MODELS if path.endswith(b"/models") else INFO
            connection.write(answer(text))
            return
        stream, num_tokens, ids = asked(body)
        if not stream:
            connection.write(answer(ANSWER))
            return
        connection.left, connection.chunk = num_tokens, CHUNK_IDS if ids else CHUNK
        connection.write(STREAM_HEAD)
        self._streams[number] = connection

    def _step(self) -> None:
        ended: list[int] = []
        num_tokens = 0
        bundle = self._pace.bundle(len(self._streams))
        for number, connection in self._streams.items():
            try:
                if connection.pending:  # slow: nothing new before the old is gone
                    connection.write(b"")
                    continue
                size = min(bundle, connection.left)
                chunk = connection.chunk * size if size > 1 else connection.chunk
                try:
                    taken = connection.send(chunk)
                except BlockingIOError:
                    taken = 0
                if taken < len(chunk):
                    connection.pending = chunk[taken:]
                num_tokens += size
                connection.left -= size
                if connection.left <= 0:
                    connection.write(END)
                    ended.append(number)
            except OSError:
                ended.append(number)
        self._pace.stepped(num_tokens)
        for number in ended:
            del self._streams[number]

    def _forget(self, number: int) -> None:
        self._streams.pop(number, None)
        connection = self._all.pop(number)
        self._epoll.unregister(number)
        connection.socket.close()


def answer(body: bytes) -> bytes:
    """Return a whole answer."""
    return (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    )


if __name__ == "__main__":
    Backend(int(sys.argv[1]), Control(Path(sys.argv[2]))).serve()
