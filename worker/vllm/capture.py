"""One file of hidden states, as the worker and vLLM's processes speak of it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass

from tokenwire.protocol.messages import JsonObject

__all__ = [
    "CAPTURE_KEY",
    "MAX_NEWS_BYTES",
    "PATH_KEY",
    "WRITE_WAIT_S",
    "Capture",
    "Notifier",
]

CAPTURE_KEY = "tokenwire_capture"
"""In a request's ``kv_transfer_params``: what the connector is to save, and where."""

PATH_KEY = "hidden_states_path"
"""In those of its end, as vLLM's own connector names it."""

WRITE_WAIT_S = 20.0
"""For a file to be whole after its request has ended in the engine. In a pair NIXL keeps
the KV for 30 s from that end: a third of it is left to the decode worker, for its queue
and its read. A file of 2 GB takes that long on a disk of 100 MB/s."""

MAX_NEWS_BYTES = 4_096


@dataclass(slots=True)
class Capture:
    """One request's file."""

    path: str
    num_tokens: int  # of the prompt
    outcome: str | None = None  # None: not yet known; empty: it is there
    settled: Callable[[str], None] | None = None
    timer: asyncio.TimerHandle | None = None

    @property
    def parameter(self) -> JsonObject:
        """What the connector is told."""
        return {"path": self.path, "num_tokens": self.num_tokens}


class Notifier:
    """The other end, in vLLM's process; from any thread."""

    def __init__(self, address: str) -> None:
        self._address = f"\0{address}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        # The kernel queues few datagrams, and a full queue makes the writer wait.
        self._socket.settimeout(WRITE_WAIT_S)

    def tell(self, path: str, num_bytes: int, error: str = "") -> None:
        """Say how a file went; where nobody listens, there is nobody to tell.

        Raises:
            OSError: It could not be sent.
        """
        news = f"{num_bytes}\n{path}\n{error}".encode()[:MAX_NEWS_BYTES]
        self._socket.sendto(news, self._address)

    def close(self) -> None:
        """Say nothing more."""
        self._socket.close()
