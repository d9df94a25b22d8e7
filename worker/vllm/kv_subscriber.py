"""The sockets of KV events: a SUB for each engine core, and a DEALER while it is asked.

The frames are vLLM's ``ZmqEventPublisher``'s: topic, 8-byte big-endian number, payload. A
replay is asked for by an empty frame and a number, and answered by the same frames behind
an empty one, the last with the number -1. vLLM's thread looks for such questions every
0.1 s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import zmq

from tokenwire.protocol.limits import MAX_MESSAGE_BYTES
from tokenwire.worker.kv_blocks import BlockUsage

from .kv_events import KVEvent
from .kv_stream import Stream

__all__ = ["REPLAY_WAIT_S", "Context", "Source", "Subscription", "new_context"]

logger = logging.getLogger(__name__)

REPLAY_WAIT_S = 5.0
"""For all of a replay, of which vLLM notices the question within 0.1 s."""

QUEUED_MESSAGES = 2_000
"""Of one step each: 20 s at a 10 ms step, in which this process does not read."""

MAX_RECEIVES_PER_WAKEUP = 64
"""Then other callbacks have their turn: a step of a full prefill batch takes 2 ms."""

Context = zmq.Context[zmq.Socket[bytes]]

_LAST = (-1).to_bytes(8, "big", signed=True)
_NUM_FRAMES = 3


@dataclass(slots=True, frozen=True)
class Source:
    """Where one engine core publishes."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""


def new_context() -> Context:
    """Return a context of ZeroMQ; whoever asks for it ends it."""
    return zmq.Context(io_threads=1)


class Subscription:
    """What one engine core publishes, in order; use from one event loop.

    Args:
        context: ZeroMQ's.
        source: Where.
        take: See ``Stream``.
        forget: See ``Stream``.
        usage: Where it counts.
    """

    def __init__(
        self,
        context: Context,
        source: Source,
        take: Callable[[Iterable[KVEvent]], None],
        forget: Callable[[], None],
        usage: BlockUsage,
    ) -> None:
        self._context = context
        self._source = source
        self._stream = Stream(take, self._ask, forget, usage)
        self._loop = asyncio.get_running_loop()
        self._asked: _Reader | None = None
        self._give_up: asyncio.TimerHandle | None = None
        socket = context.socket(zmq.SUB)
        socket.setsockopt(zmq.SUBSCRIBE, source.topic.encode())
        self._live = _Reader(socket, source.endpoint, self._take_live)
        self._stream.begin()

    def close(self) -> None:
        """Hear nothing more; harmless twice."""
        self._live.close()
        self._stop_asking()

    def _take_live(self, frames: list[bytes]) -> None:
        if len(frames) == _NUM_FRAMES and len(frames[1]) == len(_LAST):
            self._stream.live(int.from_bytes(frames[1], "big"), frames[2])

    def _ask(self, number: int) -> bool:
        endpoint = self._source.replay_endpoint
        if endpoint is None:
            return False
        self._stop_asking()  # a new socket, so that no late answer is taken for another's
        self._asked = _Reader(
            self._context.socket(zmq.DEALER), endpoint, self._take_answer
        )
        self._asked.send((b"", number.to_bytes(8, "big")))
        self._give_up = self._loop.call_later(REPLAY_WAIT_S, self._end)
        return True

    def _take_answer(self, frames: list[bytes]) -> None:
        if len(frames) < _NUM_FRAMES:
            return
        number, payload = frames[-2:]  # older releases send no topic
        if number == _LAST:
            self._end()
        elif len(number) == len(_LAST):
            self._stream.replayed(int.from_bytes(number, "big"), payload)

    def _end(self) -> None:
        self._stop_asking()
        self._stream.replay_ended()

    def _stop_asking(self) -> None:
        asked, self._asked = self._asked, None
        if asked is not None:
            asked.close()
        timer, self._give_up = self._give_up, None
        if timer is not None:
            timer.cancel()


class _Reader:
    """A connected socket whose messages are given to *take*, on the event loop.

    ZeroMQ's file descriptor is edge-triggered: a read goes on until nothing is left.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        endpoint: str,
        take: Callable[[list[bytes]], None],
    ) -> None:
        self._socket = socket
        self._take = take
        self._loop = asyncio.get_running_loop()
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, QUEUED_MESSAGES)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.ipv6 = "[" in endpoint
        socket.connect(endpoint)
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._drain)
        self._loop.call_soon(self._drain)

    def send(self, frames: tuple[bytes, ...]) -> None:
        """Send; what comes meanwhile is looked for, since a send may take the edge."""
        self._socket.send_multipart(frames, zmq.NOBLOCK)
        self._loop.call_soon(self._drain)

    def close(self) -> None:
        """Close; harmless twice."""
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close()

    def _drain(self) -> None:
        for _ in range(MAX_RECEIVES_PER_WAKEUP):
            if self._socket.closed:  # by what a message led to
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(frames)
        self._loop.call_soon(self._drain)
