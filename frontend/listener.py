"""The HTTP server under the routes: what never reaches a route has our errors, too.

aiohttp answers a request that it cannot parse, or whose ``Expect`` it does not know,
by itself and in plain text, and waits for one as long as its client likes. It has no public
way to say otherwise: private names of its servers are used here (aiohttp 3.14), and in no
other module.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

from aiohttp import web, web_response
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.web_protocol import (
    RequestHandler,
    _ErrInfo,  # pyright: ignore[reportPrivateUsage]
)
from aiohttp.web_request import BaseRequest

from .connections import ConnectionLimits, Connections
from .errors import ApiError, unavailable
from .expectation import asking_later, expects_nothing

__all__ = ["MAX_HEADERS", "Runner", "ignore_rest"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_REASON_CHARS = 200
"""Of the parser's words, which quote the request."""

MAX_HEADERS = 128
"""Of a request: aiohttp's own bound. Browsers and proxies send 10 to 40."""

SERVER = "tokenwire"
"""The header of that name; aiohttp would tell its release and Python's, which helps nobody
but who looks for a hole in one of them."""

LINGER_S = 5.0
"""How long what is left of a request is read, and thrown away, behind its answer. A client
that still sends would else lose the answer."""


# It has no setting for it, and to change it in each response would cost each of them.
web_response.__dict__["SERVER_SOFTWARE"] = SERVER


def _nobody(reason: str) -> None:
    del reason


class Runner(web.AppRunner):
    """Runs an application whose every error has OpenAI's shape.

    Args:
        app: The application.
        limits: What its connections may do.
        refused: Told why one was ended or turned away.
    """

    on_count: Callable[[int], None] | None = None
    """Called with the number of connections, whenever it changes."""

    def __init__(
        self,
        app: web.Application,
        limits: ConnectionLimits | None = None,
        refused: Callable[[str], None] = _nobody,
        *,
        shutdown_timeout: float = 60.0,
    ) -> None:
        limits = limits or ConnectionLimits()
        self.connections = Connections(limits, refused)
        super().__init__(
            app,
            handler_cancellation=True,  # a client that leaves cancels its handler
            access_log=None,
            shutdown_timeout=shutdown_timeout,
            keepalive_timeout=limits.keep_alive_timeout_s,
            lingering_time=LINGER_S,
            max_line_size=limits.max_header_bytes,
            max_field_size=limits.max_header_bytes,
            max_headers=MAX_HEADERS,
        )

    async def _make_server(self) -> web.Server:
        plain = await super()._make_server()
        server = _Server(
            _answering(plain.request_handler),
            request_factory=asking_later(plain.request_factory),
            handler_cancellation=plain.handler_cancellation,
            **plain._kwargs,  # pyright: ignore[reportPrivateUsage]
        )
        server.on_count = self.on_count
        server.bounds = self.connections
        return server

    async def cleanup(self) -> None:
        """End all connections."""
        await super().cleanup()
        self.connections.close()


class _Server(web.Server):
    """Makes a handler of ours for each connection."""

    on_count: Callable[[int], None] | None = None
    bounds: Connections
    num_connections = 0

    def connection_made(
        self, handler: RequestHandler, transport: asyncio.Transport
    ) -> None:
        """Count it."""
        super().connection_made(handler, transport)
        self._counted(1)

    def connection_lost(
        self, handler: RequestHandler, exc: BaseException | None = None
    ) -> None:
        """Count it no more, though its handler may still have something to end."""
        super().connection_lost(handler, exc)
        self._counted(-1)

    def _counted(self, change: int) -> None:
        self.num_connections += change
        if self.on_count is not None:
            self.on_count(self.num_connections)

    def __call__(self) -> RequestHandler:
        return _Connection(self, self.bounds, loop=self._loop, **self._kwargs)


