"""The worker's HTTP: its metrics, and whether it lives and serves; from a thread of its own.

Laws:
- Connections are bounded, in number and in time: each takes a thread and a descriptor, and
  without these the engine beside it cannot go on.
- Whoever fills all places keeps no probe out: the oldest makes room for the next.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from .health import Health
from .metrics import metrics_application

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

__all__ = ["MetricsServer", "serve_metrics"]

_log = logging.getLogger(__name__)

MAX_CONNECTIONS = 16
"""Probes and scrapes come one at a time, each for some milliseconds. Headers may take 6.5 MB
of each (the standard library's own bound)."""

MAX_S = 10.0
"""Of a connection, however often a byte comes or is read: as long as Prometheus waits."""

PAUSE_S = 0.1
"""After an error of the system's, as where there are no descriptors: the connection that
waits would else be asked for again at once, by a thread that does nothing else."""


@dataclass(slots=True, frozen=True)
class MetricsServer:
    """A running exposition over HTTP."""

    host: str
    port: int
    close: Callable[[], None]

    @property
    def url(self) -> str:
        """Where to scrape."""
        return f"http://{self.host}:{self.port}/metrics"


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each request, which ends with the process; not more than so many."""

    daemon_threads = True
    request_queue_size = 4 * MAX_CONNECTIONS

    def __init__(self, address: tuple[str, int], handler: Any) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self._since: dict[socket.socket, float] = {}  # the oldest first
        self._room = threading.Condition()
        super().__init__(address, handler)

    def get_request(self) -> tuple[Any, Any]:
        """Return the next connection and its address."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(PAUSE_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in its thread, when there is a place for it."""
        with self._room:
            while len(self._since) >= MAX_CONNECTIONS:
                _cut(next(iter(self._since)))
                self._room.wait(PAUSE_S)  # its thread may have something to end
            self._since[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, whose thread is about to end."""
        with self._room:
            self._since.pop(request, None)
            self._room.notify()
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Cut off who has taken too long; called twice a second."""
        late = time.monotonic() - MAX_S
        with self._room:
            for request, since in self._since.items():
                if since > late:
                    break  # those behind it came later
                _cut(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Note that a connection ended with an error: mostly its client's."""
        del request
        _log.debug("no answer for %s", client_address, exc_info=True)


def _cut(request: socket.socket) -> None:
    """Have whoever reads from a connection, or writes to it, stop at once."""
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class _SilentHandler(WSGIRequestHandler):
    """Logs no request: there is one every few seconds."""

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name there
        """Log nothing."""


def serve_metrics(host: str, port: int, health: Health) -> MetricsServer:
    """Serve the default registry and *health* from a daemon thread; 0 is any free port.

    Raises:
        OSError: The address cannot be bound.
    """
    metrics = metrics_application()

    def application(
        environ: WSGIEnvironment, start_response: StartResponse
    ) -> Iterable[bytes]:
        probed = health.answer(environ.get("PATH_INFO", ""))
        if probed is None:
            return metrics(environ, start_response)
        status, text = probed
        headers = [("Content-Type", "text/plain; charset=utf-8")]
        start_response(f"{status.value} {status.phrase}", headers)
        return [f"{text}\n".encode()]

    server = make_server(host, port, application, _Server, _SilentHandler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return MetricsServer(host, server.server_port, close)
