"""The frontend's settings, its routing, and where workers are found."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from support.awake import within
from tokenwire.frontend import discovery
from tokenwire.frontend.config import parse_config
from tokenwire.frontend.connections import ConnectionLimits
from tokenwire.frontend.discovery import discover, parse_workers_file
from tokenwire.frontend.metrics import FastHistogram, Metrics
from tokenwire.frontend.resume_settings import ResumeSettings
from tokenwire.frontend.routing import Policy
from tokenwire.frontend.routing_settings import RoutingSettings
from tokenwire.frontend.tls import TlsFiles

MINIMAL = ["--model", "m", "--worker", "tcp://127.0.0.1:1"]


def test_defaults_are_loopback() -> None:
    """Nothing listens beyond this machine unless asked to."""
    config = parse_config(MINIMAL)

    assert (config.host, config.port) == ("127.0.0.1", 8000)
    assert config.served_model_name == "m"


def test_checkpoints_are_not_signed_by_default() -> None:
    """A key is the operator's to make; a checkpoint holds for a day without it, too."""
    config = parse_config([*MINIMAL, "--checkpoint-life-s", "60"])

    assert parse_config(MINIMAL).resume == ResumeSettings(None, 86_400.0)
    assert config.resume == ResumeSettings(None, 60.0)


def test_the_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option is also a variable, a repeatable one a list."""
    monkeypatch.setenv("TOKENWIRE_WORKER", "tcp://a:1,tcp://b:2")
    monkeypatch.setenv("TOKENWIRE_MODEL", "m")

    assert parse_config([]).workers == ("tcp://a:1", "tcp://b:2")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--model", "m"],
        [*MINIMAL, "--workers-file", "x"],
        [*MINIMAL, "--port", "70000"],
        [*MINIMAL, "--port", "-1"],
        [*MINIMAL, "--max-body-bytes", "0"],
        [*MINIMAL, "--client-write-timeout-s", "nan"],
        ["--model", "m", "--worker", "127.0.0.1:1"],
        ["--model", "m", "--workers-dns", "name"],
        [*MINIMAL, "--curve-secret-key", "s"],
        [*MINIMAL, "--curve-worker-keys", "w"],
        [*MINIMAL, "--admin-port", "0", "--admin-host", "10.0.0.1"],
        [*MINIMAL, "--admin-port", "0", "--admin-host", "trainer"],
        [*MINIMAL, "--admin-port", "x"],
        [*MINIMAL, "--during-update", "maybe"],
        [*MINIMAL, "--while-paused", "maybe"],
        [*MINIMAL, "--checkpoint-life-s", "-1"],
    ],
)
def test_a_bad_setting_is_one_sentence(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and one line on stderr."""
    with pytest.raises(SystemExit) as caught:
        parse_config(arguments)

    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.pitfall(38)
def test_the_admin_plane_is_off_and_beyond_loopback_needs_a_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A file with it, or the variable that holds it."""
    monkeypatch.delenv("TOKENWIRE_ADMIN_KEY", raising=False)
    config = parse_config(MINIMAL)
    assert (config.admin.host, config.admin.port) == ("127.0.0.1", None)
    assert not config.admin.allow_collective_rpc
    assert not config.refuse_while_paused
    beyond = [*MINIMAL, "--admin-port", "0", "--admin-host", "10.0.0.1"]
    assert parse_config([*beyond, "--admin-key-file", "f"]).admin.key_file == "f"
    monkeypatch.setenv("TOKENWIRE_ADMIN_KEY", "secret")
    assert parse_config(beyond).admin.host == "10.0.0.1"


def test_routing_has_checked_weights(capsys: pytest.CaptureFixture[str]) -> None:
    """By what is cached unless told otherwise; what is out of range is named."""
    assert parse_config(MINIMAL).routing == RoutingSettings()
    given = ["--routing", "load", "--routing-queue-weight", "0.5"]
    given += ["--routing-sequence-tokens", "0", "--kv-index-blocks", "9"]
    routing = parse_config([*MINIMAL, *given]).routing
    assert (routing.policy, routing.max_index_blocks) == (Policy.LOAD, 9)
    assert (routing.weights.queue, routing.weights.sequence_tokens) == (0.5, 0)
    for option, value in (
        ("--routing", "random"),
        ("--routing-queue-weight", "-1"),
        ("--routing-queue-weight", "nan"),
        ("--routing-queue-weight", "1001"),
        ("--routing-session-tokens", "-1"),
        ("--kv-index-blocks", "0"),
    ):
        with pytest.raises(SystemExit):
            parse_config([*MINIMAL, f"{option}={value}"])
        assert option in capsys.readouterr().err


def test_a_workers_file() -> None:
    """Endpoints in order; extra keys are ignored; nonsense names its field."""
    data = b'{"workers":[{"endpoint":"tcp://a:1","worker_id":"x"}],"more":1}'

    assert parse_workers_file(data) == ["tcp://a:1"]
    for bad in (b"{}", b"[", b'{"workers":[{"endpoint":7}]}', b"\xff"):
        with pytest.raises(ValueError, match=r".+"):
            parse_workers_file(bad)
    with pytest.raises(ValueError, match="not an endpoint"):
        parse_workers_file(b'{"workers":[{"endpoint":"http://a"}]}')


async def test_a_watched_file_is_followed_and_never_emptied_by_accident(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes are reported; a broken or missing file keeps what was known."""
    monkeypatch.setattr(discovery, "FILE_POLL_S", 0.001)
    file = tmp_path / "workers.json"
    reports: asyncio.Queue[list[str]] = asyncio.Queue()
    config = parse_config(["--model", "m", "--workers-file", str(file)])
    task = asyncio.create_task(discover(config, reports.put_nowait))
    try:
        for content, expected in (
            ('{"workers":[{"endpoint":"tcp://a:1"}]}', ["tcp://a:1"]),
            ('{"workers":[', None),
            ('{"workers":[{"endpoint":"tcp://b:22"}]}', ["tcp://b:22"]),
        ):
            file.write_text(content)
            if expected is not None:
                async with within(60):
                    assert await reports.get() == expected
        assert reports.empty()
    finally:
        task.cancel()


