"""One Submit to one worker, and who hears what it answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from tokenwire.protocol.messages import (
    AGAIN,
    GRAMMAR_REJECTS_PREFIX,
    ErrorKind,
    Finished,
    Tokens,
)

from .errors import ApiError
from .link import Link
from .reply import Reply
from .resume_errors import grammar_rejects_prefix

__all__ = ["Leg", "OutputLeg", "Owner", "PrefillLeg", "Way"]


class Owner(Protocol):
    """The generation that legs belong to."""

    request_id: str
    attempt: int  # makes the legs' request ids differ: late answers find nobody

    def prefilled(self, leg: Leg, first: Tokens | None, end: Finished) -> None:
        """Go on after the prefill leg."""

    def output(self, leg: Leg, item: Tokens, end: Finished | None) -> None:
        """Pass tokens of the output on."""

    def output_ended(self, leg: Leg, end: Finished) -> None:
        """Pass the end on."""

    def leg_failed(self, leg: Leg, kind: ErrorKind, text: str) -> None:
        """Go on elsewhere, or end."""


class Way(Reply, Protocol):
    """A shorter way for what an output leg brings; it hears that in place of the leg."""

    def begin(self, output: bytearray, leg: OutputLeg) -> None:
        """Take what comes next, behind *output*; pass on to *leg* what it cannot take."""


class Leg(ABC):
    """One Submit to one worker, and what it answers."""

    __slots__ = ("again", "error", "link", "owner", "request_id", "update")

    def __init__(
        self, owner: Owner, link: Link, kind: str, request_id: str = ""
    ) -> None:
        self.owner = owner
        self.link = link
        self.update: int | None = None  # that its weights were of when it was sent
        self.again = False  # it failed, but not for want of its worker
        self.error: ApiError | None = None  # what its failure is to be told as
        self.request_id = request_id or f"{owner.request_id}{kind}{owner.attempt}"

    @abstractmethod
    def tokens(self, item: Tokens, end: Finished | None) -> None:
        """Take tokens, and the end if it came in the same batch."""

    @abstractmethod
    def finished(self, end: Finished) -> None:
        """Take an end that came alone."""

    def lost(self, reason: str) -> None:
        """Take note that the worker is gone."""
        self.owner.leg_failed(self, ErrorKind.ENGINE, reason)

    def told(self, end: Finished) -> None:
        """Take note of what a failed end says of its cause."""
        self.again = end.stop_reason == AGAIN
        if end.stop_reason == GRAMMAR_REJECTS_PREFIX:
            self.error = grammar_rejects_prefix(end.error)

    def drop(self) -> None:
        """Cancel it, and pass nothing on of what it still brings."""
        self.owner = _NOBODY
        self.bend()
        self.link.cancel(self.request_id)

    def straighten(self, way: Way) -> None:
        """Have *way* hear what comes, in place of this."""
        self.link.redirect(self.request_id, way)

    def bend(self) -> None:
        """Hear what comes, whoever has heard it so far."""
        self.link.redirect(self.request_id, self)


class PrefillLeg(Leg):
    """Computes the prompt; its one token counts only if it ends the output."""

    __slots__ = ("_first",)

    def __init__(self, owner: Owner, link: Link) -> None:
        super().__init__(owner, link, "p")
        self._first: Tokens | None = None

    def tokens(self, item: Tokens, end: Finished | None) -> None:
        """Keep the token until the leg ends."""
        if self._first is None:
            self._first = item
        if end is not None:
            self.finished(end)

    def finished(self, end: Finished) -> None:
        """Hand over, or end."""
        self.owner.prefilled(self, self._first, end)


class OutputLeg(Leg):
    """Its tokens are the output."""

    __slots__ = ()

    def __init__(self, owner: Owner, link: Link, request_id: str = "") -> None:
        super().__init__(owner, link, "d", request_id)

    def tokens(self, item: Tokens, end: Finished | None) -> None:
        """Pass tokens on."""
        self.owner.output(self, item, end)

    def finished(self, end: Finished) -> None:
        """End the output."""
        self.owner.output_ended(self, end)


class _Nobody:
    """The owner of legs that were dropped."""

    request_id = ""
    attempt = 0

    def prefilled(self, leg: Leg, first: Tokens | None, end: Finished) -> None:
        pass

    def output(self, leg: Leg, item: Tokens, end: Finished | None) -> None:
        pass

    def output_ended(self, leg: Leg, end: Finished) -> None:
        pass

    def leg_failed(self, leg: Leg, kind: ErrorKind, text: str) -> None:
        pass


_NOBODY = _Nobody()
