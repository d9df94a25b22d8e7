"""What is checked of a request before its prompt is looked at."""

from __future__ import annotations

import re

from .bounds import (
    MAX_CHOICES,
    MAX_SALT_CHARS,
    REQUEST_ID_FORM,
    SESSION_ID_FORM,
    within,
)
from .errors import bad_request
from .nvext import SELECTOR, Nvext, Selection
from .pool import Pool
from .schema import CommonRequest

__all__ = [
    "check_cache_salt",
    "check_common",
    "check_model",
    "check_request_id",
    "check_session_id",
    "refuse_chats_own",
]

_REQUEST_ID_FORM = re.compile(REQUEST_ID_FORM)
_SESSION_ID_FORM = re.compile(SESSION_ID_FORM)


def check_model(name: str | None, pool: Pool) -> str:
    """Return the adapter that *name* is, or an empty string for the model itself.

    Raises:
        ApiError: 404; 503 while a worker that had it is not connected.
    """
    if name is None or name == pool.model:
        return ""
    pool.check_adapter(name)
    return name


def check_request_id(value: str, param: str) -> None:
    """Refuse a client's request id that is not safe to repeat in a header.

    Raises:
        ApiError: 400 with *param*.
    """
    _check_form(value, param, _REQUEST_ID_FORM)


def check_session_id(value: str, param: str) -> None:
    """Refuse a session's id of another form than a header can have.

    Raises:
        ApiError: 400 with *param*.
    """
    _check_form(value, param, _SESSION_ID_FORM)


def _check_form(value: str, param: str, form: re.Pattern[str]) -> None:
    if form.fullmatch(value) is None:
        msg = f"{param} must match {form.pattern}"
        raise bad_request(msg, param)


def check_common(
    request: CommonRequest, selection: Selection, pool: Pool, *, num_prompts: int
) -> None:
    """Check what needs no tokens."""
    check_model(request.model, pool)
    if request.request_id is not None:
        check_request_id(request.request_id, "request_id")
    if request.session_id is not None:
        check_session_id(request.session_id, "session_id")
    n = within("n", 1 if request.n is None else request.n)
    if selection.completion_token_ids:
        by = f"nvext.extra_fields={[SELECTOR]}"
        if request.nvext is not None and request.nvext.is_resumable:
            by = "nvext.resumable, or resume_from,"
        only = f"{by} needs exactly one choice"
        if n != 1:
            msg = f"{only}: n must be 1, not {n}"
            raise bad_request(msg, "n")
        if num_prompts != 1:
            msg = f"{only}: one prompt, not {num_prompts}"
            raise bad_request(msg, "prompt")
    elif n * num_prompts != 1 and selection.any:
        msg = "nvext.extra_fields needs exactly one choice: n=1 and one prompt"
        raise bad_request(msg, "n" if n != 1 else "prompt")
    if n * num_prompts > MAX_CHOICES:
        msg = f"{n * num_prompts} choices were asked for, the limit is {MAX_CHOICES}"
        raise bad_request(msg, "n")
    within("priority", request.priority or 0)
    if request.stream_options is not None and not request.stream:
        msg = "stream_options needs stream: true"
        raise bad_request(msg, "stream_options")
    if request.prompt_logprobs is not None:
        within("prompt_logprobs", request.prompt_logprobs)
        if request.stream and not selection.prompt_logprobs:
            msg = (
                "prompt_logprobs are available when stream=true only with "
                "nvext.extra_fields=['prompt_logprobs']"
            )
            raise bad_request(msg, "prompt_logprobs")


def check_cache_salt(salt: str | None) -> None:
    """Refuse a salt that vLLM refuses.

    Raises:
        ApiError: 400.
    """
    if salt is not None and not 0 < len(salt) <= MAX_SALT_CHARS:
        msg = f"cache_salt must have 1 to {MAX_SALT_CHARS} characters, not {len(salt)}"
        raise bad_request(msg, "cache_salt")


def refuse_chats_own(nvext: Nvext | None) -> None:
    """Refuse what of ``nvext`` makes sense on chat alone.

    Raises:
        ApiError: 400, by its name.
    """
    for name in ("token_data", "required_prefix_token_ids"):
        if nvext is not None and getattr(nvext, name) is not None:
            msg = f"nvext.{name} belongs to chat: here prompt takes token ids"
            raise bad_request(msg, f"nvext.{name}")
