"""Token-exact turns: earlier ids stay, what follows is what the template writes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, strategies as st

from support.tiny_model import CHAT_TEMPLATE, EOS, VOCAB_SIZE, tiny_tokenizer
from tokenwire.frontend.errors import ApiError
from tokenwire.frontend.policy import Policy
from tokenwire.frontend.prompts import Prompt, chat_prompt
from tokenwire.frontend.schema import ChatRequest
from tokenwire.frontend.tokenizer import SamplingDefaults, TextModel
from tokenwire.frontend.turns import (
    Given,
    closing,
    given_by_messages,
    given_by_request,
    spliced,
)

# How templates close a message: with a token and a line feed, with a token alone, with
# text alone, and with text that the next message begins with too.
TEMPLATES = {
    "chatml": CHAT_TEMPLATE,
    "token": CHAT_TEMPLATE.replace("<|im_end|>\n", "<|im_end|>"),
    "text": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    ),
    "overlap": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}hell{% endfor %}"
        "{% if add_generation_prompt %}o{% endif %}"
    ),
}
TOKENIZER = tiny_tokenizer()
MODELS = {
    name: TextModel(
        TOKENIZER,
        vocab_size=VOCAB_SIZE,
        chat_template=template,
        special_tokens={},
        sampling_defaults=SamplingDefaults(),
        end_ids=frozenset({EOS}),
    )
    for name, template in TEMPLATES.items()
}
BYTES = {
    piece: token_id
    for piece, token_id in TOKENIZER.get_vocab().items()
    if len(piece) == 1
}

texts = st.text(st.sampled_from("helo w\nz🙂é"), max_size=12)
user = st.fixed_dictionaries({"role": st.just("user"), "content": texts})
assistant = st.fixed_dictionaries({"role": st.just("assistant"), "content": texts})


def prompt_of(
    name: str, messages: list[dict[str, Any]], exact: Given | None = None, **fields: Any
) -> Prompt:
    """Return the prompt of *messages*."""
    request = ChatRequest(messages=messages, **fields)
    return asyncio.run(chat_prompt(request, MODELS[name], Policy(), given=exact))


def text_of(token_ids: list[int]) -> str:
    """Return the text of ids, special tokens too."""
    return MODELS["chatml"].decode(token_ids, skip_special_tokens=False)


def drifting(text: str) -> list[int]:
    """Return ids of *text* that no tokenizer makes: a byte each, special tokens whole."""
    encoded = TOKENIZER.encode(text, add_special_tokens=False)
    return [
        part
        for token_id, piece in zip(encoded.ids, encoded.tokens, strict=True)
        for part in ([token_id] if token_id < 3 else [BYTES[char] for char in piece])
    ]


@given(
    name=st.sampled_from(sorted(TEMPLATES)),
    before=st.lists(st.one_of(user, assistant), max_size=3),
    last=assistant,
    after=st.lists(user, max_size=2),
    cut_off=st.booleans(),
    generation_prompt=st.booleans(),
)
def test_the_prompt_starts_with_the_ids_and_reads_as_the_template(
    name: str,
    before: list[dict[str, Any]],
    last: dict[str, Any],
    after: list[dict[str, Any]],
    cut_off: bool,
    generation_prompt: bool,
) -> None:
    """Whatever the ids, the conversation, and the way the template closes a message."""
    messages = [*before, last]
    whole = prompt_of(
        name, [*messages, *after], add_generation_prompt=generation_prompt
    ).token_ids
    until = prompt_of(name, messages, add_generation_prompt=False).token_ids
    text = text_of(until)
    if name in {"chatml", "token"}:  # the model stopped with EOS, or did not get there
        text = text.removesuffix("\n")
        if cut_off:
            text = text.removesuffix("<|im_end|>")
    ids = drifting(text)

    made = prompt_of(
        name,
        [*messages, *after],
        Given(ids, len(before), "ids"),
        add_generation_prompt=generation_prompt,
    )

    assert made.token_ids[: len(ids)] == ids
    assert text_of(made.token_ids) == text_of(whole)
    assert made.prefix is not None
    assert made.prefix.kept == len(ids)
    assert made.prefix.drifted is (made.token_ids != whole)


@given(
    messages=st.lists(st.one_of(user, assistant), min_size=1, max_size=4),
    name=st.sampled_from(["chatml", "token"]),
)
def test_ids_that_the_tokenizer_makes_change_nothing(
    messages: list[dict[str, Any]], name: str
) -> None:
    """Without drift the prompt is what it would have been, and says so."""
    until = prompt_of(name, messages, add_generation_prompt=False).token_ids
    ids = until[: until.index(EOS, -2) + 1] if name == "token" else until[:-1]
    whole = [*messages, {"role": "user", "content": "more"}]

    made = prompt_of(name, whole, Given(ids, len(messages) - 1, "ids"))

    assert made.token_ids == prompt_of(name, whole).token_ids
    assert made.prefix is not None
    assert not made.prefix.drifted


def test_another_end_than_the_templates_stays() -> None:
    """A model that ends with one token where its template writes another keeps it."""
    ids = [*drifting("hello"), EOS]
    until = [*drifting("hello"), 1, 5]  # the template closes with token 1
    whole = [*until, 7, 8]

    made = spliced(ids, whole, until, closed_at=len(until) - 2, ends={EOS})

    assert made == [*ids, 5, 7, 8]


@pytest.mark.parametrize(
    ("ids", "position"),
    [
        ([5, 6, 2], 2),
        ([5, 2, 9], 1),  # 9 is blank
        ([2, 5, 9], None),  # text behind the token: it closes something else
        ([5, 9, 9], None),
        ([9, 9], None),
        ([], None),
    ],
)
def test_the_closing_token_is_the_last_but_blanks(
    ids: list[int], position: int | None
) -> None:
    """A special token that text follows closes nothing."""
    assert closing(ids, {1, 2}, lambda token_id: token_id == 9) == position


def test_ids_that_do_not_nest_are_no_splice() -> None:
    """Where the whole goes another way than its beginning, nothing is made up."""
    assert spliced([5], [6, 2, 7], [5, 2], closed_at=1, ends={2}) is None


# --- where the ids stand -------------------------------------------------------------

U: dict[str, Any] = {"role": "user", "content": "a"}
A: dict[str, Any] = {"role": "assistant", "content": "b"}


def turn(prompt: Any, generation: Any, role: str = "assistant") -> dict[str, Any]:
    """Return a message as NeMo Gym sends it back."""
    return {
        "role": role, "content": "b", "prompt_token_ids": prompt,
        "generation_token_ids": generation, "generation_log_probs": [0.0],
    }  # fmt: skip


def test_the_last_message_with_ids_counts() -> None:
    """Prompt and generation together; a later message may have none."""
    messages = [U, turn([1], [2]), U, turn([1, 2, 3], [4]), U, A, U]

    assert given_by_messages(messages) == Given([1, 2, 3, 4], 3, "messages[3]")
    assert given_by_messages([U, A, turn(None, None)]) is None


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (turn([1], None), "messages[1].generation_token_ids"),
        (turn(None, [1]), "messages[1].prompt_token_ids"),
        (turn("1", [1]), "messages[1].prompt_token_ids"),
        (turn([1], [2], role="user"), "messages[1].prompt_token_ids"),
        (turn(None, [2], role="tool"), "messages[1].generation_token_ids"),
    ],
)
def test_half_of_the_ids_is_refused(message: dict[str, Any], param: str) -> None:
    """Both lists, on an assistant's message; the error names which is wrong."""
    with pytest.raises(ApiError) as caught:
        given_by_messages([U, message])

    assert caught.value.param == param


