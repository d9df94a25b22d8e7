"""The straight way of one id to its client, where events say nothing but text and ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenwire.protocol.messages import Finished, Tokens
from tokenwire.protocol.tokens import TOKEN_BYTES, unpack_id

from .detokenize import ByteDetokenizer
from .legs import OutputLeg
from .pace import Pace
from .sse import EventStream

__all__ = ["Around", "PlainWay"]


@dataclass(slots=True, frozen=True)
class Around:
    """What stands around text and id in the event of one id."""

    before: bytes  # the text, in JSON
    after: tuple[bytes, ...]  # it; the id stands between any two of these


class PlainWay(Pace):
    """Leads one id of a choice from its worker to its event, past all that is between.

    Most of what a token costs at an engine's pace is memory that is no longer in the
    processor's caches. So one object has all that a token touches, and is the choice's
    ``Pace``. Laws:
    - It takes single ids without logprobs, of the weights it began with, that are a text of
      their own. All else, and every end, it passes on to the leg, whose place it has.
    - Behind what it has passed on it takes nothing until ``begin``: half a character may
      be waiting.
    - What it takes, it does whole: output, pace and event are as by the long way. Nothing
      of these is kept twice: it writes where the long way does.
    - It has the leg's place from the second id on, and for as long as its choice sends
      what comes. Who ends that says ``Generation.bend``; the next id then goes the long
      way, and may open it again (``Choice.tokens``).

    Args:
        pace: The choice's so far, whose place it takes.
        around: Of the choice's events.
        detokenizer: The choice's.
        stream: Where its events go.
        broke: Told of a bug: the others in its batch go on.
    """

    __slots__ = (
        "_after",
        "_before",
        "_broke",
        "_detokenizer",
        "_leg",
        "_link",
        "_output",
        "_pieces",
        "_quoted",
        "_stream",
        "_weight_version",
    )

    def __init__(
        self,
        pace: Pace,
        around: Around,
        detokenizer: ByteDetokenizer,
        stream: EventStream,
        broke: Callable[[Exception], None],
    ) -> None:
        self.continue_from(pace)
        self._before = around.before
        self._after = around.after[0]
        self._pieces = around.after if len(around.after) > 1 else ()
        self._detokenizer = detokenizer
        self._quoted: Sequence[bytes | None] = ()  # of the ids that it takes now
        self._stream = stream
        self._broke = broke

    def begin(self, output: bytearray, leg: OutputLeg) -> None:
        """Take what comes next, behind *output*; pass on to *leg* what it cannot take."""
        self._output = output
        self._leg = leg
        self._link = leg.link
        self._weight_version = leg.link.weight_version
        detokenizer = self._detokenizer
        self._quoted = () if detokenizer.rest else detokenizer.quoted

    def tokens(self, item: Tokens, end: Finished | None) -> None:
        """Send an id's event; pass all else on."""
        packed = item.token_ids
        if (
            end is not None
            or len(packed) != TOKEN_BYTES
            or item.logprobs is not None
            or self._link.weight_version != self._weight_version
        ):
            self._pass_on(item, end)
            return
        [token_id] = unpack_id(packed)
        quoted = self._quoted
        text = quoted[token_id] if token_id < len(quoted) else None
        if text is None:
            self._pass_on(item, end)
            return
        self._output += packed
        try:
            self.tick()
            self.num_tokens += 1
            after = self._after
            if self._pieces:
                after = (b"%d" % token_id).join(self._pieces)
            self._stream.send(b"".join((self._before, text, after)))
        except Exception as error:  # noqa: BLE001 - the others in its batch go on
            self._broke(error)

    def _pass_on(self, item: Tokens, end: Finished | None) -> None:
        """Leave *item* to the leg, and all behind it until ``begin``."""
        self._quoted = ()
        self._leg.tokens(item, end)

    def finished(self, end: Finished) -> None:
        """Pass on an end that came alone."""
        self._leg.finished(end)

    def lost(self, reason: str) -> None:
        """Pass on the loss of the worker."""
        self._leg.lost(reason)
