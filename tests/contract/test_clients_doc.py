"""docs/clients.md: its examples work, on simulated workers where no tokenizer is needed.

The programs for other people's clients are run by the tests on the real engine.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from support.awake import within
from support.pages import Example, examples, programs, shape
from support.stack import MODEL_NAME, Stack, stack
from tokenwire.protocol.messages import Role

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
EXAMPLES = list(examples(PAGE))
PROGRAMS = programs(PAGE)
OF_CLIENTS = {"Prime-RL, verifiers, renderers"}
HERE = [heading for heading in PROGRAMS if heading not in OF_CLIENTS]
TIMEOUT_S = 60.0  # most of it for imports, on a busy machine


@pytest_asyncio.fixture
async def served(tiny_model: Path) -> AsyncIterator[Stack]:
    """A stack as `make run` starts it, but for the engine."""
    async with stack(tiny_model, (Role.PREFILL, Role.DECODE)) as running:
        yield running


def test_the_page_is_about_something() -> None:
    """Programs and examples are found, and each of them has a test."""
    assert {"An nvext extractor in ten lines", "NeMo Gym", *OF_CLIENTS} == set(PROGRAMS)
    assert len(EXAMPLES) == 2
    fenced = PAGE.read_text().count("\n```") // 2
    blocks = sum(
        PAGE.read_text().count(f"\n```{kind}\n") for kind in ("python", "http")
    )
    assert fenced == blocks + len(EXAMPLES)  # the others are the examples' answers


@pytest.mark.parametrize("heading", HERE)
async def test_programs_run(served: Stack, heading: str) -> None:
    """As they stand, at another address and for another model."""
    program = PROGRAMS[heading].replace("http://127.0.0.1:8000", served.url)
    assert served.url in program
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program.replace("smollm2", MODEL_NAME)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with within(TIMEOUT_S):
            _, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()

    assert process.returncode == 0, errors.decode()
    assert any(worker.service._num_submits for worker in served.workers)  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda one: one.path)
async def test_examples_are_answered_as_the_page_says(
    served: Stack, example: Example
) -> None:
    """The same keys and kinds of values; names, ids and texts are the model's."""
    body = json.loads(example.body.replace("smollm2", MODEL_NAME))
    reply = await served.post(example.path, body)

    assert reply.status == 200, reply.text
    assert shape(reply.json) == shape(json.loads(example.answer))
