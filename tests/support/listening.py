"""What processes listen on, as the kernel has it."""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["Place", "listening"]

Place = tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]

_LISTENS = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}
"""The states of sockets that take what comes from anybody."""


def listening(pids: Iterable[int]) -> dict[Place, set[int]]:
    """Return where *pids* listen, and which of them do."""
    places: dict[str, Place] = {}
    for table, state in _LISTENS.items():
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == state:
                places[f"socket:[{fields[9]}]"] = _place(fields[1])
    found: dict[Place, set[int]] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    place = places.get(os.readlink(descriptor))
                    if place is not None:
                        found.setdefault(place, set()).add(pid)
    return found


def _place(text: str) -> Place:
    """Return an address of a table: words of the machine's own order, in hexadecimal."""
    address, _, port = text.partition(":")
    words = [address[at : at + 8] for at in range(0, len(address), 8)]
    packed = b"".join(bytes.fromhex(word)[::-1] for word in words)
    return ipaddress.ip_address(packed), int(port, 16)
