"""The worker's HTTP: its metrics, and whether it lives and serves; from a thread of its own."""

from __future__ import annotations

import socket
import threading
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
    """A thread for each request, which ends with the process."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: Any) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)


class _SilentHandler(WSGIRequestHandler):
    """Logs no request: there is one every few seconds."""

    timeout = 10.0  # of a client that sends or reads nothing: each has a thread

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
