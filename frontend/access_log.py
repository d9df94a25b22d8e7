"""One line a request, at its end: who asked what, how it was answered, what it took.

Never what was asked or answered: ``--log-prompts`` has a line of its own for that.
"""

from __future__ import annotations

import hashlib
import logging
import time
from typing import Any

from aiohttp import web

from .trail import Trail

__all__ = ["Counted", "client_name", "log_access", "log_prompt", "warn_of_prompts"]

_access = logging.getLogger("tokenwire.access")
_prompts = logging.getLogger("tokenwire.prompts")

QUIET_ROUTES = frozenset(
    {"/live", "/ready", "/health", "/metrics", "/ui/state", "/ui/events"}
)
"""Asked every few seconds, or all the time, by who watches over us: no lines, no traces."""

MAX_PROMPT_CHARS = 4_096
"""Of a body that is logged: the beginning tells what it is, and readers cut long lines."""

_HASH_BYTES = 6
"""Of a client's name: no two of thousands are alike, and none leads back to a key."""


class Counted:
    """A transport whose bytes are counted; only of requests that have a line."""

    __slots__ = ("_transport", "num_bytes")

    def __init__(self, transport: Any, num_bytes: int) -> None:  # asyncio.Transport
        self._transport = transport
        self.num_bytes = num_bytes

    def write(self, data: bytes) -> None:
        """Write *data*, and count it."""
        self.num_bytes += len(data)
        self._transport.write(data)

    def get_write_buffer_size(self) -> int:
        """Return how many bytes wait for the client."""
        return int(self._transport.get_write_buffer_size())

    def is_closing(self) -> bool:
        """Return whether nothing more is sent."""
        return bool(self._transport.is_closing())

    def abort(self) -> None:
        """Close it at once."""
        self._transport.abort()


def client_name(request: web.Request, key_name: str | None) -> str:
    """Return who asks: the name of its key, a hash of what it sent for one, or its address.

    Args:
        request: What it asks.
        key_name: Of the key that was found valid; None: there is none.
    """
    if key_name is not None:
        return key_name
    given = request.headers.get("Authorization")
    if given is None:
        return request.remote or ""
    data = given.encode(errors="surrogateescape")
    return "#" + hashlib.blake2b(data, digest_size=_HASH_BYTES).hexdigest()


def log_access(
    trail: Trail, request: web.Request, route: str, status: int, client: str
) -> None:
    """Write the line of a request that is over."""
    if route in QUIET_ROUTES or not _access.isEnabledFor(logging.INFO):
        return
    fields: dict[str, Any] = {
        "method": request.method,
        "route": route,
        "status": status,
        "duration_s": round(time.monotonic() - trail.started_at, 6),
        "client": client,
        **trail.about,
    }
    if trail.job is not None:
        fields["model"] = trail.model
        fields["prompt_tokens"] = len(trail.job.prompt_token_ids)
        fields["completion_tokens"] = trail.num_tokens
        first_token_s = trail.first_token_s
        if first_token_s is not None:
            fields["ttft_s"] = round(first_token_s, 6)
        if trail.ends:
            fields["cached_tokens"] = sum(end.num_cached_tokens for end in trail.ends)
            reasons = [end.finish_reason for end in trail.ends]
            fields["finish_reason"] = reasons[0] if len(reasons) == 1 else reasons
            fields["workers"] = trail.worker_ids
    if trail.error:
        fields["error"] = trail.error
    fields["sent_bytes"] = trail.num_bytes()
    _write(_access, "request", fields)


def log_prompt(trail: Trail, body: bytes) -> None:
    """Write what was asked."""
    text = body[: 4 * MAX_PROMPT_CHARS].decode(errors="replace")[:MAX_PROMPT_CHARS]
    _write(_prompts, "prompt", {**trail.about, "body": text, "body_bytes": len(body)})


def warn_of_prompts() -> None:
    """Say that prompts are logged."""
    logging.getLogger("tokenwire.frontend").warning(
        "--log-prompts: what clients send is written to this log, to be read by all who "
        "can read it"
    )


def _write(logger: logging.Logger, message: str, fields: dict[str, Any]) -> None:
    """Write a line, without a look at who calls: that takes as long as all the rest."""
    record = logging.LogRecord(logger.name, logging.INFO, "", 0, message, (), None)
    record.fields = fields
    logger.handle(record)
