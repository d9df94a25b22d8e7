"""Text of every kind of tokenizer: streamed id by id it is what the library decodes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from tokenizers import Tokenizer

from support.tokenizer_kinds import CORPUS, KINDS, model_of, tokenizer_of
from tokenwire.frontend.detokenize import (
    ByteDetokenizer,
    PieceDetokenizer,
    StreamDetokenizer,
)
from tokenwire.frontend.fold import Fold

pytestmark = pytest.mark.parametrize("kind", KINDS)

TABLES: dict[str, type[object]] = {
    "byte_level": ByteDetokenizer,
    "tiktoken_like": ByteDetokenizer,
    "llama_2": PieceDetokenizer,
    "mistral": PieceDetokenizer,
    "gemma": PieceDetokenizer,
    "unigram": PieceDetokenizer,
    "unigram_bytes": PieceDetokenizer,
}
"""How each kind becomes text; all others: by decoding behind what is known."""

texts = st.text(st.characters(exclude_categories=["Cs"])) | st.lists(
    st.sampled_from(" ".join(CORPUS[:7]).split(" ")), max_size=8
).map(" ".join)
numbers = st.lists(st.integers(0, 10**6), max_size=30)
examples = settings(suppress_health_check=[HealthCheck.too_slow], max_examples=60)

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def ids_of(kind: str, values: list[int]) -> list[int]:
    """Return any numbers as ids of the model, padding rows included."""
    size = model_of(kind).vocab_size
    return [value % size for value in values]


def stream(
    kind: str, prompt: list[int], token_ids: list[int], *, skip: bool = True
) -> str:
    """Return the text of an output behind a prompt, fed id by id."""
    detokenizer = model_of(kind).detokenizer(prompt, skip_special_tokens=skip)
    return "".join(map(detokenizer.feed, token_ids)) + detokenizer.flush()


def whole(tokenizer: Tokenizer, token_ids: list[int], *, skip: bool = True) -> str:
    """Return what the library decodes."""
    return tokenizer.decode(token_ids, skip_special_tokens=skip)


def test_large_families_have_tables(kind: str) -> None:
    """Byte-level and SentencePiece ids become text by a table, others by decoding."""
    detokenizer = model_of(kind).detokenizer([], skip_special_tokens=True)

    assert type(detokenizer) is TABLES.get(kind, StreamDetokenizer)


@given(text=texts, special=st.booleans(), skip=st.booleans())
@examples
def test_a_text_comes_back_as_the_library_decodes_it(
    kind: str, text: str, special: bool, skip: bool
) -> None:
    """Concatenated text equals decode(ids), whatever the text."""
    tokenizer = tokenizer_of(kind)
    token_ids = tokenizer.encode(text, add_special_tokens=special).ids

    assert stream(kind, [], token_ids, skip=skip) == whole(
        tokenizer, token_ids, skip=skip
    )


@given(values=numbers, skip=st.booleans())
@examples
def test_any_ids_come_out_as_the_library_decodes_them(
    kind: str, values: list[int], skip: bool
) -> None:
    """The same for ids that no text has, special ones and padding rows among them.

    Where bytes are no text the library spoils the characters before them, too, which
    a stream has shown already; then it is the stream that is right.
    """
    token_ids = ids_of(kind, values)
    expected = whole(tokenizer_of(kind), token_ids, skip=skip)

    text = stream(kind, [], token_ids, skip=skip)

    if REPLACEMENT not in expected or TABLES.get(kind) is ByteDetokenizer:
        assert text == expected
    else:
        assert len(text) <= len(expected)
        assert text.count(REPLACEMENT) <= expected.count(REPLACEMENT)


@given(text=texts)
@examples
@pytest.mark.pitfall(5)
def test_no_replacement_that_the_model_did_not_produce(kind: str, text: str) -> None:
    """Characters cut into tokens come out whole: U+FFFD is there only if it was said."""
    token_ids = tokenizer_of(kind).encode(text, add_special_tokens=False).ids

    assert stream(kind, [], token_ids).count(REPLACEMENT) <= text.count(REPLACEMENT)


@given(before=texts, after=texts, at=st.integers(0, 200))
@examples
def test_an_output_goes_on_where_the_prompt_ended(
    kind: str, before: str, after: str, at: int
) -> None:
    """Prompt and output, cut anywhere between characters, join to the decoded whole."""
    tokenizer = tokenizer_of(kind)
    token_ids = tokenizer.encode(before + " " + after, add_special_tokens=False).ids
    prompt, output = token_ids[:at], token_ids[at:]
    start, all_text = whole(tokenizer, prompt), whole(tokenizer, token_ids)
    if not all_text.startswith(start):
        return  # cut inside a character; the next test

    assert start + stream(kind, prompt, output) == all_text


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.pitfall(6)
def test_a_prompt_that_ends_inside_a_character_does_not_leak(
    kind: str, at: int
) -> None:
    """Only generated text comes out: nothing of a prompt that ends in half a character."""
    encode = tokenizer_of(kind).encode
    smile = encode("🦕", add_special_tokens=False).ids[-4:]
    prompt = encode("secret", add_special_tokens=False).ids + smile[:at]
    word = encode(" story", add_special_tokens=False).ids

    text = stream(kind, prompt, [*smile[at:], *word])

    if len(smile) == 4 and kind in TABLES:  # spelled in bytes
        assert text.lstrip(REPLACEMENT).strip() == "story"
        assert text.count(REPLACEMENT) == 4 - at
    assert not set("cr") & set(text.replace("story", ""))


@given(values=numbers, cuts=st.lists(st.integers(0, 30), max_size=4))
@examples
@pytest.mark.pitfall(4)
def test_batches_do_not_matter(kind: str, values: list[int], cuts: list[int]) -> None:
    """Ids in one batch or in several fold to the same text."""
    token_ids = ids_of(kind, values)

    def folded(batches: list[list[int]]) -> str:
        fold = Fold(model_of(kind).detokenizer([], skip_special_tokens=True))
        return "".join(fold.feed(batch)[0] for batch in batches) + fold.finish()

    edges = [0, *sorted(cuts), len(token_ids)]
    batches = [token_ids[a:b] for a, b in pairwise(edges)]

    assert folded(batches) == folded([token_ids])


def test_logprob_bytes_join_to_the_text(kind: str) -> None:
    """The bytes of tokens, joined, are the text, but for what stands at its beginning."""
    text = "the end of café 🦕 story"
    token_ids = tokenizer_of(kind).encode(text, add_special_tokens=False).ids

    joined = b"".join(map(model_of(kind).token_bytes, token_ids)).decode()

    if kind in TABLES:
        unknown = "<unk>" if kind == "unigram" else "🦕"
        assert joined.lstrip() == text.replace("🦕", unknown)


async def test_ids_are_what_the_library_gives(kind: str) -> None:
    """A text has the ids of the tokenizer, with and without special tokens."""
    text = "Hello there 🙂 naïve"
    for special in (True, False):
        expected = tokenizer_of(kind).encode(text, add_special_tokens=special).ids
        got = await model_of(kind).encode(text, add_special_tokens=special)
        assert got == expected
