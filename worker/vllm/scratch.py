"""Folders of one worker in the system's folder for temporary files.

Laws:
- A folder is this user's alone, and its lock is held for as long as its process lives.
- What killed workers of this user have left is deleted when the next folder of that kind
  is made; what is locked, of another user, or a link, is not touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

__all__ = ["Scratch"]

MAX_TRIES = 10
"""To make a folder that another worker's sweep does not take for one that is left."""


class Scratch:
    """A new folder, made behind a sweep.

    A folder that is locked is not cleared away by systemd's tmpfiles either.

    Args:
        prefix: What the names of its kind begin with.

    Raises:
        OSError: None can be made.
    """

    def __init__(self, prefix: str) -> None:
        _sweep(prefix)
        for _ in range(MAX_TRIES):
            root = Path(tempfile.mkdtemp(prefix=prefix))
            lock = _locked(root)
            if lock is not None and root.exists():
                self.root = root
                self._lock = lock  # whoever can take it may delete the folder
                return
            if lock is not None:
                os.close(lock)
            with contextlib.suppress(OSError):
                root.rmdir()  # a file system without locks
        msg = f"no folder can be made in {tempfile.gettempdir()}"
        raise OSError(msg)

    def close(self) -> None:
        """Delete the folder with all that is in it; once."""
        shutil.rmtree(self.root, ignore_errors=True)
        os.close(self._lock)


def _sweep(prefix: str) -> None:
    """Delete what killed workers of this user have left."""
    with contextlib.suppress(OSError):
        for root in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            lock = _locked(root)
            if lock is None:
                continue
            if os.fstat(lock).st_uid == os.getuid():
                shutil.rmtree(root, ignore_errors=True)
            os.close(lock)


def _locked(root: Path) -> int | None:
    """Return a lock on *root*, which closing it gives back; None: it is another's."""
    try:
        lock = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock
