"""What a worker writes of itself into a file once it is ready, for who has started it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from .files import replace_file

__all__ = ["Announce", "BadAnnounce", "announce", "read_announce"]

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


def announce(path: Path, worker: Announce) -> None:
    """Write what *worker* says of itself.

    Raises:
        OSError: It cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, msgspec.json.encode(worker) + b"\n")


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
