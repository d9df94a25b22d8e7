"""Collecting items, and splitting what no message can carry."""

from __future__ import annotations

import pytest

from tokenwire.protocol.errors import MessageTooLarge
from tokenwire.protocol.limits import MAX_BATCH_ITEMS
from tokenwire.protocol.messages import (
    Batch,
    ErrorKind,
    Finished,
    FinishReason,
    Logprobs,
    Tokens,
)
from tokenwire.worker.outbox import Outbox, send_batch

LOGPROBS = Logprobs(1, bytes(400), bytes(400), bytes(400))


def tokens(n: int) -> Tokens:
    """Return one token of request *n*."""
    return Tokens(str(n), 0, bytes(4))


def end(n: int, *, heavy: bool = False) -> Finished:
    """Return the end of request *n*."""
    burden = LOGPROBS if heavy else None
    return Finished(str(n), FinishReason.STOP, 1, prompt_logprobs=burden)


class Wire:
    """Takes Batches of so many items, none of them heavy."""

    def __init__(self, max_items: int) -> None:
        self.max_items = max_items
        self.sent: list[Batch] = []
        self.is_open = True

    def send(self, batch: Batch) -> bool:
        """Take *batch*, or raise as an encoder does."""
        heavy = any(item.prompt_logprobs is not None for item in batch.finished)
        if heavy or len(batch.tokens) + len(batch.finished) > self.max_items:
            msg = "too large"
            raise MessageTooLarge(msg)
        if self.is_open:
            self.sent.append(batch)
        return self.is_open


def test_taking_empties() -> None:
    """One Batch for all, then none."""
    outbox = Outbox()
    outbox.tokens.append(tokens(1))
    outbox.finished.append(end(1))
    assert list(outbox.take()) == [Batch([tokens(1)], [end(1)])]
    assert list(outbox.take()) == []


def test_the_number_of_items_in_a_batch_is_bounded() -> None:
    """More make more Batches, in order, each end in the one of its last token."""
    outbox = Outbox()
    outbox.tokens = [tokens(n) for n in range(MAX_BATCH_ITEMS)]
    outbox.finished = [end(MAX_BATCH_ITEMS - 1), end(0)]
    first, second = outbox.take()
    assert first.tokens + second.tokens == [tokens(n) for n in range(MAX_BATCH_ITEMS)]
    assert first.finished == [end(0)]
    assert second.finished == [end(MAX_BATCH_ITEMS - 1)]


def test_an_end_follows_all_tokens_of_its_request() -> None:
    """Also where these are in several Batches, and where there are none."""
    outbox = Outbox()
    outbox.tokens = [tokens(0)] * (MAX_BATCH_ITEMS + 1)
    outbox.finished = [end(0), end(1)]
    first, second = outbox.take()
    assert not first.finished
    assert second.finished == [end(0), end(1)]


@pytest.mark.parametrize("max_items", [1, 2, 3, 7])
def test_a_batch_that_is_too_large_goes_in_parts_and_in_order(max_items: int) -> None:
    """Nothing is lost, nothing comes twice, an end stays with its token if it can."""
    batch = Batch([tokens(n) for n in range(5)], [end(n) for n in range(3)])
    wire = Wire(max_items)
    assert send_batch(batch, wire.send)
    assert [item for part in wire.sent for item in part.tokens] == batch.tokens
    assert [item for part in wire.sent for item in part.finished] == batch.finished
    for item in batch.finished:
        places = [
            number
            for number, part in enumerate(wire.sent)
            if item in part.finished
            or item.request_id in {one.request_id for one in part.tokens}
        ]
        assert len(places) == (1 if max_items > 1 else 2)


def test_an_end_that_alone_is_too_large_becomes_an_error() -> None:
    """It keeps its counts."""
    wire = Wire(10)
    assert send_batch(Batch([tokens(1)], [end(1, heavy=True), end(2)]), wire.send)
    ends = [item for part in wire.sent for item in part.finished]
    assert [item.request_id for item in ends] == ["1", "2"]
    assert ends[0].error_kind is ErrorKind.INVALID
    assert ends[0].num_output_tokens == 1
    assert "too large" in ends[0].error


def test_sending_stops_when_the_peer_is_lost() -> None:
    """The rest has nowhere to go."""
    wire = Wire(1)
    wire.is_open = False
    assert not send_batch(Batch([tokens(1), tokens(2)], []), wire.send)


def test_a_single_item_that_cannot_be_sent_is_a_bug() -> None:
    """Tokens cannot be left out, and an error has nothing to be left out of."""
    with pytest.raises(MessageTooLarge):
        send_batch(Batch([tokens(1)], []), Wire(0).send)
    with pytest.raises(MessageTooLarge):
        send_batch(Batch([], [end(1)]), Wire(0).send)
