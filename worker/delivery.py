"""What goes out to the frontends: numbered, and collected into few Batches.

Law: all that one loop iteration brings for a frontend leaves as one Batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from tokenwire.protocol.messages import Batch, Finished, FromWorker, Tokens

from .frontends import Frontend
from .metrics import Metrics
from .outbox import send_batch
from .timers import Timers

__all__ = ["Delivery", "Sender"]


class Sender(Protocol):
    """The link, as far as the service needs it."""

    def send(self, identity: bytes, message: FromWorker) -> bool:
        """Queue *message*; return False if the peer is lost."""
        ...


class Delivery:
    """Sends to frontends that are there.

    Args:
        sender: The link.
        timers: The event loop, for the end of an iteration.
        metrics: Where it counts.
        lose: Called with a frontend that nothing can be sent to, and why.
    """

    def __init__(
        self,
        sender: Sender,
        timers: Timers,
        metrics: Metrics,
        lose: Callable[[Frontend, str], None],
    ) -> None:
        self._sender = sender
        self._timers = timers
        self._metrics = metrics
        self._lose = lose
        self._dirty: list[Frontend] = []

    def send(self, frontend: Frontend, message: FromWorker) -> bool:
        """Send *message* now; return whether its frontend is still there."""
        if frontend.is_lost:
            return False
        if self._sender.send(frontend.identity, frontend.outgoing.numbered(message)):
            frontend.outgoing.sent(message)
            return True
        self._lose(frontend, "nothing can be sent to it")
        return False

    def tokens(self, frontend: Frontend, item: Tokens) -> None:
        """Send *item* with the next Batch; called per token."""
        frontend.outbox.tokens.append(item)
        if not frontend.is_dirty:
            self._flush_soon(frontend)

    def finished(self, frontend: Frontend, end: Finished) -> None:
        """Send *end* with the next Batch."""
        frontend.outbox.finished.append(end)
        if not frontend.is_dirty:
            self._flush_soon(frontend)

    def flush(self) -> None:
        """Send what is collected."""
        dirty, self._dirty = self._dirty, []
        for frontend in dirty:
            frontend.is_dirty = False
            for batch in frontend.outbox.take():
                send_batch(batch, partial(self._send_one_batch, frontend))

    def _flush_soon(self, frontend: Frontend) -> None:
        frontend.is_dirty = True
        if not self._dirty:
            self._timers.call_soon(self.flush)
        self._dirty.append(frontend)

    def _send_one_batch(self, frontend: Frontend, batch: Batch) -> bool:
        if not self.send(frontend, batch):
            return False
        self._metrics.batch_sent()
        return True
