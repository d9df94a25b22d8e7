"""Options from the command line and the environment."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import pytest

from tokenwire.protocol.settings import (
    SettingsParser,
    port,
    port_or_off,
    seconds,
    truth,
    whole_number,
)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the tests' own surroundings away: they may set variables of ours."""
    for name in list(os.environ):
        if name.startswith("TOKENWIRE_"):
            monkeypatch.delenv(name)


@pytest.fixture
def parser() -> SettingsParser:
    """Give a parser with an option of every kind."""
    parser = SettingsParser(prog="tw")
    parser.add_argument("--port", type=int, default=8000, help="port")
    parser.add_argument("--model", required=True, help="100%% a model")
    parser.add_argument("--role", choices=["prefill", "decode"], help="role")
    parser.add_argument("--reuse-port", action="store_true", help="share")
    parser.add_argument(
        "--cache", action=argparse.BooleanOptionalAction, default=True, help="cache"
    )
    parser.add_argument("--version", action="version", version="tw 1.2.3")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--worker", action="append", help="workers")
    group.add_argument("--workers-file", help="file")
    return parser


def refused(
    parser: SettingsParser, capsys: pytest.CaptureFixture[str], *arguments: str
) -> str:
    """Return the one sentence with which *arguments* are refused."""
    with pytest.raises(SystemExit) as end:
        parser.parse_settings(arguments)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_defaults(parser: SettingsParser) -> None:
    """Without a word from anywhere the defaults hold."""
    settings = parser.parse_settings(["--model", "m"])
    assert (settings.port, settings.reuse_port, settings.cache) == (8000, False, True)


