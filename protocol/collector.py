"""How a collector of traces is asked: its answers are read within a bound.

Nobody looks at what stands in them, and a collector is another's process: one that answers
without end would fill the memory of who tells it of spans, or hold its thread.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from requests import PreparedRequest, Response, Session

__all__ = ["bounded_session"]

MAX_ANSWER_BYTES = 64 * 1024
"""A full answer of OTLP says how many spans were refused, and why, in a sentence."""

READ_S = 10.0
"""The exporter's own limit for one export (``OTEL_EXPORTER_OTLP_TIMEOUT``), which bounds
each wait for a byte, and not all of them."""

_CHUNK_BYTES = 8 * 1024

_PROVIDERS = (
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER",
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER",
)
"""Variables by which an operator's own session is used, with its credentials."""


def bounded_session() -> Session | None:
    """Return what an exporter is to ask with; None: the operator has said by what.

    A function, since its base class is imported only where traces are wanted.
    """
    if any(os.environ.get(name) for name in _PROVIDERS):
        return None
    from requests import Session

    class Bounded(Session):
        def send(self, request: PreparedRequest, **options: Any) -> Response:
            response = super().send(request, **{**options, "stream": True})
            if not _read_whole(response):
                response.close()  # and its connection: what is left of it is unread
            return response

    return Bounded()


def _read_whole(response: Response) -> bool:
    """Read and forget an answer; return whether that is all of it."""
    num_bytes, until = 0, time.monotonic() + READ_S
    while num_bytes <= MAX_ANSWER_BYTES and time.monotonic() < until:
        part = response.raw.read1(_CHUNK_BYTES, decode_content=False)
        if not part:
            return True
        num_bytes += len(part)
    return False
