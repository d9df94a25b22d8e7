"""The metrics of several processes as those of one frontend.

Laws:
- A sum never falls: what a process had counted stays when it ends, and while it does not
  answer. Prometheus would take a smaller number for a restart, and count all of it again.
- A gauge is of the processes that answer.
- ``process_*`` is told of each process by itself, under the label ``process``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

__all__ = ["LARGEST", "OWN", "SUMMED", "Books"]

SUMMED = frozenset(
    {
        "tokenwire_connections",
        "tokenwire_requests_inflight",
        "tokenwire_queue_requests",
        "tokenwire_queue_tokens",
        "tokenwire_requests_admitted",
        # While little runs, each sees all the room that there is.
        "tokenwire_requests_limit",
    }
)
"""Gauges of what each process has for itself."""

LARGEST = frozenset(
    {
        "tokenwire_workers_ready",
        "tokenwire_num_requests_running",
        "tokenwire_num_requests_waiting",
        "tokenwire_kv_cache_usage_perc",
        "tokenwire_kv_index_blocks",
        "tokenwire_frontend_info",
    }
)
"""Gauges of what all processes see: the workers."""

OWN = frozenset(
    {
        "tokenwire_frontend_processes",
        "tokenwire_frontend_processes_answering",
        "tokenwire_frontend_process_restarts_total",
    }
)
"""What is written here, and not by the processes."""

_CUMULATIVE = {"counter", "histogram", "summary"}


@dataclass(slots=True)
class _Family:
    """One metric: its samples by name and labels, as they are written."""

    name: str
    text: str = ""
    kind: str = ""
    samples: dict[str, float] = field(default_factory=dict[str, float])


_Families = dict[str, _Family]


class Books:
    """What each process last told, and what those that have ended had counted."""

    def __init__(self, num_processes: int) -> None:
        self._num_processes = num_processes
        self._last: dict[int, _Families] = {}  # by the process's number
        self._ended: _Families = {}
        self._num_ended = 0

    def told(self, process: int, page: str) -> None:
        """Keep the page of a process."""
        self._last[process] = _parsed(page)

    def ended(self, process: int) -> None:
        """Add what a process had counted, as far as it is known, to that of the others."""
        self._num_ended += 1
        for family in self._last.pop(process, {}).values():
            if _adds_up(family):
                _add(self._ended, family)

    def page(self, answering: Collection[int]) -> str:
        """Return the page of all, of which these have told theirs just now."""
        whole: _Families = {}
        for process, families in sorted(self._last.items()):
            for family in families.values():
                if _adds_up(family):
                    _add(whole, family)
                elif process in answering or family.name in OWN:
                    _take(whole, family, process)
        for family in self._ended.values():
            _add(whole, family)
        prefix = "tokenwire_frontend_process"
        counts = (
            (f"{prefix}es", self._num_processes),
            (f"{prefix}es_answering", len(answering)),
            (f"{prefix}_restarts_total", self._num_ended),
        )
        for name, number in counts:
            if name in whole:
                whole[name].samples = {name: number}
        return "".join(_lines(whole.values()))


def _adds_up(family: _Family) -> bool:
    return family.kind in _CUMULATIVE and not family.name.startswith("process_")


def _add(whole: _Families, family: _Family) -> None:
    """Add the samples of *family* to those of its name."""
    samples = _of(whole, family).samples
    for series, value in family.samples.items():
        samples[series] = samples.get(series, 0.0) + value


def _take(whole: _Families, family: _Family, process: int) -> None:
    """Take the samples of one process's *family*, as fits what they say."""
    if family.name in LARGEST:
        samples = _of(whole, family).samples
        for series, value in family.samples.items():
            samples[series] = max(samples.get(series, value), value)
    elif family.name in SUMMED:
        _add(whole, family)
    else:
        # Of a gauge that nobody has a rule for, each process's own is never wrong.
        samples = _of(whole, family).samples
        for series, value in family.samples.items():
            samples[_labelled(series, process)] = value


def _of(whole: _Families, family: _Family) -> _Family:
    found = whole.get(family.name)
    if found is None:
        found = whole[family.name] = _Family(family.name, family.text, family.kind)
    return found


def _labelled(series: str, process: int) -> str:
    label = f'process="{process}"'
    if series.endswith("}"):
        return f"{series[:-1]},{label}}}"
    return f"{series}{{{label}}}"


def _parsed(page: str) -> _Families:
    """Return the families of a page that a process of ours has made."""
    families: _Families = {}
    family = _Family("")
    # Not splitlines(): labels may hold other ends of lines.
    for line in page.removesuffix("\n").split("\n"):
        if line.startswith("# "):
            _, word, name, rest = f"{line} ".split(" ", 3)
            family = families.setdefault(name, _Family(name))
            if word == "HELP":
                family.text = rest.rstrip()
            else:
                family.kind = rest.rstrip()
        else:
            series, _, value = line.rpartition(" ")
            family.samples[series] = float(value)
    return families


def _lines(families: Iterable[_Family]) -> Iterator[str]:
    for family in families:
        yield f"# HELP {family.name} {family.text}\n# TYPE {family.name} {family.kind}\n"
        for series, value in family.samples.items():
            yield f"{series} {_number(value)}\n"


def _number(value: float) -> str:
    """Return *value* as Prometheus writes it."""
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(float(value))
