"""Text over HTTP, with every kind of tokenizer: streamed, whole, stopped, cut anywhere."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from support.stack import Reply, Stack, stack
from support.templates import CHATML
from support.tokenizer_kinds import KINDS, PADDING, model_of, tokenizer_of
from tokenwire.protocol.messages import Role

IDS: dict[str, Any] = {"return_token_ids": True}
BATCHES = {"one": "1", "several": "5"}
"""Tokens that come in one step."""

NUM_TOKENS = 60


@pytest_asyncio.fixture(params=[(kind, size) for kind in KINDS for size in BATCHES])
async def served(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[tuple[str, Stack]]:
    """The kind, and a pair of workers with its tokenizer; tokens come one or several."""
    kind, batches = request.param
    tokenizer = tokenizer_of(kind)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {
        "vocab_size": tokenizer.get_vocab_size() + PADDING,
        "max_position_embeddings": 2048,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    options = ("--step-ms", "0", "--tokens-per-step", BATCHES[batches])
    async with stack(tmp_path, (Role.PREFILL, Role.DECODE), options) as running:
        yield kind, running
        await running.idle()


def joined(reply: Reply) -> tuple[str, list[int]]:
    """Return text and ids of a stream of either endpoint."""
    text, ids = "", list[int]()
    for event in reply.events:
        for choice in (event.body or {}).get("choices", []):
            text += choice.get("text") or choice.get("delta", {}).get("content") or ""
        ids += event.nvext.get("completion_token_ids", [])
    return text, ids


def expected(kind: str, prompt: list[int], token_ids: list[int]) -> str:
    """Return the text of an output, fed id by id."""
    detokenizer = model_of(kind).detokenizer(prompt, skip_special_tokens=True)
    return "".join(map(detokenizer.feed, token_ids)) + detokenizer.flush()


@pytest.mark.pitfall(4)
@pytest.mark.pitfall(5)
@pytest.mark.parametrize("seed", range(3))
async def test_streamed_and_whole_are_one_text(
    served: tuple[str, Stack], seed: int
) -> None:
    """Ids, text, logprobs and usage agree, however they come; text is that of the ids."""
    kind, running = served
    prompt = model_of(kind).decode([30 + seed], skip_special_tokens=False) + "the end"
    options: dict[str, Any] = {
        "prompt": prompt, "max_tokens": NUM_TOKENS, "seed": seed, "logprobs": 1, **IDS
    }  # fmt: skip
    whole = (await running.complete(**options)).json
    streamed = await running.complete(stream=True, **options)

    [choice] = whole["choices"]
    ids = whole["nvext"]["completion_token_ids"]
    assert choice["text"] == expected(kind, whole["nvext"]["prompt_token_ids"], ids)
    assert joined(streamed) == (choice["text"], ids)
    assert len(ids) == whole["usage"]["completion_tokens"]
    logprobs: dict[str, list[Any]] = {}
    for event in streamed.events[:-1]:
        assert event.body is not None
        body: dict[str, list[Any]] = event.body["choices"][0]["logprobs"] or {}
        num_ids = len(event.nvext.get("completion_token_ids", []))
        assert {len(entries) for entries in body.values()} <= {num_ids}
        for name, entries in body.items():
            logprobs.setdefault(name, []).extend(entries)
    assert logprobs == choice["logprobs"]
    assert {len(entries) for entries in logprobs.values()} == {len(ids)}


@pytest.mark.pitfall(6)
async def test_a_prompt_inside_a_character_leaks_nothing(
    served: tuple[str, Stack],
) -> None:
    """Behind every cut of a character only generated text comes out."""
    kind, running = served
    encode = tokenizer_of(kind).encode
    secret = encode("secret", add_special_tokens=False).ids
    smile = encode("🦕", add_special_tokens=False).ids
    for at in range(1, len(smile) + 1):
        prompt = secret + smile[:at]
        reply = await running.complete(prompt=prompt, max_tokens=20, **IDS)
        streamed = await running.complete(
            prompt=prompt, max_tokens=20, stream=True, **IDS
        )

        ids = reply.json["nvext"]["completion_token_ids"]
        text = reply.json["choices"][0]["text"]
        assert text == expected(kind, prompt, ids)
        assert joined(streamed) == (text, ids)


@pytest.mark.pitfall(1)
@pytest.mark.pitfall(7)
async def test_stop_strings_at_every_split(served: tuple[str, Stack]) -> None:
    """Wherever tokens cut a stop string, nothing of it gets out, and the ids end with it."""
    kind, running = served
    prompt = [40, 41, 42]
    free = (await running.complete(prompt=prompt, max_tokens=NUM_TOKENS, **IDS)).json
    text, ids = free["choices"][0]["text"], free["nvext"]["completion_token_ids"]
    stops = [text[at : at + 1 + at % 5] for at in range(0, len(text) - 6, 3)]
    assert len(stops) > 4
    for stop in stops:
        options: dict[str, Any] = {
            "prompt": prompt, "max_tokens": NUM_TOKENS, "stop": stop, **IDS
        }  # fmt: skip
        cut = (await running.complete(**options)).json
        shown = (
            await running.complete(include_stop_str_in_output=True, **options)
        ).json
        streamed = await running.complete(stream=True, **options)

        at = text.index(stop)
        [choice] = cut["choices"]
        kept = cut["nvext"]["completion_token_ids"]
        assert (choice["text"], choice["finish_reason"]) == (text[:at], "stop")
        assert shown["choices"][0]["text"] == text[:at] + stop
        assert joined(streamed) == (text[:at], kept)
        assert kept == ids[: len(kept)]
        assert stop in expected(kind, prompt, kept)
        assert stop not in expected(kind, prompt, kept[:-1])
        assert cut["usage"]["completion_tokens"] == len(kept)


async def test_a_chat_is_rendered_and_tokenized_here(
    served: tuple[str, Stack],
) -> None:
    """The engine gets the ids of the rendered text, with no BOS but the template's."""
    kind, running = served
    reply = await running.chat("the end", max_tokens=8, **IDS)

    text = "<|im_start|>user\nthe end<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer_of(kind).encode(text, add_special_tokens=False).ids
    assert reply.json["nvext"]["prompt_token_ids"] == ids
