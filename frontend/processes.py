"""``--processes N``: one frontend as several processes, under a parent that serves nothing.

Laws:
- The parent alone binds; its processes take connections from the sockets that it listens
  on, so that a process can come and go while the port is there.
- A process that ends is started again, after ever longer pauses; the others go on.
- No process outlives its parent: the end of the sockets between them ends it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Sequence

from tokenwire.protocol.restart import (
    GiveUp,
    RestartPolicy,
    Restarts,
    status_text,
)

from .board import Board
from .config import Config
from .control import Kind, Start
from .doors import listening, scheme_of
from .events import first_of
from .ledger import Ledger
from .pages import Books
from .spawned import Spawned
from .tls import TlsFiles

__all__ = ["Processes", "run_processes"]

_log = logging.getLogger("tokenwire.frontend")

WAIT_S = 1.0
"""For the pages of all processes: one is made in some 3 ms, and a scrape times out after 10 s."""

KILL_AFTER_S = 10.0
"""Beyond the time that requests have: ends are told, connections closed in some 3 s."""

RESTARTS = RestartPolicy(first_delay_s=0.25, max_delay_s=10.0, max_failed_starts=1)
"""Quicker than for engines: a start takes a second, and the others carry its load."""


def run_processes(config: Config, arguments: Sequence[str]) -> int:
    """Run the processes until SIGINT or SIGTERM, and return the exit code.

    Args:
        config: What *arguments* and the environment say.
        arguments: The command line, for the processes.

    Raises:
        OSError: An address cannot be listened on.
    """
    return asyncio.run(Processes(config, arguments).run())


class Processes:
    """The parent."""

    def __init__(self, config: Config, arguments: Sequence[str]) -> None:
        self._config = config
        self._arguments = arguments
        self._board = Board.create(config.processes)
        self._ledger = Ledger.create(config.processes)
        self._books = Books(config.processes)
        self._running: dict[int, Spawned] = {}
        self._restarts: dict[int, Restarts] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._listeners: list[socket.socket] = []
        self._admin_listeners: list[socket.socket] = []
        self._metrics_listeners: list[socket.socket] = []
        self._started = int(time.time())
        self._stopping = asyncio.Event()
        self._hurrying = asyncio.Event()
        self._first_is_up = asyncio.Event()
        self._exit_code = 0
        self._rounds: dict[Kind, asyncio.Task[str]] = {}
        self._next_rounds: dict[Kind, asyncio.Task[str]] = {}
        self._moments: dict[int, str] = {}  # what each has told of itself for ``/ui``

    async def run(self) -> int:
        """Run until a signal, or until the first process turns out not to start.

        Raises:
            OSError: An address cannot be listened on.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        config = self._config
        try:
            self._listeners = await listening(
                config.host, config.port, reuse_port=config.reuse_port
            )
            if config.admin.port is not None:
                self._admin_listeners = await listening(
                    config.admin.host, config.admin.port
                )
            if config.access.metrics_listen is not None:
                self._metrics_listeners = await listening(
                    *config.access.metrics_listen, reuse_port=config.reuse_port
                )
            async with asyncio.TaskGroup() as tasks:
                self._keepers = [
                    tasks.create_task(self._keep(number))
                    for number in range(config.processes)
                ]
                await self._stopping.wait()
                await self._end()
        finally:
            for one in self._running.values():
                one.kill()  # empty but after a bug of ours
            for listener in (
                *self._listeners,
                *self._admin_listeners,
                *self._metrics_listeners,
            ):
                listener.close()
            self._board.close()
            self._ledger.close()
        return self._exit_code

    def _on_signal(self) -> None:
        (self._hurrying if self._stopping.is_set() else self._stopping).set()

    # --- one process, for as long as we run --------------------------------------------

    async def _keep(self, number: int) -> None:
        """Run a process, again and again, until we stop.

        The others wait for the first: what is wrong with all is said once, and a model
        is downloaded once.
        """
        restarts = Restarts(RESTARTS)
        if number:
            await first_of(self._first_is_up, self._stopping)
            restarts.up(time.monotonic())  # with these settings a process comes up
        while not self._stopping.is_set():
            try:
                one = await Spawned.spawn(self._start(number), self._arguments)
            except OSError as error:
                how, status = f"{number} cannot be started: {error}", 1
            else:
                how, status = await self._attend(one, restarts)
            if self._stopping.is_set():
                return
            verdict = restarts.ended(time.monotonic(), status)
            if isinstance(verdict, GiveUp):
                # Most have said why; of a signal nobody has.
                _log.error("process %s, before it was up: giving up", how)
                self._exit_code = status if status > 0 else 1
                self._stopping.set()
                return
            _log.error(
                "process %s; it is started again in %.2g s, the others go on",
                *(how, verdict.delay_s),
            )
            await first_of(self._stopping, timeout_s=verdict.delay_s)

    async def _attend(self, one: Spawned, restarts: Restarts) -> tuple[str, int]:
        """Return how a process has ended, in words and as its exit status."""
        self._running[one.number] = one
        self._restarts[one.number] = restarts
        if self._stopping.is_set():  # while it was being made
            one.stop()
        status = await one.attend(self)
        del self._running[one.number]
        self._board.leave(one.number)
        self._ledger.leave(one.number)
        self._books.ended(one.number)
        self._moments.pop(one.number, None)
        how = f"{one.number} (pid {one.pid}) has ended with {status_text(status)}"
        return how, status

    def _start(self, number: int) -> Start:
        is_first = number == 0
        return Start(
            process=number,
            num_processes=self._config.processes,
            frontend_id=f"{self._config.frontend_id}-{number}",
            started=self._started,
            board=self._board.fd,
            ledger=self._ledger.fd,
            listeners=[one.fileno() for one in self._listeners],
            # One has the admin plane: what it does, all learn from the workers.
            admin_listeners=[one.fileno() for one in self._admin_listeners if is_first],
            metrics_listeners=[one.fileno() for one in self._metrics_listeners],
        )

    async def _end(self) -> None:
        """End all: ask, hurry them after another signal, then kill."""
        for one in self._running.values():
            one.stop()
        ended = asyncio.ensure_future(asyncio.wait(self._keepers))
        hurrying = asyncio.ensure_future(self._hurrying.wait())
        bound_s = self._config.shutdown_timeout_s + KILL_AFTER_S
        await asyncio.wait(
            [ended, hurrying], timeout=bound_s, return_when=asyncio.FIRST_COMPLETED
        )
        hurrying.cancel()
        if not ended.done():
            for one in self._running.values():
                one.hurry()
            await asyncio.wait([ended], timeout=KILL_AFTER_S)
        for one in self._running.values():
            _log.error("process %d does not end: killing it", one.number)
            one.kill()
        await ended

    # --- what processes say ------------------------------------------------------------

    def is_up(self, one: Spawned) -> None:
        """Note that a process takes connections."""
        self._restarts[one.number].up(time.monotonic())
        _log.info("process %d (pid %d) is up", one.number, one.pid)
        if not self._first_is_up.is_set():
            self._first_is_up.set()
            tls = self._config.access.tls
            _say_where("listening on", self._listeners, tls)
            _say_where("admin plane on", self._admin_listeners, tls)
            _say_where("metrics on", self._metrics_listeners, None)

    def told(self, one: Spawned, page: str, kind: Kind) -> None:
        """Keep what a process has of a kind."""
        if kind == "live":
            self._moments[one.number] = page
        else:
            self._books.told(one.number, page)

    async def page(self, kind: Kind) -> str:
        """Return what all processes have of a kind, as it is from now on.

        However many ask, one round of questions is under way and one waits.
        """
        if kind not in self._next_rounds:
            waiting = self._ask_all(kind, self._rounds.get(kind))
            self._next_rounds[kind] = asyncio.create_task(waiting)
        return await asyncio.shield(self._next_rounds[kind])

    async def _ask_all(self, kind: Kind, before: asyncio.Task[str] | None) -> str:
        if before is not None:
            await asyncio.wait([before])
        self._rounds[kind] = self._next_rounds.pop(kind)
        running = [one for one in self._running.values() if one.is_up]
        asked = {one.ask(kind): one for one in running}
        if asked:
            await asyncio.wait(asked, timeout=WAIT_S)
        answering = {
            one.number
            for answer, one in asked.items()
            if answer.done() and not answer.cancelled()
            # It may have ended since, while others were waited for.
            if self._running.get(one.number) is one
        }
        if kind == "live":
            told = [self._moments[number] for number in sorted(answering)]
            return f"[{','.join(told)}]"
        return self._books.page(answering)


def _say_where(
    what: str, listeners: Sequence[socket.socket], tls: TlsFiles | None
) -> None:
    if listeners:
        host, port = listeners[0].getsockname()[:2]
        _log.info("%s %s://%s:%s", what, scheme_of(tls), host, port)
