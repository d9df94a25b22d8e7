"""What the operator allows requests to do, and how answers look."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .checkpoint import MAX_LIFE_S
from .nvext import Placement
from .parsers import Parsers
from .resume_keys import ResumeKeys

__all__ = ["Policy"]


def _nobody() -> None:
    """Tell nobody."""


@dataclass(slots=True, frozen=True)
class Policy:
    """The operator's choices about requests."""

    placement: Placement = Placement.AUTO
    ignore_unknown_fields: bool = False
    trust_chat_template: bool = False  # a request may bring its own
    exclude_tools: bool = False  # from the prompt, when ``tool_choice`` is none
    parsers: Parsers | None = None  # of chat outputs; None: text is all there is
    parser_failed: Callable[[], None] = (
        _nobody  # told of each output whose parser fails
    )
    resume_keys: ResumeKeys = field(default_factory=ResumeKeys)  # of checkpoints
    checkpoint_life_s: float = MAX_LIFE_S
