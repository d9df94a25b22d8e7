"""Every row of the table of pitfalls in CONTRIBUTING.md has a test that names it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def table() -> set[int]:
    """Return the rows of the table."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text.split("### Pitfalls", 1)[1].split("\n#", 1)[0]
    return {int(row) for row in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)}


def marked(source: str) -> Iterator[int]:
    """Yield the rows that the tests of a module guard against."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) == "pytest.mark.pitfall"
            and isinstance(node.args[0], ast.Constant)
            and isinstance(node.args[0].value, int)
        ):
            yield node.args[0].value


def test_marks_are_found() -> None:
    """The reader sees the marker of a test and of a module."""
    source = "pytestmark = [pytest.mark.pitfall(7)]\n@pytest.mark.pitfall(8)\ndef test(): ..."

    assert sorted(marked(source)) == [7, 8]


def test_every_row_has_a_test() -> None:
    """No row is without a guard, and no guard without a row."""
    sources = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]

    assert {row for source in sources for row in marked(source)} == table()
    assert {*range(1, 37)} <= table()
