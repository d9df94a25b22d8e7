"""The workers' own metrics, ``vllm:*``, on this frontend's page.

Each is asked over its link. The label ``engine``, which in each worker counts its engine
cores from 0, becomes ``WORKER_ID:RANK``; ``worker_id`` and ``role`` stand beside it.

Laws:
- However often the page is read, workers are asked once in ``FRESH_S``.
- A worker that does not answer is left out after ``WAIT_S``; the page waits no longer.
- Nothing of a worker's text gets onto the page but well-formed samples of ``vllm:*``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from .link import Link
from .metrics import Metrics

__all__ = ["EngineMetrics", "Page", "merged"]

_log = logging.getLogger(__name__)

FRESH_S = 1.0
"""So old a page is served again. Prometheus asks every few seconds; whoever asks more
often costs the workers nothing more."""

WAIT_S = 1.0
"""For answers: a worker's text is made in some 10 ms, and a scrape times out after 10 s."""

MAX_PAGE_BYTES = 64 * 1024 * 1024
"""Of all workers: a thousand of vLLM's pages. What is above is left out, and logged."""

_HEAD = re.compile(r"# (HELP|TYPE) (vllm:[a-zA-Z0-9_:]+) (.*)")
_SAMPLE = re.compile(
    r"(vllm:[a-zA-Z0-9_:]+)(?:\{(.*)\})? ([-+]?(?:[0-9]+(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?|Inf)|NaN)"
)
_PAIR = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"(?:,|$)')
_SUFFIXES = ("", "_bucket", "_sum", "_count")
_KINDS = {"counter", "gauge", "histogram", "summary", "untyped"}
_OURS = {"engine", "worker_id", "role"}


class Page(NamedTuple):
    """What one worker said."""

    worker_id: str
    role: str
    text: str


@dataclass(slots=True)
class _Family:
    """One metric of all workers: Prometheus wants its samples side by side."""

    name: str
    text: str = ""
    kind: str = ""
    samples: list[str] = field(default_factory=list[str])


def merged(pages: Iterable[Page]) -> str:
    """Return *pages* as one, in Prometheus' text format; linear in their length."""
    families: dict[str, _Family] = {}
    for page in pages:
        worker_id = _escaped(page.worker_id)
        own = f'worker_id="{worker_id}",role="{_escaped(page.role)}"'
        family: _Family | None = None
        for line in page.text.split("\n"):
            if line.startswith("#"):
                family = _declared(families, line, family)
            elif family is not None:
                family.samples += _relabelled(line, family.name, worker_id, own)
    parts: list[str] = []
    for name, family in families.items():
        if family.samples:
            parts.append(f"# HELP {name} {family.text}")
            parts.append(f"# TYPE {name} {family.kind}")
            parts += family.samples
    return "".join(f"{part}\n" for part in parts)


def _declared(
    families: dict[str, _Family], line: str, before: _Family | None
) -> _Family | None:
    """Return the family that *line* begins; None: its samples are passed over."""
    match = _HEAD.fullmatch(line)
    if match is None:
        return before if not line.startswith(("# HELP", "# TYPE")) else None
    word, name, rest = match.groups()
    # When each series began, a second one for each counter: nobody reads it.
    if name.endswith("_created"):
        return None
    family = families.setdefault(name, _Family(name))
    if word == "HELP":
        family.text = family.text or rest
        return None  # the next line says what it is
    if rest not in _KINDS:
        return None
    # Two releases of vLLM may differ; Prometheus would refuse the whole page.
    family.kind = family.kind or rest
    return family if family.kind == rest else None


def _relabelled(line: str, family: str, worker_id: str, own: str) -> list[str]:
    """Return a sample of *family* with the labels of its worker; none: it is no sample."""
    match = _SAMPLE.fullmatch(line)
    if match is None:
        return []
    name, labels, value = match.groups()
    if not name.startswith(family) or name[len(family) :] not in _SUFFIXES:
        return []
    rank, kept, at = "0", list[str](), 0
    for pair in _PAIR.finditer(labels or ""):
        if pair.start() != at:
            return []
        at = pair.end()
        if pair[1] == "engine":
            rank = pair[2]
        elif pair[1] not in _OURS:
            kept.append(f'{pair[1]}="{pair[2]}"')
    if at != len(labels or ""):
        return []
    ours = f'engine="{worker_id}:{rank}",{own}'
    return [f"{name}{{{','.join([ours, *kept])}}} {value}"]


def _escaped(text: str) -> str:
    """Return *text* as the value of a label."""
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class EngineMetrics:
    """Asks the workers, and keeps the page they make together.

    Args:
        links: Returns every worker known.
        metrics: Where it counts.
    """

    def __init__(self, links: Callable[[], Iterable[Link]], metrics: Metrics) -> None:
        self._links = links
        self._metrics = metrics
        self._page = b""
        self._made_at = float("-inf")
        self._making: asyncio.Task[None] | None = None

    async def page(self) -> bytes:
        """Return the families of all workers that answer; may take ``WAIT_S``."""
        loop = asyncio.get_running_loop()
        if self._making is None and loop.time() - self._made_at >= FRESH_S:
            self._making = loop.create_task(self._refresh())
        if self._making is not None:
            await asyncio.shield(self._making)  # others may wait for it, too
        return self._page

    async def _refresh(self) -> None:
        try:
            pages = await self._ask()
            self._page = await asyncio.to_thread(_encoded, pages)
        except Exception:  # noqa: BLE001 - this frontend's own metrics are still served
            _log.exception("the workers' metrics cannot be put together")
            self._page = b""
        finally:
            self._made_at = asyncio.get_running_loop().time()
            self._making = None

    async def _ask(self) -> list[Page]:
        """Return what comes within ``WAIT_S``."""
        pages: dict[Link, Page] = {}
        waiting = set(self._links())
        all_there = asyncio.Event()

        def take(link: Link, text: str) -> None:
            waiting.discard(link)
            if link.card is not None:
                pages[link] = Page(link.worker_id, link.card.role.value, text)
            if not waiting:
                all_there.set()

        asked = [link for link in list(waiting) if link.scrape(partial(take, link))]
        waiting &= set(asked)  # less those that have answered already
        if waiting:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(all_there.wait(), WAIT_S)
        self._metrics.engines_scraped(len(pages), len(waiting))
        # One that goes may have a successor of its name: each series is told once.
        going = sorted(
            pages, key=lambda link: not (link.is_leaving or link.load.draining)
        )
        unique = {pages[link].worker_id: pages[link] for link in going}
        return sorted(unique.values())  # the same order each time


def _encoded(pages: Sequence[Page]) -> bytes:
    room = MAX_PAGE_BYTES
    taken: list[Page] = []
    for page in pages:
        room -= len(page.text)
        if room < 0:
            _log.error("%d workers' metrics are too much", len(pages) - len(taken))
            break
        taken.append(page)
    return merged(taken).encode()
