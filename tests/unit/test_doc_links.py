"""Links between documents lead somewhere, and ARCHITECTURE.md is a map of what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.pages import PAGES, ROOT, anchors, links

MAP = ROOT / "ARCHITECTURE.md"
MAX_LINES = 200
"""A map that takes longer to read than to look for oneself is none."""


def test_there_are_pages() -> None:
    """The next test is about something."""
    assert {"README.md", "operations.md"} <= {page.name for page in PAGES}


@pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_links_lead_somewhere(page: Path) -> None:
    """Files are there, and so are the headings in them."""
    broken: list[str] = []
    for link in links(page):
        name, _, heading = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (heading and heading not in anchors(target)):
            broken.append(link)

    assert not broken


def test_every_page_is_in_the_readme() -> None:
    """A newcomer finds each of docs/ from there."""
    linked = {link.partition("#")[0] for link in links(ROOT / "README.md")}

    there = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")}
    assert there <= linked


def test_the_map_is_short() -> None:
    """As it says itself."""
    assert len(MAP.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("package", ["protocol", "frontend", "worker"])
def test_every_module_is_on_the_map(package: str) -> None:
    """In the table of its package; what is named there exists."""
    table = MAP.read_text().partition(f"\n| {package}/ | |\n")[2].partition("\n\n")[0]
    rows = [row.split("|")[1] for row in table.splitlines()[1:]]
    named = {name for row in rows for name in re.findall(r"`(\w+\.py)`", row)}
    there = {path.name for path in (ROOT / package).glob("*.py")}

    assert named == there - {"__init__.py", "__main__.py"}
