"""The short way of one id to its client, where events say nothing but text and ids."""

from __future__ import annotations

from dataclasses import dataclass

from .detokenize import ByteDetokenizer, Detokenizer
from .sse import EventStream

__all__ = ["Around", "PlainWay", "plain_way"]


@dataclass(slots=True, frozen=True)
class Around:
    """What stands around text and id in the event of one id."""

    before: bytes  # the text, in JSON
    after: tuple[bytes, ...]  # it; the id stands between any two of these


class PlainWay:
    """Sends one id of a choice, if it is a text of its own that is known already.

    No string is made and nothing encoded: the event's parts are there, and leave as they
    are. One object has all of it, since most of what a token costs at an engine's pace is
    memory that is no longer in the processor's caches.
    """

    __slots__ = (
        "_after",
        "_before",
        "_detokenizer",
        "_num_bytes",
        "_pieces",
        "_quoted",
        "_stream",
    )

    def __init__(
        self, around: Around, detokenizer: ByteDetokenizer, stream: EventStream
    ) -> None:
        self._before = around.before
        self._after = around.after[0]
        self._pieces = around.after if len(around.after) > 1 else ()
        self._num_bytes = len(self._before) + len(self._after)
        self._detokenizer = detokenizer
        self._quoted = detokenizer.quoted
        self._stream = stream

    def send(self, token_id: int) -> bool:
        """Send the event of an id; returns False, and does nothing, where it cannot."""
        try:
            text = self._quoted[token_id]
        except IndexError:
            return False
        if text is None or self._detokenizer.rest:
            return False
        after, num_bytes = self._after, self._num_bytes + len(text)
        if self._pieces:
            num_bytes -= len(after)
            after = (b"%d" % token_id).join(self._pieces)
            num_bytes += len(after)
        self._stream.send_parts((self._before, text, after), num_bytes)
        return True


def plain_way(
    around: Around | None, detokenizer: Detokenizer, stream: EventStream
) -> PlainWay | None:
    """Return the short way, if there is one.

    Args:
        around: Of the choice's events; None: they say more.
        detokenizer: The choice's.
        stream: Where its events go.
    """
    if around is None or not isinstance(detokenizer, ByteDetokenizer):
        return None
    return PlainWay(around, detokenizer, stream)
