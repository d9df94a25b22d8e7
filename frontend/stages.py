"""What a request waits for, from its client to a worker's engine and back."""

from __future__ import annotations

import enum

__all__ = ["STAGE_NAMES", "Stage"]


class Stage(enum.IntEnum):
    """What a request waits for; in the order in which it comes.

    Numbers, since thousands may be looked at in one turn of the event loop.
    """

    RECEIVING = 0  # the rest of its body
    TOKENIZING = 1  # template, tokenizer and checks, here
    QUEUED = 2  # its turn: room at the workers
    PREFILL = 3  # its prompt's KV
    MOVING = 4  # a worker that goes on with it: its own has failed
    HANDOVER = 5  # the decode worker to read the KV
    DECODE = 6  # the next token
    STREAMING = 7  # its client, who has yet to read what is there


STAGE_NAMES = tuple(stage.name.lower() for stage in Stage)
