"""Work-around: an idle NIXL agent keeps one core busy.

NIXL's progress thread sleeps in ``poll`` until a transfer needs it, for at most its
"progress delay". NIXL 1.5.1's Python API sets that delay to 0 (``nixl_agent`` in
``_api.py``), so the thread spins: one core for each engine, all the time, which on two
cores makes decoding ten times slower. A GPU host has cores to spare and the last
microsecond to win; a CPU engine needs its cores for the model.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

__all__ = ["let_progress_thread_sleep"]

PROGRESS_DELAY_US = 1_000
"""NIXL's own smallest delay that is none of 0: it rounds up to whole milliseconds. A
transfer's events end the sleep at once; the delay is for the events that UCX misses."""


def let_progress_thread_sleep() -> None:
    """Give every NIXL agent made from here on a progress delay; may be called again."""
    # vLLM sets it just before it imports NIXL itself, and warns when it comes too late.
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
    try:
        bindings: Any = import_module("nixl._api").nixlBind
    except (ImportError, AttributeError):
        return  # no NIXL, or another release: nothing breaks, a core may spin
    make_agent = bindings.nixlAgent
    if getattr(make_agent, "sleeps", False):
        return

    def agent(name: str, config: Any) -> Any:
        config.pthrDelay = config.pthrDelay or PROGRESS_DELAY_US
        return make_agent(name, config)

    agent.sleeps = True  # type: ignore[attr-defined]  # a mark on a function
    bindings.nixlAgent = agent
