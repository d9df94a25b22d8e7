"""Who hears the answers to one Submit."""

from __future__ import annotations

from typing import Protocol

from tokenwire.protocol.messages import Finished, Tokens

__all__ = ["Reply"]


class Reply(Protocol):
    """Who hears the answers of one Submit; called on the event loop."""

    def tokens(self, item: Tokens, end: Finished | None) -> None:
        """Take tokens, and the end if it came in the same batch."""

    def finished(self, end: Finished) -> None:
        """Take an end that came alone."""

    def lost(self, reason: str) -> None:
        """The worker is gone; nothing more comes."""
