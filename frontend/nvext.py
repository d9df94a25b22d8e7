"""The ``nvext`` object of requests and responses: what was selected, and its answer.

``return_token_ids: true`` at a request's root is an alias of the selector
``nvext.extra_fields=["completion_token_ids"]``; it is folded before validation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import msgspec

from .errors import bad_request

__all__ = ["SELECTOR", "Nvext", "Selection", "fold_alias", "select"]

SELECTOR = "completion_token_ids"
"""Selects the trio: completion ids, prompt ids and ``kv_transfer_params``."""

_SELECTORS = {
    SELECTOR,
    "prompt_token_ids",
    "kv_transfer_params",
    "worker_id",
    "timing",
    "stop_reason",
}
_KEYS = {"extra_fields", "token_data"}


class Nvext(msgspec.Struct):
    """``nvext`` of a request."""

    extra_fields: list[str] | None = None
    token_data: list[int] | None = None  # (num_prompt_tokens,), instead of messages


@dataclass(slots=True, frozen=True)
class Selection:
    """Which extra fields a response carries."""

    completion_token_ids: bool = False
    prompt_token_ids: bool = False
    kv_transfer_params: bool = False
    worker_id: bool = False
    timing: bool = False
    stop_reason: bool = False

    @property
    def any_final(self) -> bool:
        """Whether the final chunk has an ``nvext`` beyond its ids."""
        return (
            self.prompt_token_ids
            or self.kv_transfer_params
            or self.worker_id
            or self.timing
            or self.stop_reason
        )


def fold_alias(body: dict[str, object]) -> None:
    """Replace a root ``return_token_ids`` by the selector, once.

    Raises:
        ApiError: 400, it is neither a boolean nor null, or ``nvext`` is no object.
    """
    if "return_token_ids" not in body:
        return
    value = body.pop("return_token_ids")
    if value is not None and not isinstance(value, bool):
        msg = f"return_token_ids must be a boolean, not {value!r:.40}"
        raise bad_request(msg, "return_token_ids")
    if not value:
        return
    nvext = body.get("nvext")
    if nvext is None:
        nvext = {}
    if not isinstance(nvext, dict):
        msg = "nvext must be an object"
        raise bad_request(msg, "nvext")
    given = cast("dict[str, object]", nvext)
    listed = given.get("extra_fields")
    if listed is None:
        listed = []
    if not isinstance(listed, list):
        msg = "nvext.extra_fields must be a list of strings"
        raise bad_request(msg, "nvext.extra_fields")
    fields = cast("list[object]", listed)
    if SELECTOR not in fields:
        fields = [*fields, SELECTOR]
    body["nvext"] = {**given, "extra_fields": fields}


def check_keys(nvext: object) -> None:
    """Refuse keys of ``nvext`` that this release does not know.

    Raises:
        ApiError: 400 with the unknown keys and the known ones.
    """
    if isinstance(nvext, dict):
        unknown = sorted(cast("dict[str, object]", nvext).keys() - _KEYS)
        if unknown:
            msg = f"unknown nvext keys {unknown}; known are {sorted(_KEYS)}"
            raise bad_request(msg, "nvext")


def select(nvext: Nvext | None) -> Selection:
    """Return what *nvext* selects.

    Raises:
        ApiError: 400 with the unknown selectors and the known ones.
    """
    fields = set(nvext.extra_fields or ()) if nvext is not None else set[str]()
    unknown = sorted(fields - _SELECTORS)
    if unknown:
        msg = f"unknown nvext.extra_fields {unknown}; known are {sorted(_SELECTORS)}"
        raise bad_request(msg, "nvext.extra_fields")
    trio = SELECTOR in fields
    return Selection(
        completion_token_ids=trio,
        prompt_token_ids=trio or "prompt_token_ids" in fields,
        kv_transfer_params=trio or "kv_transfer_params" in fields,
        worker_id="worker_id" in fields,
        timing="timing" in fields,
        stop_reason="stop_reason" in fields,
    )
