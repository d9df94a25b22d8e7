"""The refusals of a resume: each names what differs, so that a client can act on it."""

from __future__ import annotations

from tokenwire.protocol.messages import CANCELLED, GOES_ON, Finished

from .errors import ApiError

__all__ = [
    "PARAM",
    "checkpoint_forbidden",
    "ended_elsewhere",
    "exactness_unavailable",
    "generation_active",
    "generation_not_found",
    "grammar_rejects_prefix",
    "invalid_resume",
    "mismatch",
    "not_resumable",
    "output_hash_mismatch",
    "replay_window_lost",
    "resume_too_large",
]

PARAM = "nvext.resume_from"
"""Where a request says what it goes on from."""


def invalid_resume(message: str, param: str = PARAM) -> ApiError:
    """Return a 400: what is to be resumed makes no sense."""
    return ApiError(400, message, param=param, code="invalid_resume")


def checkpoint_forbidden(message: str) -> ApiError:
    """Return a 403: the checkpoint is altered, unsigned, too old, or another client's."""
    param = f"{PARAM}.checkpoint"
    return ApiError(403, message, param=param, code="checkpoint_forbidden")


def exactness_unavailable(message: str) -> ApiError:
    """Return a 409: nobody here goes on as exactly as it must be."""
    return ApiError(409, message, param="nvext.exactness", code="exactness_unavailable")


def grammar_rejects_prefix(message: str) -> ApiError:
    """Return a 422: the output is none that its grammar could have led to."""
    return ApiError(422, message, param=PARAM, code="grammar_rejects_prefix")


def mismatch(code: str, field: str, theirs: object, ours: object) -> ApiError:
    """Return a 409: going on here would not go on with the same.

    Args:
        code: Of the error.
        field: What differs, as a path from ``nvext.resume_from``.
        theirs: Its value, or hash, where the output came from.
        ours: The same for this request, here.
    """
    msg = f"{field} differs: {theirs!s:.80} is to be resumed, here it is {ours!s:.80}"
    return ApiError(409, msg, param=f"{PARAM}.{field}", code=code)


def output_hash_mismatch(message: str) -> ApiError:
    """Return a 412: the ids are not those that the checkpoint was made of."""
    param = f"{PARAM}.checkpoint.state.output"
    return ApiError(412, message, param=param, code="output_hash_mismatch")


def not_resumable(message: str, param: str) -> ApiError:
    """Return a 422: what is asked for has no output that one could go on behind."""
    return ApiError(422, message, param=param, code="not_resumable")


def resume_too_large(num_tokens: int, limit: int) -> ApiError:
    """Return a 413: more output than a context of this model can hold."""
    msg = f"{num_tokens} output tokens cannot be resumed: the context length is {limit}"
    return ApiError(413, msg, param=PARAM, code="resume_too_large")


def generation_not_found(generation_id: str) -> ApiError:
    """Return a 404: nobody keeps such a generation for this client."""
    msg = (
        f"no worker keeps a generation {generation_id!r:.80} of this API key: it was not "
        "resumable, or is over for longer than it is kept, or its worker is gone; resume "
        "from a checkpoint"
    )
    return ApiError(404, msg, code="generation_not_found")


def replay_window_lost(generation_id: str, why: str) -> ApiError:
    """Return a 410: it was kept, and is not any more."""
    msg = (
        f"generation {generation_id!r:.80} cannot be told again: {why}; resume from a "
        "checkpoint"
    )
    return ApiError(410, msg, code="replay_window_lost")


def generation_active(generation_id: str) -> ApiError:
    """Return a 409: it is still running, so there is nothing to begin behind it."""
    msg = (
        f"generation {generation_id!r:.80} is running: follow it with GET "
        f"/v1/generations/{generation_id}/stream, or cancel it first"
    )
    return ApiError(409, msg, param=PARAM, code="generation_active")


def ended_elsewhere(end: Finished) -> ApiError:
    """Return the error of an answer whose output another request has ended or taken."""
    if end.stop_reason == GOES_ON:
        msg = "another request follows this generation now"
        return ApiError(409, msg, code="taken_over")
    if end.stop_reason == CANCELLED:
        return ApiError(409, "this generation was cancelled", code="cancelled")
    msg = "this generation has ended with its client's connection"
    return ApiError(409, msg, code="disconnected")
