"""The connections of a listener: how many there may be, and how long each may take.

Laws:
- Who sends no whole request, or reads nothing, is dropped within a bound.
- Where all places are taken, who only waits makes room for who comes.
- Time is counted in looks, one a second: a machine that stood still finds nobody late
  when it goes on.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
from collections import Counter
from collections.abc import Callable
from typing import Protocol

import msgspec

__all__ = ["ConnectionLimits", "Connections", "Peer", "client_of"]

LOOK_S = 1.0
"""Between two looks, while there is somebody to look at: bounds are of whole seconds."""

ROOM_SHARE = 16
"""When places run out, so many parts of them are made free at once: looking for those
that wait takes a millisecond for some thousands."""

SLOW_LOOKS = 5
"""Beyond the time that a stream gives its reader itself, so that it speaks first."""


CLIENT_BITS = 64
"""Of an IPv6 address, those that tell clients apart: the rest is the client's own to choose
(RFC 4291, 2.5.4)."""


class ConnectionLimits(msgspec.Struct, frozen=True):
    """What the operator allows."""

    max_header_bytes: int = 16 * 1024
    header_timeout_s: float = 20.0
    keep_alive_timeout_s: float = 620.0
    max_connections: int = 16_384
    max_per_client: int = 0  # 0: no bound
    write_timeout_s: float = 60.0


class Peer(Protocol):
    """One connection."""

    @property
    def address(self) -> str:
        """Where it comes from."""
        ...

    @property
    def is_idle(self) -> bool:
        """Whether no request of its is under way."""
        ...

    @property
    def num_unsent_bytes(self) -> int:
        """What is written and not sent."""
        ...

    def expire(self) -> None:
        """End it: its request did not come in time."""
        ...

    def drop(self) -> None:
        """End it at once."""
        ...


class Connections:
    """All of one listener.

    Args:
        limits: The operator's.
        refused: Told why a connection was ended or turned away.
    """

    def __init__(
        self, limits: ConnectionLimits, refused: Callable[[str], None]
    ) -> None:
        self.limits = limits
        self.refused = refused
        self._peers: dict[Peer, str] = {}  # and addresses; the oldest first
        self._by_address: Counter[str] = Counter()
        self._waited_for: dict[Peer, int] = {}  # since which look; the oldest first
        self._stalled: dict[
            Peer, tuple[int, int]
        ] = {}  # unsent bytes; since which look
        self._look_number = 0
        self._max_looks = math.ceil(limits.header_timeout_s / LOOK_S)
        self._max_stalled = math.ceil(limits.write_timeout_s / LOOK_S) + SLOW_LOOKS
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._peers)

    def enter(self, peer: Peer) -> bool:
        """Take a new connection; False: it must be turned away. ``leave`` follows."""
        address = client_of(peer.address)
        limits = self.limits
        if limits.max_per_client and self._by_address[address] >= limits.max_per_client:
            self.refused("client_limit")
            return False
        if len(self._peers) >= limits.max_connections:
            self._make_room()
            if len(self._peers) >= limits.max_connections:
                self.refused("limit")
                return False
        self._peers[peer] = address
        self._by_address[address] += 1
        self.awaits(peer)
        return True

    def leave(self, peer: Peer) -> None:
        """Forget a connection; harmless for one that was turned away."""
        address = self._peers.pop(peer, None)
        if address is None:
            return
        self._waited_for.pop(peer, None)
        self._stalled.pop(peer, None)
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]

    def awaits(self, peer: Peer) -> None:
        """Take note that a request is to come, or has begun to; harmless if known."""
        if peer in self._peers and peer not in self._waited_for:
            self._waited_for[peer] = self._look_number
            self._look_later()

    def arrived(self, peer: Peer) -> None:
        """Take note that a request's headers are here."""
        self._waited_for.pop(peer, None)

    def stalls(self, peer: Peer) -> None:
        """Take note that a client does not read what is written."""
        if peer in self._peers:
            self._stalled[peer] = peer.num_unsent_bytes, self._look_number
            self._look_later()

    def flows(self, peer: Peer) -> None:
        """Take note that it does."""
        self._stalled.pop(peer, None)

    def look(self) -> None:
        """End what has taken too long. Called once a second, as long as somebody may."""
        self._look_number += 1
        for peer, since in [*self._waited_for.items()]:
            if self._look_number - since <= self._max_looks:
                break  # those behind it came later
            del self._waited_for[peer]
            self.refused("slow_request")
            peer.expire()
        for peer, (unsent, since) in [*self._stalled.items()]:
            now_unsent = peer.num_unsent_bytes
            if now_unsent < unsent:
                self._stalled[peer] = now_unsent, self._look_number
            elif self._look_number - since > self._max_stalled:
                del self._stalled[peer]
                self.refused("slow_reader")
                peer.drop()

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _look_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.look()
        if self._waited_for or self._stalled:
            self._look_later()

    def _make_room(self) -> None:
        """Drop some of those that wait: who has sent nothing yet, then who is idle."""
        wanted = max(1, self.limits.max_connections // ROOM_SHARE)
        fresh = [*self._waited_for]
        idle = (peer for peer in [*self._peers] if peer not in self._waited_for)
        for peer in [*fresh, *idle]:
            if not wanted:
                return
            if peer.is_idle:
                wanted -= 1
                self.refused("room")
                self.leave(peer)
                peer.drop()


def client_of(address: str) -> str:
    """Return whose *address* is: IPv4 as it is, of IPv6 the network, which is one client's."""
    if ":" not in address:
        return address
    try:
        given = ipaddress.IPv6Address(address)
    except ValueError:
        return address
    if given.ipv4_mapped is not None:
        return str(given.ipv4_mapped)
    kept = int(given) >> (128 - CLIENT_BITS) << (128 - CLIENT_BITS)
    zone = f"%{given.scope_id}" if given.scope_id else ""
    return f"{ipaddress.IPv6Address(kept)}{zone}/{CLIENT_BITS}"
