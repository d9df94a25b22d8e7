"""Samples of a metrics page, in Prometheus' text."""

from __future__ import annotations

__all__ = ["total"]


def total(page: str, name: str) -> float:
    """Return the sum of a family's samples, whatever their labels.

    Raises:
        AssertionError: It has none.
    """
    lines = [
        line for line in page.splitlines() if line.startswith((name + "{", name + " "))
    ]
    assert lines, f"no sample of {name}"
    return sum(float(line.rpartition(" ")[2]) for line in lines)
