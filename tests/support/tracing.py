"""Which processes of the tests coverage follows."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["untraced"]


def untraced(environment: Mapping[str, str]) -> dict[str, str]:
    """Return *environment* for a process that a run under coverage leaves out.

    Tracing costs vLLM's processes half as much CPU again with each engine that is loaded.
    """
    return {k: v for k, v in environment.items() if k != "COVERAGE_PROCESS_CONFIG"}
