"""Files, whole: read within a bound, and written so that nobody reads half of one."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

__all__ = ["UnusableFile", "Version", "read_file", "replace_file", "version_of"]

Version = tuple[int, int, int]
"""What another file, or other contents, at the same path would have otherwise."""

_RIGHTS = {"r": 4, "w": 2, "x": 1}
"""Of everyone, in a file's mode."""


class UnusableFile(Exception):
    """A file cannot be used; one sentence for the operator."""


def read_file(kind: str, path: str, max_bytes: int, *, denied: str = "") -> bytes:
    """Return what the file *path* holds.

    Args:
        kind: What it is, as in ``key file``.
        path: Where it is.
        max_bytes: More are another file.
        denied: Those of the rights ``rwx`` that not everyone may have.

    Raises:
        UnusableFile: It cannot be read, is none, is too long, or everyone has such a right.
    """
    try:
        with open(path, "rb", opener=_opened) as file:
            mode = os.fstat(file.fileno()).st_mode
            _check_is_file(kind, path, mode)
            if any(mode & _RIGHTS[right] for right in denied):
                msg = f"the {kind} {path} is open to everyone: chmod o-{denied} {path}"
                raise UnusableFile(msg)
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise _unreadable(kind, path, error.strerror or str(error)) from error
    if len(data) > max_bytes:
        msg = f"{path} is above {max_bytes} bytes: it is no {kind}"
        raise UnusableFile(msg)
    return data


def replace_file(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Put *data* at *path* so that no reader ever sees half of it.

    Args:
        path: Where it is to be.
        data: All of it.
        mode: Of the file at any time, less the umask.

    Raises:
        OSError: It cannot be written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)  # of a process of the same id that was killed
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def version_of(kind: str, path: str) -> Version:
    """Return the version of the file *path*, a *kind*.

    Raises:
        UnusableFile: It cannot be looked at, or is none.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        raise _unreadable(kind, path, error.strerror or str(error)) from error
    _check_is_file(kind, path, status.st_mode)
    return status.st_mtime_ns, status.st_size, status.st_ino


def _opened(path: str, flags: int) -> int:
    """Open *path* at once: a pipe to which nobody writes would be waited for."""
    return os.open(path, flags | os.O_NONBLOCK)


def _check_is_file(kind: str, path: str, mode: int) -> None:
    """Refuse what has no end, or none yet: pipes, devices; and folders.

    What a link leads to counts: secrets of Kubernetes are links to files.
    """
    if not stat.S_ISREG(mode):
        raise _unreadable(kind, path, "it is no regular file")


def _unreadable(kind: str, path: str, why: str) -> UnusableFile:
    msg = f"cannot read the {kind} {path}: {why}"
    return UnusableFile(msg)
