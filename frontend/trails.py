"""Trails of all requests: begun as they come, left as a line and as spans at their end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from aiohttp import web

from tokenwire.protocol.logs import ABOUT
from tokenwire.protocol.messages import Trace
from tokenwire.protocol.tracing import Tracing, checked_trace

from .access import key_name_of
from .access_log import QUIET_ROUTES, client_name, log_access, log_prompt
from .checks import check_request_id
from .errors import ApiError
from .observability import Observability
from .spans import RequestSpans
from .trail import CURRENT, Trail

__all__ = ["Trails", "route_of"]

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

TRAIL = web.RequestKey("trail", Trail)

REQUEST_ID = "X-Request-Id"
TRACEPARENT = "traceparent"


class Trails:
    """The trails of a frontend's requests.

    Args:
        settings: What is told.
        tracing: Makes spans; None: nobody does.
    """

    def __init__(self, settings: Observability, tracing: Tracing | None) -> None:
        self._settings = settings
        self._tracing = tracing

    @web.middleware
    async def leave(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Serve a request, and leave its trail whatever becomes of it."""
        trail = self._begun(request)
        request[TRAIL] = trail
        current, about = CURRENT.set(trail), ABOUT.set(trail.about)
        response: web.StreamResponse | None = None
        try:
            response = await handler(request)
            return response
        finally:
            if trail.counts_bytes and isinstance(response, web.Response):
                body = response.body
                if isinstance(body, bytes):
                    trail.opened(0, partial(len, body))
            status = trail.ended(None if response is None else response.status)
            if self._settings.access_log:
                client = client_name(request, key_name_of(request))
                log_access(trail, request, route_of(request), status, client)
            trail.forget()
            ABOUT.reset(about)
            CURRENT.reset(current)

    def of(self, request: web.Request) -> Trail:
        """Return the trail of *request*; one that leads nowhere, where there is none."""
        trail = request.get(TRAIL)
        return Trail(Trace()) if trail is None else trail

    def asked(self, trail: Trail, body: bytes) -> None:
        """Note what was asked, if that is to be told."""
        if self._settings.log_prompts:
            log_prompt(trail, body)

    def _begun(self, request: web.Request) -> Trail:
        headers, tracing = request.headers, self._tracing
        client_id = _safe_id(headers.get(REQUEST_ID))
        given = headers.get(TRACEPARENT)
        trace = checked_trace(
            given, ",".join(headers.getall("tracestate", ())) if given else ""
        )
        spans: RequestSpans | None = None
        if tracing is not None:
            route = route_of(request)
            if route not in QUIET_ROUTES:
                span = tracing.begin(
                    f"{request.method} {route}",
                    "SERVER",
                    trace,
                    http__request__method=request.method,
                    http__route=route,
                    url__scheme=request.scheme,
                    tokenwire__client_request_id=client_id or None,
                )
                trace = span.trace()
                if span.is_recording:
                    spans = RequestSpans(span)
        return Trail(
            trace,
            spans,
            client_id,
            counts_bytes=self._settings.access_log,
        )


def route_of(request: web.Request) -> str:
    """Return the route of *request*, by its pattern."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "unknown"


def _safe_id(given: str | None) -> str:
    if given is None:
        return ""
    try:
        check_request_id(given, "X-Request-Id")
    except ApiError:
        return ""
    return given
