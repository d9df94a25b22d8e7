"""Files: read within a bound, written whole."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from tokenwire.protocol.files import UnusableFile, read_file, replace_file, version_of


@pytest.mark.parametrize(
    ("mode", "denied", "is_refused"),
    [
        (0o604, "r", True),
        (0o602, "r", False),
        (0o660, "rwx", False),
        (0o601, "rwx", True),
        (0o602, "w", True),
        (0o604, "w", False),
        (0o666, "", False),
    ],
)
def test_rights_that_everyone_may_not_have(
    tmp_path: Path, mode: int, denied: str, is_refused: bool
) -> None:
    """They are refused with what takes them away."""
    file = tmp_path / "names"
    file.write_text("a")
    file.chmod(mode)
    if not is_refused:
        assert read_file("name file", str(file), 8, denied=denied) == b"a"
        return
    with pytest.raises(UnusableFile, match=f"open to everyone: chmod o-{denied} "):
        read_file("name file", str(file), 8, denied=denied)


def test_what_cannot_be_read_or_is_too_long_is_a_sentence(tmp_path: Path) -> None:
    """With what it was to be; one that just fits is read."""
    file = tmp_path / "names"
    with pytest.raises(UnusableFile, match=r"^cannot read the name file .*: No such"):
        read_file("name file", str(file), 8)
    file.write_bytes(b"a" * 8)
    assert read_file("name file", str(file), 8) == b"a" * 8
    file.write_bytes(b"a" * 9)
    with pytest.raises(UnusableFile, match="is above 8 bytes: it is no name file"):
        read_file("name file", str(file), 8)


@pytest.mark.timeout(20)  # it would wait for who writes
@pytest.mark.parametrize("what", ["pipe", "folder", "device"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, what: str) -> None:
    """Also behind a link: a pipe is read for ever, and a device may have no end."""
    path = tmp_path / what
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    else:
        path = Path(os.devnull)
    link = tmp_path / "link"
    link.symlink_to(path)
    for given in (path, link):
        for look in (partial(read_file, max_bytes=8), version_of):
            with pytest.raises(
                UnusableFile, match=r"cannot .*: (it is no regular file|Is a dir)"
            ):
                look("name file", str(given))


def test_links_to_files_are_files(tmp_path: Path) -> None:
    """As Kubernetes mounts a secret: a link to a file in a folder that is a link."""
    data = tmp_path / "..data-1"
    data.mkdir()
    (data / "keys").write_text("a")
    (tmp_path / "..data").symlink_to(data.name)
    (tmp_path / "keys").symlink_to("..data/keys")
    assert read_file("name file", str(tmp_path / "keys"), 8) == b"a"
    assert version_of("name file", str(tmp_path / "keys"))[1] == 1


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """The old content stays until the new is complete, and no draft is left."""
    path = tmp_path / "workers.json"
    path.write_bytes(b"old")
    with path.open("rb") as reader:
        replace_file(path, b"new")
        assert reader.read() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_replacement_leaves_no_draft(tmp_path: Path) -> None:
    """An error is raised, and the folder is as before."""
    path = tmp_path / "workers.json"
    path.mkdir()
    with pytest.raises(OSError, match="workers"):
        replace_file(path, b"new")
    assert list(tmp_path.iterdir()) == [path]


def test_a_secret_is_never_there_for_others(tmp_path: Path) -> None:
    """Its mode is there from the start, also where a draft was left by a killed process."""
    path = tmp_path / "key"
    draft = tmp_path / f".key.{os.getpid()}"
    draft.write_bytes(b"left")
    draft.chmod(0o666)
    replace_file(path, b"secret", 0o600)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_bytes() == b"secret"
    assert list(tmp_path.iterdir()) == [path]
