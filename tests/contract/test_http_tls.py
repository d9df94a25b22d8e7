"""TLS of the HTTP listeners: who is let in, and certificates that change."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncGenerator
from pathlib import Path

import aiohttp
import pytest
import trustme

from support.awake import within
from support.certificates import Certificates
from support.stack import Stack, eventually, stack
from tokenwire.frontend import acceptor, app
from tokenwire.frontend.config import parse_config
from tokenwire.frontend.keys import Keys
from tokenwire.frontend.tls import Tls, TlsFiles
from tokenwire.protocol.files import UnusableFile

BODY = {"prompt": [5], "max_tokens": 3, "stream": True}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Files that no test changes: keys take time to make."""
    return Certificates(tmp_path_factory.mktemp("tls"))


async def asked(url: str, context: ssl.SSLContext) -> aiohttp.ClientResponse:
    """GET something, with a connection of its own."""
    connector = aiohttp.TCPConnector(ssl=context, force_close=True)
    async with (
        aiohttp.ClientSession(connector=connector) as client,
        client.get(f"{url}/v1/models") as answer,
    ):
        await answer.read()
        return answer


async def is_refused(url: str, context: ssl.SSLContext) -> bool:
    """Return whether no request comes through."""
    with contextlib.suppress(aiohttp.ClientError, ssl.SSLError, ConnectionError):
        await asked(url, context)
        return False
    return True


async def test_streams_and_answers_go_over_tls(
    tiny_model: Path, shared: Certificates
) -> None:
    """As they do in plain text; the admin plane has the same certificate."""
    context = shared.client()
    async with (
        stack(tiny_model, arguments=shared.arguments) as running,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as client,
    ):
        assert running.url.startswith("https://")
        url = f"{running.url}/v1/completions"
        async with client.post(url, json=BODY) as answer:
            assert (await answer.text()).endswith("data: [DONE]\n\n")
        async with client.post(url, json={**BODY, "stream": False}) as answer:
            assert (await answer.json())["usage"]["completion_tokens"] == 3
        async with client.get(f"{running.admin}/is_paused") as answer:
            assert await answer.json() == {"is_paused": False}
        async with running.client.get(f"{running.probes}/ready") as answer:
            assert answer.status == 200  # in plain text


