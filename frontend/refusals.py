"""What aiohttp refuses before a handler, in our words."""

from __future__ import annotations

from aiohttp import web

from .errors import ApiError

__all__ = ["AT_ROOT", "at_root", "in_our_words"]

AT_ROOT = web.AppKey("at_root", str)
"""What an application says to who looks at ``/``, where there is nothing."""

_NOTHING = "there is no such route"


def at_root(*, has_page: bool) -> str:
    """Return where to go from ``/``, for a person who has typed the address.

    It stays a 404: load balancers that ask there want to know whether it serves.
    """
    page = "/ui is the live page, " if has_page else ""
    return f"there is nothing at /: {page}/openapi.json has all routes, /ready is for probes"


def in_our_words(
    error: web.HTTPException, request: web.Request, max_body_bytes: int
) -> ApiError:
    """Return aiohttp's refusal of *request* in OpenAI's shape."""
    headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
    match error.status:
        case 404:
            is_root = request.path == "/"
            message = request.app.get(AT_ROOT, _NOTHING) if is_root else _NOTHING
        case 405:
            message = f"this route takes {headers.get('Allow', 'another method')}"
        case 413:
            message = f"the body is above the limit of {max_body_bytes} bytes"
        case _:
            message = error.text or error.reason
    return ApiError(error.status, message, headers=headers)
