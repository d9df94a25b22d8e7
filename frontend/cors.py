"""Which pages in browsers may read answers: those of the operator's origins, exactly.

Without ``--cors-origin`` there is none of this: a browser then shows a page of another
origin nothing, and does not even send what is JSON. No cookies are allowed: nothing here
reads any.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection

from aiohttp import web

__all__ = ["Cors", "is_origin"]

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_AGE_S = 600
"""How long a browser need not ask again; browsers take 7,200 s at most. A changed list of
origins counts so soon."""

METHODS = "GET, POST, DELETE"

EXPOSED = ", ".join(
    (
        "Retry-After",
        "WWW-Authenticate",
        "X-Request-Id",
        *(
            f"x-ratelimit-{part}-{what}"
            for what in ("requests", "tokens")
            for part in ("limit", "remaining", "reset")
        ),
    )
)
"""What a page may read beside the body."""

_ORIGIN = re.compile(r"https?://[a-z0-9.\-\[\]:]+(?<!/)")
_NAMES = re.compile(r"[A-Za-z0-9-]+(?:, ?[A-Za-z0-9-]+)*")


def is_origin(text: str) -> bool:
    """Return whether *text* is what a browser sends as an ``Origin``, letter by letter."""
    return _ORIGIN.fullmatch(text) is not None


class Cors:
    """The middleware and the signal."""

    def __init__(self, origins: Collection[str]) -> None:
        self._origins = frozenset(origins)

    @web.middleware
    async def preflight(
        self, request: web.Request, handler: Handler
    ) -> web.StreamResponse:
        """Answer what a browser asks before a request; it brings no key."""
        asks = "Access-Control-Request-Method" in request.headers
        if request.method != "OPTIONS" or not asks or not self._allows(request):
            return await handler(request)
        headers = {
            "Access-Control-Allow-Methods": METHODS,
            "Access-Control-Max-Age": str(MAX_AGE_S),
        }
        wanted = request.headers.get("Access-Control-Request-Headers", "")
        if _NAMES.fullmatch(wanted):
            # Any: OpenAI's client has a dozen of its own. What they say is checked here.
            headers["Access-Control-Allow-Headers"] = wanted
        return web.Response(status=204, headers=headers)

    async def allow(self, request: web.Request, response: web.StreamResponse) -> None:
        """Say on a response, of whatever status, that its page may read it."""
        response.headers.add("Vary", "Origin")
        if self._allows(request):
            response.headers["Access-Control-Allow-Origin"] = request.headers["Origin"]
            response.headers["Access-Control-Expose-Headers"] = EXPOSED

    def _allows(self, request: web.Request) -> bool:
        return request.headers.get("Origin") in self._origins