async def test_plain_text_gets_no_answer(
    tiny_model: Path, shared: Certificates
) -> None:
    """A client that speaks no TLS is not spoken to; it is counted."""
    async with stack(tiny_model, arguments=shared.arguments) as running:
        host, port = running.url.removeprefix("https://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert not await reader.read()
        writer.close()
        async with running.client.get(f"{running.probes}/metrics") as answer:
            page = await answer.text()
        assert 'tokenwire_connections_refused_total{reason="tls"} 1.0' in page


def test_old_versions_are_not_spoken(shared: Certificates) -> None:
    """TLS 1.2 is the oldest."""
    context = Tls(TlsFiles(str(shared.cert), str(shared.key))).context()
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert context.verify_mode is ssl.CERT_NONE


async def test_a_handshake_has_its_bound(
    tiny_model: Path, shared: Certificates
) -> None:
    """Who connects and says nothing is closed."""
    arguments = (*shared.arguments, "--client-header-timeout-s", "0.2")
    async with stack(tiny_model, arguments=arguments) as running:
        host, port = running.url.removeprefix("https://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with within(20):
            with contextlib.suppress(ConnectionError):
                assert not await reader.read()
        writer.close()


async def test_handshakes_have_a_bound_of_their_own(
    tiny_model: Path, shared: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest makes room for who comes: each has a descriptor, as connections have."""
    monkeypatch.setattr(acceptor, "MIN_OPENING", 2)
    arguments = (*shared.arguments, "--max-connections", "4")
    async with stack(tiny_model, arguments=arguments) as running:
        host, port = running.url.removeprefix("https://").split(":")
        # All before the first is taken: none of them is looked at twice.
        sockets = [socket.create_connection((host, int(port))) for _ in range(8)]
        silent = [await asyncio.open_connection(sock=one) for one in sockets]
        async with within(15):  # the time of a handshake is 20 s
            for reader, _ in silent[:6]:
                with contextlib.suppress(ConnectionError):
                    assert not await reader.read()
        assert (await asked(running.url, shared.client())).status == 200
        for _, writer in silent:
            writer.close()


@pytest.mark.parametrize(("tls", "most"), [(False, 800), (True, 640)])
def test_connections_leave_descriptors_for_all_else(
    shared: Certificates, monkeypatch: pytest.MonkeyPatch, tls: bool, most: int
) -> None:
    """And for handshakes, where there are such."""
    monkeypatch.setattr(app, "num_files", lambda: app.OWN_FILES + 800)
    arguments = [*("--model", "m", "--worker", "tcp://127.0.0.1:1")]
    config = parse_config([*arguments, *(shared.arguments if tls else ())])
    assert app._limits(config).max_connections == most  # pyright: ignore[reportPrivateUsage]


async def test_clients_need_certificates_of_the_right_authority(
    tiny_model: Path, shared: Certificates
) -> None:
    """With one, served; without, or with another's, not; the admin plane may differ."""
    async with stack(tiny_model, arguments=shared.mutual) as running:
        for url in (running.url, running.admin):
            served = await asked(url, shared.client(shared.clients))
            assert served.status == 200
            assert await is_refused(url, shared.client())
            assert await is_refused(url, shared.client(trustme.CA()))
            assert await is_refused(url, shared.client(shared.authority))


async def test_the_admin_plane_may_ask_for_other_clients(
    tiny_model: Path, shared: Certificates, tmp_path: Path
) -> None:
    """Than the API does, or for some where that asks for none."""
    operators = trustme.CA()
    file = tmp_path / "operators.crt"
    file.write_bytes(operators.cert_pem.bytes())
    arguments = (*shared.arguments, "--admin-tls-client-ca", str(file))
    async with stack(tiny_model, arguments=arguments) as running:
        assert (await asked(running.url, shared.client())).status == 200
        assert await is_refused(running.admin, shared.client(shared.clients))
        served = await asked(running.admin, shared.client(operators))
        assert served.status == 200


@contextlib.asynccontextmanager
async def looked_at(
    model: Path, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[Stack]:
    """Run a stack that looks at its files for every connection."""
    monkeypatch.setattr("tokenwire.frontend.tls.LOOK_S", 0.0)
    async with stack(model, arguments=arguments) as running:
        yield running


async def test_certificates_are_read_again(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New connections get the new one, those that are there go on; a slip changes nothing."""
    files = Certificates(tmp_path)
    before = files.client()
    async with looked_at(tiny_model, files.arguments, monkeypatch) as running:
        connector = aiohttp.TCPConnector(ssl=before)
        async with aiohttp.ClientSession(connector=connector) as kept:
            async with kept.get(f"{running.url}/live") as answer:
                assert answer.status == 200
            files.cert.write_text("half a certi")
            assert (await asked(running.url, before)).status == 200
            files.issue(trustme.CA())
            assert (await asked(running.url, files.client())).status == 200
            assert await is_refused(running.url, before)
            async with kept.get(f"{running.url}/live") as answer:
                assert answer.status == 200


async def test_authorities_of_clients_are_read_again(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is taken off the list is out, also one who would take up an old session."""
    files = Certificates(tmp_path)
    out = files.client(files.clients)
    async with looked_at(tiny_model, files.mutual, monkeypatch) as running:
        assert (await asked(running.url, out)).status == 200
        files.trust(trustme.CA())
        assert await is_refused(running.url, out)
        assert (await asked(running.url, files.client(files.clients))).status == 200


async def test_a_slow_reader_is_held_back_over_tls(
    tiny_model: Path, shared: Certificates
) -> None:
    """Its tokens wait, and its request ends when it leaves."""
    async with stack(tiny_model, arguments=shared.arguments) as running:
        host, port = running.url.removeprefix("https://").split(":")
        reader, writer = await asyncio.open_connection(
            host,
            int(port),
            ssl=shared.client(),
            server_hostname="localhost",
            limit=1024,
        )
        ask = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
        writer.write(ask * 200)
        assert running.runner is not None
        stalled = running.runner.connections._stalled  # pyright: ignore[reportPrivateUsage]
        await eventually(lambda: bool(stalled))
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.transport.abort()
        await eventually(lambda: not stalled)


def test_files_that_are_none_stop_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Missing, of another pair, with a password, or without certificates."""
    files, others = Certificates(tmp_path), tmp_path / "others"
    others.mkdir()
    other = Certificates(others)
    cert, key = str(files.cert), str(files.key)
    for bad in (
        TlsFiles(cert, "/nowhere"),
        TlsFiles(cert, str(other.key)),
        TlsFiles(key, cert),
        TlsFiles(cert, key, client_ca=key),
    ):
        with pytest.raises(UnusableFile, match="TLS"):
            Tls(bad)
    assert not caplog.records


@pytest.mark.parametrize("is_apart", [True, False])
def test_a_key_that_all_may_read_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_apart: bool
) -> None:
    """Though two listeners have it, also with other authorities each."""
    files = Certificates(tmp_path)
    files.key.chmod(0o644)
    arguments = [
        *("--model", "m", "--worker", "tcp://127.0.0.1:1"),
        *("--tls-cert", str(files.cert), "--tls-key", str(files.key)),
        *(("--admin-tls-client-ca", str(files.client_ca)) if is_apart else ()),
    ]
    with caplog.at_level(logging.WARNING):
        keys = Keys.read(parse_config(arguments))
    assert caplog.text.count("can be read by every user") == 1
    assert (keys.tls is keys.admin_tls) != is_apart
