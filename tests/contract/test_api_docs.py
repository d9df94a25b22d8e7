"""docs/api.md: its tables are complete and fresh, and its examples work."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from api_docs import PAGE, openai_fields, recorded, rendered, undecided

from support.pages import Example, events, examples, shape
from support.stack import MODEL_NAME, Stack, stack
from tokenwire.frontend.nvext import SELECTORS, Placement
from tokenwire.protocol.messages import Role

FRONTEND = Path(__file__).parents[2] / "frontend"


EXAMPLES = list(examples(PAGE))


@pytest_asyncio.fixture
async def served(tiny_model: Path) -> AsyncIterator[Stack]:
    """A stack as `make run` starts it, but for the engine."""
    async with stack(tiny_model, (Role.PREFILL, Role.DECODE)) as running:
        yield running


def test_the_tables_are_fresh() -> None:
    """They are what `make docs` makes of the code as it is."""
    assert PAGE.read_text() == rendered(), "run `make docs`"


def test_the_recorded_fields_of_openai_are_the_installed_ones() -> None:
    """Another SDK may have other fields: record them, and decide on each."""
    assert recorded()["openai"] == openai_fields(), "scripts/api_docs.py --record"


def test_every_field_of_others_is_honoured_or_refused_by_name() -> None:
    """So that the two tables, together, are complete."""
    assert undecided() == set()


def test_selectors_and_placements_are_explained() -> None:
    """Each has a row of its own."""
    page = PAGE.read_text()

    for name in (*SELECTORS, *Placement):
        assert f"\n| `{name}`" in page


def test_every_code_of_an_error_is_explained() -> None:
    """All constants that are given as a ``code``, or may be by default."""
    codes: set[str] = set()
    for path in FRONTEND.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "code":
                codes |= {
                    part.value
                    for part in ast.walk(node.value)
                    if isinstance(part, ast.Constant) and isinstance(part.value, str)
                }

    assert {"model_not_found", "worker_failed"} <= codes
    explained = set(re.findall(r"\| `\w+` \| `(\w+)` \|", PAGE.read_text()))
    assert codes - explained == set()


def test_the_page_has_examples() -> None:
    """The next test is about something."""
    assert len(EXAMPLES) > 6


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda one: one.body[:60] or one.path)
async def test_examples_are_answered_as_the_page_says(
    served: Stack, example: Example
) -> None:
    """The same keys and kinds of values; names, ids and texts are the model's."""
    if example.method == "GET":
        reply = await served.get(example.path)
    else:
        body = json.loads(example.body.replace("smollm2", MODEL_NAME))
        reply = await served.post(example.path, body)

    if example.answer.startswith("data: "):
        want = [json.loads(data) for data in events(example.answer)]
        assert [shape(event.body) for event in reply.events[:-1]] == [*map(shape, want)]
        assert example.answer.endswith("data: [DONE]\n")
    else:
        want = json.loads(example.answer)
        assert "error" in want or reply.status == 200
        assert shape(reply.json) == shape(want)
