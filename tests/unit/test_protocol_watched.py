"""Files of the operator's: read within a bound, and again when they have changed."""

from __future__ import annotations

import logging
import os
import time
from functools import partial
from pathlib import Path

import pytest

from tokenwire.protocol.files import read_file
from tokenwire.protocol.watched import Watched

MAX_BYTES = 8


def touch(path: Path) -> None:
    """Have a file look changed, however quick the test is."""
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file that holds ``a``."""
    file = tmp_path / "names"
    file.write_text("a")
    return file


@pytest.fixture
def watched(file: Path) -> Watched[bytes]:
    """Return who watches it; it has been read."""
    load = partial(read_file, "name file", str(file), MAX_BYTES)
    watched = Watched("name file", [str(file)], load)
    assert watched.read() == b"a"
    return watched


def test_what_has_changed_is_told_once(file: Path, watched: Watched[bytes]) -> None:
    """Other contents, or another file with the same ones."""
    assert watched.changed() is None
    file.write_text("bb")
    assert watched.changed() == b"bb"
    assert watched.changed() is None
    touch(file)
    assert watched.changed() == b"bb"
    assert watched.changed() is None


def test_one_of_several_may_change(file: Path, tmp_path: Path) -> None:
    """All of them are read then."""
    other = tmp_path / "other"
    other.write_text("1")
    watched = Watched(
        "name file",
        [str(file), str(other)],
        lambda: file.read_text() + other.read_text(),
    )
    assert watched.changed() == "a1"  # nothing was read before
    other.write_text("22")
    assert watched.changed() == "a22"


def test_what_is_wrong_is_said_once_and_changes_nothing(
    file: Path, watched: Watched[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """Something else that is wrong is said, too; and that it is over."""
    caplog.set_level(logging.INFO)
    file.write_bytes(b"b" * (MAX_BYTES + 1))
    assert watched.changed() is watched.changed() is None
    file.unlink()
    assert watched.changed() is watched.changed() is None
    stays = "; what was read before stays in use"
    assert caplog.messages == [
        f"{file} is above 8 bytes: it is no name file{stays}",
        f"cannot read the name file {file}: No such file or directory{stays}",
    ]

    file.write_text("c")
    assert watched.changed() == b"c"
    assert caplog.messages[2:] == [f"the name file {file} can be used again"]
    file.unlink()
    assert watched.changed() is None
    assert len(caplog.messages) == 4


def test_a_file_that_comes_back_as_it_was_is_said_to_be_good_again(
    file: Path, watched: Watched[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """Such as on a mount that was away; the next time is said again."""
    caplog.set_level(logging.INFO)
    aside = file.with_name("aside")
    for _ in range(2):
        caplog.clear()
        file.rename(aside)
        assert watched.changed() is None
        aside.rename(file)
        assert watched.changed() is None
        assert len(caplog.messages) == 2
        assert caplog.messages[1] == f"the name file {file} can be used again"


def test_many_questions_are_one_look(
    file: Path, watched: Watched[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the time that is given; without one, each is a look."""
    now = time.monotonic() + 10.0
    monkeypatch.setattr("tokenwire.protocol.watched.time.monotonic", lambda: now)
    assert watched.changed(every_s=1.0) is None
    file.write_text("bb")
    now += 0.5
    assert watched.changed(every_s=1.0) is None
    now += 0.5
    assert watched.changed(every_s=1.0) == b"bb"
    file.write_text("ccc")
    assert watched.changed() == b"ccc"
