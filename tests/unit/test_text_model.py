"""The door to tokenizers and templates: what a hostile text or template does there."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, cast

import pytest
from tokenizers import Tokenizer

from support.tiny_model import tiny_tokenizer, write_tiny_model
from tokenwire.frontend.errors import ApiError
from tokenwire.frontend.model import load_model
from tokenwire.frontend.tokenizer import SamplingDefaults, TextModel


def text_model(template: str | None = None) -> TextModel:
    """Return a text model with *template*."""
    return TextModel(
        tiny_tokenizer(),
        vocab_size=264,
        chat_template=template,
        special_tokens={},
        sampling_defaults=SamplingDefaults(),
    )


@pytest.mark.pitfall(28)
async def test_a_long_text_does_not_hold_the_event_loop() -> None:
    """While a long text is tokenized the loop never waits for most of it, for the GIL."""
    # In time of the processors: what this process stands still for is nobody's.
    began = last = time.process_time()
    longest = 0.0
    encoding = asyncio.ensure_future(
        text_model().encode("hello world " * 50_000, add_special_tokens=False)
    )
    while not encoding.done():
        await asyncio.sleep(0)
        now = time.process_time()
        longest, last = max(longest, now - last), now

    assert len(await encoding) == 350_000
    assert longest < (last - began) / 2


@pytest.mark.parametrize("size", [10, 10_000])
async def test_a_lone_surrogate_is_the_callers_fault(size: int) -> None:
    """Text that is no Unicode is a 400, tokenized here or in a thread."""
    with pytest.raises(ApiError, match="surrogate"):
        await text_model().encode("\ud800" * size, add_special_tokens=False)


async def test_settings_of_a_training_run_do_not_change_a_prompt(
    tmp_path: Path,
) -> None:
    """Truncation and padding in ``tokenizer.json`` neither cut nor fill a prompt."""
    folder = write_tiny_model(tmp_path / "tiny")
    file = str(folder / "tokenizer.json")
    tokenizer = cast("Any", Tokenizer.from_file(file))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=6)
    tokenizer.save(file)

    model = load_model(str(folder))

    assert len(await model.encode("ab", add_special_tokens=False)) == 2
    assert len(await model.encode("abcdefgh", add_special_tokens=False)) == 8


TEMPLATES = {
    "undefined attribute": "{{ messages[0].name.first }}",
    "no such message": "{{ messages[7].role }}",
    "division": "{{ 1 // (messages | length - 1) }}",
    "endless range": "{% for n in range(10 ** 9) %}x{% endfor %}",
    "its own refusal": "{{ raise_exception('no') }}",
    "format": "{{ '{} {}'.format(messages[0].role) }}",
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_whatever_a_template_meets_is_a_400(case: str) -> None:
    """A template that fails on the messages refuses them, in whatever way it fails."""
    model = text_model(TEMPLATES[case])

    with pytest.raises(ApiError, match="chat template refused") as caught:
        model.render_chat(
            [{"role": "user", "content": "a"}],
            add_generation_prompt=True,
            continue_final_message=False,
            template_kwargs={},
        )

    assert caught.value.status == 400
