"""The client of resumable generations on a stack that breaks: tool calls and reasoning."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
from resume_client import ResumableStream
from resume_state import Message

from support.format_stacks import load_format
from support.formats import QWEN3, TOOLS
from support.resumable import PATHS
from support.two_frontends import STRIKES, as_promised, same, struck, two
from tokenwire.frontend.parsers import Parsers

pytestmark = pytest.mark.timeout(120)  # the library takes 10 s to import

BODY = {
    "messages": [{"role": "user", "content": "called"}],
    "tools": TOOLS,
    "temperature": 0.8,
    "seed": 7,
    "stream_options": {"include_usage": True},
    "nvext": {"resumable": {"on_disconnect": "continue"}},
}
CUTS: dict[str, Callable[[Message], bool]] = {
    "reasoning": lambda message: "need" in message.reasoning,
    "arguments": lambda message: "rich" in _arguments(message),
    "second": lambda message: len(message.tool_calls) > 1,
}


def _arguments(message: Message) -> str:
    calls = message.tool_calls
    return str(calls[0]["function"]["arguments"]) if calls else ""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Parsers]:
    """A model that reasons and calls two tools, and its parsers."""
    folder = tmp_path_factory.mktemp("model")
    return folder, load_format(folder, QWEN3)


@pytest.mark.parametrize("where", CUTS)
@pytest.mark.parametrize("name", STRIKES)
async def test_a_tool_call_is_the_same_whatever_breaks(
    model: tuple[Path, Parsers], name: str, where: str
) -> None:
    """Reasoning, names and arguments; a call's id is the first generation's."""
    folder, parsers = model
    script = ("--script", str(folder / "script.json"))
    async with two(folder, *script, parsers=parsers) as stack:
        at = 0
        async with ResumableStream(stack.urls, PATHS["chat"], BODY) as stream:
            async for _ in stream:
                if not at and CUTS[where](stream.progress.message):
                    at = len(stream.progress.token_ids)
            calm = await stream.complete()
        assert at

        outcome, generation_id = await struck(
            stack, PATHS["chat"], BODY, at, STRIKES[name]
        )

    same(outcome, calm)
    as_promised(outcome, name, "continue")
    calls = outcome.message.tool_calls
    assert [call["function"]["name"] for call in calls] == ["get_weather"] * 2
    if where != "reasoning":  # the first call had begun before the cut
        digest = hashlib.sha256(f"{generation_id}/0/0".encode()).hexdigest()
        assert calls[0]["id"] == f"chatcmpl-tool-{digest[:32]}"
