"""A link's side of the protocol: its Hellos, the cards they bring, and the numbers."""

from __future__ import annotations

import secrets

from tokenwire.protocol.errors import SequenceError
from tokenwire.protocol.messages import (
    CAPTURE,
    CAPTURE_TOLD,
    ORPHANED_KV,
    PROTOCOL_VERSION,
    STATUS,
    Hello,
)
from tokenwire.protocol.numbering import Incoming, Outgoing

__all__ = ["BREACH_MEMORY_S", "FIRST_PAUSE_S", "HELLO_AGAIN_S", "Conversation"]

HELLO_AGAIN_S = 10.0
"""After a refusal; an operator may have fixed the worker behind this address."""

FIRST_PAUSE_S = 0.5
"""After a second breach of the protocol; twice as long after each further one, up to
``HELLO_AGAIN_S``. What never makes sense (another release, another program) would else be
asked again as fast as it answers, and fill the log."""

BREACH_MEMORY_S = 30.0
"""Without a breach for so long, the next one is a first one again: a message was lost."""


class Conversation:
    """What was said on one link; *now* is any monotonic clock, in s."""

    __slots__ = (
        "_breach_at",
        "_num_cards_due",
        "_pause_s",
        "_speak_at",
        "hello",
        "incoming",
        "outgoing",
    )

    def __init__(self, frontend_id: str, incarnation: str) -> None:
        self.hello = Hello(
            PROTOCOL_VERSION,
            frontend_id,
            incarnation,
            [ORPHANED_KV, STATUS, CAPTURE, CAPTURE_TOLD],
            link_id=secrets.token_hex(4),
        )
        self.incoming, self.outgoing = Incoming(), Outgoing()
        self._num_cards_due = 0  # Hellos of this connection without a card
        self._speak_at = 0.0
        self._breach_at = float("-inf")
        self._pause_s = 0.0  # after the next breach

    def said_hello(self) -> None:
        """Take note that a Hello has been sent: the numbers begin anew."""
        self.outgoing = Outgoing()
        self._num_cards_due += 1

    def got_card(self) -> None:
        """Take note that a Card has come: the worker's numbers begin anew.

        Raises:
            SequenceError: Nobody has asked for it.
        """
        if not self._num_cards_due:
            msg = "a card that was not asked for: the worker has begun anew"
            raise SequenceError(msg)
        self._num_cards_due -= 1
        self.incoming = Incoming()

    def broke(self) -> None:
        """Take note that the connection is gone, and with it what was on its way."""
        self._num_cards_due = 0

    def pause_after_breach(self, now: float) -> float:
        """Take note of a breach of the protocol; return how long to be quiet for it."""
        if now - self._breach_at > BREACH_MEMORY_S:
            self._pause_s = 0.0
        pause_s, self._breach_at = self._pause_s, now
        self._pause_s = min(max(2 * pause_s, FIRST_PAUSE_S), HELLO_AGAIN_S)
        return pause_s

    def be_quiet(self, now: float, seconds: float = HELLO_AGAIN_S) -> None:
        """Say no Hello for a while."""
        self._speak_at = now + seconds

    def speak_soon(self) -> None:
        """Say a Hello at the next look at the clock, if one is to be said."""
        self._speak_at = 0.0

    def hello_due(self, now: float) -> bool:
        """Return whether a Hello may be said again."""
        return now >= self._speak_at
