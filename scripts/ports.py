"""Ports for servers of tests and benchmarks."""

from __future__ import annotations

import contextlib
import random
import socket

__all__ = ["free_port"]

PORTS = range(20_000, 32_000)
"""Below those that Linux gives to outgoing connections (32768 up): one of them would
take a free port before its server has started."""

_ports = iter(random.SystemRandom().sample(PORTS, len(PORTS)))


def free_port() -> int:
    """Return a port of the loopback interface that nobody has; never one again."""
    for port in _ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    msg = "no port is free"
    raise OSError(msg)
