"""Who may use which route: API keys and their limits, before a body is read.

Laws:
- Without a key of ours nothing is answered but ``OPEN_ROUTES``, by GET; not even whether
  there is such a route. ``/`` says where those are.
- A key is named, and never shown: in errors, metrics and logs stands its name.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.hdrs import AUTHORIZATION

from .api_keys import ApiKeys
from .bearer import bearer
from .errors import ApiError
from .listener import ignore_rest
from .live_files import PAGE_PATHS
from .metrics import Metrics
from .quotas import Grant, Quotas

__all__ = [
    "BRIEF",
    "OPEN_ROUTES",
    "OPERATOR",
    "Access",
    "briefly",
    "grant_of",
    "identity_of",
    "is_open",
    "key_name_of",
]

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OPEN_ROUTES = frozenset({"/live", "/ready", "/health"}) | PAGE_PATHS
"""What probes ask, and the files of the live page. Probes are told whether this process
runs and can serve, with numbers of workers; names, addresses and failures of these, to
those alone who have a key. So is the page's data."""

_ENDS = frozenset({"/v1/generations/{id}/cancel", "/v1/generations/{id}"})
"""What makes a client's generations fewer is not kept from it by their number."""

_WATCH = "/ui/events"
"""A page that is watched would take one of its key's requests for as long as it is open,
and the playground in it could be left with none."""

GRANT = web.RequestKey("grant", Grant)
"""Of a request whose key was found right."""

OPERATOR = web.RequestKey("operator", bool)
"""Of a request that has the admin plane's key."""

_OPERATOR_NAME = "admin"

BRIEF = web.RequestKey("brief", bool)
"""Of a request that is told as little as an open route says."""


class Access:
    """The middleware. Without keys there is none, and all may do all.

    Args:
        keys: The operator's.
        quotas: What they have used.
        metrics: Where it counts.
    """

    def __init__(self, keys: ApiKeys, quotas: Quotas, metrics: Metrics) -> None:
        self._keys = keys
        self._quotas = quotas
        self._metrics = metrics

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Let *request* in, or refuse it before anything of its body is looked at."""
        given = request.headers.get(AUTHORIZATION)
        key = self._keys.verified(given)
        if is_open(request):
            request[BRIEF] = key is None
            return await handler(request)
        if key is None:
            raise self._unauthorized(given, ignore_rest(request))
        path = _path(request)
        is_counted = path != _WATCH and (request.method == "GET" or path not in _ENDS)
        grant = self._quotas.enter(key, is_counted=is_counted)
        request[GRANT] = grant
        try:
            return await handler(request)
        finally:
            self._quotas.leave(grant)

    async def tell_limits(
        self, request: web.Request, response: web.StreamResponse
    ) -> None:
        """Add what is left of the limits of a request's key, if it has any."""
        grant = request.get(GRANT)
        if grant is not None:
            response.headers.update(self._quotas.headers(grant.key))

    def _unauthorized(self, given: str | None, headers: dict[str, str]) -> ApiError:
        if bearer(given):
            self._metrics.key_used("", "invalid")
            msg = "this API key is not known here"
            scheme = 'Bearer error="invalid_token"'
        else:
            self._metrics.key_used("", "missing")
            msg = "an API key is needed: Authorization: Bearer KEY"
            scheme = "Bearer"
        headers = {"WWW-Authenticate": scheme, **headers}
        return ApiError(401, msg, code="invalid_api_key", headers=headers)


@web.middleware
async def briefly(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Tell no more than an open route says."""
    request[BRIEF] = True
    return await handler(request)


def is_open(request: web.Request) -> bool:
    """Return whether a request needs no key."""
    if request.method not in {"GET", "HEAD"}:
        return False
    return _path(request) in OPEN_ROUTES or request.path == "/"


def grant_of(request: web.Request) -> Grant | None:
    """Return what pays for a request; None: nobody counts."""
    return request.get(GRANT)


def key_name_of(request: web.BaseRequest) -> str | None:
    """Return the name of a request's key; None: it has none of ours."""
    grant = request.get(GRANT)
    if grant is None and request.get(OPERATOR):
        return _OPERATOR_NAME
    return None if grant is None else grant.key.name


def identity_of(request: web.Request, grant: Grant | None) -> str | None:
    """Return whose a request is, which *grant* pays for; None: it does not say.

    The name of its key, where keys are known, so that who gets a new key under the same
    name keeps what is his. No header can be made to look like one: none has a zero byte.
    """
    if grant is None:
        return request.headers.get(AUTHORIZATION)
    return f"\0{grant.key.name}"


def _path(request: web.Request) -> str:
    """Return the pattern of a request's route; empty: there is none."""
    resource = request.match_info.route.resource
    return "" if resource is None else resource.canonical
