"""What a request waits for, from its client to a worker's engine and back."""

from __future__ import annotations

import enum

__all__ = ["Stage"]


class Stage(enum.Enum):
    """What a request waits for; in the order in which it comes."""

    RECEIVING = "receiving"  # the rest of its body
    TOKENIZING = "tokenizing"  # template, tokenizer and checks, here
    QUEUED = "queued"  # its turn: room at the workers
    PREFILL = "prefill"  # its prompt's KV
    MOVING = "moving"  # a worker that goes on with it: its own has failed
    HANDOVER = "handover"  # the decode worker to read the KV
    DECODE = "decode"  # the next token
    STREAMING = "streaming"  # its client, who has yet to read what is there
