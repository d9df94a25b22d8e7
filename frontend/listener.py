"""The HTTP server under the routes: what never reaches a route has our errors, too.

aiohttp answers a request that it cannot parse, or whose ``Expect`` it does not know,
by itself and in plain text. It has no public way to say otherwise: private names of its
servers are used here (aiohttp 3.14), and in no other module.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.web_protocol import RequestHandler
from aiohttp.web_request import BaseRequest

from .errors import ApiError

__all__ = ["Runner"]

_log = logging.getLogger(__name__)

MAX_REASON_CHARS = 200
"""Of the parser's words, which quote the request."""


class Runner(web.AppRunner):
    """Runs an application whose every error has OpenAI's shape."""

    on_count: Callable[[int], None] | None = None
    """Called with the number of connections, whenever it changes."""

    async def _make_server(self) -> web.Server:
        plain = await super()._make_server()
        server = _Server(
            _answering(plain.request_handler),
            request_factory=plain.request_factory,
            handler_cancellation=plain.handler_cancellation,
            **plain._kwargs,  # pyright: ignore[reportPrivateUsage]
        )
        server.on_count = self.on_count
        return server


class _Server(web.Server):
    """Makes a handler of ours for each connection."""

    on_count: Callable[[int], None] | None = None
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
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Connection(RequestHandler):
    """One connection."""

    __slots__ = ()

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
        if status < 500:
            _log.info("malformed request from %s: %s", request.remote, exc)
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


def _answering(
    handler: Callable[[BaseRequest], Awaitable[web.StreamResponse]],
) -> Callable[[BaseRequest], Awaitable[web.StreamResponse]]:
    """Return *handler* with aiohttp's refusals before any route in our shape."""

    async def answer(request: BaseRequest) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException as error:
            return _response(ApiError(error.status, error.text or error.reason))

    return answer


def _response(error: ApiError) -> web.Response:
    return web.Response(
        status=error.status, body=error.body(), content_type="application/json"
    )
