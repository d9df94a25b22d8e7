"""Large bodies: prepared one at a time, and what they took is given back.

A body may take up to twenty times its size as Python objects, and the C library keeps what was
freed: the tokenizer's small pieces of memory lie between each other, so that nothing is
left over as a whole. Nobody but the next such body would ever use that.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext

from .errors import bad_request

__all__ = ["MAX_TOKENS", "Large", "check_length", "trim_heap"]

LARGE_BODY_BYTES = 1024 * 1024
"""Of larger bodies one is prepared at a time: there are two threads for all of them, which
share one interpreter."""

MEDIUM_BODY_BYTES = 16 * 1024
"""Of larger ones some are: 4,096 of this size are 64 MiB, and as Python objects 1 GiB."""

MAX_MEDIUM = 16
"""So many: more than there are threads, for some may wait for workers that keep what they
go on from."""

GIVE_BACK_BYTES = LARGE_BODY_BYTES
"""Larger bodies are followed by a trim of the heap: 200,000 tokens are about 25 MiB while
they are made."""

GIVE_BACK_S = 1.0
"""How long after it: by then most are refused or sent, and others have come in between."""

MAX_TOKENS = 2 * 1024 * 1024
"""Made of one text, where no model's context says less: some 500 MiB for a moment."""

PIECE_CHARS = 64 * 1024
"""Of a text that may be too long, tokenized at once: some 3 MiB."""

CHARS_PER_TOKEN = 4
"""Of texts in ASCII that may be within a limit without a look: English has 4.5. Others
may have a token a character, and more."""


def check_length(
    text: str, max_model_len: int | None, count: Callable[[str], int]
) -> None:
    """Refuse a text of many more tokens than could be used, before all are made.

    A token of a text takes some 250 bytes while it is made, so that 60 MiB took 7 GB, and
    two minutes. Its pieces have as many as the whole, or a few more at each cut.

    Args:
        text: To be tokenized.
        max_model_len: The context length that it must fit into; None: ``MAX_TOKENS``
            are the limit. Only what has twice as many is refused here: what is near
            is looked at as a whole, by who needs it.
        count: Returns how many tokens a piece has.

    Raises:
        ApiError: 400.
    """
    limit = MAX_TOKENS if max_model_len is None else 2 * max_model_len
    if len(text) <= limit * (CHARS_PER_TOKEN if text.isascii() else 1):
        return
    num_tokens = 0
    for start in range(0, len(text), PIECE_CHARS):
        num_tokens += count(text[start : start + PIECE_CHARS])
        if num_tokens > limit:
            msg = f"a text may have {limit} tokens, and this one has more"
            if max_model_len is not None:
                msg = (
                    f"This model's maximum context length is {max_model_len} tokens, "
                    f"the prompt has more than {limit}"
                )
            raise bad_request(msg, "prompt", "context_length_exceeded")


class Large:
    """What large bodies wait for, and what follows them.

    Args:
        give_back: Called, in a thread, a while after one was there.
    """

    def __init__(self, give_back: Callable[[], None] | None = None) -> None:
        self._give_back = give_back or trim_heap
        self._large = asyncio.Lock()
        self._medium = asyncio.Semaphore(MAX_MEDIUM)
        self._timer: asyncio.TimerHandle | None = None
        self._giving: asyncio.Future[None] | None = None  # the last time

    def preparing(self, num_bytes: int) -> AbstractAsyncContextManager[None]:
        """Return what to be in while a body of *num_bytes* is prepared.

        Its wait is bounded by how many bytes of bodies may be held at all.
        """
        if num_bytes <= MEDIUM_BODY_BYTES:
            return _AT_ONCE
        return self._medium if num_bytes <= LARGE_BODY_BYTES else self._large

    def is_over(self, num_bytes: int) -> None:
        """Take note that a body of *num_bytes* is no longer needed."""
        if num_bytes > GIVE_BACK_BYTES and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(GIVE_BACK_S, self._on_time, loop)

    def _on_time(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        self._giving = loop.run_in_executor(None, self._give_back)


_AT_ONCE = nullcontext()

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; musl has none


def trim_heap() -> None:
    """Give memory that was freed back to the system; the GIL is let go meanwhile."""
    if _trim is not None:
        _trim(0)
