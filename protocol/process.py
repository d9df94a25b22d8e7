"""What a process of ours asks of the system."""

from __future__ import annotations

import contextlib
import resource

__all__ = ["raise_file_limit"]


def raise_file_limit() -> None:
    """Allow as many sockets as the system does: each client and each peer is one."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
