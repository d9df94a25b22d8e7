"""The ``nvext`` object of requests: what was selected, and where it is to stand.

``return_token_ids: true`` at a request's root is an alias of the selector
``nvext.extra_fields=["completion_token_ids"]``; it is folded before validation.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal, TypeVar, cast

import msgspec

from .errors import bad_request

__all__ = [
    "SELECTOR",
    "SELECTORS",
    "CheckpointOptions",
    "Nvext",
    "Placement",
    "ResumableOptions",
    "ResumeFrom",
    "Selection",
    "fold_alias",
    "root_or_nvext",
    "select",
]

SELECTOR = "completion_token_ids"
"""Selects the trio: completion ids, prompt ids and ``kv_transfer_params``."""


class Placement(StrEnum):
    """Where token ids stand in a response, beside ``nvext``."""

    AUTO = "auto"
    """In vLLM's places too, for requests that used vLLM's ``return_token_ids``."""
    NVEXT = "nvext"
    """Nowhere else."""
    VLLM = "vllm"
    """In vLLM's places too, whenever ids were selected."""
    SGLANG = "sglang"
    """In SGLang's places too, whenever ids were selected."""


class ResumableOptions(msgspec.Struct, forbid_unknown_fields=True):
    """``nvext.resumable``, where it says more than ``true``."""

    on_disconnect: Literal["cancel", "continue"] | None = None
    ttl_s: int | None = None  # how long its checkpoints hold


class CheckpointOptions(msgspec.Struct, forbid_unknown_fields=True):
    """``nvext.checkpoint``: what a resumable generation tells of where it stands."""

    every_tokens: int | None = None  # default: at its end alone
    prompt: Literal["ids", "hash"] | None = None  # default: hash


class ResumeFrom(msgspec.Struct, forbid_unknown_fields=True):
    """``nvext.resume_from``: a checkpoint, what is kept of a generation, or the output."""

    checkpoint: dict[str, Any] | None = None  # see ``checkpoint``
    generation_id: str | None = None  # of one that a worker keeps
    seq: int | None = None  # of its last event that the client has; default: all
    output_token_ids: list[int] | None = None  # (num_output_tokens,)
    # With these, to be sure:
    prompt_token_ids: list[int] | None = None  # (num_prompt_tokens,)
    contract: str | None = None  # ``nvext.generation.contract`` of the first chunk


class Nvext(msgspec.Struct):
    """``nvext`` of a request."""

    extra_fields: list[str] | None = None
    token_data: list[int] | None = None  # (num_prompt_tokens,), instead of messages
    # Also at the root of a request:
    cache_salt: str | None = None
    required_prefix_token_ids: list[int] | None = None  # (num_kept,), see ``turns``
    truncate_prompt_tokens: int | None = None
    migratable: bool | None = None  # may go on at another worker; default: yes
    exactness: Literal["best_effort", "same_rng", "bitwise"] | None = None
    resumable: bool | ResumableOptions | None = None
    checkpoint: CheckpointOptions | None = None
    resume_from: ResumeFrom | None = None

    @property
    def least_exactness(self) -> str:
        """How exactly output must go on, see ``Card``; empty: as may be."""
        asked = self.exactness or ""
        return "" if asked == "best_effort" else asked

    @property
    def is_resumable(self) -> bool:
        """Whether the answer is to be one that can be resumed."""
        asks = self.resumable is not None and self.resumable is not False
        return asks or self.resume_from is not None


_KEYS = set(Nvext.__struct_fields__)

T = TypeVar("T")


def root_or_nvext(root: T | None, nested: T | None, field: str) -> T | None:
    """Return the value of a field that may stand in both places.

    Raises:
        ApiError: 400, it stands in both and differs.
    """
    if root is not None and nested is not None and root != nested:
        msg = f"{field} and nvext.{field} differ"
        raise bad_request(msg, field)
    return nested if root is None else root


class Selection(msgspec.Struct, frozen=True):
    """Which extra fields a response carries, and where beside ``nvext``."""

    completion_token_ids: bool = False
    prompt_token_ids: bool = False
    kv_transfer_params: bool = False
    worker_id: bool = False
    timing: bool = False
    stop_reason: bool = False
    engine_data: bool = False
    prompt_logprobs: bool = False
    weight_version: bool = False
    native: Placement | None = None  # VLLM or SGLANG; None: under nvext alone

    @property
    def any_final(self) -> bool:
        """Whether the final chunk has an ``nvext`` beyond its ids."""
        return (
            self.prompt_token_ids
            or self.kv_transfer_params
            or self.worker_id
            or self.timing
            or self.stop_reason
            or self.engine_data
            or self.prompt_logprobs
            or self.weight_version
        )

    @property
    def any(self) -> bool:
        """Whether anything was selected."""
        return self.completion_token_ids or self.any_final

    @property
    def needs_prompt_ids(self) -> bool:
        """Whether the engine's own view of the prompt is to come back."""
        return self.prompt_token_ids or self.engine_data


NOTHING = Selection()
"""What nearly all requests select."""

SELECTORS = frozenset(Selection.__struct_fields__) - {"native"}
"""What ``extra_fields`` may name."""


def fold_alias(body: dict[str, object]) -> bool:
    """Replace a root ``return_token_ids`` by the selector, once; returns if it was true.

    Raises:
        ApiError: 400, it is neither a boolean nor null, or ``nvext`` is no object.
    """
    if "return_token_ids" not in body:
        return False
    value = body.pop("return_token_ids")
    if value is not None and not isinstance(value, bool):
        msg = f"return_token_ids must be a boolean, not {value!r:.40}"
        raise bad_request(msg, "return_token_ids")
    if not value:
        return False
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
    selectors = cast("list[object]", listed)
    if SELECTOR not in selectors:
        selectors = [*selectors, SELECTOR]
    body["nvext"] = {**given, "extra_fields": selectors}
    return True


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


def select(
    nvext: Nvext | None,
    placement: Placement = Placement.NVEXT,
    *,
    by_alias: bool = False,
) -> Selection:
    """Return what *nvext* selects.

    Args:
        nvext: The request's, its alias folded.
        placement: The operator's choice.
        by_alias: Whether the request used ``return_token_ids``.

    Raises:
        ApiError: 400 with the unknown selectors and the known ones.
    """
    if nvext is None:
        return NOTHING
    names, implied = set(nvext.extra_fields or ()), nvext.is_resumable
    unknown = sorted(names - SELECTORS)
    if unknown:
        msg = f"unknown nvext.extra_fields {unknown}; known are {sorted(SELECTORS)}"
        raise bad_request(msg, "nvext.extra_fields")
    if not names and not implied:
        return NOTHING
    trio = set[str]()
    if SELECTOR in names:
        trio = {"prompt_token_ids", "kv_transfer_params"}
    elif implied:
        trio = {SELECTOR}  # a resumable stream has the prompt in its first chunk
    return Selection(
        **dict.fromkeys(names | trio, True),
        native=_native(placement, by_alias=by_alias),
    )


def _native(placement: Placement, *, by_alias: bool) -> Placement | None:
    match placement:
        case Placement.AUTO:
            return Placement.VLLM if by_alias else None
        case Placement.NVEXT:
            return None
        case Placement.VLLM | Placement.SGLANG:
            return placement
