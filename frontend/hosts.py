"""Which names a listener answers to, where being on this machine is all that it asks for.

A page of any site can have its name point at 127.0.0.1 once it is loaded (DNS rebinding).
What listens there is of the page's own origin then: its browser asks nobody before, and
lets it read all. The name stands in ``Host`` all the same, and no page can change that.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Awaitable, Callable, Collection
from functools import lru_cache

from aiohttp import web
from aiohttp.hdrs import HOST

from tokenwire.protocol.keys import stays_here

from .errors import ApiError

__all__ = ["ANY", "Hosts", "hosts_for", "is_allowed_host"]

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

ANY = "*"
"""In place of a name: all of them."""

MAX_REMEMBERED = 64
"""Of ``Host`` headers that were looked at; clients of one machine send two or three."""

MAX_SHOWN_CHARS = 100
"""Of a name that is refused."""

_NAME = re.compile(r"[A-Za-z0-9._-]+")
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::[0-9]*)?")
"""An IPv6 address or a name, and maybe a port."""


def is_allowed_host(text: str) -> bool:
    """Return whether *text* can be the name of a host, without a port; or is ``ANY``."""
    return text == ANY or _NAME.fullmatch(text) is not None


def hosts_for(listens_at: str, allowed: Collection[str]) -> Hosts | None:
    """Return what guards a listener without keys; None: nothing needs to.

    Args:
        listens_at: Its address. Beyond loopback whoever reaches it may use it, and it has
            whatever names there are.
        allowed: Names that the operator adds.
    """
    if ANY in allowed or not stays_here(f"tcp://{listens_at}:0"):
        return None
    return Hosts(allowed)


class Hosts:
    """The middleware."""

    def __init__(self, allowed: Collection[str]) -> None:
        self._allowed = frozenset(map(_plain, allowed))
        self._is_ours = lru_cache(MAX_REMEMBERED)(self._looks_ours)

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Let *request* in if it names this machine; browsers always say a name.

        Raises:
            ApiError: 403.
        """
        given = request.headers.get(HOST)
        if given and not self._is_ours(given):
            msg = (
                f"this listener needs no key, so it answers to localhost and to addresses "
                f"alone, not to {given:.{MAX_SHOWN_CHARS}}: ask 127.0.0.1, or start the "
                "frontend with --allowed-host NAME or --api-keys"
            )
            raise ApiError(403, msg, code="host_not_allowed")
        return await handler(request)

    def _looks_ours(self, header: str) -> bool:
        parts = _HOST.fullmatch(header)
        if parts is None:
            return False
        name = _plain(parts[1] or parts[2])
        if name in self._allowed or name.endswith(".localhost") or name == "localhost":
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True  # an address is nobody's to point elsewhere


def _plain(name: str) -> str:
    return name.lower().removesuffix(".")