def test_the_requests_ids_end_with_the_last_assistant() -> None:
    """They need one, and must not contradict what a message brings."""
    assert given_by_request([U, A, U, A, U], [1, 2], "f") == Given([1, 2], 3, "f")
    assert given_by_request([U, turn([1], [2]), U], [1, 2], "f").message == 1
    for messages in ([U], [], [U, turn([1], [3]), U]):
        with pytest.raises(ApiError) as caught:
            given_by_request(messages, [1, 2], "f")
        assert caught.value.param == "f"


@pytest.mark.parametrize("lead", [0, 1, 5])
def test_a_template_that_forgets_is_refused_with_the_message(lead: int) -> None:
    """A template that drops earlier reasoning does not nest: the 400 says where."""
    template = CHAT_TEMPLATE.replace(
        "{{ m.content }}",
        "{{ m.content if loop.last or m.role == 'user' else m.content.split('z')[-1] }}",
    )
    MODELS["forgets"] = TextModel(
        TOKENIZER,
        vocab_size=VOCAB_SIZE,
        chat_template=template,
        special_tokens={},
        sampling_defaults=SamplingDefaults(),
    )
    messages = [U] * lead + [{"role": "assistant", "content": "wwzh"}, U]

    with pytest.raises(ApiError) as caught:
        prompt_of("forgets", messages, Given([5], lead, "ids"))

    assert caught.value.status == 400
    assert caught.value.param == f"messages[{lead}]"
    assert "h<|im_end|>" in caught.value.message


@pytest.mark.parametrize("ids", [[], [-1], [VOCAB_SIZE], [True], ["5"], [2**31]])
def test_ids_of_no_vocabulary_are_refused(ids: list[Any]) -> None:
    """Given ids are checked like any others."""
    with pytest.raises(ApiError) as caught:
        prompt_of("chatml", [U, A, U], Given(ids, 1, "messages[1]"))

    assert caught.value.param == "messages[1]"