async def test_a_name_is_resolved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name's addresses are the workers; a change of them is reported."""
    monkeypatch.setattr(discovery, "DNS_POLL_S", 0.001)
    answers = [["10.0.0.2", "10.0.0.1"], ["10.0.0.2", "10.0.0.1"], ["10.0.0.3", "::1"]]
    loop = asyncio.get_running_loop()

    async def resolve(name: str, port: int, **_: object) -> list[tuple[object, ...]]:
        assert name == "workers"
        addresses = answers.pop(0) if len(answers) > 1 else answers[0]
        return [(0, 0, 0, "", (address, port)) for address in addresses]

    monkeypatch.setattr(loop, "getaddrinfo", resolve, raising=False)
    reports: asyncio.Queue[list[str]] = asyncio.Queue()
    config = parse_config(["--model", "m", "--workers-dns", "workers:5"])
    task = asyncio.create_task(discover(config, reports.put_nowait))
    try:
        async with within(60):
            first, second = await reports.get(), await reports.get()
    finally:
        task.cancel()

    assert first == ["tcp://10.0.0.1:5", "tcp://10.0.0.2:5"]
    assert second == ["tcp://10.0.0.3:5", "tcp://[::1]:5"]


def test_histograms_are_cumulative() -> None:
    """A bound counts what is at most as large, as Prometheus wants it."""
    histogram = FastHistogram([1.0, 2.0])
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)

    assert histogram.buckets() == [("1.0", 2), ("2.0", 3), ("+Inf", 4)]
    assert histogram.total == 12.0


def test_the_exposition_names_what_vllm_names() -> None:
    """One dashboard serves both."""
    page = Metrics().exposition().decode()

    for name in (
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
    ):
        assert f"tokenwire_{name}_bucket" in page


def test_who_may_speak_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    """By default everyone who reaches it, in plain text; halves of options are refused."""
    access = parse_config(MINIMAL).access
    assert (access.api_keys, access.tls, access.metrics_listen) == (None, None, None)
    assert access.cors_origins == ()
    assert access.limits == ConnectionLimits()
    given = ["--tls-cert", "c", "--tls-key", "k", "--tls-client-ca", "a"]
    given += ["--metrics-listen", "[::1]:9400", "--cors-origin", "https://a.b"]
    access = parse_config([*MINIMAL, *given, "--cors-origin", "https://c.d"]).access
    assert access.tls == access.admin_tls == TlsFiles("c", "k", "a")
    assert access.metrics_listen == ("::1", 9400)
    assert access.cors_origins == ("https://a.b", "https://c.d")
    given += ["--admin-tls-client-ca", "o", "--client-write-timeout-s", "5"]
    access = parse_config([*MINIMAL, *given]).access
    assert access.admin_tls == TlsFiles("c", "k", "o")
    assert access.limits.write_timeout_s == 5
    for bad, says in (
        (["--tls-cert", "c"], "give both --tls-cert and --tls-key"),
        (["--tls-client-ca", "a"], "need --tls-cert and --tls-key"),
        (["--cors-origin", "*"], "is not an origin"),
        (["--metrics-listen", "9400"], "is not HOST:PORT"),
        (["--max-header-bytes", "10"], "from 1024 up"),
        (["--max-connections", "0"], "from 1 up"),
    ):
        with pytest.raises(SystemExit):
            parse_config([*MINIMAL, *bad])
        assert says in capsys.readouterr().err
