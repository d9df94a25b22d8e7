"""Questions to one worker about what it keeps, that have no answer yet."""

from __future__ import annotations

from collections.abc import Callable

from tokenwire.protocol.messages import Recalled

from .reply import Reply

__all__ = ["AWAY", "Recalls", "TakeRecalled"]

AWAY = "away"
"""``Recalled.state`` where no worker said it: the answer did not come."""

TakeRecalled = Callable[[Recalled], Reply | None]
"""Takes the answer; returns who hears what follows it, where somebody is to."""


class Recalls:
    """Each is answered once: by the worker, or with its loss."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: dict[str, TakeRecalled] = {}

    def add(self, request_id: str, take: TakeRecalled) -> None:
        """Have *take* called with the answer, at once when it comes."""
        self._waiting[request_id] = take

    def forget(self, request_id: str) -> None:
        """Wait for an answer no longer."""
        self._waiting.pop(request_id, None)

    def answered(self, message: Recalled) -> Reply | None:
        """Pass an answer on, if it is still waited for."""
        take = self._waiting.pop(message.request_id, None)
        return None if take is None else take(message)

    def lose_all(self) -> None:
        """Answer all: the worker is lost."""
        for request_id in list(self._waiting):
            self.answered(Recalled(request_id, AWAY))
