"""Long work beside the event loop, so that no stream waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar, cast

__all__ = [
    "LONG_BODY_BYTES",
    "LONG_CHARS",
    "LONG_IDS",
    "Threads",
    "is_long_conversation",
]

LONG_CHARS = 4_096
"""Texts up to this length are tokenized on the event loop: about 1 ms."""

LONG_IDS = 16_384
"""So many ids are checked on the event loop: about 1 ms."""

LONG_BODY_BYTES = 128 * 1024
"""Bodies up to this size are parsed on the event loop: about 1 ms (of ids, or of the
smallest messages)."""

LONG_MESSAGES = 64
"""Conversations of so many messages are rendered on the event loop, if their texts are
not long: about 1 ms."""

USUAL_DEPTH = 16
"""Levels of a conversation: four for texts, the others for arguments of tool calls."""

T = TypeVar("T")


class Threads:
    """Runs short work here and long work in *executor* (None: the loop's own)."""

    def __init__(self, executor: Executor | None = None) -> None:
        self._executor = executor

    async def run(self, is_long: bool, work: Callable[[], T]) -> T:
        """Return what *work* does; the event loop goes on meanwhile if it *is_long*.

        Long work must let the GIL go now and then: Python code does every 5 ms, a
        single call into C does not.
        """
        if not is_long:
            return work()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, work)

    async def of_body(self, body: bytes, work: Callable[[], T]) -> T:
        """Return what *work* makes of a *body*, which may be long."""
        return await self.run(len(body) > LONG_BODY_BYTES, work)


def is_long_conversation(messages: Sequence[dict[str, Any]]) -> bool:
    """Return whether rendering these *messages*, not yet checked, takes long."""
    if len(messages) > LONG_MESSAGES:
        return True
    return _room(list(messages), LONG_CHARS, USUAL_DEPTH) < 0


def _room(value: object, room: int, depth: int) -> int:
    """Return what is left of *room* characters when *value* is written; may be negative.

    Stops where it is: nothing long or deep is walked through.
    """
    if isinstance(value, str):
        return room - len(value)
    inside: Iterable[object] = ()
    if isinstance(value, dict):
        inside = cast("dict[str, object]", value).values()
    elif isinstance(value, list):
        inside = cast("list[object]", value)
    for one in inside:
        if depth and isinstance(one, str):
            room -= 1 + len(one)
        else:
            room = _room(one, room - 1, depth - 1) if depth else -1
        if room < 0:
            break
    return room
