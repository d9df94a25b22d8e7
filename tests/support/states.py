"""Files of hidden states, as their clients read and take them."""

from __future__ import annotations

import fcntl
import os
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["read_states", "take_states"]


def read_states(path: str | Path) -> dict[str, Any]:
    """Return a file's numpy arrays by name, read by the safetensors library."""
    # Its types are unknown to the checkers.
    library: Any = import_module("safetensors.numpy")
    return dict(library.load_file(path))


def take_states(path: str | Path) -> dict[str, Any]:
    """Do as speculators does: lock, delete the lock, read the file and delete it.

    The lock must be there and free, since the response is there.
    """
    with open(f"{path}.lock", "r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.remove(f"{path}.lock")
    arrays = read_states(path)
    os.remove(path)
    return arrays
