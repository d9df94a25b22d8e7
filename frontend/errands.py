"""Admin calls to one worker that have no answer yet: who waits for it."""

from __future__ import annotations

import asyncio

from tokenwire.protocol.messages import AdminDone

__all__ = ["Errands"]


class Errands:
    """Each call ends once: with the worker's answer, or with the worker."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[AdminDone]] = {}

    def add(self, request_id: str) -> asyncio.Future[AdminDone]:
        """Return what brings the answer; who gives up waiting cancels it."""
        future = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        future.add_done_callback(lambda _: self._waiting.pop(request_id, None))
        return future

    def done(self, message: AdminDone) -> None:
        """Pass an answer on, if it is still waited for."""
        future = self._waiting.pop(message.request_id, None)
        if future is not None and not future.done():
            future.set_result(message)

    def end(self, request_id: str, error: str, kind: str) -> None:
        """End a call that no answer will come to."""
        self.done(AdminDone(request_id, error, kind))

    def lose_all(self, reason: str) -> None:
        """End all calls: the worker is lost."""
        for request_id in list(self._waiting):
            self.end(request_id, reason, "lost")
