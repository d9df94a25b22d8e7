"""Tables of measurements in documents: what a script writes stands between two markers."""

from __future__ import annotations

from pathlib import Path

__all__ = ["replaced", "write"]


def write(page: Path, name: str, text: str) -> None:
    """Put *text* between the markers of *name*; what people wrote around them stays.

    Raises:
        ValueError: The page has not both markers.
    """
    page.write_text(replaced(page.read_text(), name, text))


def replaced(page: str, name: str, text: str) -> str:
    """Return the text of a page with *text* between the markers of *name*.

    Raises:
        ValueError: The page has not both markers.
    """
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    head, has_begin, rest = page.partition(begin)
    _, has_end, tail = rest.partition(end)
    if not has_begin or not has_end:
        msg = f"the page lacks the markers of {name}"
        raise ValueError(msg)
    return f"{head}{begin}{text.rstrip()}\n{end}{tail}"
