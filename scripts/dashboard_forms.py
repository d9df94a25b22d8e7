"""What panels of the Grafana dashboard are made of: PromQL, and forms that come again.

In queries ``@`` stands for the selection of the dashboard (``job=~"$job"``), and ``[w]``
for a window that Grafana makes long enough for the scrape interval.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "Panel",
    "by_process",
    "by_worker",
    "counted",
    "largest",
    "latency",
    "number",
    "quantile",
    "rate",
    "share",
    "stacked",
    "total",
]


@dataclass(slots=True, frozen=True)
class Panel:
    """One picture, or one number."""

    title: str
    text: str  # what it shows, and when to worry
    unit: str
    queries: dict[str, str]  # by what each of their series is called
    kind: str = "timeseries"
    width: int = 8
    stack: bool = False
    worry_above: float | None = None  # of a number: from here on it is red
    worry_below: float | None = None


# --- queries -----------------------------------------------------------------------

QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


def rate(name: str, *labels: str, where: str = "") -> str:
    """Return how often a counter counts in a second, by *labels*."""
    by = f" by ({', '.join(labels)}) " if labels else ""
    return f"sum{by}(rate({name}{{@{where}}}[w]))"


def total(name: str) -> str:
    """Return what gauges come to."""
    return f"sum({name}{{@}})"


def share(part: str, whole: str) -> str:
    """Return how much of one counter another is."""
    return f"{rate(part)} / {rate(whole)}"


def quantile(name: str, label: str) -> str:
    """Return a quantile of a histogram."""
    buckets = f"sum by (le) (rate({name}_bucket{{@}}[w]))"
    return f"histogram_quantile({QUANTILES[label]}, {buckets})"


def value_of(label: str) -> str:
    """Return what a series is called in Grafana after its *label*."""
    return f"{{{{{label}}}}}"


def by_worker(query: str) -> dict[str, str]:
    """Return *query*, a series for each worker process, under the workers' names."""
    named = (
        f"sum by (worker_id, role) ({query} * on (job, instance) "
        "group_left (worker_id, role) tokenwire_worker_info{@})"
    )
    return {"{{worker_id}} ({{role}})": named}


def by_process(name: str) -> dict[str, str]:
    """Return a gauge of every process."""
    return {"{{job}} {{instance}}": f"sum by (job, instance) ({name}{{@}})"}


# --- panels ------------------------------------------------------------------------


def number(
    title: str,
    text: str,
    unit: str,
    query: str,
    legend: str = "",
    *,
    worry_above: float | None = None,
    worry_below: float | None = None,
) -> Panel:
    """Return one of the numbers that are read first."""
    return Panel(
        title,
        text,
        unit,
        {legend: query},
        kind="stat",
        width=3,
        worry_above=worry_above,
        worry_below=worry_below,
    )


def latency(title: str, text: str, name: str) -> Panel:
    """Return the median and the slow end of a histogram."""
    return Panel(
        title, text, "s", {label: quantile(name, label) for label in QUANTILES}
    )


def counted(
    title: str, text: str, name: str, *labels: str, unit: str = "reqps"
) -> Panel:
    """Return a counter, a line for each value of its *labels*."""
    legend = " ".join(map(value_of, labels))
    return Panel(title, text, unit, {legend: rate(name, *labels)})


def stacked(title: str, text: str, name: str, label: str) -> Panel:
    """Return a counter whose values of a *label* are parts of a whole."""
    queries = {value_of(label): rate(name, label)}
    return Panel(title, text, "reqps", queries, stack=True)


def largest(title: str, text: str, unit: str, name: str, label: str = "role") -> Panel:
    """Return a gauge that each frontend has of its own: the one that sees the most."""
    queries = {value_of(label): f"max by ({label}) ({name}{{@}})"}
    return Panel(title, text, unit, queries)
