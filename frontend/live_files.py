"""The live page's files, as they are served: from memory, with strict headers."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from aiohttp import web
from aiohttp.typedefs import Handler

__all__ = ["PAGE_PATHS", "add_files", "page_files"]

FOLDER = Path(__file__).parent / "ui"

PAGE = "index.html"

TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
"""A file of any other kind is none of the page's."""

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # Nothing may become markup: the page writes text nodes alone.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""Nothing from elsewhere, nothing inline, in nobody's frame."""

HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # asked for again each time: 304 while it is the same
}


class PageFile(NamedTuple):
    """One file."""

    body: bytes
    content_type: str
    etag: str


def page_files() -> dict[str, PageFile]:
    """Return the page's files by name, from this package's folder."""
    files: dict[str, PageFile] = {}
    for path in sorted(FOLDER.iterdir()):
        content_type = TYPES.get(path.suffix)
        if content_type is not None:
            body = path.read_bytes()
            etag = hashlib.sha256(body).hexdigest()[:16]
            files[path.name] = PageFile(body, content_type, etag)
    return files


PAGE_PATHS = frozenset(
    {"/ui", "/ui/", *(f"/ui/{name}" for name in page_files() if name != PAGE)}
)
"""What may be had by all who reach the port: the page, and none of its data."""


def add_files(router: web.UrlDispatcher) -> None:
    """Serve the page at ``/ui``, what it needs below that, and nothing else."""
    files = page_files()
    router.add_get("/ui", _serving(files.pop(PAGE)))
    router.add_get("/ui/", _moved)
    for name, file in files.items():
        router.add_get(f"/ui/{name}", _serving(file))


async def _moved(request: web.Request) -> web.Response:
    """Send the page's address with a slash to the one that its links stand below."""
    del request
    return web.Response(status=308, headers={**HEADERS, "Location": "../ui"})


def _serving(file: PageFile) -> Handler:
    async def serve(request: web.Request) -> web.Response:
        known = request.if_none_match or ()
        is_known = any(etag.value in (file.etag, "*") for etag in known)
        response = web.Response(status=304, headers=HEADERS) if is_known else None
        if response is None:
            response = web.Response(
                body=file.body,
                content_type=file.content_type,
                charset="utf-8",
                headers=HEADERS,
            )
        response.etag = file.etag
        return response

    return serve
