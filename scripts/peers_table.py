"""The table beside the peers: medians, spreads, ratios, and where we lose."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = [
    "CHECKS",
    "FIGURES",
    "OURS",
    "PAIRED",
    "Figure",
    "Repeats",
    "Results",
    "full_title",
    "losses",
    "page",
    "paired_ratio",
    "ratio",
]

OURS = "tokenwire"
DIRECT = "direct"
Results = Mapping[str, Mapping[str, Sequence[float]]]
"""Values by arm and figure."""

Repeats = Mapping[str, Mapping[str, Sequence[int]]]
"""In which repeat each of them was taken."""


@dataclass(frozen=True)
class Figure:
    """What a figure is called, and which way is better."""

    key: str
    title: str
    unit: str
    digits: int = 2
    more_is_better: bool = False


FIGURES = (
    Figure("sat_us", "CPU per streamed token, 48 streams, saturated", "us"),
    Figure("sat_ids_us", "the same, with token ids", "us"),
    Figure("brisk_us", "CPU per streamed token, 48 streams, 1 ms step", "us"),
    Figure("near_us", "CPU per streamed token, 48 streams, 6 ms step", "us"),
    Figure("near_ids_us", "the same, with token ids", "us"),
    Figure("paced_us", "CPU per streamed token, 48 streams, 10 ms step", "us"),
    Figure("paced_ids_us", "the same, with token ids", "us"),
    Figure("tokens_per_s_per_core", "tokens/s per core, saturated", "1/s", 0, True),
    Figure("requests_per_s", "requests/s, max_tokens=1, 32 at once", "1/s", 0, True),
    Figure("request_us", "CPU per request, max_tokens=1", "us", 0),
    Figure("added_ttft_ms", "added TTFT, one at a time", "ms", 3),
    Figure("itl_p99_ms", "inter-token p99, 64 streams, 10 ms step", "ms"),
    Figure("short_ttft_ms", "TTFT of short prompts beside 100k-token ones", "ms", 1),
    Figure("short_ttft_p99_ms", "the same, p99", "ms", 1),
    Figure("rss_idle_mib", "RSS, idle", "MiB", 0),
    Figure("open_1000_rss_mib", "RSS, 1,000 open streams", "MiB", 0),
    Figure("open_5000_rss_mib", "RSS, 5,000 open streams", "MiB", 0),
    Figure("open_1000_busy", "CPU, 1,000 open streams, a token/s each", "cores", 3),
    Figure("open_5000_busy", "CPU, 5,000 open streams, a token/s each", "cores", 3),
    Figure("open_1000_failed", "streams without tokens, of 1,000", "", 0),
    Figure("open_5000_failed", "streams without tokens, of 5,000", "", 0),
)

PAIRED = ("near_us", "near_ids_us", "paced_us", "paced_ids_us")
"""Figures that vary with the machine's state: their windows are also compared one by one."""

CHECKS = (
    Figure("sat_busy", "the server's core, saturated", "cores"),
    Figure("sat_rate", "events/s, saturated", "1/s", 0, True),
    Figure("sat_events_per_token", "events per token, saturated", ""),
    Figure("brisk_rate", "events/s, 1 ms step", "1/s", 0, True),
    Figure("near_step_ms", "the step that the client saw, of 6 ms", "ms"),
    Figure("paced_step_ms", "the step that the client saw, of 10 ms", "ms"),
    Figure("paced_busy", "the server's core, 10 ms step", "cores"),
    Figure("paced_events_per_token", "events per token, 10 ms step", ""),
    Figure("open_5000_rate", "events/s, 5,000 open streams", "1/s", 0, True),
    Figure("long_prompts_per_s", "100k-token prompts answered/s", "1/s", 2, True),
    Figure("ttft_ms", "TTFT, one at a time", "ms", 3),
)