class _Connection(RequestHandler):
    """One connection; to its ``Connections`` a ``Peer``."""

    __slots__ = ("_bounds", "_ignores", "_may_be_long", "_num_head_bytes")

    def __init__(self, server: _Server, bounds: Connections, **options: Any) -> None:
        super().__init__(server, **options)
        self._bounds = bounds
        self._num_head_bytes = 0  # of a request whose headers are not all there
        self._may_be_long = False  # the headers of any request, from now on
        self._ignores = False  # whatever comes

    # --- how long it may take ----------------------------------------------------------

    @property
    def address(self) -> str:
        """Where it comes from."""
        peer = self.peername
        return str(peer[0]) if isinstance(peer, tuple) else ""

    @property
    def is_idle(self) -> bool:
        """Whether no request of its is under way."""
        return self._waiter is not None and not self._waiter.done()

    @property
    def num_unsent_bytes(self) -> int:
        """What is written and not sent."""
        return 0 if self.transport is None else self.transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take it, or turn it away."""
        super().connection_made(transport)
        if sys.version_info < (3, 12):  # from then on a new task begins at once
            self._loop = cast("asyncio.AbstractEventLoop", _Same(self._loop))
        if not self._bounds.enter(self) and self.transport is not None:
            self.transport.write(_TURNED_AWAY)
            self.force_close()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget it."""
        self._bounds.leave(self)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Take note that its client does not read."""
        super().pause_writing()
        self._bounds.stalls(self)

    def resume_writing(self) -> None:
        """Take note that it does."""
        super().resume_writing()
        self._bounds.flows(self)

    def data_received(self, data: bytes) -> None:
        """Take what has come, unless it belongs to a request that was refused."""
        if self._ignores:
            return
        num_before = self._request_count
        super().data_received(data)
        limit = self._bounds.limits.max_header_bytes
        if self._request_count != num_before:
            self._bounds.arrived(self)
            if self._num_head_bytes + len(data) > limit:
                self._may_be_long = True
            self._num_head_bytes = 0
        elif not self.is_idle:
            # Of a body, or of the headers of a request behind the one that is served.
            self._may_be_long = True
        elif data:
            # A request has begun. One that has behind another is seen with its next byte.
            self._num_head_bytes += len(data)
            self._bounds.awaits(self)
            if self._num_head_bytes > limit:
                self._refuse(431, _too_long(limit))

    def expire(self) -> None:
        """End it: its request did not come in time."""
        if self._num_head_bytes and self.is_idle:
            limit_s = self._bounds.limits.header_timeout_s
            self._refuse(408, f"the headers have not arrived within {limit_s:g} s")
        else:
            self.force_close()

    def drop(self) -> None:
        """End it at once."""
        if self.transport is not None:
            self.transport.abort()

    def check_head(self, request: BaseRequest) -> None:
        """Refuse a request whose headers came with something else, and are too long.

        Raises:
            ApiError: 431.
        """
        if not self._may_be_long:
            return
        limit = self._bounds.limits.max_header_bytes
        num_bytes = len(request.raw_path) + sum(
            len(name) + len(value) for name, value in request.raw_headers
        )
        if num_bytes > limit:
            self._ignores = True
            raise ApiError(431, _too_long(limit), code="headers_too_long")

    def _refuse(self, status: int, message: str) -> None:
        """Answer a request that has begun, as if the parser had found it wrong."""
        self._ignores = True
        self._num_head_bytes = 0
        self._bounds.arrived(self)
        error = _ErrInfo(
            status, HttpProcessingError(code=status, message=message), message
        )
        self._messages.append((error, EMPTY_PAYLOAD))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def finish_response(
        self, request: BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer, and have no body kept of it until the next request comes."""
        sent, has_left = await super().finish_response(request, resp, start_time)
        if isinstance(sent, web.Response):
            sent.body = None
        return sent, has_left

    # --- errors ------------------------------------------------------------------------

    def log_exception(self, *args: object, **kwargs: object) -> None:
        """Log an error, unless it is the client's: it has left, or was answered.

        A body that does not unpack fails once where it is read, and a second time when
        aiohttp reads what is left of it.
        """
        error = kwargs.get("exc_info")
        if not isinstance(error, web.RequestPayloadError | ConnectionError):
            super().log_exception(*args, **kwargs)

    def handle_error(
        self,
        request: BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the answer to what could not be parsed or handled; then close."""
        if request.writer.output_size > 0:
            msg = "part of another answer is sent already"
            raise ConnectionError(msg)
        if status in _REFUSED:
            error = ApiError(status, message or "", code=_REFUSED[status])
        elif isinstance(exc, LineTooLong):
            limit = self._bounds.limits.max_header_bytes
            error = ApiError(431, _too_long(limit), code=_REFUSED[431])
        elif status < 500:
            # Its words, which quote the request, are for its client alone.
            fault = type(exc).__name__
            _log.info("malformed request from %s: %s", request.remote, fault)
            reason = (message or str(exc) or "it cannot be parsed").partition("\n")[0]
            error = ApiError(
                status, f"malformed HTTP request: {reason:.{MAX_REASON_CHARS}}"
            )
        else:
            _log.error("a request failed outside its handler", exc_info=exc)
            error = ApiError(
                status, "internal error; the log has it", kind="server_error"
            )
        response = _response(error)
        response.force_close()
        return response


class _Same:
    """The loop, to a connection whose own task is to serve its requests, too.

    aiohttp makes a task for each request and waits for it: two turns of the loop more, in
    which a request waits for all that is ready before it. A task has a context of its
    own; what ``Trails`` sets in it, it takes back.
    """

    __slots__ = ("_loop", "call_at", "create_future", "time")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.call_at = loop.call_at
        self.create_future = loop.create_future
        self.time = loop.time

    def __getattr__(self, name: str) -> object:
        """Return what else an aiohttp of another release may ask the loop for."""
        return getattr(self._loop, name)

    def create_task(self, work: T) -> T:
        """Return what is waited for in place of a task."""
        return work


def _answering(
    handler: Callable[[BaseRequest], Awaitable[web.StreamResponse]],
) -> Callable[[BaseRequest], Awaitable[web.StreamResponse]]:
    """Return *handler* with aiohttp's refusals before any route in our shape."""

    async def answer(request: BaseRequest) -> web.StreamResponse:
        try:
            if isinstance(request.protocol, _Connection):
                request.protocol.check_head(request)
            response = await handler(request)
        except web.HTTPException as error:
            response = _response(ApiError(error.status, error.text or error.reason))
        except ApiError as error:
            response = _response(error)
            response.force_close()
        else:
            if not expects_nothing(request):
                response.force_close()
        return response

    return answer


def ignore_rest(request: web.Request) -> dict[str, str]:
    """Have nothing more of *request* read, nor unpacked: its client may not send any.

    Its connection closes behind the answer; returns the headers which say so there.
    """
    if not request.body_exists or request.content.is_eof():
        return {}
    request.protocol.close()
    return {"Connection": "close"}


def _response(error: ApiError) -> web.Response:
    return web.Response(
        status=error.status, body=error.body(), content_type="application/json"
    )


def _too_long(limit: int) -> str:
    return f"a request's line and headers are above the limit of {limit} bytes"


_REFUSED = {408: "request_timeout", 431: "headers_too_long"}
"""Codes of what is refused before it is a request."""


def _raw(error: ApiError) -> bytes:
    """Return an answer for a connection on which nothing is read."""
    body = error.body()
    lines = [
        f"HTTP/1.1 {error.status} Service Unavailable",
        *(f"{name}: {value}" for name, value in error.headers.items()),
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


_TURNED_AWAY = _raw(
    unavailable("this frontend has as many connections as it may", "overloaded")
)
