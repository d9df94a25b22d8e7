"""Counts for the event loop's thread alone, several a request.

The Prometheus library's own counters look a child up behind a lock, as text, and count
behind another: five microseconds each, a dozen times a request.
"""

from __future__ import annotations

__all__ = ["Count", "Tally"]


class Count:
    """One number that only rises."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        """Add *amount*, which is not negative."""
        self.value += amount


class Tally:
    """The counts of one name, by the values of its labels.

    Args:
        name: Of the metric, without ``_total``.
        text: What it counts.
        label_names: Of its labels; none: there is one count.
    """

    __slots__ = ("counts", "label_names", "name", "text")

    def __init__(self, name: str, text: str, label_names: tuple[str, ...]) -> None:
        self.name = name
        self.text = text
        self.label_names = label_names
        self.counts: dict[tuple[str, ...], Count] = {}
        if not label_names:
            self.labels()

    def labels(self, *values: str) -> Count:
        """Return the count of these values, which is shown from now on."""
        count = self.counts.get(values)
        if count is None:
            count = self.counts[values] = Count()
        return count

    def inc(self, amount: float = 1) -> None:
        """Add *amount* where there are no labels."""
        self.counts[()].inc(amount)
