"""Files of hidden states: whole or not there, with their locks, deleted with care."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import socket
import stat
from array import array
from pathlib import Path

import pytest

from support.states import read_states
from tokenwire.worker import capture_files
from tokenwire.worker.capture_files import (
    Access,
    Array,
    Removal,
    Sweep,
    new_name,
    remove,
    write,
)

ARRAYS = {
    "hidden_states": Array(
        "F32", (2, 1, 2), array("f", [1.0, -2.0, 0.5, 4.0]).tobytes()
    ),
    "token_ids": Array("I64", (2,), memoryview(array("q", [7, 49_151]))),
}
PRIVATE = Access(0o600)


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Where a file goes."""
    return str(tmp_path / new_name())


def names(path: str) -> set[str]:
    """Return what is in the folder, as suffixes of *path*."""
    folder, name = os.path.split(path)
    return {entry.removeprefix(name) for entry in os.listdir(folder)}


def test_the_safetensors_library_reads_what_was_written(path: str) -> None:
    """Names, types, shapes and values are as given."""
    size = write(path, ARRAYS, PRIVATE)
    read = read_states(path)

    assert read["hidden_states"].tolist() == [[[1.0, -2.0]], [[0.5, 4.0]]]
    assert read["hidden_states"].dtype == "float32"
    assert read["token_ids"].tolist() == [7, 49_151]
    assert size == os.stat(path).st_size


def test_the_lock_is_there_and_free(path: str) -> None:
    """A client takes it at once, and nothing else is left beside the file."""
    write(path, ARRAYS, PRIVATE)

    assert names(path) == {"", ".lock"}
    with open(path + ".lock", "r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_the_lock_is_held_until_the_file_is_there(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each write the lock is taken by another, and the file has not its name yet."""
    seen: list[tuple[bool, bool]] = []
    really_write = os.write

    def look(file: int, data: memoryview) -> int:
        with open(path + ".lock", "r+b") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_held = False
            except BlockingIOError:
                is_held = True
        seen.append((is_held, os.path.exists(path)))
        return really_write(file, data[:5])  # a disk may take less than it was given

    monkeypatch.setattr(os, "write", look)
    write(path, ARRAYS, PRIVATE)

    assert len(seen) > 3
    assert set(seen) == {(True, False)}
    assert names(path) == {"", ".lock"}


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_mode_and_group_are_the_operator_s(path: str, mode: int) -> None:
    """Of file and lock, whatever the umask says."""
    group = os.getgid()
    before = os.umask(0o077)
    try:
        write(path, ARRAYS, Access(mode, group))
    finally:
        os.umask(before)

    for one in (path, path + ".lock"):
        status = os.stat(one)
        assert stat.S_IMODE(status.st_mode) == mode
        assert status.st_gid == group


def test_a_full_disk_leaves_nothing(path: str) -> None:
    """A write that fails half-way has its errno, and no file, part or lock is left."""
    big = {"hidden_states": Array("U8", (100_000,), bytes(100_000))}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(OSError, match="too large") as caught:
            write(path, big, PRIVATE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert caught.value.errno == errno.EFBIG
    assert names(path) == set()
    write(path, big, PRIVATE)  # with room it would have worked
    assert names(path) == {"", ".lock"}


def test_no_name_is_used_twice(path: str) -> None:
    """What is there is never written over."""
    write(path, ARRAYS, PRIVATE)
    with pytest.raises(FileExistsError):
        write(path, {}, PRIVATE)
    assert os.stat(path).st_size > 8


def test_removal_takes_all(path: str) -> None:
    """File, lock, and what a writer that was killed has left."""
    size = write(path, ARRAYS, PRIVATE)
    Path(path + ".part").write_bytes(b"1234")

    assert remove(path) == Removal(size + 4)
    assert names(path) == set()
    assert remove(path).is_gone


def test_what_somebody_locks_stays(path: str) -> None:
    """A client that moves its file is not disturbed."""
    write(path, ARRAYS, PRIVATE)
    with open(path + ".lock", "r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not remove(path).is_gone
        assert names(path) == {"", ".lock"}
    assert remove(path).is_gone


def test_what_a_client_has_claimed_does_not_go_for_its_size(path: str) -> None:
    """It has deleted the lock and reads the file; one that died there left it for good."""
    write(path, ARRAYS, PRIVATE)
    os.unlink(path + ".lock")
    assert remove(path, Sweep.SIZE) == Removal(is_gone=False)
    assert names(path) == {""}
    assert remove(path, Sweep.AGE).is_gone
    assert names(path) == set()


def test_a_claim_counts_while_its_lock_is_waited_for(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client deletes the lock when the sweep has opened it already."""
    write(path, ARRAYS, PRIVATE)
    flock = fcntl.flock

    def just_then(file: int, operation: int) -> None:
        os.unlink(path + ".lock")
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", just_then)
    assert not remove(path, Sweep.SIZE).is_gone
    assert names(path) == {""}


@pytest.mark.parametrize("kind", ["link", "folder", "socket", "not ours"])
def test_what_cannot_be_locked_goes_with_age(
    path: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before, and nothing that a link leads to: no file may stay for good."""
    write(path, ARRAYS, PRIVATE)
    lock, other = Path(path + ".lock"), Path(path).parent / "other"
    other.touch()
    if kind == "not ours":
        really_open = os.open

        def refuse(name: str, flags: int, mode: int = 0o777) -> int:
            if name == str(lock):
                raise PermissionError(errno.EACCES, "Permission denied")
            return really_open(name, flags, mode)

        monkeypatch.setattr(os, "open", refuse)
    else:
        lock.unlink()
    if kind == "link":
        lock.symlink_to(other)
    elif kind == "folder":
        lock.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            monkeypatch.chdir(lock.parent)  # an address is short
            bound.bind(lock.name)

    for sweep in (None, Sweep.SIZE, Sweep.BROKEN):
        removal = remove(path, sweep)
        assert not removal.is_gone
        assert removal.error
    assert names(path) == {"", ".lock", "other"}
    removal = remove(path, Sweep.AGE)
    assert (removal.is_gone, removal.error) == (True, "")
    assert names(path) == {"other"}


def test_a_broken_part_goes_without_its_file(path: str) -> None:
    """The lock stays where there is a file that it is the lock of."""
    write(path, ARRAYS, PRIVATE)
    Path(path + ".part").touch()
    remove(path, Sweep.BROKEN)
    assert names(path) == {"", ".lock"}

    os.unlink(path)
    Path(path + ".part").touch()
    remove(path, Sweep.BROKEN)
    assert names(path) == set()


def test_a_part_that_has_become_a_file_is_not_broken(path: str) -> None:
    """Its writer was done between the listing and the look at its lock."""
    write(path, ARRAYS, PRIVATE)
    assert remove(path, Sweep.BROKEN) == Removal(is_gone=False)
    assert names(path) == {"", ".lock"}

    os.unlink(path)  # its client has it, and is about to take the lock, too
    assert not remove(path, Sweep.BROKEN).is_gone
    assert names(path) == {".lock"}


@pytest.mark.parametrize(
    "path",
    [
        "/d/x.safetensors", "/d/../etc/passwd", "/d/capture-1.safetensors", "/d/", "",
        "/e/NAME", "/d/e/NAME", "/d/../d/NAME", "/d/NAME.lock", "/d/NAME\n", "NAME",
    ],
)  # fmt: skip
def test_only_our_names_are_ours(path: str) -> None:
    """In that folder, spelled as we spell it."""
    assert not capture_files.is_ours(path.replace("NAME", new_name()), "/d")
    assert capture_files.is_ours("/d/" + new_name(), "/d")
