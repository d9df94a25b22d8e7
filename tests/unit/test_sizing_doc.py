"""docs/sizing.md: its arithmetic is right."""

from __future__ import annotations

import re

import pytest

from support.pages import ROOT

TEXT = (ROOT / "docs" / "sizing.md").read_text()
ROWS = re.findall(
    r"^\| ([\w. -]+, [\w ]+) \| (\d+) \| (\d+) \| (\d+) \| (\d) \| (\d+) KiB \| ([\d,]+) \|$",
    TEXT,
    flags=re.MULTILINE,
)
KIB, GIB = 2**10, 2**30
TIMES = "\N{MULTIPLICATION SIGN}"
NUMBER = re.compile(r"[\d,.]*\d")


def test_the_table_has_models() -> None:
    """The next test is about something."""
    assert len(ROWS) >= 5


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_kv_takes_what_the_table_says(row: tuple[str, ...]) -> None:
    """By the formula above it."""
    layers, heads, size, width, kib = map(int, row[1:6])
    of_a_token = 2 * layers * heads * size * width

    assert of_a_token == kib * KIB
    assert 40 * GIB // of_a_token == int(row[6].replace(",", ""))


@pytest.mark.parametrize(
    ("sum_", "result"), re.findall(rf": ([\d,. {TIMES}/]+) = (\d[\d,.]*\d|\d)", TEXT)
)
def test_examples_are_calculated_right(sum_: str, result: str) -> None:
    """Each sum of the page, to the digits that it gives."""
    factors = [float(one.replace(",", "")) for one in NUMBER.findall(sum_)]
    signs = re.findall(f"[{TIMES}/]", sum_)
    value = factors[0]
    for sign, factor in zip(signs, factors[1:], strict=True):
        value = value * factor if sign == TIMES else value / factor
    given = result.replace(",", "")
    digits = len(given.partition(".")[2])

    assert round(value, digits) == float(given)


def test_cores_of_the_example() -> None:
    """The one sum with brackets."""
    assert f"20 {TIMES} (0.0008 + 0.0045 + 0.009) / 0.7 = 0.4" in TEXT
    assert round(20 * (0.0008 + 300 * 15e-6 + 3000 * 3e-6) / 0.7, 1) == 0.4
