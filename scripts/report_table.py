"""The resume report's tables, and the numbers behind them, a cell for each group of cases."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from report_cases import BASELINES, Outcome
from report_compare import Metrics
from report_cuts import CUTS, UNDER_WAY

__all__ = ["COLUMNS", "cells", "failures", "tables"]

RAW = "raw ids"

BASELINES_SAY = (
    "The baselines, where there is some output: how often the ids of prompt and output are "
    "those that the model had, and how often what comes then is what would have come."
)
_SHARES = (
    "prefix_exact", "post_resume_exact", "text_exact", "parsed_exact", "usage_ok", "claim_ok"
)  # fmt: skip
_SUMS = ("lost_tokens", "dup_tokens", "repeated_decode_tokens")
_MEDIANS = (
    "resume_ttft_ms", "prefix_cache_hit_tokens", "repeated_prefill_tokens", "first_divergence"
)  # fmt: skip

Group = Callable[[Outcome], tuple[str, ...]]


def failures(outcomes: Iterable[Outcome]) -> list[str]:
    """Return each case of raw ids that is not as if nothing had happened."""
    return [
        f"{one.path}, {one.case.kind.name}, {one.case.sampling.name}, "
        f"{'with' if one.case.penalized else 'without'} penalties, "
        f"cut {one.cut.name} ({one.cut.k}): {one.metrics}"
        for one in outcomes
        if one.method == RAW and not one.metrics.passed
    ]


COLUMNS = (
    *("method", "path", "kind", "sampling", "penalties", "cases", *_SHARES, *_SUMS),
    *(f"median_{name}" for name in _MEDIANS),
)
"""Of the numbers: a group, how many cases it has, how many of them are so, sums, and
medians of those where it could be measured."""


def cells(outcomes: Sequence[Outcome]) -> list[list[Any]]:
    """Return the numbers of each method, path, kind, sampling and penalties."""
    groups = _grouped(
        outcomes,
        lambda one: (
            one.method,
            one.path,
            one.case.kind.name,
            one.case.sampling.name,
            "on" if one.case.penalized else "off",
        ),
    )
    return [
        [
            *(*key, len(group)),
            *(sum(getattr(one, name) for one in group) for name in (*_SHARES, *_SUMS)),
            *(_median(group, name) for name in _MEDIANS),
        ]
        for key, group in groups.items()
    ]


def _median(group: Sequence[Metrics], name: str) -> float | None:
    values = [getattr(one, name) for one in group]
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 1) if known else None


def tables(outcomes: Sequence[Outcome]) -> str:
    """Return the tables of one engine, in Markdown."""
    raw = [one for one in outcomes if one.method == RAW]
    parts = [
        _raw_by_path(raw),
        "Where it was cut, in all of these ways; the baselines at the same cuts:",
        _by_cut(outcomes),
        "By sampling, both with and without penalties:",
        _by_sampling(outcomes),
        BASELINES_SAY,
        _baselines(outcomes),
    ]
    return "\n\n".join(part for part in parts if part)


def _raw_by_path(raw: Sequence[Outcome]) -> str:
    rows: list[list[str]] = []
    for (path, kind), group in _grouped(
        raw, lambda one: (one.path, one.case.kind.name)
    ).items():
        time_ms = _median(group, "resume_ttft_ms")
        rows.append(
            [
                path,
                kind,
                str(len(group)),
                *(_share(group, name) for name in _SHARES[:4]),
                *(str(sum(getattr(one, name) for one in group)) for name in _SUMS),
                *(_share(group, name) for name in _SHARES[4:]),
                "" if time_ms is None else f"{time_ms:.0f}",
            ]
        )
    head = (
        "path", "kind", "cases", "prefix exact", "post-resume exact", "text exact",
        "parsed exact", "lost", "repeated", "decoded again", "usage right", "claim kept",
        "first token, ms (median)",
    )  # fmt: skip
    return _table(head, rows)


def _by_cut(outcomes: Sequence[Outcome]) -> str:
    groups = _grouped(outcomes, lambda one: (one.cut.name, one.method))
    rows = [
        [cut, *(_exact_of(groups.get((cut, method))) for method in (RAW, *BASELINES))]
        for cut in (*CUTS, UNDER_WAY)
        if (cut, RAW) in groups
    ]
    return _table(("cut behind", RAW, *BASELINES), rows)


def _by_sampling(outcomes: Sequence[Outcome]) -> str:
    groups = _grouped(
        outcomes,
        lambda one: (
            one.case.sampling.name,
            "yes" if one.case.penalized else "no",
            one.method,
        ),
    )
    keys = dict.fromkeys(key[:2] for key in groups)
    rows = [
        [*key, *(_exact_of(groups.get((*key, method))) for method in (RAW, *BASELINES))]
        for key in keys
    ]
    return _table(("sampling", "penalties", RAW, *BASELINES), rows)


def _baselines(outcomes: Sequence[Outcome]) -> str:
    others = [one for one in outcomes if one.method != RAW]
    # No output yet is the same for everyone.
    others = [one for one in others if one.cut.k]
    groups = _grouped(others, lambda one: (one.method, one.case.kind.name))
    rows = [
        [
            *key,
            str(len(group)),
            _share(group, "prefix_exact"),
            _share(group, "post_resume_exact"),
            _share(group, "parsed_exact"),
            str(sum(bool(one.remark) for one in group)),
        ]
        for key, group in groups.items()
    ]
    head = (
        "baseline", "kind", "cases", "prefix exact", "continuation exact", "message exact",
        "refused",
    )  # fmt: skip
    return _table(head, rows) if rows else ""


def _grouped(
    outcomes: Iterable[Outcome], key: Group
) -> dict[tuple[str, ...], list[Metrics]]:
    groups: dict[tuple[str, ...], list[Metrics]] = {}
    for one in outcomes:
        groups.setdefault(key(one), []).append(one.metrics)
    return groups


def _share(group: Sequence[Metrics], name: str) -> str:
    """Return a share that is 100 % only if it is all of them."""
    count = sum(getattr(one, name) for one in group)
    if count == len(group):
        return "100 %"
    return f"{min(99, round(100 * count / len(group)))} %"


def _exact_of(group: Sequence[Metrics] | None) -> str:
    if not group:
        return ""
    return f"{sum(one.post_resume_exact for one in group)} of {len(group)}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
