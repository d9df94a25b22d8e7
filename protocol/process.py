"""What a process of ours asks of the system."""

from __future__ import annotations

import contextlib
import resource
import sys

__all__ = ["num_files", "raise_file_limit"]


def raise_file_limit() -> None:
    """Allow as many sockets as the system does: each client and each peer is one."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def num_files() -> int:
    """Return how many descriptors this process may have."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft
