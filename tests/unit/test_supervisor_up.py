"""The command line of ``tokenwire-up``: what it refuses, and how."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from tokenwire.deploy import up
from tokenwire.deploy.probe import PortUnusable, browsable, http_status, usable_port


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "x"], "'x' is not a number"),
        (["--port", "70000"], "70000 is not within 0..65535"),
        (["--decode", "-1"], "-1 is not within 0..64"),
        (["--start-timeout-s", "nan"], "nan is not within"),
        (["--engine", "trt"], "invalid choice"),
        (["--pre", "1"], "unrecognized arguments"),
        (
            ["--model", "m", "--decode", "0", "--prefill", "1"],
            "--decode or --aggregated must be",
        ),
        (["--model", "m", "--frontends", "0"], "--frontends must be"),
        (
            ["--model", "/no/such/model"],
            "argument --model: there is no folder /no/such",
        ),
        (["--model", "./none"], "argument --model: there is no folder ./none"),
        ([], "--model is required: no demo model is built in"),
    ],
)
def test_a_bad_value_is_one_sentence_and_exit_code_2(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A wrong setting starts nothing; one line says which, and exit code 2."""
    monkeypatch.setenv("TOKENWIRE_CACHE", str(tmp_path))
    monkeypatch.setenv("TOKENWIRE_PORT", "0")
    with pytest.raises(SystemExit) as end:
        up.main(arguments)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("tokenwire-up: ")
    assert error.count("\n") == 1


def test_a_taken_port_is_one_sentence_and_exit_code_1() -> None:
    """A port in use is refused before any engine loads."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(SystemExit) as end:
            up.main(["--model", "m", "--port", str(port)])
    assert end.value.code == (
        f"tokenwire-up: port {port} on 127.0.0.1 is already in use: "
        "choose another with --port"
    )


def test_a_folder_of_logs_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    """It names the option, before anything is started."""
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "logs"
    arguments = ["--model", "m", "--engine", "sim", "--port", "0"]
    with pytest.raises(SystemExit) as end:
        up.main([*arguments, "--log-dir", str(folder)])
    assert end.value.code == f"tokenwire-up: --log-dir {folder}: Not a directory"


def test_help_names_every_variable(capsys: pytest.CaptureFixture[str]) -> None:
    """Each option's variable stands in ``--help``."""
    with pytest.raises(SystemExit) as end:
        up.main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    options = {word.strip("[],") for word in text.split() if word.startswith("--")}
    for option in options - {"--", "--help"}:
        assert "[TOKENWIRE_" + option[2:].upper().replace("-", "_") + "]" in text


def test_a_free_port_is_found() -> None:
    """Port 0 gives a port that can be listened on."""
    port = usable_port("127.0.0.1", 0)
    socket.create_server(("127.0.0.1", port)).close()


def test_a_foreign_address_is_refused() -> None:
    """An address of another machine is named as unusable."""
    with pytest.raises(PortUnusable, match=r"cannot listen on 192\.0\.2\.1"):
        usable_port("192.0.2.1", 0)


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("0.0.0.0", "127.0.0.1"),  # noqa: S104 - not bound
        ("::", "[::1]"),
        ("::1", "[::1]"),
        ("gpu-1", "gpu-1"),
    ],
)
def test_browsable(host: str, shown: str) -> None:
    """A URL for a wildcard address names the loopback; IPv6 is bracketed."""
    assert browsable(host) == shown


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (b"HTTP/1.1 503 No\r\n\r\n", 503),
        (b"what?\r\n", 0),
        (b"x" * 100_000, 0),
        (b"", 0),
    ],
)
async def test_http_status(answer: bytes, status: int) -> None:
    """The status is read; anything that is not HTTP counts as no answer."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert await http_status("127.0.0.1", port, "/ready") == status


async def test_http_status_of_a_closed_port() -> None:
    """Nobody listens: no answer."""
    assert await http_status("127.0.0.1", usable_port("127.0.0.1", 0), "/") == 0
