"""Whether a folder has weights that can be loaded: looked at before any is touched.

An engine loads in place. What is missing or cut short would be found in the middle, with
a part of the weights replaced; here it is found before, from names and sizes alone.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from tokenwire.worker.engine import AdminOutcome

__all__ = ["checkpoint_fault"]

MAX_HEADER_BYTES = 100 * 1024 * 1024
"""The format's own limit."""

_LENGTH = struct.Struct("<Q")


def checkpoint_fault(folder: str) -> AdminOutcome | None:
    """Return why the weights in *folder* cannot be loaded, or None.

    Blocks: it may be on a network.
    """
    path = Path(folder)
    if not path.is_dir():
        return AdminOutcome(f"there is no folder {folder}", "not_found")
    files = sorted(path.glob("*.safetensors"))
    if not files:
        return AdminOutcome(f"{folder} has no *.safetensors", "not_found")
    try:
        missing = _missing(path)
        if missing:
            return AdminOutcome(f"{folder} lacks {missing} of its index", "not_found")
        for file in files:
            text = _cut(file)
            if text:
                return AdminOutcome(f"{file}: {text}", "invalid")
    except (OSError, ValueError) as error:
        return AdminOutcome(f"{folder} cannot be read: {error}", "invalid")
    return None


def _missing(path: Path) -> str:
    """Return a file that the index names and that is not there."""
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return ""
    named: dict[str, str] = json.loads(index.read_bytes()).get("weight_map", {})
    names = sorted(set(named.values()))
    return next((name for name in names if not (path / name).is_file()), "")


def _cut(path: Path) -> str:
    """Return what is wrong with the size of a file of safetensors."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(_LENGTH.size)
        if len(start) < _LENGTH.size:
            return "it is cut short"
        (num_header_bytes,) = _LENGTH.unpack(start)
        if num_header_bytes > min(MAX_HEADER_BYTES, size):
            return "it is no file of safetensors, or cut short"
        header: dict[str, Any] = json.loads(file.read(num_header_bytes))
    ends = [
        int(tensor["data_offsets"][1])
        for name, tensor in header.items()
        if name != "__metadata__"
    ]
    due = _LENGTH.size + num_header_bytes + max(ends, default=0)
    return "" if size == due else f"it has {size} bytes, {due} are due"
