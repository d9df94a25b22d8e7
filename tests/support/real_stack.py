"""What the tests on the real pair of engines share; the pair itself is a fixture."""

from __future__ import annotations

import re

from .up import Up

__all__ = ["LOAD_S", "NAME", "PAIR", "gauge_pages", "prompt_of"]

NAME = "smollm2"
PAIR = {"prefill": 1, "decode": 1}
LOAD_S = 300.0
"""Two engines on two cores: 60-90 s, on a busy machine several times that."""


def prompt_of(length: int) -> list[int]:
    """Return a prompt of *length* ids, unlike those of other lengths."""
    return [1_000 + (length * 7_919 + n * 104_729) % 40_000 for n in range(length)]


def gauge_pages(running: Up, worker: str) -> list[str]:
    """Return where a worker shows its gauges, once for each time it was started."""
    return re.findall(rf"{worker} +(http://\S+/metrics)", running.log.read_text())
