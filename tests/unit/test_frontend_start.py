"""What stops a frontend's start: a sentence, and a code that says whether to try again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tokenwire.frontend import app
from tokenwire.frontend.config import parse_config
from tokenwire.frontend.model import NoModelYet
from tokenwire.protocol.restart import BAD_SETTINGS, GiveUp, RestartPolicy, Restarts

NOWHERE = "/nowhere"
FILES = {
    "--api-keys": ("cannot read the API key file", ()),
    "--admin-key-file": ("cannot read the admin key file", ()),
    "--resume-key-file": ("cannot read the", ()),
    "--tls-cert": ("cannot read the TLS file", ("--tls-key", NOWHERE)),
    "--curve-secret-key": (
        "cannot read the key file",
        ("--curve-worker-keys", NOWHERE),
    ),
}


@pytest.fixture(autouse=True)
def _the_same_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a start sets in its process is not this one's."""

    def stays(seconds: float) -> None:
        del seconds

    monkeypatch.setattr(sys, "setswitchinterval", stays)
    monkeypatch.setattr(app, "raise_file_limit", lambda: None)


def ended(*arguments: str) -> object:
    """Return the code of a frontend that cannot start."""
    config = parse_config(["--worker", "tcp://127.0.0.1:1", *arguments])
    with pytest.raises(SystemExit) as caught:
        app.run(config)
    return caught.value.code


@pytest.mark.parametrize("option", FILES)
def test_a_file_that_is_missing_is_named_with_its_option(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And it is not tried again: it does not come by waiting."""
    says, more = FILES[option]
    code = ended("--model", NOWHERE, option, NOWHERE, *more)
    said = capsys.readouterr().err
    assert said.startswith(f"tokenwire-frontend: {option}")
    assert f": {says}" in said
    assert said.endswith("No such file or directory; mend the file, or the option\n")
    assert code == BAD_SETTINGS
    assert isinstance(Restarts(RestartPolicy()).ended(0, BAD_SETTINGS), GiveUp)


def test_a_model_without_a_folder_is_not_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor one whose folder lacks what is needed."""
    for folder, says in ((NOWHERE, "no such folder"), (str(tmp_path), "cannot read")):
        assert ended("--model", folder) == BAD_SETTINGS
        assert f"model {folder}: " in (said := capsys.readouterr().err)
        assert says in said


def test_a_hub_that_is_away_may_be_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a model that could not be had is tried again."""

    def load_model(*_: object) -> None:
        msg = "the hub is away"
        raise NoModelYet(msg)

    monkeypatch.setattr(app, "load_model", load_model)
    assert ended("--model", "a/b") == "tokenwire-frontend: the hub is away"
