"""One request being served, as others may look at it: nothing is done for them before."""

from __future__ import annotations

import time

from .admission import State, Ticket
from .session import Session
from .stages import Stage

__all__ = ["Visit"]


class Visit:
    """One request, from its headers to the last of its answer.

    Args:
        path: Of its URL.
    """

    __slots__ = ("began_at", "is_read", "num_body_bytes", "path", "session", "ticket")

    def __init__(self, path: str) -> None:
        self.path = path
        self.began_at = time.monotonic()
        self.num_body_bytes = 0  # that are held until it is parsed
        self.is_read = False  # its body is here
        self.session: Session | None = None  # None: it is not prepared yet
        self.ticket: Ticket | None = None  # None: it needs no turn

    def runs(self, session: Session, ticket: Ticket | None = None) -> None:
        """Take note of who answers it."""
        self.session, self.ticket = session, ticket

    @property
    def stage(self) -> Stage:
        """What it waits for now."""
        if self.session is None:
            return Stage.TOKENIZING if self.is_read else Stage.RECEIVING
        if self.ticket is not None and self.ticket.state is State.WAITING:
            return Stage.QUEUED
        return self.session.stage
