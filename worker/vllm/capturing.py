"""Hidden states on their way to disk: which are awaited, and when each file is whole.

vLLM names a file before it is written, in another process and a step later. A request
that has asked for one ends when that has told how it went, so that a client never gets
the path of a file that will not come, and a full disk is its request's failure.

The news comes as a datagram through an abstract Unix socket, which no file system has
to hold and which is gone with the process. A datagram counts if it comes from a process
of the same user; it then says name and error, and a name is a random one of ours.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
from collections.abc import Callable
from functools import partial

from tokenwire.protocol.messages import JsonObject
from tokenwire.worker.captures import CaptureError, Captures
from tokenwire.worker.engine import EngineFinished, EngineTokens

from .arguments import CaptureArguments
from .capture import MAX_NEWS_BYTES, PATH_KEY, WRITE_WAIT_S, Capture
from .request import OpenRequest

__all__ = ["Capturing"]

NUM_NEWS_AT_ONCE = 256
"""Then the loop's other work has its turn."""

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: unix(7), ``struct ucred``

Deliver = Callable[[OpenRequest, EngineTokens | None, EngineFinished], None]


class Capturing:
    """The files that an engine is about to write; use from one event loop.

    Args:
        layers: Whose hidden states the engine keeps; none: there is nothing to save.
        captures: The folder; None: nothing is saved.
    """

    def __init__(self, layers: tuple[int, ...], captures: Captures | None) -> None:
        self._layers = layers
        self._captures = captures
        self._loop: asyncio.AbstractEventLoop
        self._open: dict[str, Capture] = {}  # by path
        self._num_waits = 0
        self._address = f"tokenwire-{os.getpid()}-{secrets.token_hex(8)}"
        self._socket: socket.socket | None = None

    def open(self) -> None:
        """Begin to hear of files."""
        self._loop = asyncio.get_running_loop()
        if self._captures is not None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._socket.bind(f"\0{self._address}")
            self._loop.add_reader(self._socket, self._read, self._socket)

    @property
    def arguments(self) -> CaptureArguments | None:
        """What vLLM is told at its start."""
        if not self._layers:
            return None
        if self._captures is None:
            return CaptureArguments(self._layers)
        settings = self._captures.settings
        return CaptureArguments(
            self._layers, settings.folder, settings.access, self._address
        )

    def begin(self, state: OpenRequest) -> JsonObject | None:
        """Return what vLLM is to save of a request, if anything.

        Raises:
            CaptureError: There is no room for more.
        """
        if self._captures is None or not state.request.capture_tokens:
            return None
        if refusal := self._captures.refusal:
            raise CaptureError(refusal)
        path = self._captures.new_path()
        state.capture = self._open[path] = Capture(path, state.request.capture_tokens)
        return state.capture.parameter

    def holds(
        self,
        state: OpenRequest,
        new: EngineTokens | None,
        end: EngineFinished,
        deliver: Deliver,
    ) -> bool:
        """Return whether *end* has to wait for its file; *deliver* then gets both.

        Its last tokens wait with it, and fail with it: what goes on at another worker
        goes on from where it was.
        """
        capture = state.capture
        if capture is None or PATH_KEY not in (end.kv_transfer_params or {}):
            return False
        capture.settled = partial(self._settled, state, new, end, deliver)
        if capture.outcome is not None:
            self._tell(capture)
        else:
            capture.timer = self._loop.call_later(WRITE_WAIT_S, self._overdue, capture)
        return True

    def num_waits(self) -> int:
        """Return a count that is another one at each call while an end waits here.

        The engine makes no step meanwhile, and it is the disk that is slow: a frontend
        would take a worker whose count of steps stands still for stalled.
        """
        if any(capture.settled is not None for capture in self._open.values()):
            self._num_waits += 1
        return self._num_waits

    def ended(self, state: OpenRequest) -> None:
        """Take note that a request has ended: a file that is not its client's goes."""
        capture, state.capture = state.capture, None
        if capture is None or self._captures is None:
            return
        self._open.pop(capture.path, None)
        if capture.timer is not None:
            capture.timer.cancel()
        if capture.outcome == "":
            self._captures.discard(capture.path)

    def close(self) -> None:
        """Hear nothing more."""
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._socket.close()
            self._socket = None

    def _read(self, news: socket.socket) -> None:
        for _ in range(NUM_NEWS_AT_ONCE):
            try:
                data, ancillary, _, _ = news.recvmsg(
                    MAX_NEWS_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size)
                )
            except BlockingIOError:
                return
            if _sender(ancillary) == os.getuid():
                self._heard(data)

    def _heard(self, data: bytes) -> None:
        size, _, rest = data.decode(errors="replace").partition("\n")
        path, _, error = rest.partition("\n")
        captures = self._captures
        if captures is None or not (size.isdecimal() and captures.has(path)):
            return
        capture = self._open.get(path)
        if not error:
            captures.written(int(size))
            if capture is None:
                captures.discard(path)  # its request has ended meanwhile
        if capture is not None:
            capture.outcome = captures.failed(error) if error else ""
            self._tell(capture)

    def _overdue(self, capture: Capture) -> None:
        if self._captures is not None:
            error = f"it takes longer than {WRITE_WAIT_S:.0f} s"
            capture.outcome = self._captures.failed(error)
            self._tell(capture)

    def _tell(self, capture: Capture) -> None:
        if capture.settled is not None and capture.outcome is not None:
            capture.settled(capture.outcome)

    def _settled(
        self,
        state: OpenRequest,
        new: EngineTokens | None,
        end: EngineFinished,
        deliver: Deliver,
        error: str,
    ) -> None:
        capture = state.capture
        if capture is None:
            return  # it has ended otherwise
        if not error and not state.aborted:
            self._open.pop(capture.path, None)
            if capture.timer is not None:
                capture.timer.cancel()
            state.capture = None  # the file is its client's now
        deliver(state, None if error else new, state.captured(end, error))


def _sender(ancillary: list[tuple[int, int, bytes]]) -> int | None:
    """Return the user id of a datagram's sender, as the kernel saw it."""
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            return int(_CREDENTIALS.unpack(data)[1])
    return None
