"""What one loop iteration has for one frontend: collected, then sent as few Batches.

Laws:
- One Batch per flush, unless it would be above a limit of the wire.
- The ends follow the tokens; within each, the order is kept.
- An end that no message can carry becomes an error, never silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tokenwire.protocol.errors import LocalProtocolError, MessageTooLarge, ProtocolError
from tokenwire.protocol.limits import MAX_BATCH_ITEMS, MAX_ERROR_CHARS
from tokenwire.protocol.messages import (
    Batch,
    ErrorKind,
    Finished,
    FinishReason,
    Tokens,
)

__all__ = ["Outbox", "send_batch"]


class Outbox:
    """Tokens and ends on their way to one frontend."""

    __slots__ = ("finished", "tokens")

    def __init__(self) -> None:
        self.tokens: list[Tokens] = []
        self.finished: list[Finished] = []

    def take(self) -> Iterator[Batch]:
        """Return all that is collected, in order, and begin anew."""
        tokens, finished = self.tokens, self.finished
        self.tokens, self.finished = [], []
        num_items = len(tokens) + len(finished)
        if 0 < num_items <= MAX_BATCH_ITEMS:
            yield Batch(tokens, finished)
            return
        for start in range(0, len(tokens), MAX_BATCH_ITEMS):
            yield Batch(tokens[start : start + MAX_BATCH_ITEMS], [])
        for start in range(0, len(finished), MAX_BATCH_ITEMS):
            yield Batch([], finished[start : start + MAX_BATCH_ITEMS])


def send_batch(batch: Batch, send: Callable[[Batch], bool]) -> bool:
    """Give *batch* to *send*, in parts if one message cannot carry it.

    Returns:
        What *send* returned last; the first False ends it.

    Raises:
        MessageTooLarge: One Tokens alone is: a bug, an engine step is far smaller.
        LocalProtocolError: One Tokens alone cannot be encoded: a bug as well.
    """
    try:
        return send(batch)
    except (MessageTooLarge, LocalProtocolError) as error:
        parts = _parts(batch, error)
    return all(send_batch(part, send) for part in parts)


def _parts(batch: Batch, error: ProtocolError) -> tuple[Batch, ...]:
    tokens, finished = batch.tokens, batch.finished
    if tokens and finished:
        return Batch(tokens, []), Batch([], finished)
    if len(tokens) > 1:
        middle = len(tokens) // 2
        return Batch(tokens[:middle], []), Batch(tokens[middle:], [])
    if len(finished) > 1:
        middle = len(finished) // 2
        return Batch([], finished[:middle]), Batch([], finished[middle:])
    if not finished:
        raise error
    return (Batch([], [_without_burden(finished[0], error)]),)


def _without_burden(end: Finished, error: ProtocolError) -> Finished:
    """Return the end that says that *end* cannot be sent.

    Raises:
        ProtocolError: It is that end already.
    """
    too_large = isinstance(error, MessageTooLarge)
    instead = Finished(
        request_id=end.request_id,
        reason=FinishReason.ERROR,
        num_output_tokens=end.num_output_tokens,
        num_prompt_tokens=end.num_prompt_tokens,
        num_cached_tokens=end.num_cached_tokens,
        error_kind=ErrorKind.INVALID if too_large else ErrorKind.ENGINE,
        error=f"the answer cannot be sent: {error}"[:MAX_ERROR_CHARS],
    )
    if end == instead:
        raise error
    return instead
