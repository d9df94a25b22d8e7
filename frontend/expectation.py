"""``Expect: 100-continue``: a client asks whether its body is wanted before it sends it.

aiohttp says yes to all, before anybody has looked at a key. Here yes is said where a body is
read, so that who is refused before that is told at once, and has sent nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from aiohttp import HttpVersion11, web
from aiohttp.hdrs import EXPECT
from multidict import CIMultiDict, CIMultiDictProxy

__all__ = ["asking_later", "expects_nothing", "go_on"]

R = TypeVar("R", bound=web.BaseRequest)

_ASKED = "100-continue"
_GO_ON = b"HTTP/1.1 100 Continue\r\n\r\n"

WAITS = web.RequestKey("waits", bool)
"""Of a request whose client asked, and has not been answered."""


def asking_later(make: Callable[..., R]) -> Callable[..., R]:
    """Return a maker of requests in which aiohttp does not see that a client asked."""

    def made(message: Any, *rest: Any) -> R:
        headers = message.headers
        if EXPECT not in headers or message.version < HttpVersion11:
            return make(message, *rest)
        if headers[EXPECT].lower() != _ASKED:
            return make(message, *rest)  # aiohttp knows no other, and says so
        others = CIMultiDict(headers)
        del others[EXPECT]
        request = make(message._replace(headers=CIMultiDictProxy(others)), *rest)
        request[WAITS] = True
        return request

    return made


def go_on(request: web.BaseRequest) -> None:
    """Tell a client which waits for it that its body is read now."""
    if request.get(WAITS):
        request[WAITS] = False
        if request.transport is not None:
            request.transport.write(_GO_ON)


def expects_nothing(request: web.BaseRequest) -> bool:
    """Return whether the client knows what to send next; if not, its connection closes.

    One that is refused before it was told to go on may send its body or another request.
    """
    return not request.get(WAITS) or request.content.is_eof()
