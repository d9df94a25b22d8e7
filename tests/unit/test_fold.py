"""Ids to text: stop strings, stop tokens, and batches of any size."""

from __future__ import annotations

from itertools import pairwise

import pytest

from support.tiny_model import EOS, tiny_tokenizer
from tokenwire.frontend.fold import Fold
from tokenwire.frontend.stop import StopStrings
from tokenwire.frontend.tokenizer import SamplingDefaults, TextModel

TOKENIZER = tiny_tokenizer()
MODEL = TextModel(
    TOKENIZER,
    vocab_size=264,
    chat_template=None,
    special_tokens={},
    sampling_defaults=SamplingDefaults(),
)
TEXT = "hello wörld"
IDS = TOKENIZER.encode(TEXT).ids
HELLO = TOKENIZER.encode("hello").ids[-1]


def fold(*stop: str, include_stop: bool = False) -> Fold:
    """Return a fold that shows special tokens."""
    strings = StopStrings(stop, include=include_stop) if stop else None
    detokenizer = MODEL.detokenizer([], skip_special_tokens=False)
    return Fold(detokenizer, strings, include_stop=include_stop)


def run(made: Fold, *batches: list[int]) -> tuple[str, int]:
    """Return all text and the number of ids, the last of which ended the output."""
    text = ""
    for number, batch in enumerate(batches):
        piece, _ = made.feed(batch, stopped=number == len(batches) - 1)
        text += piece
    if made.matched is None:
        text += made.finish()
    return text, made.num_tokens


@pytest.mark.parametrize("stop", [EOS, HELLO])
def test_the_token_that_ended_the_output_has_no_text(stop: int) -> None:
    """EOS that would be shown, and a stop token that is an ordinary word; it counts."""
    assert run(fold(), [*IDS, stop]) == (TEXT, len(IDS) + 1)
    assert run(fold(), IDS, [stop]) == (TEXT, len(IDS) + 1)
    assert run(fold(), [stop]) == ("", 1)


@pytest.mark.parametrize("stop", [EOS, HELLO])
def test_a_client_can_ask_for_its_text(stop: int) -> None:
    """By ``include_stop_str_in_output``, as in vLLM."""
    shown = TEXT + TOKENIZER.decode([stop], skip_special_tokens=False)
    assert run(fold(include_stop=True), [*IDS, stop]) == (shown, len(IDS) + 1)


def test_an_end_without_a_stop_token_keeps_all_text() -> None:
    """An output that is full ends with a word of its own."""
    made = fold()
    assert made.feed(IDS)[0] + made.finish() == TEXT


def test_text_held_back_for_a_stop_string_comes_with_the_stop_token() -> None:
    """It began like one, and nothing follows that could make it one."""
    made = fold("ld!")
    assert run(made, [*IDS, EOS]) == (TEXT, len(IDS) + 1)
    assert made.matched is None


def test_a_stop_string_before_the_stop_token_counts() -> None:
    """What follows it is no output, the stop token included."""
    made = fold("wö")
    text, used = made.feed([*IDS, EOS], stopped=True)
    assert (text, made.matched) == ("hello ", "wö")
    assert used < len(IDS)


def test_the_same_from_all_batches() -> None:
    """Wherever the ids are cut in two."""
    ids = [*IDS, EOS]
    for cut in range(len(ids)):
        batches = [ids[a:b] for a, b in pairwise(sorted({0, cut, len(ids)}))]
        assert run(fold(), *batches) == (TEXT, len(ids))


def test_a_plain_fold_parses_nothing() -> None:
    """And says so."""
    made = fold()
    run(made, [*IDS, EOS])
    assert made.take() is None
    assert not made.parses
    assert not made.called_tools
    assert made.num_reasoning_tokens == 0
