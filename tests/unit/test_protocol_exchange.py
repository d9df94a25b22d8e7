"""The order of one request's answers."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings, strategies as st

from tokenwire.protocol.errors import SequenceError
from tokenwire.protocol.exchange import Exchange
from tokenwire.protocol.messages import Finished, FinishReason, Tokens
from tokenwire.protocol.tokens import pack_ids


def tokens(index: int, num_tokens: int = 1) -> Tokens:
    """Return *num_tokens* tokens from *index* on."""
    return Tokens("r", index, pack_ids(range(num_tokens)))


def finished(num_output_tokens: int) -> Finished:
    """Return an end that counts *num_output_tokens*."""
    return Finished("r", FinishReason.STOP, num_output_tokens)


def test_contiguous_tokens_and_one_end_are_accepted() -> None:
    """Batches of any size in order, then the end with their count."""
    exchange = Exchange()
    exchange.tokens(tokens(0, 1))
    exchange.tokens(tokens(1, 3))
    assert (exchange.num_tokens, exchange.ended) == (4, False)
    exchange.finished(finished(4))
    assert exchange.ended


def test_an_end_without_tokens_is_accepted() -> None:
    """A request may fail before its first token."""
    exchange = Exchange()
    exchange.finished(finished(0))
    assert exchange.ended


@pytest.mark.parametrize(("index", "word"), [(0, "repeat"), (1, "repeat"), (3, "gap")])
def test_repeats_and_gaps_are_named(index: int, word: str) -> None:
    """Tokens at any index but the due one are refused, and say in which way."""
    exchange = Exchange()
    exchange.tokens(tokens(0, 2))
    with pytest.raises(SequenceError, match=f"request r: {word}.*where 2 was due"):
        exchange.tokens(tokens(index))
    assert exchange.num_tokens == 2


def test_tokens_after_the_end_are_refused() -> None:
    """Nothing follows the end."""
    exchange = Exchange()
    exchange.finished(finished(0))
    with pytest.raises(SequenceError, match="tokens after its end"):
        exchange.tokens(tokens(0))


def test_a_second_end_is_refused() -> None:
    """The end comes once."""
    exchange = Exchange()
    exchange.finished(finished(0))
    with pytest.raises(SequenceError, match=r"second end \(stop\)"):
        exchange.finished(finished(0))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_an_end_that_counts_other_tokens_is_refused(count: int) -> None:
    """Lost tokens are noticed at the end at the latest, and it does not count as one."""
    exchange = Exchange()
    exchange.tokens(tokens(0, 2))
    with pytest.raises(SequenceError, match="2 arrived"):
        exchange.finished(finished(count))
    assert not exchange.ended


def replay(exchange: Exchange, items: Iterable[Tokens | Finished]) -> None:
    """Account for *items* in order."""
    for item in items:
        if isinstance(item, Tokens):
            exchange.tokens(item)
        else:
            exchange.finished(item)


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=2), st.data())
def test_any_lost_repeated_or_swapped_batch_is_noticed(
    sizes: list[int], data: st.DataObject
) -> None:
    """One batch dropped, doubled or moved never passes unseen."""
    items: list[Tokens | Finished] = []
    total = 0
    for size in sizes:
        items.append(tokens(total, size))
        total += size
    items.append(finished(total))
    at = data.draw(st.integers(0, len(items) - 2))
    fault = data.draw(st.sampled_from(["drop", "double", "swap"]))
    if fault == "drop":
        del items[at]
    elif fault == "double":
        items.insert(at, items[at])
    else:
        items[at], items[at + 1] = items[at + 1], items[at]
    exchange = Exchange()
    with pytest.raises(SequenceError):
        replay(exchange, items)
