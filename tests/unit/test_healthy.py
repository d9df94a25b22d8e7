"""``tokenwire-healthy``."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tokenwire.deploy.healthy import main


class Handler(BaseHTTPRequestHandler):
    """Answers with the status in the path."""

    def do_GET(self) -> None:  # noqa: D102 - http.server's name
        self.send_response(int(self.path[1:]))
        self.end_headers()
        self.wfile.write(b"why")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002, D102
        pass


@pytest.fixture
def url() -> Iterator[str]:
    """Where it serves."""
    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize(("status", "code"), [(200, 0), (404, 1), (503, 1)])
def test_the_exit_code_says_how_it_is(
    url: str, status: int, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the line why, which `docker inspect` shows."""
    assert main([f"{url}/{status}"]) == code
    assert capsys.readouterr().out == f"{status} why\n"


def test_nobody_there_is_not_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    """Port 1 is nobody's."""
    assert main(["http://127.0.0.1:1/ready"]) == 1
    assert "refused" in capsys.readouterr().err


@pytest.mark.parametrize("given", [[], ["a", "b"], ["https://host/"]])
def test_what_is_no_url_is_said(given: list[str]) -> None:
    """A check that cannot succeed is not to look like a process that is ill."""
    assert main(given) == 2
