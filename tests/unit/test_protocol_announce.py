"""Announce files and the workers file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tokenwire.deploy.workers_file import render_workers
from tokenwire.protocol.announce import (
    MAX_ANNOUNCE_BYTES,
    Announce,
    BadAnnounce,
    read_announce,
)

WORKER = Announce(endpoint="tcp://127.0.0.1:5", worker_id="w", role="decode", pid=1)


def test_reads_an_announce_and_ignores_what_a_newer_worker_adds(tmp_path: Path) -> None:
    """Known fields are read; unknown ones do no harm."""
    path = tmp_path / "a.json"
    assert read_announce(path) is None
    fields = {"endpoint": "tcp://127.0.0.1:5", "worker_id": "w", "role": "decode"}
    path.write_text(json.dumps({**fields, "pid": 1, "metrics": None, "new": 1}))
    assert read_announce(path) == WORKER


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"\xff", b'{"pid": "x"}', b" " * (MAX_ANNOUNCE_BYTES + 1)],
)
def test_a_malformed_announce_is_refused_in_a_sentence(
    tmp_path: Path, data: bytes
) -> None:
    """Whatever else the file holds, it is said to be malformed or too large."""
    path = tmp_path / "a.json"
    path.write_bytes(data)
    with pytest.raises(BadAnnounce, match="its announce file is"):
        read_announce(path)


def test_the_workers_file_is_sorted() -> None:
    """Equal sets of workers give equal bytes, so that a watcher sees real changes."""
    other = Announce(endpoint="tcp://127.0.0.1:6", worker_id="a", role="x", pid=2)
    data = render_workers([WORKER, other])
    assert data == render_workers([other, WORKER])
    assert json.loads(data) == {
        "workers": [
            {"endpoint": "tcp://127.0.0.1:6", "worker_id": "a"},
            {"endpoint": "tcp://127.0.0.1:5", "worker_id": "w"},
        ]
    }
