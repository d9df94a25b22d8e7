"""Holds back what a worker is about to do, for as long as a test wants to look.

Instead of a time that is hoped to be long enough: an update that takes 300 ms may be over
before a test, or the machine, comes to look at it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenwire.protocol.admin import Action, UpdateWeights
from tokenwire.worker.sim.engine import SimEngine

__all__ = ["Held", "brake", "held_reads", "held_updates"]


class Held:
    """Calls of *owner*'s method *name* that wait for ``release``.

    Args:
        owner: Whose method it is.
        name: Of the method, which returns nothing.
        when: Whether a call, by its arguments, waits; all do if it is not given. None
            does after ``release``.
    """

    def __init__(
        self, owner: object, name: str, when: Callable[..., bool] = lambda *_: True
    ) -> None:
        self._owner: Any = owner
        self._name = name
        self._when = when
        self._call: Callable[..., None] = getattr(owner, name)
        self._waiting: list[tuple[Any, ...]] = []
        setattr(owner, name, self._take)

    @property
    def num_waiting(self) -> int:
        """How many calls wait."""
        return len(self._waiting)

    def release(self) -> None:
        """Make the calls, and let all later ones through."""
        setattr(self._owner, self._name, self._call)
        waiting, self._waiting = self._waiting, []
        for arguments in waiting:
            self._call(*arguments)

    def _take(self, *arguments: Any) -> None:
        if self._when(*arguments):
            self._waiting.append(arguments)
        else:
            self._call(*arguments)


def brake(engine: SimEngine, when: Callable[[], bool] = lambda: True) -> Held:
    """Let no step of *engine* begin once *when* is so, until the release."""
    return Held(engine, "_begin_step", when)


def held_reads(engine: SimEngine) -> Held:
    """Let *engine* read no KV until the release."""
    return Held(engine._channel, "read")  # pyright: ignore[reportPrivateUsage]


def held_updates(engine: SimEngine) -> Held:
    """Let *engine* begin no update of its weights until the release."""

    def is_update(action: Action, *_: object) -> bool:
        return isinstance(action, UpdateWeights)

    return Held(engine, "administer", is_update)
