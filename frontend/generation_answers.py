"""What the routes of kept generations answer."""

from __future__ import annotations

from typing import Literal

import msgspec

from .checkpoint import Checkpoint, Count, UnixSeconds

__all__ = ["DeletedGeneration", "FinishReason", "KeptGeneration", "Status"]

FinishReason = Literal["stop", "length", "tool_calls", "abort"]
Status = Literal["running", "completed", "cancelled"]


class KeptGeneration(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A generation that a worker keeps."""

    id: str
    object: Literal["generation"] = "generation"
    created: UnixSeconds
    status: Status
    finish_reason: FinishReason | None  # null: it runs, or was cancelled
    is_followed: bool  # by some frontend's stream
    on_disconnect: Literal["cancel", "continue"]
    seq: Count  # of the last event so far
    prompt_tokens: Count
    completion_tokens: Count  # of this generation, without what it had resumed
    checkpoint: Checkpoint  # of all that there is so far


class DeletedGeneration(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A generation that is not kept any more."""

    id: str
    object: Literal["generation.deleted"] = "generation.deleted"
    deleted: Literal[True] = True
