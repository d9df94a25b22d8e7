"""Which processes of the tests coverage follows."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager

from coverage import Coverage

__all__ = ["paused", "untraced"]

_VARIABLE = "COVERAGE_PROCESS_CONFIG"
"""In the environment of processes that coverage is to follow."""


@contextmanager
def paused() -> Generator[None]:
    """Follow neither this process nor those that it starts, if coverage does."""
    here = Coverage.current()
    config = os.environ.pop(_VARIABLE, None)
    if here is not None:
        here.stop()
    try:
        yield
    finally:
        if here is not None:
            here.start()
        if config is not None:
            os.environ[_VARIABLE] = config


def untraced(environment: Mapping[str, str]) -> dict[str, str]:
    """Return *environment* for a process that a run under coverage leaves out.

    Tracing costs vLLM's processes half as much CPU again with each engine that is loaded.
    """
    return {k: v for k, v in environment.items() if k != _VARIABLE}
