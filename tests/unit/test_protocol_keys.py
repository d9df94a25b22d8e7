"""Key files: what is a key, what a comment, what happens when they change."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from tokenwire.protocol.files import UnusableFile
from tokenwire.protocol.keys import (
    Key,
    KeyList,
    read_secret_key,
    stays_here,
)

KEY = "AHW5qg2x*q=o[LLU*&aXqdg(Nh8a?8lS<<pE9rVu"
OTHER = "*Xi!^H%w>X5eu]8!>VJet>kyvL913ny4-5Q*$(-C"


def written(folder: Path, text: str, name: str = "keys") -> str:
    """Write a key file; return its path."""
    path = folder / name
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def test_keys_and_notes_and_comments(tmp_path: Path) -> None:
    """A note follows a space."""
    text = f"# of us\n#{OTHER}\n\n {KEY}  frontend one \n{OTHER}\n"

    assert KeyList(written(tmp_path, text)).keys == (
        Key(KEY, "frontend one"),
        Key(OTHER),
    )


@pytest.mark.parametrize(
    "line",
    [
        "a comment without its sign",
        KEY[:-1],
        KEY + "x",
        KEY[:-1] + "é",
        "%" * 40,  # the right letters, above the largest number
        KEY[:20] + " " + KEY[20:],
    ],
)
def test_what_is_no_key_is_refused_by_its_line(tmp_path: Path, line: str) -> None:
    """And not repeated: it may be a secret one with a typing error."""
    with pytest.raises(UnusableFile, match="line 2 of") as caught:
        KeyList(written(tmp_path, f"# first\n{line}\n"))
    assert line not in str(caught.value)


def test_a_list_follows_its_file(tmp_path: Path) -> None:
    """Without a restart; an empty file allows nobody."""
    path = written(tmp_path, KEY)
    keys = KeyList(path)
    assert not keys.refresh()

    written(tmp_path, f"{KEY}\n{OTHER}\n")
    assert keys.refresh()
    assert [key.z85 for key in keys.keys] == [KEY, OTHER]
    written(tmp_path, "")
    assert keys.refresh()
    assert keys.keys == ()


def test_a_broken_change_keeps_what_was_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A slip does not stop a cluster; it is logged once, until it is mended."""
    path = written(tmp_path, KEY)
    keys = KeyList(path)
    written(tmp_path, "oops")
    for _ in range(3):
        assert not keys.refresh()
    os.unlink(path)
    assert not keys.refresh()

    assert [key.z85 for key in keys.keys] == [KEY]
    assert len(caplog.messages) == 2
    assert "line 1 of" in caplog.messages[0]
    assert "No such file" in caplog.messages[1]
    written(tmp_path, OTHER)
    assert keys.refresh()


def test_a_secret_key_file_holds_one_key(tmp_path: Path) -> None:
    """None, or two, is a mistake that would be found out too late."""
    assert read_secret_key(written(tmp_path, f"# mine\n{KEY}\n")) == KEY
    for text, words in (("", "holds 0 keys"), (f"{KEY}\n{OTHER}", "holds 2 keys")):
        with pytest.raises(UnusableFile, match=words):
            read_secret_key(written(tmp_path, text))
    with pytest.raises(UnusableFile, match="No such file"):
        read_secret_key(str(tmp_path / "nowhere"))


def test_a_secret_that_all_can_read_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With what to do about it."""
    path = written(tmp_path, KEY)
    read_secret_key(path)
    assert not caplog.messages
    os.chmod(path, 0o644)
    caplog.set_level(logging.WARNING)
    read_secret_key(path)
    assert "chmod 600" in caplog.messages[0]


def test_a_huge_file_is_no_key_file(tmp_path: Path) -> None:
    """It is not read to its end."""
    with pytest.raises(UnusableFile, match="no key file"):
        KeyList(written(tmp_path, "#..\n" * 400_000))


@pytest.mark.parametrize(
    ("endpoint", "here"),
    [
        ("tcp://127.0.0.1:5", True),
        ("tcp://127.9.9.9:5", True),
        ("tcp://[::1]:5", True),
        ("tcp://localhost:5", True),
        ("ipc:///tmp/x", True),
        ("tcp://0.0.0.0:5", False),
        ("tcp://*:5", False),
        ("tcp://[::]:5", False),
        ("tcp://10.0.0.1:5", False),
        ("tcp://eth0:5", False),
        ("tcp://localhost.example.com:5", False),
        ("tcp://127.0.0.1.example.com:5", False),
        ("nonsense", False),
    ],
)
def test_only_loopback_and_ipc_stay_on_this_machine(endpoint: str, here: bool) -> None:
    """A name may be anybody's, whatever it looks like."""
    assert stays_here(endpoint) is here
