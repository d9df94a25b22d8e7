"""Parts of prompts that have come before: the same ids, in bounded memory."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given, strategies as st
from tokenizers import AddedToken, Tokenizer

from support.tiny_model import CHAT_TEMPLATE, tiny_tokenizer
from support.tokenizer_kinds import tokenizer_of
from tokenwire.frontend.segments import Segments, cuts
from tokenwire.frontend.tokenizer import SamplingDefaults, TextModel

TOKENIZER = tiny_tokenizer()
PIECES = [
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|im_",
    "end|>",
    " ",
    "\n",
    "he",
]
TEXTS = st.lists(
    st.sampled_from(PIECES) | st.text(st.characters(exclude_categories=["Cs"])),
    max_size=12,
).map("".join)


def counted(tokenizer: Tokenizer, seen: list[str], **options: int) -> Segments:
    """Return what keeps parts, and notes in *seen* what the tokenizer was asked for."""

    def encode(texts: list[str]) -> list[list[int]]:
        seen.extend(texts)
        return [tokenizer.encode(one, add_special_tokens=False).ids for one in texts]

    at = cuts(tokenizer.get_added_tokens_decoder().items(), CHAT_TEMPLATE)
    return Segments(encode, at, **options)


KEPT = counted(TOKENIZER, [])


@given(TEXTS)
def test_the_ids_are_those_of_the_whole_text(text: str) -> None:
    """However special tokens, and halves of them, stand in it."""
    for _ in range(2):
        whole = TOKENIZER.encode(text, add_special_tokens=False).ids
        assert KEPT.encode(text) == whole


def test_only_new_parts_are_tokenized() -> None:
    """The next turn of a conversation costs what is new in it."""
    seen: list[str] = []
    segments = counted(TOKENIZER, seen)
    first = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    segments.encode(first)
    assert seen == ["", "user\nhello", "\n", "assistant\n"]
    seen.clear()
    segments.encode(first.removesuffix("assistant\n") + "assistant\nhe<|im_end|>\n")

    assert seen == ["assistant\nhe"]


def test_the_least_used_goes_first() -> None:
    """And what is kept stays within its bound."""
    seen: list[str] = []
    segments = counted(TOKENIZER, seen, max_bytes=2_000)
    for number in range(50):
        segments.encode(f"{number}<|im_end|>first")
        assert segments.num_bytes <= 2_000
    assert seen.count("first") == 1
    seen.clear()
    segments.encode("49<|im_end|>0")
    assert seen == ["0"]


def test_what_is_kept_is_counted_as_it_was() -> None:
    """A text that is no ASCII is larger once a tokenizer has read it.

    It was let go by less than it had been counted: in the end requests failed.
    """
    seen: list[str] = []
    segments = counted(TOKENIZER, seen, max_bytes=20_000)
    texts = [f"{number}: 世界{'é' * 100}<|im_end|>" for number in range(300)]
    for text in texts:
        segments.encode(text)
        segments.encode(text)
        assert segments.num_bytes <= 20_000
    seen.clear()
    for text in reversed(texts[-10:]):
        segments.encode(text)
    assert not seen


def test_what_is_too_large_is_not_kept() -> None:
    """It would drive all else out."""
    seen: list[str] = []
    segments = counted(TOKENIZER, seen, max_bytes=2_000)
    for _ in range(2):
        segments.encode("x" * 2_000)

    assert len(seen) == 2
    assert segments.num_bytes == 0


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("<|im_end|>>", special=True),  # longer, at the same place
        AddedToken("x<|im_", special=True),  # takes its beginning
        AddedToken("y<|im_end|>", special=True),
    ],
)
def test_a_token_that_another_can_hide_is_no_cut(token: AddedToken) -> None:
    """There the tokenizer would find the other one."""
    tokenizer = tiny_tokenizer()
    cast("Any", tokenizer).add_special_tokens([token])
    tokens = tokenizer.get_added_tokens_decoder().items()
    text = f"hello {token.content}im_end|> hello<|im_end|>"

    assert "<|im_end|>" not in cuts(tokens, CHAT_TEMPLATE)
    if cuts(tokens, CHAT_TEMPLATE):
        whole = tokenizer.encode(text, add_special_tokens=False).ids
        assert counted(tokenizer, []).encode(text) == whole


@pytest.mark.parametrize("kind", ["byte_level", "tiktoken_like"])
@given(text=TEXTS)
def test_tokenizers_as_models_have_them_give_the_same(kind: str, text: str) -> None:
    """Their own ways to split, and to form, what stands between special tokens."""
    tokenizer = tokenizer_of(kind)
    special = [one.content for one in tokenizer.get_added_tokens_decoder().values()]
    at = cuts(tokenizer.get_added_tokens_decoder().items(), "".join(special))
    assert at

    def encode(texts: list[str]) -> list[list[int]]:
        return [tokenizer.encode(one, add_special_tokens=False).ids for one in texts]

    text = special[-1].join([text, "", text])
    whole = tokenizer.encode(text, add_special_tokens=False).ids
    assert Segments(encode, at).encode(text) == whole


@pytest.mark.parametrize("option", ["lstrip", "rstrip", "single_word"])
def test_tokens_that_look_beside_themselves_leave_nothing_to_cut(option: str) -> None:
    """What they take depends on the parts beside."""
    tokenizer = tiny_tokenizer()
    other = AddedToken("<|other|>", special=True, **{option: True})
    cast("Any", tokenizer).add_special_tokens([other])

    assert cuts(tokenizer.get_added_tokens_decoder().items(), CHAT_TEMPLATE) == {}


async def test_a_salted_prompt_leaves_no_trace() -> None:
    """Nor does it find one: how long it takes tells nothing of others."""
    model = TextModel(
        TOKENIZER,
        vocab_size=264,
        chat_template=CHAT_TEMPLATE,
        special_tokens={},
        sampling_defaults=SamplingDefaults(),
    )
    text = "<|im_start|>user\nhello<|im_end|>\n"
    ids = await model.encode(text, add_special_tokens=False)
    assert model.segments is not None
    assert model.segments.num_bytes == 0

    assert await model.encode(text, add_special_tokens=False, shared=True) == ids
    assert model.segments.num_bytes > 0
