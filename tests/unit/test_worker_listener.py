"""The worker's HTTP, under clients that are many, slow, or do not ask for anything."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tokenwire.worker import listener
from tokenwire.worker.health import Health
from tokenwire.worker.listener import MetricsServer, serve_metrics

WAIT_S = 60.0
LIVE = b"GET /live HTTP/1.0\r\n\r\n"


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    """A server on a free port."""
    running = serve_metrics("127.0.0.1", 0, Health())
    yield running
    running.close()


def opened(server: MetricsServer, data: bytes = b"") -> socket.socket:
    """Return a connection that has sent *data*."""
    client = socket.create_connection((server.host, server.port), timeout=WAIT_S)
    client.sendall(data)
    return client


def answer(client: socket.socket) -> bytes:
    """Return all that comes until the server closes."""
    parts = bytearray()
    try:
        while part := client.recv(65536):
            parts += part
    except ConnectionResetError:
        pass
    return bytes(parts)


def test_whoever_takes_all_places_keeps_no_probe_out(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest makes room, however slowly it speaks; and no more threads are there."""
    monkeypatch.setattr(listener, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(listener, "MAX_S", 10 * WAIT_S)
    with ExitStack() as open_ones:
        silent = [open_ones.enter_context(opened(server, b"GET /li")) for _ in range(4)]
        with opened(server, LIVE) as probe:
            assert answer(probe).startswith(b"HTTP/1.0 200 OK")
        assert [answer(one) for one in silent[:3]] == [b""] * 3
        silent[3].sendall(b"ve HTTP/1.0\r\n\r\n")
        assert answer(silent[3]).startswith(b"HTTP/1.0 200 OK")


def test_a_connection_has_its_time(
    server: MetricsServer,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Whatever it has sent, and without a word in the log."""
    with opened(server, b"GET /live HT") as slow:
        monkeypatch.setattr(listener, "MAX_S", 0.0)
        assert answer(slow) == b""
    monkeypatch.setattr(listener, "MAX_S", WAIT_S)
    with opened(server, LIVE) as probe:
        assert answer(probe).startswith(b"HTTP/1.0 200 OK")
    assert capfd.readouterr().err == ""


def test_without_descriptors_it_waits_and_goes_on(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not ask for the same connection as fast as it can."""
    naps: list[float] = []
    refusing = [OSError(24, "Too many open files")] * 2
    accept = socket.socket.accept

    def scarce(self: socket.socket) -> tuple[socket.socket, object]:
        if refusing:
            raise refusing.pop()
        return accept(self)

    monkeypatch.setattr(time, "sleep", naps.append)
    monkeypatch.setattr(socket.socket, "accept", scarce)
    with opened(server, LIVE) as probe:
        assert answer(probe).startswith(b"HTTP/1.0 200 OK")
    assert naps == [listener.PAUSE_S] * 2
