"""What a process of ``--processes N`` has of the others: sockets, counts, one page.

Laws:
- It ends when its parent does.
- Liveness asks nobody: only ``/metrics`` and ``/ui`` wait for the others, and that not
  for long.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from itertools import count

import msgspec

from .board import TICK_S, Board, Seat, Turn
from .control import Ask, FromParent, Kind, Page, Start, Up, framed, read
from .errors import unavailable
from .ledger import Ledger

__all__ = ["PAGE_WAIT_S", "Share"]

PAGE_WAIT_S = 5.0
"""For the page of all: the parent waits for a second in each of two rounds at most."""

_decoder = msgspec.msgpack.Decoder(FromParent)


class Share:
    """The place of this process among them.

    Args:
        start: What the parent has said first.
        control: The socket to it.
    """

    def __init__(self, start: Start, control: socket.socket) -> None:
        self.process = start.process
        self.num_processes = start.num_processes
        self.started = start.started
        self.frontend_id = start.frontend_id
        self.listeners = [socket.socket(fileno=fd) for fd in start.listeners]
        self.admin_listeners = [
            socket.socket(fileno=fd) for fd in start.admin_listeners
        ]
        self.metrics_listeners = [
            socket.socket(fileno=fd) for fd in start.metrics_listeners
        ]
        for listener in (
            *self.listeners,
            *self.admin_listeners,
            *self.metrics_listeners,
        ):
            listener.setblocking(False)
        self.ledger = Ledger(start.ledger, start.num_processes, start.process)
        self._control = control
        self._board = Board(start.board, start.num_processes)
        self._writer: asyncio.StreamWriter | None = None
        self._numbers = count()
        self._asked: dict[int, asyncio.Future[str]] = {}

    async def run(
        self,
        is_ready: Callable[[], bool],
        own_page: Callable[[Kind], bytes],
        on_alone: Callable[[], None],
    ) -> None:
        """Speak with the parent, until it is gone.

        Args:
            is_ready: Returns whether this process can serve.
            own_page: Returns what it has of a kind.
            on_alone: Called when the parent is gone.
        """
        reader, self._writer = await asyncio.open_unix_connection(sock=self._control)
        self._writer.write(framed(Up()))
        ticks = asyncio.create_task(self._tick(is_ready))
        try:
            while (message := await read(reader, _decoder)) is not None:
                match message:
                    case Ask(number, kind):
                        text = own_page(kind).decode()
                        self._writer.write(framed(Page(number, text, kind)))
                    case Page(number, text):
                        asked = self._asked.get(number)
                        if asked is not None and not asked.done():
                            asked.set_result(text)
                    case Start():
                        pass  # it was the first
            on_alone()
            await ticks
        finally:
            ticks.cancel()
            self._writer.close()

    async def page(self, kind: Kind = "metrics") -> bytes:
        """Return what all processes have of a kind.

        Raises:
            ApiError: 503, there is no answer. A page without the others would have
                smaller sums, which Prometheus takes for a restart.
        """
        number = next(self._numbers)
        answer = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            if self._writer is not None:
                self._writer.write(framed(Ask(number, kind)))
            text: str = await asyncio.wait_for(answer, PAGE_WAIT_S)
            return text.encode()
        except TimeoutError as error:
            msg = "the other processes of this frontend cannot be asked"
            raise unavailable(msg) from error
        finally:
            del self._asked[number]

    def sit(self, *, ready: bool) -> None:
        """Say to the others whether this process can serve."""
        self._board.sit(self.process, time.monotonic(), ready=ready)

    def count(self, num_connections: int) -> None:
        """Say to the others how many clients this process has."""
        self._board.count(self.process, num_connections)

    def turn(self) -> Turn:
        """Return whether this process takes a connection that waits."""
        return self._board.turn(self.process, time.monotonic())

    def is_ready(self) -> bool:
        """Return whether any process can serve."""
        return self._board.is_ready(time.monotonic())

    def seats(self) -> list[Seat]:
        """Return what each process says of itself."""
        return self._board.seats(time.monotonic())

    async def _tick(self, is_ready: Callable[[], bool]) -> None:
        while True:
            self.sit(ready=is_ready())
            await asyncio.sleep(TICK_S)
