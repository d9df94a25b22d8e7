"""The token that ends an output: its id is output, its text is not."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from support.stack import Reply, Stack, stack
from support.tiny_model import tiny_tokenizer
from tokenwire.protocol.messages import Role

IDS: dict[str, Any] = {"return_token_ids": True}
ENCODE = tiny_tokenizer().encode
WORDS = ENCODE("well, hello world").ids
HELLO = ENCODE("hello").ids[-1]
ROLES = {"aggregated": (Role.AGGREGATED,), "pair": (Role.PREFILL, Role.DECODE)}


@pytest_asyncio.fixture(params=[1, 1000])
async def served(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path
) -> AsyncIterator[Stack]:
    """A stack that says the same words to everybody, in one step or in many."""
    script = tmp_path / "script.json"
    script.write_text(json.dumps([{"output_token_ids": WORDS}]))
    options = ("--script", str(script), "--tokens-per-step", str(request.param))
    async with stack(tiny_model, options=("--step-ms", "0", *options)) as running:
        yield running
        await running.idle()


def texts(reply: Reply, streamed: Reply) -> str:
    """Return the text of a completion, which its stream must repeat."""
    text: str = reply.json["choices"][0]["text"]
    chunks = [event.body["choices"][0] for event in streamed.events if event.body]
    assert "".join(chunk["text"] for chunk in chunks) == text
    ids = [
        token_id
        for event in streamed.events
        for token_id in event.nvext.get("completion_token_ids", [])
    ]
    assert ids == reply.json["nvext"]["completion_token_ids"]
    assert len(ids) == reply.json["usage"]["completion_tokens"]
    return text


@pytest.mark.parametrize(
    ("fields", "text", "last"),
    [
        ({"skip_special_tokens": False}, "well, hello world", "eos"),
        ({"stop_token_ids": [HELLO]}, "well, ", HELLO),
        (
            {"stop_token_ids": [HELLO], "include_stop_str_in_output": True},
            "well, hello",
            HELLO,
        ),
        (
            {"skip_special_tokens": False, "include_stop_str_in_output": True},
            "well, hello world<|im_end|>",
            "eos",
        ),
        ({"stop_token_ids": [HELLO], "stop": ["llo"]}, "well, ", HELLO),
    ],
)
async def test_the_stop_token_is_an_id_and_no_text(
    served: Stack, fields: dict[str, Any], text: str, last: int | str
) -> None:
    """EOS where special tokens are shown, and a stop token that is a word."""
    body: dict[str, Any] = {"prompt": "x", "max_tokens": 50, **fields, **IDS}
    reply = await served.complete(**body)
    streamed = await served.complete(stream=True, **body)

    assert texts(reply, streamed) == text
    assert reply.json["choices"][0]["finish_reason"] == "stop"
    final = reply.json["nvext"]["completion_token_ids"][-1]
    assert final == (2 if last == "eos" else last)


async def test_the_same_word_in_the_middle_is_text(served: Stack) -> None:
    """Only the end of an output makes a token a stop token."""
    body: dict[str, Any] = {"prompt": "x", "max_tokens": 50, **IDS}
    reply = await served.complete(**body)

    streamed = await served.complete(stream=True, **body)
    assert texts(reply, streamed) == "well, hello world"


@pytest.mark.parametrize("roles", ROLES.values(), ids=ROLES)
@pytest.mark.pitfall(20)
async def test_a_first_token_that_stops(
    tiny_model: Path, tmp_path: Path, roles: tuple[Role, ...]
) -> None:
    """No text at all, also where the prefill worker alone saw it."""
    script = tmp_path / "script.json"
    script.write_text(json.dumps([{"output_token_ids": [HELLO]}]))
    options = ("--step-ms", "0", "--script", str(script))
    async with stack(tiny_model, roles, options) as served:
        reply = await served.complete(
            prompt="x", max_tokens=9, temperature=0, stop_token_ids=[HELLO], **IDS
        )
        assert reply.json["choices"][0]["text"] == ""
        assert reply.json["nvext"]["completion_token_ids"] == [HELLO]
        await served.idle()
