"""What one loop iteration has for one frontend: collected, then sent as few Batches.

Laws:
- One Batch per flush, unless it would be above a limit of the wire.
- The ends follow the tokens; within each, the order is kept.
- An end is in the Batch of its last token, so that a frontend knows a stop token when
  it comes; apart from it only if no message can carry the two together.
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
        batch = Batch(self.tokens, self.finished)
        self.tokens, self.finished = [], []
        if batch.tokens or batch.finished:
            yield from _bounded(batch)


def _bounded(batch: Batch) -> Iterator[Batch]:
    if len(batch.tokens) + len(batch.finished) <= MAX_BATCH_ITEMS:
        yield batch
        return
    for part in _halves(batch):
        yield from _bounded(part)


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
    if len(batch.tokens) + len(batch.finished) > 1:
        return _halves(batch)
    if not batch.finished:
        raise error
    return (Batch([], [_without_burden(batch.finished[0], error)]),)


def _halves(batch: Batch) -> tuple[Batch, Batch]:
    """Return the two halves of a batch of two items or more."""
    tokens, finished = batch.tokens, batch.finished
    if not tokens:
        middle = len(finished) // 2
        return Batch([], finished[:middle]), Batch([], finished[middle:])
    middle = (len(tokens) + 1) // 2
    first, second = tokens[:middle], tokens[middle:]
    if not second and len(finished) == 1:
        return Batch(first, []), Batch([], finished)
    later = {item.request_id for item in second}
    whole = {item.request_id for item in first} - later
    return (
        Batch(first, [end for end in finished if end.request_id in whole]),
        Batch(second, [end for end in finished if end.request_id not in whole]),
    )


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
