"""The order of one request's answers: contiguous tokens, then exactly one end.

Laws:
- The index of every Tokens equals the number of ids before it: no gap, no repeat.
- Finished comes once, counts what Tokens carried, and nothing follows it.
Both sides hold an ``Exchange`` per request: the worker so as not to break the laws,
the frontend to notice who does.
"""

from __future__ import annotations

from .errors import SequenceError
from .messages import Finished, Tokens
from .tokens import TOKEN_BYTES

__all__ = ["Exchange"]


class Exchange:
    """The state of one request's answers: how many ids so far, and whether it ended."""

    __slots__ = ("ended", "num_tokens")

    def __init__(self) -> None:
        self.num_tokens = 0
        self.ended = False

    def tokens(self, item: Tokens) -> None:
        """Account for *item*.

        Raises:
            SequenceError: It repeats, leaves a gap, or follows the end.
        """
        if self.ended:
            msg = f"request {item.request_id}: tokens after its end"
            raise SequenceError(msg)
        if item.index != self.num_tokens:
            what = "gap" if item.index > self.num_tokens else "repeat"
            msg = (
                f"request {item.request_id}: {what}, index {item.index} "
                f"where {self.num_tokens} was due"
            )
            raise SequenceError(msg)
        self.num_tokens += len(item.token_ids) // TOKEN_BYTES

    def finished(self, item: Finished) -> None:
        """Account for the end.

        Raises:
            SequenceError: There was an end before, or it counts other ids.
        """
        if self.ended:
            msg = f"request {item.request_id}: a second end ({item.reason.value})"
            raise SequenceError(msg)
        if item.num_output_tokens != self.num_tokens:
            msg = (
                f"request {item.request_id}: ended with {item.num_output_tokens} "
                f"tokens, {self.num_tokens} arrived"
            )
            raise SequenceError(msg)
        self.ended = True
