"""The order of one link's messages: numbered by the sender, checked by the receiver.

TCP loses and repeats nothing within a connection, but a link is more than one: ZeroMQ
reconnects by itself, drops what its queues have no room for, and may run through
proxies. A message that is lost in silence (a Submit, a Cancel, an end) would leave its
request open for ever, so each message has a number, and the next one, a heartbeat at
the latest, shows the gap.

Laws:
- Hello begins the frontend's count, and Card the worker's: the first message behind
  either is number 1.
- A peer of an older release numbers nothing, and is believed.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from .errors import SequenceError
from .messages import (
    FromFrontend,
    FromWorker,
    NumberedFromFrontend,
    NumberedFromWorker,
)

__all__ = ["Incoming", "Numbered", "Outgoing"]

Numbered = NumberedFromFrontend | NumberedFromWorker
"""All but Hello, Card and Refused."""

M = TypeVar("M", bound=FromFrontend | FromWorker)


class Outgoing:
    """The numbers of what is sent, since Hello or Card."""

    __slots__ = ("num_sent",)

    def __init__(self) -> None:
        self.num_sent = 0

    def numbered(self, message: M) -> M:
        """Return *message* with the next number, which ``sent`` uses up."""
        if not isinstance(message, Numbered):
            return message
        return msgspec.structs.replace(message, seq=self.num_sent + 1)

    def sent(self, message: FromFrontend | FromWorker) -> None:
        """Take note that *message* has been sent."""
        if isinstance(message, Numbered):
            self.num_sent += 1


class Incoming:
    """The numbers of what comes, since Hello or Card."""

    __slots__ = ("num_received",)

    def __init__(self) -> None:
        self.num_received = 0

    def check(self, message: Numbered) -> None:
        """Account for *message*.

        Raises:
            SequenceError: Messages before it are missing, or it is not in its place.
        """
        seq, due = message.seq, self.num_received + 1
        if seq == due:
            self.num_received = due
            return
        if isinstance(seq, msgspec.UnsetType):
            if self.num_received:
                msg = f"{_name(message)} has no number, the one before had"
                raise SequenceError(msg)
            return
        if seq > due:
            msg = f"{seq - due} messages are missing before {_name(message)} {seq}"
        else:
            msg = f"{_name(message)} {seq} came where number {due} was due"
        raise SequenceError(msg)


def _name(message: Numbered) -> str:
    return type(message).__name__
