"""A pool in which nobody is."""

from __future__ import annotations

from typing import cast

from tokenwire.frontend.link import Link
from tokenwire.frontend.pool import Pool
from tokenwire.protocol.messages import Role

__all__ = ["no_workers"]


class _NoWorkers:
    links: tuple[Link, ...] = ()

    def usable(self, role: Role) -> list[Link]:
        del role
        return []


def no_workers() -> Pool:
    """Return what gauges look at of a pool, without workers."""
    return cast("Pool", _NoWorkers())
