"""Names by which a frontend without keys is asked: a page's own never reaches it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from support.keyed import Keyed, with_key
from support.stack import Reply, Stack, frontend
from tokenwire.frontend.config import parse_config
from tokenwire.frontend.hosts import hosts_for

OURS = (
    "localhost",
    "LOCALHOST:8000",
    "localhost.:8000",
    "tokenwire.localhost:8000",
    "127.0.0.1:8000",
    "10.1.2.3:8000",
    "[::1]:8000",
    "[::1]",
    "box.example.com",
    "Box.Example.com:443",
)
THEIRS = (
    "evil.example.com",
    "evil.example.com:8000",
    "localhost.evil.com",
    "notlocalhost",
    "127.0.0.1.evil.com",
    "127.0.0.1@evil.com",
    "[evil.com]",
    "[::1].evil.com]",
    "sub.box.example.com",
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def open_one(tiny_model: Path) -> AsyncIterator[Stack]:
    """A frontend on loopback without keys, which has a name."""
    arguments = ("--allowed-host", "box.example.com", "--metrics-listen", "127.0.0.1:1")
    async with frontend(tiny_model, arguments) as served:
        yield served


async def asked(served: Stack, url: str, host: str, method: str = "GET") -> Reply:
    """Ask as a browser does for a page at *host*."""
    async with served.client.request(method, url, headers={"Host": host}) as answer:
        return Reply(answer.status, answer.headers, await answer.text())


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("host", THEIRS)
async def test_a_page_whose_name_points_here_gets_nothing(
    open_one: Stack, host: str
) -> None:
    """No route of any listener, also none that is not there, and no preflight."""
    for url in (
        f"{open_one.url}/v1/models",
        f"{open_one.url}/ui",
        f"{open_one.url}/nothing",
        f"{open_one.admin}/weight_version",
        f"{open_one.admin}/v1/models",
        f"{open_one.probes}/metrics",
    ):
        for method in ("GET", "POST", "OPTIONS"):
            reply = await asked(open_one, url, host, method)
            assert (reply.status, reply.error["code"]) == (403, "host_not_allowed")
            assert "--allowed-host" in reply.error["message"]
    page = await open_one.get("/metrics")
    assert 'code="host_not_allowed"' in page.text


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("host", OURS)
async def test_names_of_this_machine_are_answered(open_one: Stack, host: str) -> None:
    """By any case, with a port and without; addresses are nobody's to point elsewhere."""
    assert (await asked(open_one, f"{open_one.url}/v1/models", host)).status == 200
    assert (await asked(open_one, f"{open_one.admin}/v1/models", host)).status == 200
    assert (await asked(open_one, f"{open_one.probes}/live", host)).status == 200


async def test_with_keys_any_name_is_answered(tiny_model: Path, tmp_path: Path) -> None:
    """A page has none, so it gets a 401; who has one may call us what he likes."""
    arguments = Keyed(tmp_path / "keys", ["a"]).arguments
    async with frontend(tiny_model, arguments) as served:
        url = f"{served.url}/v1/models"
        assert (await asked(served, url, THEIRS[0])).status == 401
        headers = {"Host": THEIRS[0], **with_key("key-of-a")}
        async with served.client.get(url, headers=headers) as answer:
            assert answer.status == 200
        assert (await asked(served, f"{served.url}/live", THEIRS[0])).status == 200


@pytest.mark.parametrize("host", ["192.168.0.1", "::", "10.1.2.3", "a.example"])
def test_beyond_loopback_nothing_is_asked(host: str) -> None:
    """Whoever reaches it there may use it; probes and proxies have names of their own."""
    assert hosts_for(host, ()) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.0.1"])
def test_on_loopback_it_is(host: str) -> None:
    """Unless the operator allows all names."""
    assert hosts_for(host, ("a",)) is not None
    assert hosts_for(host, ("a", "*")) is None


@pytest.mark.parametrize("name", ["http://a", "a:80", "a/b", "*.a", ""])
def test_what_is_no_name_is_refused(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would allow nobody, in silence."""
    with pytest.raises(SystemExit):
        parse_config(
            ["--model", "m", "--worker", "tcp://a:1", f"--allowed-host={name}"]
        )
    assert "is not a name like" in capsys.readouterr().err
