"""The worker's settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenwire.protocol.messages import Role
from tokenwire.worker.config import parse_config

LEAST = ["--role", "prefill", "--model", "m"]


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROLE", "MODEL", "ENGINE", "LISTEN", "METRICS_PORT", "ENGINE_ARGS"):
        monkeypatch.delenv(f"TOKENWIRE_{name}", raising=False)


def test_the_least_that_must_be_said() -> None:
    """A role and a model; all else has a default, loopback among them."""
    config = parse_config(LEAST)
    assert (config.engine, config.role, config.model) == ("vllm", Role.PREFILL, "m")
    assert config.served_model_name == "m"
    assert config.listen == "tcp://127.0.0.1:0"
    assert config.metrics_port is None
    assert config.announce == ""
    assert config.worker_id.startswith("prefill-")
    assert config.engine_args == ()
    assert config.exact_resume
    assert config.kv_events
    assert (config.journal_bytes, config.journal_life_s) == (256 << 20, 600.0)


def test_what_stands_behind_the_dashes_is_the_engine_s() -> None:
    """Untouched, a second pair of dashes included."""
    config = parse_config([*LEAST, "--", "--role", "x", "--", "--model"])
    assert config.engine_args == ("--role", "x", "--", "--model")
    assert config.role is Role.PREFILL


def test_the_engine_s_arguments_can_come_in_one_string(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that a variable can hold them; those on the command line follow."""
    monkeypatch.setenv("TOKENWIRE_ENGINE_ARGS", "--a 'b c'")
    assert parse_config([*LEAST, "--", "--d"]).engine_args == ("--a", "b c", "--d")


def test_variables_serve_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line wins."""
    monkeypatch.setenv("TOKENWIRE_ROLE", "decode")
    monkeypatch.setenv("TOKENWIRE_MODEL", "from-environment")
    monkeypatch.setenv("TOKENWIRE_METRICS_PORT", "0")
    config = parse_config(["--model", "given"])
    assert (config.role, config.model) == (Role.DECODE, "given")
    assert config.metrics_port == 0


def test_every_value_has_its_place() -> None:
    """As given."""
    config = parse_config(
        [
            *LEAST, "--engine=sim", "--served-model-name=n", "--listen=ipc:///tmp/x",
            "--announce=f", "--worker-id=w", "--metrics-host=127.0.0.2",
            "--metrics-port=9", "--max-requests=3", "--max-queued-tokens=4",
            "--heartbeat-interval-s=0.5", "--heartbeat-timeout-s=2",
            "--shutdown-timeout-s=0", "--no-exact-resume", "--no-kv-events", "--journal-bytes=0",
            "--journal-life-s=7",
        ]
    )  # fmt: skip
    assert (config.engine, config.served_model_name) == ("sim", "n")
    assert (config.listen, config.announce) == ("ipc:///tmp/x", "f")
    assert (config.worker_id, config.metrics_host) == ("w", "127.0.0.2")
    assert (config.metrics_port, config.max_requests) == (9, 3)
    assert config.max_queued_tokens == 4
    assert (config.heartbeat_interval_s, config.heartbeat_timeout_s) == (0.5, 2.0)
    assert config.shutdown_timeout_s == 0.0
    assert not config.exact_resume
    assert not config.kv_events
    assert (config.journal_bytes, config.journal_life_s) == (0, 7.0)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--role", "prefill"],
        ["--role", "both", "--model", "m"],
        ["--role", "prefill", "--model", ""],
        [*LEAST, "--engine", "x"],
        [*LEAST, "--listen", "127.0.0.1:5"],
        [*LEAST, "--listen", "ipc://" + "x" * 108],
        [*LEAST, "--metrics-port", "65536"],
        [*LEAST, "--metrics-port", "on"],
        [*LEAST, "--max-requests", "0"],
        [*LEAST, "--heartbeat-timeout-s", "x"],
        [*LEAST, "--heartbeat-timeout-s", "1"],
        [*LEAST, "--shutdown-timeout-s", "inf"],
        [*LEAST, "--engine-args", "'"],
        [*LEAST, "--journal-bytes", "-1"],
        [*LEAST, "--journal-life-s", "0"],
        [*LEAST, "--mod", "m"],
        [*LEAST, "stray"],
    ],
)
def test_a_bad_value_is_one_sentence_and_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """On stderr, with the command's name."""
    with pytest.raises(SystemExit) as stopped:
        parse_config(arguments)
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("tokenwire-worker: ")
    assert said.count("\n") == 1


