"""Answers of a collector of traces: read within a bound, whatever it says."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from requests import Session

from tokenwire.protocol import collector
from tokenwire.protocol.collector import bounded_session
from tokenwire.protocol.messages import Trace
from tokenwire.protocol.tracing import TraceSettings, start_tracing

PART = b"a" * 1024 * 1024
NUM_PARTS = 64  # far above what sockets hold
WAIT_S = 60.0


class Talker:
    """A collector that says more than anybody asked for."""

    def __init__(self) -> None:
        self.url = ""
        self.num_parts = NUM_PARTS
        self.num_connections = 0
        self.was_cut = threading.Event()  # its client closed before all was sent


@contextmanager
def talking() -> Generator[Talker]:
    """Run one on loopback."""
    talker = Talker()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            talker.num_connections += 1

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            try:
                for _ in range(talker.num_parts):
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(PART), PART))
                self.wfile.write(b"0\r\n\r\n")
            except ConnectionError:
                self.close_connection = True
                talker.was_cut.set()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            del format, args

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    talker.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield talker
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def session() -> Session:
    """What spans are sent by."""
    made = bounded_session()
    assert made is not None
    return made


def test_spans_are_sent_so() -> None:
    """To a collector that never ends."""
    with talking() as talker:
        tracing = start_tracing(TraceSettings(talker.url), "s", "i")
        assert tracing is not None
        tracing.begin("a", "SERVER", Trace()).end()
        tracing.flush()
        assert talker.was_cut.wait(WAIT_S)
        tracing.close()


def test_an_answer_without_an_end_is_cut(session: Session) -> None:
    """Its status counts all the same; another connection is made for the next."""
    with talking() as talker, session:
        assert session.post(talker.url, data=b"a", timeout=WAIT_S).status_code == 200
        assert talker.was_cut.wait(WAIT_S)
        talker.num_parts = 0
        assert session.post(talker.url, data=b"a", timeout=WAIT_S).status_code == 200
        assert talker.num_connections == 2


def test_an_answer_that_takes_too_long_is_cut(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte may come in time, and all of them together not."""
    monkeypatch.setattr(collector, "MAX_ANSWER_BYTES", NUM_PARTS * len(PART))
    monkeypatch.setattr(collector, "READ_S", 0.0)
    with talking() as talker, session:
        assert session.post(talker.url, data=b"a", timeout=WAIT_S).status_code == 200
        assert talker.was_cut.wait(WAIT_S)


def test_a_usual_answer_leaves_its_connection_open(session: Session) -> None:
    """Spans go every five seconds."""
    with talking() as talker, session:
        talker.num_parts = 0
        for _ in range(3):
            answer = session.post(talker.url, data=b"a", timeout=WAIT_S)
            assert answer.status_code == 200
        assert talker.num_connections == 1


@pytest.mark.parametrize("signal", ["", "TRACES_"])
def test_the_operators_own_session_stays(
    monkeypatch: pytest.MonkeyPatch, signal: str
) -> None:
    """It brings credentials."""
    name = f"OTEL_PYTHON_EXPORTER_OTLP_HTTP_{signal}CREDENTIAL_PROVIDER"
    monkeypatch.setenv(name, "mine")
    assert bounded_session() is None
