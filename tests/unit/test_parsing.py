"""A fold with a parser: what it asks of it, and how often."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from support.tiny_model import tiny_tokenizer
from tokenwire.frontend.message import MessagePart
from tokenwire.frontend.parsing import ParsingFold
from tokenwire.frontend.tokenizer import SamplingDefaults, TextModel

MODEL = TextModel(
    tiny_tokenizer(),
    vocab_size=264,
    chat_template=None,
    special_tokens={},
    sampling_defaults=SamplingDefaults(),
)
REASONING, OTHER = tiny_tokenizer().encode("ab").ids


class Counting:
    """A parser that takes one id for reasoning, and knows how many it went through."""

    called_tools = False

    def __init__(self) -> None:
        self.num_seen = 0

    def feed(self, text: str, token_ids: list[int], *, finished: bool) -> MessagePart:
        """Return the text as content."""
        del token_ids, finished
        return MessagePart(text)

    def count_reasoning(self, token_ids: Sequence[int]) -> int:
        """Return how often the one id is there."""
        self.num_seen += len(token_ids)
        return list(token_ids).count(REASONING)


@pytest.mark.parametrize("num_ids", [1, 2, 15, 16, 17, 40, 5000])
def test_reasoning_is_counted_along_at_a_bounded_price(num_ids: int) -> None:
    """Asked after each id, the parser sees a multiple of the output; the end is exact."""
    parser = Counting()
    fold = ParsingFold(parser, MODEL.detokenizer([], skip_special_tokens=True))
    ids = [REASONING if n % 3 else OTHER for n in range(num_ids)]
    for number, token_id in enumerate(ids, 1):
        fold.feed([token_id])
        exact = ids[:number].count(REASONING)
        assert exact - number // 16 <= fold.num_reasoning_tokens <= exact

    fold.finish()

    assert fold.num_reasoning_tokens == ids.count(REASONING)
    assert fold.num_reasoning_tokens == ids.count(REASONING)
    assert parser.num_seen <= 20 * num_ids


def test_the_end_is_exact_when_it_comes_with_the_last_id() -> None:
    """A stop token ends the output without a call of ``finish`` that adds anything."""
    parser = Counting()
    fold = ParsingFold(parser, MODEL.detokenizer([], skip_special_tokens=True))
    fold.feed([REASONING] * 100)
    assert fold.num_reasoning_tokens == 100
    fold.feed([REASONING, OTHER], stopped=True)

    assert fold.num_reasoning_tokens == 101
