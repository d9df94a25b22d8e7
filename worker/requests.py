"""What is open: Submits without a Finished, by the engine's ids, and how each is ended.

Law: what the engine does not end after an abort is given up.
No socket, no clock and no event loop in here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator

from tokenwire.protocol.logs import about
from tokenwire.worker.engine import Engine

from .admission import Admission
from .frontends import EndedBy, Request
from .metrics import Metrics
from .spans import about_submit
from .timers import Timers

__all__ = ["ABORT_GRACE_S", "Requests"]

logger = logging.getLogger(__name__)

ABORT_GRACE_S = 15.0
"""An engine that has not ended a cancelled request by then never will: the Finished is
made up. Longer than the simulated engine's longest read of KV, and NIXL's usual ones."""


class Requests:
    """The open requests of all frontends.

    Args:
        engine: What runs them.
        admission: What counts them.
        timers: The clock.
        metrics: Where cancels are counted.
        on_idle: Called when the last of a draining worker has gone.
    """

    def __init__(
        self,
        engine: Engine,
        admission: Admission,
        timers: Timers,
        metrics: Metrics,
        on_idle: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._admission = admission
        self._timers = timers
        self._metrics = metrics
        self._on_idle = on_idle
        self._aborting: dict[str, float] = {}  # engine id -> when to give up, ascending
        self.by_engine_id: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self.by_engine_id)

    def __iter__(self) -> Iterator[Request]:
        """Go through those that are open now, whatever becomes of them meanwhile."""
        return iter(list(self.by_engine_id.values()))

    def add(self, request: Request) -> None:
        """Take one that is admitted, with its frontend."""
        request.frontend.requests[request.request_id] = request
        self.by_engine_id[request.engine_id] = request
        self._admission.num_requests += 1
        self._admission.num_queued_tokens += request.num_queued_tokens

    def begun(self, request: Request) -> None:
        """Take note of its first token: its prompt does not wait any more."""
        self._admission.num_queued_tokens -= request.num_queued_tokens
        request.num_queued_tokens = 0

    def cancel(self, request: Request) -> None:
        """Have it ended, once."""
        if request.engine_id not in self._aborting:
            self._aborting[request.engine_id] = self._timers.time() + ABORT_GRACE_S
            self._metrics.cancelled()
            self._engine.abort(request.engine_id)

    def abandon(self, requests: Iterable[Request]) -> None:
        """Forget requests that nobody waits for, and have them ended."""
        abandoned = list(requests)
        for request in abandoned:
            self.forget(request)
            if request.spans is not None:
                request.spans.abandoned()
        if abandoned:
            self._metrics.cancelled(len(abandoned))
        for request in abandoned:
            self._engine.abort(request.engine_id)

    def forget(self, request: Request) -> None:
        """Drop one that has ended, or that nobody waits for."""
        del self.by_engine_id[request.engine_id]
        self._admission.num_requests -= 1
        if request.is_followed:
            del request.frontend.requests[request.request_id]
        self._aborting.pop(request.engine_id, None)
        self._admission.num_queued_tokens -= request.num_queued_tokens
        if self._admission.is_draining and not self.by_engine_id:
            self._on_idle()

    def end_by_admin(self, why: EndedBy, requests: Iterable[Request]) -> None:
        """Cancel *requests*, unless something else has."""
        for request in list(requests):
            if request.engine_id not in self._aborting:
                request.ended_by = why
                self.cancel(request)

    def evict_all(self) -> None:
        """Cancel all: each ends as ``draining``, and goes on elsewhere."""
        for request in self:
            request.is_evicted = True
            self.cancel(request)

    def overdue(self, now: float) -> Iterator[Request]:
        """Return what the engine should have ended by *now*; the caller ends it."""
        for engine_id, give_up_at in list(self._aborting.items()):
            if give_up_at > now:
                break
            request = self.by_engine_id[engine_id]
            logger.error(
                "the engine did not end request %s after abort",
                engine_id,
                extra=about(about_submit(request.submit)),
            )
            yield request
