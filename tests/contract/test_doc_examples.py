"""The examples of all documents do what they say, against a simulated stack.

Shell blocks with curl are run by bash as they stand, at another address and for another
model; an answer that is no success fails. So is Python. docs/api.md and docs/clients.md have
tests of their own, and their HTTP examples.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from support.admin import weights
from support.awake import within
from support.blocks import SHELLS, Block, all_blocks, commands
from support.stack import MODEL_NAME, Stack, stack
from tokenwire.protocol.messages import Role

ADDRESS = "http://127.0.0.1:8000"
TIMEOUT_S = 60.0  # on a busy machine; nothing here takes seconds
OF_OTHER_TESTS = {"docs/api.md", "docs/clients.md"}

HARMLESS = {
    "cat",
    "curl",
    "echo",
    "export",
    "grep",
    "head",
    "jq",
    "sleep",
    "sort",
    "tail",
}
"""What may stand beside curl: the rest of such a block is run, too."""


def page_of(block: Block) -> str:
    """Return a block's page."""
    return block.name.partition(":")[0]


BLOCKS = [block for block in all_blocks() if not block.reason]
CURLS = [
    block
    for block in BLOCKS
    if block.language in SHELLS
    and any(words[0] == "curl" for words in commands(block.script))
]
PROGRAMS = [
    block
    for block in BLOCKS
    if block.language == "python" and page_of(block) not in OF_OTHER_TESTS
]


@pytest_asyncio.fixture
async def served(tiny_model: Path) -> AsyncIterator[Stack]:
    """A stack as `make run` starts it, but for the engine."""
    async with stack(tiny_model, (Role.PREFILL, Role.DECODE)) as running:
        yield running


def test_there_are_examples() -> None:
    """The next tests are about something, and about all that there is."""
    assert {"README.md", "docs/install.md"} <= set(map(page_of, CURLS))
    assert "README.md" in set(map(page_of, PROGRAMS))
    assert {page_of(b) for b in BLOCKS if b.language == "http"} <= OF_OTHER_TESTS


@pytest.mark.parametrize("block", CURLS, ids=lambda block: block.name)
async def test_curl_examples_are_answered(
    served: Stack, block: Block, tmp_path: Path
) -> None:
    """With a success, each of them."""
    assert {words[0] for words in commands(block.script)} <= HARMLESS, "mark or divide"
    (tmp_path / ".curlrc").write_text("fail-with-body\nshow-error\n")
    env = {
        "PATH": os.environ["PATH"],
        "CURL_HOME": str(tmp_path),
        "TOKENWIRE": served.url,
        "ADMIN": served.admin,
        "WEIGHTS": str(weights(tmp_path)),
        "ID": await generation(served) if "$ID" in block.text else "",
    }
    script = block.script.replace(ADDRESS, served.url).replace("smollm2", MODEL_NAME)
    process = await asyncio.create_subprocess_exec(
        *("bash", "-euo", "pipefail", "-c", script),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=env,
    )
    try:
        async with within(TIMEOUT_S):
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()

    assert process.returncode == 0, (output + errors).decode()


@pytest.mark.parametrize("block", PROGRAMS, ids=lambda block: block.name)
async def test_programs_run(
    served: Stack, block: Block, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a thread of this process: importing a client takes longer than to run it."""
    program = block.text.replace(ADDRESS, served.url).replace("smollm2", MODEL_NAME)
    assert served.url in program
    async with within(TIMEOUT_S):
        # S102: it is our own document.
        await asyncio.to_thread(exec, compile(program, block.name, "exec"), {})

    assert capsys.readouterr().out


async def generation(served: Stack) -> str:
    """Return the id of a generation that a worker keeps, of more than 17 events."""
    reply = await served.chat(
        max_tokens=32, stream=True, ignore_eos=True, nvext={"resumable": True}
    )
    assert reply.status == 200, reply.text
    return reply.headers["X-Generation-Id"]
