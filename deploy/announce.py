"""How processes find each other on one machine: announce files and the workers file.

A worker writes its announce file once it is ready; the supervisor gathers them into
the workers file, which the frontends watch. Both are replaced as a whole.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

__all__ = ["Announce", "BadAnnounce", "read_announce", "render_workers", "replace_file"]

MAX_ANNOUNCE_BYTES = 64 * 1024
"""An announce has about 200 bytes."""


class Announce(msgspec.Struct, frozen=True):
    """What a ready worker says of itself."""

    endpoint: str  # where frontends connect
    worker_id: str
    role: str
    pid: int
    model: str = ""
    metrics: str | None = None  # URL of its metrics; None: off


class BadAnnounce(Exception):
    """An announce file holds something else; one sentence."""


def read_announce(path: Path) -> Announce | None:
    """Return what the worker announced, or None while it has not.

    Raises:
        BadAnnounce: The file is not an announce.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_ANNOUNCE_BYTES + 1)
    except FileNotFoundError:
        return None
    if len(data) > MAX_ANNOUNCE_BYTES:
        msg = f"its announce file is above {MAX_ANNOUNCE_BYTES} bytes"
        raise BadAnnounce(msg)
    try:
        return msgspec.json.decode(data, type=Announce)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        msg = f"its announce file is malformed: {error}"
        raise BadAnnounce(msg) from error


def render_workers(workers: Iterable[Announce]) -> bytes:
    """Return the workers file for *workers*, in the order of their names."""
    entries = [
        {"endpoint": worker.endpoint, "worker_id": worker.worker_id}
        for worker in sorted(workers, key=lambda worker: worker.worker_id)
    ]
    return msgspec.json.format(msgspec.json.encode({"workers": entries})) + b"\n"


def replace_file(path: Path, data: bytes) -> None:
    """Put *data* at *path* so that no reader ever sees half of it.

    Raises:
        OSError: The folder cannot be written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(data)
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
