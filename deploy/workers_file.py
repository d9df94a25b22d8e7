"""The workers file, which frontends watch: what the workers on one machine announce."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tokenwire.protocol.announce import Announce

__all__ = ["render_workers"]


def render_workers(workers: Iterable[Announce]) -> bytes:
    """Return the workers file for *workers*, in the order of their names."""
    entries = [
        {"endpoint": worker.endpoint, "worker_id": worker.worker_id}
        for worker in sorted(workers, key=lambda worker: worker.worker_id)
    ]
    return msgspec.json.format(msgspec.json.encode({"workers": entries})) + b"\n"