def ratio(results: Results, figure: Figure, peer: str) -> float | None:
    """Return ours / the peer's, of medians; ``None`` where one of them is missing."""
    ours, theirs = (results.get(arm, {}).get(figure.key) for arm in (OURS, peer))
    if not ours or not theirs or not statistics.median(theirs):
        return None
    return statistics.median(ours) / statistics.median(theirs)


def paired_ratio(results: Results, repeats: Repeats, key: str, peer: str) -> float:
    """Return the median of ours / the peer's, of windows of the same repeat.

    What the machine did to both in one repeat is not in it. 0: there are none.
    """
    ours, theirs = (_by_repeat(results, repeats, arm, key) for arm in (OURS, peer))
    found = [
        one / other
        for repeat, windows in ours.items()
        for one, other in zip(windows, theirs.get(repeat, []), strict=False)
        if other
    ]
    return statistics.median(found) if found else 0.0


def _by_repeat(
    results: Results, repeats: Repeats, arm: str, key: str
) -> dict[int, list[float]]:
    values = results.get(arm, {}).get(key, [])
    taken_in = repeats.get(arm, {}).get(key, [])  # older files do not say
    found: dict[int, list[float]] = {}
    for repeat, value in zip(taken_in, values, strict=False):
        found.setdefault(repeat, []).append(value)
    return found


def lost(figure: Figure, value: float) -> bool:
    """Return whether a ratio is one where we lose."""
    return value < 1 if figure.more_is_better else value > 1


def losses(results: Results) -> list[str]:
    """Return a line for each peer: every ratio where we lose."""
    lines: list[str] = []
    for peer in _peers(results):
        named = [
            f"{full_title(figure)} {value:.2f}"
            for figure in FIGURES
            if (value := ratio(results, figure, peer)) is not None
            and lost(figure, value)
        ]
        none = sum(
            bool(values) for key, values in results[peer].items() if key in _keys()
        )
        if named:
            lines.append(f"- **{peer}**: {'; '.join(named)}.")
        elif none:
            lines.append(f"- **{peer}**: nowhere.")
    return lines


def full_title(figure: Figure) -> str:
    """Return a figure's title, whole where it says "the same"."""
    if not figure.title.startswith("the same"):
        return figure.title
    before = FIGURES[FIGURES.index(figure) - 1]
    return full_title(before) + figure.title.removeprefix("the same")


def _keys() -> set[str]:
    return {figure.key for figure in FIGURES}


def _peers(results: Results) -> list[str]:
    return [arm for arm in results if arm != DIRECT and not arm.startswith(OURS)]


def with_added(results: Results) -> dict[str, dict[str, list[float]]]:
    """Return the results with each TTFT less that of the client and engine alone."""
    made = {
        arm: {
            key: list(values)
            for key, values in figures.items()
            # The direct arm has no server, whose CPU and memory could be told.
            if arm != DIRECT or key.endswith("_failed") or any(values)
        }
        for arm, figures in results.items()
    }
    alone = made.get(DIRECT, {}).get("ttft_ms")
    if alone:
        least = statistics.median(alone)
        for arm, figures in made.items():
            if arm != DIRECT and figures.get("ttft_ms"):
                added = [value - least for value in figures["ttft_ms"]]
                figures["added_ttft_ms"] = added
    return made


def cell(values: Sequence[float] | None, digits: int) -> str:
    """Return a median with its spread."""
    if not values:
        return "-"
    median = f"{statistics.median(values):.{digits}f}"
    least, most = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return median if least == most else f"{median} ({least} to {most})"


def table(results: Results, figures: Sequence[Figure]) -> str:
    """Return a table of figures by arm."""
    arms = list(results)
    rows = [
        f"| {figure.title}{f', {figure.unit}' if figure.unit else ''} | "
        + " | ".join(cell(results[arm].get(figure.key), figure.digits) for arm in arms)
        + " |"
        for figure in figures
    ]
    head = f"| | {' | '.join(arms)} |\n|---|{'---:|' * len(arms)}\n"
    return head + "\n".join(rows) + "\n"


