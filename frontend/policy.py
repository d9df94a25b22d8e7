"""What the operator allows requests to do, and how answers look."""

from __future__ import annotations

from dataclasses import dataclass

from .nvext import Placement

__all__ = ["Policy"]


@dataclass(slots=True, frozen=True)
class Policy:
    """The operator's choices about requests."""

    placement: Placement = Placement.AUTO
    ignore_unknown_fields: bool = False
    trust_chat_template: bool = False  # a request may bring its own