def test_every_kind_of_option_reads_its_variable(
    parser: SettingsParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values, switches, their opposites and lists, also a required option."""
    monkeypatch.setenv("TOKENWIRE_MODEL", "m=1 -x")
    monkeypatch.setenv("TOKENWIRE_PORT", "7")
    monkeypatch.setenv("TOKENWIRE_ROLE", "decode")
    monkeypatch.setenv("TOKENWIRE_REUSE_PORT", "Yes")
    monkeypatch.setenv("TOKENWIRE_CACHE", "off")
    monkeypatch.setenv("TOKENWIRE_WORKER", "tcp://a:1, tcp://b:2,")
    settings = parser.parse_settings([])
    assert vars(settings) == {
        "model": "m=1 -x",
        "port": 7,
        "role": "decode",
        "reuse_port": True,
        "cache": False,
        "worker": ["tcp://a:1", "tcp://b:2"],
        "workers_file": None,
    }


def test_an_empty_variable_is_no_variable(
    parser: SettingsParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compose files pass unset variables on as empty ones."""
    monkeypatch.setenv("TOKENWIRE_PORT", "")
    assert parser.parse_settings(["--model=m"]).port == 8000


@pytest.mark.parametrize(
    "arguments", [["--port", "9"], ["--port=9"], ["--port", "8", "--port", "9"]]
)
def test_the_command_line_wins(
    parser: SettingsParser, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    """A variable does not matter, right or wrong, where the option is given."""
    monkeypatch.setenv("TOKENWIRE_PORT", "wrong")
    assert parser.parse_settings(["--model=m", *arguments]).port == 9


def test_the_command_line_replaces_a_list(
    parser: SettingsParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers given by hand are not added to those of the environment."""
    monkeypatch.setenv("TOKENWIRE_WORKER", "tcp://a:1")
    settings = parser.parse_settings(["--model=m", "--worker", "tcp://b:2"])
    assert settings.worker == ["tcp://b:2"]


def test_the_command_line_wins_over_what_it_excludes(
    parser: SettingsParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option that excludes another one also silences that one's variable."""
    monkeypatch.setenv("TOKENWIRE_WORKER", "tcp://a:1")
    settings = parser.parse_settings(["--model=m", "--workers-file", "f"])
    assert (settings.worker, settings.workers_file) == (None, "f")


@pytest.mark.parametrize(
    ("variable", "value"),
    [("PORT", "x"), ("ROLE", "x"), ("REUSE_PORT", "perhaps"), ("CACHE", "2")],
)
def test_a_bad_variable_is_named(
    parser: SettingsParser,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variable: str,
    value: str,
) -> None:
    """The sentence names the variable that holds the bad value, and exit code is 2."""
    monkeypatch.setenv(f"TOKENWIRE_{variable}", value)
    error = refused(parser, capsys, "--model=m")
    assert error.startswith(f"tw: TOKENWIRE_{variable}: ")
    assert repr(value) in error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model=m", "--port", "x"], "argument --port: invalid int value: 'x'"),
        (["--model=m", "--role", "x"], "argument --role: invalid choice: 'x'"),
        (["--model=m", "--colour", "x"], "unrecognized arguments: --colour x"),
        (["--model=m", "--por", "1"], "unrecognized arguments: --por 1"),
        ([], "the following arguments are required: --model"),
        (["--model=m", "--worker=a", "--workers-file=b"], "not allowed with"),
    ],
)
def test_a_bad_argument_is_one_sentence(
    parser: SettingsParser,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    """Wrong, unknown, abbreviated, missing and excluded options exit with 2."""
    assert words in refused(parser, capsys, *arguments)


def test_a_value_that_looks_like_an_option_does_not_silence_it(
    parser: SettingsParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows ``--`` belongs to somebody else."""
    parser.add_argument("rest", nargs="*")
    monkeypatch.setenv("TOKENWIRE_PORT", "7")
    settings = parser.parse_settings(["--model=m", "--", "--port", "9"])
    assert (settings.port, settings.rest) == (7, ["--port", "9"])


def test_version_is_not_a_switch(
    parser: SettingsParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TOKENWIRE_VERSION and TOKENWIRE_HELP belong to images and charts."""
    monkeypatch.setenv("TOKENWIRE_VERSION", "0.1.0")
    monkeypatch.setenv("TOKENWIRE_HELP", "true")
    assert parser.parse_settings(["--model=m"]).port == 8000


def test_help_names_the_variables(parser: SettingsParser) -> None:
    """Every option names its variable, those in groups too."""
    text = " ".join(parser.format_help().split())
    for name in ("PORT", "MODEL", "REUSE_PORT", "CACHE", "WORKER", "WORKERS_FILE"):
        assert f"[TOKENWIRE_{name}]" in text
    assert "100% a model" in text
    assert "TOKENWIRE_VERSION" not in text


@pytest.mark.parametrize("value", ["1", "true", "TRUE", " yes ", "on"])
def test_true(value: str) -> None:
    """The usual words for yes."""
    assert truth(value) is True


@pytest.mark.parametrize("value", ["0", "false", "No", "off"])
def test_false(value: str) -> None:
    """The usual words for no."""
    assert truth(value) is False


@pytest.mark.parametrize("value", ["", "2", "y", "None"])
def test_neither(value: str) -> None:
    """Anything else is refused rather than guessed."""
    with pytest.raises(ValueError, match="invalid boolean value"):
        truth(value)


@pytest.mark.parametrize(
    ("read", "good", "bad"),
    [
        (whole_number(1), {"1": 1, "70000": 70000}, ["0", "-1", "1.5", "", "x"]),
        (whole_number(0), {"0": 0}, ["-1"]),
        (port, {"0": 0, "65535": 65535}, ["65536", "-1", "off", ""]),
        (port_or_off, {"off": None, "8000": 8000}, ["65536", "on"]),
        (seconds(), {"0.5": 0.5, "999999": 999999.0}, ["0", "-1", "nan", "inf", "1e6"]),
        (seconds(zero=True), {"0": 0.0, "2": 2.0}, ["-1", "nan", "inf", "x"]),
    ],
)
def test_readers_of_values_know_their_bounds(
    read: Callable[[str], object], good: dict[str, object], bad: list[str]
) -> None:
    """Each gives the number in a text, and refuses in a sentence what is out of bounds."""
    assert {text: read(text) for text in good} == good
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError, match="is not a"):
            read(text)