def ratios(results: Results) -> str:
    """Return the table of ratios, those where we lose in bold."""
    peers = _peers(results)
    rows: list[str] = []
    for figure in FIGURES:
        cells: list[str] = []
        for peer in peers:
            value = ratio(results, figure, peer)
            if value is None:
                cells.append("-")
            else:
                text = f"{value:.2f}"
                cells.append(f"**{text}**" if lost(figure, value) else text)
        better = "more is better" if figure.more_is_better else "less is better"
        rows.append(f"| {figure.title} ({better}) | {' | '.join(cells)} |")
    head = f"| ours / theirs | {' | '.join(peers)} |\n|---|{'---:|' * len(peers)}\n"
    return head + "\n".join(rows) + "\n"


def pairs(results: Results, repeats: Repeats) -> str:
    """Return a sentence: the ratios of windows of the same repeat, for each peer."""
    told: list[str] = []
    for peer in _peers(results):
        several = [paired_ratio(results, repeats, key, peer) for key in PAIRED]
        if any(several):
            told.append(f"{peer} {', '.join(f'{one:.2f}' for one in several)}")
    if not told:
        return ""
    return (
        "CPU per token at paced steps, the median of the ratios of windows taken in the same repeat (6 ms, "
        f"with ids, 10 ms, with ids): {'; '.join(told)}."
    )


def limits(results: Results) -> str:
    """Return whether client and engines could be the limit, as a sentence."""
    alone = results.get(DIRECT, {}).get("sat_rate")
    rates = {
        arm: statistics.median(figures["sat_rate"])
        for arm, figures in results.items()
        if arm != DIRECT and figures.get("sat_rate")
    }
    if not alone or not rates:
        return "The direct arm was not run: whether client and engine are the limit is not known."
    fastest = max(rates, key=lambda arm: rates[arm])
    factor = statistics.median(alone) / rates[fastest]
    verdict = (
        "client and simulated server are not the limit"
        if factor >= 2
        else "**less than twice: client and simulated server may be the limit of the saturated arms' rate, "
        "though not of their CPU time**"
    )
    idle = [
        f"{arm} {statistics.median(figures['sat_busy']):.2f}"
        for arm, figures in results.items()
        if figures.get("sat_busy") and 0 < statistics.median(figures["sat_busy"]) < 0.9
    ]
    told = f"The direct arm carries {factor:.1f} times the events/s of the fastest ({fastest}): {verdict}."
    if idle:
        told += (
            " Where the server's core was busy for less than 0.9 of the saturated load, engine or client was "
            f"the limit, not the server: {', '.join(idle)}."
        )
    return told


def page(
    results: Results,
    notes: Mapping[str, str],
    errors: Mapping[str, Sequence[str]],
    head: str,
    repeats: Repeats,
) -> str:
    """Return all of it, for between the markers."""
    whole = with_added(results)
    failed = [
        f"- **{arm}**: {'; '.join(dict.fromkeys(told))}"
        for arm, told in errors.items()
        if told
    ]
    parts = [
        head,
        "\n".join(f"- **{arm}**: {note}." for arm, note in notes.items()),
        table(whole, FIGURES),
        "### Ratios\n\nMedians; above 1 is worse where less is better. In bold, where we lose.",
        ratios(whole),
        pairs(results, repeats),
        "### Where we lose\n\nOurs / theirs, one process:",
        "\n".join(losses(whole)) or "No peer was measured.",
        "### What limits what",
        limits(whole),
        table(whole, CHECKS),
    ]
    pictures = [
        f"![{full_title(figure)}](plots/peers-{figure.key}.svg)" for figure in FIGURES
    ]
    parts += ["### Pictures", "\n".join(pictures)]
    if failed:
        parts += ["### What failed", "\n".join(failed)]
    return "\n" + "\n\n".join(part.strip() for part in parts if part) + "\n"