def test_help_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    """Every option with its variable."""
    with pytest.raises(SystemExit) as stopped:
        parse_config(["--help"])
    assert stopped.value.code == 0
    said = capsys.readouterr().out
    for name in (
        "ENGINE",
        "ROLE",
        "LISTEN",
        "ANNOUNCE",
        "METRICS_PORT",
        "MAX_REQUESTS",
    ):
        assert f"[TOKENWIRE_{name}]" in said


KEYS = ["--curve-secret-key", "s", "--curve-allowed-keys", "a"]


@pytest.mark.parametrize(
    "listen", ["tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://10.1.2.3:5555"]
)
def test_beyond_this_machine_only_with_keys(
    listen: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or when told to; a worker that anyone could use does not start."""
    with pytest.raises(SystemExit) as end:
        parse_config([*LEAST, "--listen", listen])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert f"--listen {listen} without keys would let everyone" in error
    assert error.count("\n") == 1

    assert parse_config([*LEAST, "--listen", listen, *KEYS]).keys.peer_keys == "a"
    told = parse_config([*LEAST, "--listen", listen, "--insecure-plaintext"])
    assert told.keys.is_plaintext


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (KEYS[:2], "give both --curve-secret-key and --curve-allowed-keys"),
        (KEYS[2:], "give both --curve-secret-key and --curve-allowed-keys"),
        ([*KEYS, "--insecure-plaintext"], "--insecure-plaintext contradicts"),
    ],
)
def test_half_a_pair_of_keys_is_refused(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would be plain text where the operator thinks that it is not."""
    with pytest.raises(SystemExit):
        parse_config([*LEAST, *options])
    assert words in capsys.readouterr().err


CAPTURE = ["--capture-hidden-states", "/d", "--capture-layers", "2,15,30"]


def test_hidden_states_are_saved_where_the_operator_says() -> None:
    """With layers, mode, group, age and size; the defaults are for one group."""
    assert parse_config(LEAST).capture is None
    capture = parse_config([*LEAST, *CAPTURE]).capture
    assert capture is not None
    assert (capture.folder, capture.layers) == ("/d", (2, 15, 30))
    assert (capture.access.mode, capture.access.group) == (0o660, None)
    assert (capture.ttl_s, capture.max_bytes) == (600.0, 64 << 30)

    capture = parse_config(
        [
            *LEAST, *CAPTURE, "--capture-file-mode=0640", "--capture-file-group=0",
            "--capture-ttl-s=5", "--capture-max-bytes=1000",
        ]
    ).capture  # fmt: skip
    assert capture is not None
    assert (capture.access.mode, capture.access.group) == (0o640, 0)
    assert (capture.ttl_s, capture.max_bytes) == (5.0, 1000)


def test_a_relative_folder_is_made_absolute(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Clients run elsewhere."""
    monkeypatch.chdir(tmp_path)
    capture = parse_config(
        [*LEAST, "--capture-hidden-states=x", CAPTURE[2], "1"]
    ).capture
    assert capture is not None
    assert capture.folder == str(tmp_path / "x")


def test_a_decode_worker_keeps_the_layers_alone() -> None:
    """With the folder, which `tokenwire-up` gives to all, or without."""
    decode = ["--role", "decode", "--model", "m"]
    for arguments in (CAPTURE, CAPTURE[2:]):
        capture = parse_config([*decode, *arguments]).capture
        assert capture is not None
        assert (capture.folder, capture.layers) == ("", (2, 15, 30))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (CAPTURE[:2], "--capture-hidden-states needs --capture-layers"),
        (CAPTURE[2:], "--capture-layers needs --capture-hidden-states"),
        ([*CAPTURE[:3], "2,x"], "no list of layers like"),
        ([*CAPTURE[:3], ""], "no list of layers like"),
        ([*CAPTURE[:3], "-1"], "no list of layers like"),
        ([*CAPTURE[:3], "15,2"], "not in ascending order, each layer once"),
        ([*CAPTURE[:3], "2,2"], "not in ascending order, each layer once"),
        ([*CAPTURE, "--capture-file-mode=0444"], "no octal mode"),
        ([*CAPTURE, "--capture-file-mode=0o9"], "no octal mode"),
        ([*CAPTURE, "--capture-file-mode=4660"], "no octal mode"),
        ([*CAPTURE, "--capture-file-group=no-such-group"], "there is no group"),
        ([*CAPTURE, "--capture-ttl-s=0"], "not a number of seconds above 0"),
        ([*CAPTURE, "--capture-max-bytes=0"], "not a whole number from 1 up"),
    ],
)
def test_a_bad_capture_option_is_one_sentence(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2."""
    with pytest.raises(SystemExit) as caught:
        parse_config([*LEAST, *arguments])
    assert caught.value.code == 2
    assert words in capsys.readouterr().err
