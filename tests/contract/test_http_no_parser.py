"""A frontend without parsers: what it takes of tools, and what it does not load."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from support.awake import STANDSTILL_S
from support.formats import TOOLS, Format, write_format_model
from support.stack import Stack, stack

IDS: dict[str, Any] = {"return_token_ids": True}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
PLAIN = Format("plain", None, None, (), "<|im_end|>", ())


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncIterator[Stack]:
    """A stack whose template shows tools."""
    async with stack(write_format_model(tmp_path / "model", PLAIN)) as running:
        yield running
        await running.idle()


@pytest.mark.parametrize("choice", [None, "auto", "required", NAMED])
async def test_calls_cannot_be_asked_for(served: Stack, choice: object) -> None:
    """A 400 names the option that is missing, instead of calls that never come."""
    for stream in (False, True):
        reply = await served.chat(tools=TOOLS, tool_choice=choice, stream=stream)
        assert reply.status == 400
        assert reply.error["param"] == "tool_choice"
        assert "--tool-call-parser" in reply.error["message"]


async def test_tools_can_be_shown(served: Stack) -> None:
    """With ``tool_choice: none`` the template has them; the response has no new key."""
    reply = await served.chat(tools=TOOLS, tool_choice="none", max_tokens=2, **IDS)
    prompt = served.model.decode(
        reply.json["nvext"]["prompt_token_ids"], skip_special_tokens=False
    )
    assert '<tools>[{"type": "function", "function": {"name": "get_weather"' in prompt
    [choice] = reply.json["choices"]
    assert set(choice["message"]) == {"role", "content", "refusal"}
    assert "completion_tokens_details" not in reply.json["usage"]


async def test_fields_of_reasoning_are_taken(served: Stack) -> None:
    """The effort is the template's; there is no reasoning to leave out."""
    reply = await served.chat(
        reasoning_effort="high", include_reasoning=False, max_tokens=2, **IDS
    )
    prompt = served.model.decode(
        reply.json["nvext"]["prompt_token_ids"], skip_special_tokens=False
    )
    assert "effort high" in prompt


SERVE_ONCE = """
import asyncio, sys
from pathlib import Path
import tokenwire.frontend.app
from support.awake import STANDSTILL_S
from support.formats import TOOLS, Format, write_format_model
from support.stack import stack

async def main():
    plain = Format("plain", None, None, (), "<|im_end|>", ())
    async with stack(write_format_model(Path(sys.argv[1]), plain)) as served:
        for stream in (False, True):
            reply = await served.chat(
                tools=TOOLS, tool_choice="none", max_tokens=3, stream=stream
            )
            assert reply.status == 200, reply.text

asyncio.run(main())
print(sorted({"torch", "vllm"} & set(sys.modules)))
"""


def test_neither_torch_nor_vllm_is_loaded(tmp_path: Path) -> None:
    """Not at start-up, and not by a request with tools."""
    done = subprocess.run(
        [sys.executable, "-c", SERVE_ONCE, str(tmp_path / "model")],
        capture_output=True,
        text=True,
        timeout=60 + STANDSTILL_S,
        check=False,
        cwd=Path(__file__).parents[1],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
