"""Tables of measurements in documents: what a script writes stands between two markers."""

from __future__ import annotations

from pathlib import Path

__all__ = ["write"]


def write(page: Path, name: str, text: str) -> None:
    """Put *text* between the markers of *name*; what people wrote around them stays.

    Raises:
        ValueError: The page has not both markers.
    """
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    head, has_begin, rest = page.read_text().partition(begin)
    _, has_end, tail = rest.partition(end)
    if not has_begin or not has_end:
        msg = f"{page} lacks the markers of {name}"
        raise ValueError(msg)
    page.write_text(f"{head}{begin}{text.rstrip()}\n{end}{tail}")
