"""Documents as tests see them: their examples, and what an answer is compared by."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, cast

__all__ = [
    "PAGES",
    "ROOT",
    "Example",
    "anchors",
    "events",
    "examples",
    "links",
    "programs",
    "shape",
]

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "deploy").rglob("*.md"),
    ]
)
"""What people read."""


class Example(NamedTuple):
    """A request of a page, and the answer that stands below it."""

    method: str
    path: str
    body: str
    answer: str


def examples(page: Path) -> Iterator[Example]:
    """Yield a page's HTTP examples."""
    form = (
        r"```http\n(?P<method>\w+) (?P<path>\S+)\n(?P<body>.*?)```\n\n"
        r"```(?:json|text)\n(?P<answer>.*?)```\n"
    )
    for found in re.finditer(form, page.read_text(), flags=re.DOTALL):
        yield Example(**found.groupdict())


def programs(page: Path) -> dict[str, str]:
    """Return a page's Python by heading; what stands under one belongs together."""
    found: dict[str, str] = {}
    for section in re.split(r"^## ", page.read_text(), flags=re.MULTILINE)[1:]:
        heading = section.splitlines()[0]
        blocks = re.findall(r"```python\n(.*?)```\n", section, flags=re.DOTALL)
        if blocks:
            found[heading] = "\n".join(blocks)
    return found


def shape(value: object) -> object:
    """Return *value* with the kind of each leaf in its place; of lists, all kinds."""
    if isinstance(value, dict):
        fields = cast("dict[str, object]", value)
        return {key: shape(fields[key]) for key in sorted(fields)}
    if isinstance(value, list):
        kinds = [shape(one) for one in cast("list[object]", value)]
        return [kind for n, kind in enumerate(kinds) if kind not in kinds[:n]]
    return value if value is None or isinstance(value, bool) else type(value).__name__


def events(text: str) -> Iterator[str]:
    """Yield the data of a stream's events but the last."""
    for block in text.strip().split("\n\n")[:-1]:
        yield block.removeprefix("data: ")


def links(page: Path) -> Iterator[str]:
    """Yield what a page's links to our own files lead to, from its folder on."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in target:
            yield target


def anchors(page: Path) -> set[str]:
    """Return the names by which a page's headings are linked to, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in headings
    }
