"""A figure as a picture: one bar an arm, its spread a thin line, as SVG."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from html import escape

__all__ = ["bars"]

WIDTH, LEFT, RIGHT, TOP, ROW = 640, 120, 110, 34, 24
STYLE = (
    "text{font:13px sans-serif;fill:#24292f}.t{font-weight:600}"
    ".b{fill:#8c959f}.o{fill:#0969da}.s{stroke:#24292f;stroke-width:1.5}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}"
    ".b{fill:#6e7681}.o{fill:#58a6ff}.s{stroke:#e6edf3}}"
)
"""Without a background: it is the page's, light or dark."""


def bars(
    title: str, unit: str, digits: int, values: Mapping[str, Sequence[float]]
) -> str:
    """Return a picture of medians with their spread.

    Args:
        title: What is shown.
        unit: Of the values.
        digits: After the point.
        values: By arm, none of them empty; ours begin with ``tokenwire``.
    """
    height = TOP + ROW * len(values) + 8
    most = max((max(several) for several in values.values()), default=0.0) or 1.0
    scale = (WIDTH - LEFT - RIGHT) / most
    lines = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" role="img" aria-label="{escape(title)}">'
        ),
        f"<style>{STYLE}</style>",
        (
            f'<text class="t" x="8" y="20">{escape(title)}'
            f"{f' ({escape(unit)})' if unit else ''}</text>"
        ),
    ]
    for number, (arm, several) in enumerate(values.items()):
        top = TOP + ROW * number
        middle = top + ROW / 2
        median = statistics.median(several)
        least, greatest = (
            LEFT + max(value, 0.0) * scale for value in (min(several), max(several))
        )
        kind = "o" if arm.startswith("tokenwire") else "b"
        lines += [
            (
                f'<text x="{LEFT - 8}" y="{middle + 4:.0f}" text-anchor="end">'
                f"{escape(arm)}</text>"
            ),
            (
                f'<rect class="{kind}" x="{LEFT}" y="{top + 4}" '
                f'width="{max(median, 0.0) * scale:.1f}" height="{ROW - 8}"/>'
            ),
            f'<path class="s" d="M{least:.1f} {middle:.0f}H{greatest:.1f}"/>',
            f'<text x="{greatest + 6:.0f}" y="{middle + 4:.0f}">{median:.{digits}f}</text>',
        ]
    return "\n".join([*lines, "</svg>\n"])
