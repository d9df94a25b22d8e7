"""Log probabilities: one entry an id, texts that join to the text, at their offsets."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from support.tokenizer_kinds import CORPUS, KINDS, model_of, tokenizer_of
from tokenwire.frontend.logprobs import (
    TokenTexts,
    chat_logprobs,
    completion_logprobs,
    echoed_logprobs,
)
from tokenwire.protocol.messages import Logprobs
from tokenwire.protocol.tokens import pack_floats, pack_ids

pytestmark = [pytest.mark.parametrize("kind", KINDS), pytest.mark.pitfall(2)]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
examples = settings(suppress_health_check=[HealthCheck.too_slow], max_examples=40)
texts = st.text(
    st.characters(exclude_categories=["Cs"]), max_size=20
) | st.sampled_from(CORPUS)


def record(token_ids: list[int], others: int = 2) -> Logprobs:
    """Return the record of an output, with alternatives beside each id."""
    width = 1 + others
    candidates = [
        candidate
        for token_id in token_ids
        for candidate in (token_id, *range(5, 5 + others))
    ]
    return Logprobs(
        width,
        pack_ids(candidates),
        pack_floats([-1.0 - n % width for n in range(len(candidates))]),
        pack_ids([1 + n % width for n in range(len(candidates))]),
    )


def texts_of(kind: str, prompt: list[int], *, skip: bool = True) -> TokenTexts:
    """Return the texts behind a prompt."""
    return TokenTexts(model_of(kind), prompt, skip_special_tokens=skip)


def shown(kind: str, prompt: list[int], token_ids: list[int], *, skip: bool) -> str:
    """Return the text that a response has, but for what never became a character."""
    detokenizer = model_of(kind).detokenizer(prompt, skip_special_tokens=skip)
    return "".join(map(detokenizer.feed, token_ids))


@given(text=texts, prompt=texts, skip=st.booleans())
@examples
def test_texts_and_offsets_are_those_of_the_text(
    kind: str, text: str, prompt: str, skip: bool
) -> None:
    """Joined they are the output; each stands at its offset; none is half a character."""
    encode = tokenizer_of(kind).encode
    prompt_ids = encode(prompt).ids
    token_ids = encode(text, add_special_tokens=False).ids

    body = cast(
        "dict[str, Any]",
        completion_logprobs(
            record(token_ids), 2, texts_of(kind, prompt_ids, skip=skip), as_ids=False
        ),
    )

    whole = shown(kind, prompt_ids, token_ids, skip=skip)
    assert {len(values) for values in body.values()} == {len(token_ids)}
    visible = [
        (token, offset)
        for token, offset, token_id in zip(
            body["tokens"], body["text_offset"], token_ids, strict=True
        )
        if not skip or token_id not in model_of(kind).special_ids
    ]
    assert "".join(token for token, _ in visible) == whole
    for token, offset in visible:
        assert whole[offset:].startswith(token)
    assert "".join(body["tokens"]).count(REPLACEMENT) <= text.count(REPLACEMENT)


@given(
    values=st.lists(st.integers(0, 10**6), max_size=20),
    cuts=st.lists(st.integers(0, 20), max_size=4),
)
@examples
def test_chunks_are_the_whole_in_pieces(
    kind: str, values: list[int], cuts: list[int]
) -> None:
    """Streamed in any chunks, entries and offsets are those of the whole response."""
    token_ids = [value % model_of(kind).vocab_size for value in values]
    edges = [0, *sorted(cuts), len(token_ids)]
    chunks = [token_ids[a:b] for a, b in pairwise(edges) if token_ids[a:b]]

    def completion(parts: list[list[int]]) -> dict[str, list[Any]]:
        texts = texts_of(kind, [5])
        joined: dict[str, list[Any]] = {}
        for part in parts:
            body = completion_logprobs(record(part), 2, texts, as_ids=False)
            for name, entries in body.items():
                joined.setdefault(name, []).extend(cast("list[Any]", entries))
        return joined

    def chat(parts: list[list[int]]) -> list[Any]:
        texts = texts_of(kind, [5])
        bodies = [
            chat_logprobs(record(part), model_of(kind), 2, texts, as_ids=False)
            for part in parts
        ]
        return [entry for body in bodies for entry in cast("Any", body)["content"]]

    assert completion(chunks) == completion([token_ids] if token_ids else [])
    assert chat(chunks) == chat([token_ids] if token_ids else [])
    assert len(chat(chunks)) == len(token_ids)


def test_alternatives_end_the_character_that_waits(kind: str) -> None:
    """Beside a character's last token, the others are what they would have made of it."""
    token_ids = tokenizer_of(kind).encode("🦕", add_special_tokens=False).ids
    record_ = record(token_ids)
    body: Any = chat_logprobs(
        record_, model_of(kind), 2, texts_of(kind, [5]), as_ids=False
    )

    tops = [top["token"] for entry in body["content"] for top in entry["top_logprobs"]]
    assert len(tops) == 2 * len(token_ids)
    if len(token_ids) == 4:
        assert [entry["token"] for entry in body["content"]] == ["", "", "", "🦕"]
        spelled = bytes(byte for entry in body["content"] for byte in entry["bytes"])
        assert spelled.decode() == "🦕"


def test_an_echos_offsets_go_on_behind_the_prompt(kind: str) -> None:
    """Prompt and output are one text; a BOS that is not in it takes no place."""
    encode = tokenizer_of(kind).encode
    model = model_of(kind)
    prompt_ids = encode("the end").ids
    output_ids = encode("the story", add_special_tokens=False).ids
    echo = model.decode(prompt_ids, skip_special_tokens=True)
    length = len(echo)

    body = cast(
        "dict[str, Any]",
        echoed_logprobs(
            echo,
            prompt_ids,
            record(prompt_ids[1:]) if prompt_ids[1:] else None,
            record(output_ids),
            2,
            model,
            TokenTexts(model, prompt_ids, skip_special_tokens=True, length=length),
            as_ids=False,
        ),
    )

    whole = echo + shown(kind, prompt_ids, output_ids, skip=True)
    assert {len(values) for values in body.values()} == {
        len(prompt_ids) + len(output_ids)
    }
    for token, offset in list(zip(body["tokens"], body["text_offset"], strict=True))[
        1:
    ]:
        if token != "</s>":
            assert whole[offset:].startswith(token)
