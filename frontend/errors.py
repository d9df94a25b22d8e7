"""Failures as a client sees them: OpenAI's error object, with the right status."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenwire.protocol.messages import ErrorKind

__all__ = [
    "ApiError",
    "bad_request",
    "from_worker",
    "internal_error",
    "no_such_model",
    "overloaded",
    "unavailable",
]

MAX_MESSAGE_CHARS = 2_000
"""Of an error's message: it may quote a field, and a field may have any length."""

MAX_LISTED = 8
"""Names in an error: enough to see a slip of the pen."""

RETRY_AFTER_S = 1
"""What a busy or worker-less frontend tells clients to wait: one heartbeat, after
which the load it routes by is fresh."""


class ApiError(Exception):
    """An answer other than success; ``body`` is its JSON."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        nvext: dict[str, object] | None = None,
    ) -> None:
        if len(message) > MAX_MESSAGE_CHARS:
            message = f"{message[:MAX_MESSAGE_CHARS]}..."
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}
        self.nvext = nvext  # beside the error object; None: nothing

    def body(self) -> bytes:
        """Return OpenAI's error object as JSON."""
        body: dict[str, object] = {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }
        if self.nvext is not None:
            body["nvext"] = self.nvext
        return msgspec.json.encode(body)


def bad_request(
    message: str, param: str | None = None, code: str | None = None
) -> ApiError:
    """Return a 400: the caller's fault."""
    return ApiError(400, message, param=param, code=code)


def no_such_model(name: str, known: Sequence[str]) -> ApiError:
    """Return a 404: a model, or an adapter, that is not served."""
    listed = ", ".join(map(repr, known[:MAX_LISTED]))
    more = ", ..." if len(known) > MAX_LISTED else ""
    does = "does" if len(known) == 1 else "do"
    msg = f"The model {name!r:.200} does not exist; {listed}{more} {does}"
    return ApiError(404, msg, param="model", code="model_not_found")


def overloaded(
    message: str, code: str = "overloaded", retry_after_s: int = RETRY_AFTER_S
) -> ApiError:
    """Return a 429: this frontend is at its bound."""
    return ApiError(
        429,
        message,
        kind="rate_limit_error",
        code=code,
        headers={"Retry-After": str(retry_after_s)},
    )


def unavailable(
    message: str, code: str = "no_worker", retry_after_s: int = RETRY_AFTER_S
) -> ApiError:
    """Return a 503: no worker can take the request now."""
    return ApiError(
        503,
        message,
        kind="service_unavailable_error",
        code=code,
        headers={"Retry-After": str(retry_after_s)},
    )


def internal_error() -> ApiError:
    """Return a 500: a bug."""
    return ApiError(500, "internal error; the log has it", kind="server_error")


def from_worker(kind: ErrorKind, message: str) -> ApiError:
    """Return the answer for a request that a worker ended with an error."""
    match kind:
        case ErrorKind.INVALID:
            code = "context_length_exceeded" if "context length" in message else None
            return bad_request(message, code=code)
        case ErrorKind.BUSY | ErrorKind.DRAINING:
            return unavailable(message, code="overloaded")
        case ErrorKind.HANDOVER | ErrorKind.ENGINE:
            return ApiError(502, message, kind="server_error", code="worker_failed")
        case ErrorKind.CAPTURE:
            return ApiError(502, message, kind="server_error", code="capture_failed")
