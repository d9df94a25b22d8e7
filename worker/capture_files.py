"""One file of hidden states: its name, its lock, how it is written and deleted.

Laws:
- A reader never sees a part of a file: it gets its name when it is whole.
- Its lock (``<path>.lock``) is there before it, held while it is written, free then.
- No name is a client's: it is random, and what does not look so is never touched.

Clients know the format from vLLM's own connector: safetensors with ``hidden_states``
(num_tokens, num_layers, hidden_size) and ``token_ids`` (num_tokens,). They lock
``<path>.lock``, move or delete the file, and delete the lock. Written here rather than
by safetensors: that makes files of mode 0600, and an error without its errno.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
import uuid
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from enum import StrEnum

__all__ = [
    "LOCK",
    "Access",
    "Array",
    "Removal",
    "Sweep",
    "is_ours",
    "name_of",
    "new_name",
    "remove",
    "renew",
    "write",
]

LOCK = ".lock"
PART = ".part"

_UNLOCKABLE = (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.EACCES)
"""Of a lock that is a symbolic link, a folder, a socket, or of another user: somebody
with access to the folder has put it there."""

_NAME = re.compile(r"(capture-[0-9a-f]{32}\.safetensors)(?:\.lock|\.part)?")


@dataclass(slots=True, frozen=True)
class Access:
    """Who may read and take the files."""

    mode: int
    group: int | None = None  # id; None: the process's own


@dataclass(slots=True, frozen=True)
class Array:
    """One array of a file."""

    dtype: str  # in the words of safetensors: "F32", "BF16", "I64", ...
    shape: tuple[int, ...]
    data: bytes | memoryview  # row by row, little-endian


class Sweep(StrEnum):
    """Why a file goes that nobody has asked to delete."""

    AGE = "age"
    SIZE = "size"  # unless a client has claimed it: has deleted its lock, but not it
    BROKEN = "broken"  # what its writer, which is gone, has left: its part alone goes


@dataclass(slots=True, frozen=True)
class Removal:
    """What became of a file that was to go."""

    num_bytes: int = 0
    is_gone: bool = True  # False: it is somebody's, or it may not be deleted
    error: str = ""


def new_name() -> str:
    """Return a name that no file has had."""
    return f"capture-{uuid.uuid4().hex}.safetensors"


def name_of(entry: str) -> str | None:
    """Return which file an entry of the folder belongs to; None: it is not ours."""
    match = _NAME.fullmatch(entry)
    return None if match is None else match[1]


def is_ours(path: str, folder: str) -> bool:
    """Return whether *path* is a file of ours in *folder*."""
    head, name = os.path.split(path)
    return name_of(name) == name and head == folder


def write(path: str, arrays: Mapping[str, Array], access: Access) -> int:
    """Write a file, whole or not at all; return its size in bytes.

    Raises:
        OSError: It cannot be written; nothing of it is left.
    """
    head = _head(arrays)
    with _locked(path, access):
        try:
            size = _write_part(path + PART, [head, *_data(arrays)], access)
            os.replace(path + PART, path)
        except BaseException:
            for left in (path + PART, path + LOCK):
                with contextlib.suppress(OSError):
                    os.unlink(left)
            raise
    return size


def renew(path: str) -> None:
    """Let a file that may be there be as young as one that is written now."""
    with contextlib.suppress(OSError):
        os.utime(path, follow_symlinks=False)


def remove(path: str, sweep: Sweep | None = None) -> Removal:
    """Delete a file with its lock, unless somebody holds that.

    What stands in the place of a lock and cannot be locked protects until it is old.

    Args:
        path: The file's.
        sweep: Why; None: its client does not want it.
    """
    try:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        lock = os.open(path + LOCK, flags)
    except FileNotFoundError:
        if sweep is Sweep.SIZE:
            return Removal(is_gone=False)
        return _unlink(path, sweep)
    except OSError as error:
        if sweep is Sweep.AGE and error.errno in _UNLOCKABLE:
            return _unlink(path, sweep)
        return Removal(is_gone=False, error=str(error))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if sweep is Sweep.SIZE and os.fstat(lock).st_nlink == 0:
            return Removal(is_gone=False)  # claimed since the lock was opened
        return _unlink(path, sweep)
    except BlockingIOError:
        return Removal(is_gone=False)
    except OSError as error:
        return Removal(is_gone=False, error=str(error))
    finally:
        os.close(lock)


def _unlink(path: str, sweep: Sweep | None) -> Removal:
    num_bytes = 0
    suffixes = [PART, "", LOCK]
    if sweep is Sweep.BROKEN:  # the lock, too, where no file will come to it
        suffixes = [PART] if os.path.exists(path) else [PART, LOCK]
    for suffix in suffixes:
        try:
            status = os.lstat(path + suffix)
            is_folder = suffix == LOCK and stat.S_ISDIR(status.st_mode)
            (os.rmdir if is_folder else os.unlink)(path + suffix)
        except FileNotFoundError:
            if sweep is Sweep.BROKEN and suffix == PART:
                return Removal(is_gone=False)  # its writer has just made it whole
            continue
        except OSError as error:
            return Removal(num_bytes, is_gone=False, error=str(error))
        num_bytes += status.st_size
    return Removal(num_bytes)


@contextlib.contextmanager
def _locked(path: str, access: Access) -> Generator[None]:
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
    lock = os.open(path + LOCK, flags, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            _open_to(lock, access)
        except BaseException:
            os.unlink(path + LOCK)
            raise
        yield
    finally:
        os.close(lock)


def _write_part(path: str, pieces: list[bytes | memoryview], access: Access) -> int:
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
    size = 0
    file = os.open(path, flags, 0o600)
    try:
        _open_to(file, access)
        for piece in pieces:
            rest = memoryview(piece)
            while rest:
                written = os.write(file, rest)
                size += written
                rest = rest[written:]
    finally:
        os.close(file)  # a network disk says here that it is full
    return size


def _open_to(file: int, access: Access) -> None:
    # By descriptor: the umask must not take away what the operator has set.
    if access.group is not None:
        os.fchown(file, -1, access.group)
    os.fchmod(file, access.mode)


def _data(arrays: Mapping[str, Array]) -> list[memoryview]:
    return [memoryview(array.data).cast("B") for array in arrays.values()]


def _head(arrays: Mapping[str, Array]) -> bytes:
    """Return what stands before the arrays: a length, and JSON padded to 8 bytes."""
    table: dict[str, object] = {}
    start = 0
    for name, array in arrays.items():
        end = start + memoryview(array.data).nbytes
        table[name] = {
            "dtype": array.dtype,
            "shape": list(array.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
