"""What the admin plane answers when an action has ended at every worker."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus

import msgspec
from aiohttp import web

from .errors import ApiError
from .fanout import Outcome

__all__ = ["done", "failure", "failure_text", "json_answer", "verdict"]

_STATUS = {"invalid": 400, "not_found": 404, "unsupported": 501, "busy": 503}
"""Of an action that failed at all workers for the same reason; 500 otherwise."""


def verdict(outcomes: Sequence[Outcome]) -> str:
    """Return how an action has ended as a whole: ``ok``, ``partial`` or ``failed``."""
    num_done = sum(outcome.is_done for outcome in outcomes)
    if num_done == len(outcomes):
        return "ok"
    return "partial" if num_done else "failed"


def done(answer: object) -> web.Response:
    """Return the answer to what has worked: a text, or JSON."""
    if isinstance(answer, str):
        return web.Response(text=answer)
    return json_answer(answer)


def failure_text(name: str, outcomes: Sequence[Outcome]) -> str:
    """Return where the action *name* has failed, and why."""
    failed = [outcome for outcome in outcomes if not outcome.is_done]
    reasons = "; ".join(f"{one.link.worker_id}: {one.done.error}" for one in failed)
    return f"{name} failed at {len(failed)} of {len(outcomes)} workers: {reasons}"


def failure(name: str, outcomes: Sequence[Outcome]) -> web.Response:
    """Return the answer to what has failed: an error, and the state of each worker."""
    is_partial = verdict(outcomes) == "partial"
    kinds = {outcome.done.error_kind for outcome in outcomes}
    kind = kinds.pop() if len(kinds) == 1 else ""  # "" where it is done, too
    status = _STATUS.get(kind, 500)
    if name == "update_weights" and kind == "not_found":
        # Written a moment ago, on a file system that is shared: it may be there
        # soon, and Prime-RL tries again after such a status alone.
        status = HTTPStatus.SERVICE_UNAVAILABLE
    again = {"Retry-After": "1"} if status == HTTPStatus.SERVICE_UNAVAILABLE else {}
    error = ApiError(
        status,
        failure_text(name, outcomes),
        kind="invalid_request_error" if status < 500 else "server_error",
        code="partial_failure" if is_partial else "worker_failed",
        headers=again,
    )
    body = msgspec.json.decode(error.body())
    body["workers"] = [_state(outcome) for outcome in outcomes]
    response = json_answer(body, status)
    response.headers.update(error.headers)
    return response


def json_answer(value: object, status: int = 200) -> web.Response:
    """Return *value* as an answer."""
    return web.Response(
        status=status,
        body=msgspec.json.encode(value),
        content_type="application/json",
    )


def _state(outcome: Outcome) -> dict[str, object]:
    """Return what is known of a worker after an action."""
    status = outcome.link.status
    return {
        "worker_id": outcome.link.worker_id,
        "ok": outcome.is_done,
        "error": outcome.done.error or None,
        "kind": outcome.done.error_kind or None,
        "connected": outcome.link.is_ready,
        "weight_version": status.weight_version,
        "adapters": [adapter.name for adapter in status.adapters],
        "paused": status.paused,
        "sleep_level": status.sleep_level,
        "busy": status.busy or None,
        "fault": status.fault or None,
    }
