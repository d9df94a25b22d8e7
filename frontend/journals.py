"""What workers keep of generations: which of them has one, and what it is told.

Laws:
- No frontend knows where a generation is: all workers are asked, and of several that have
  it, the one that was asked for it last counts.
- A generation that an answer came too late for is let go of again.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass

from tokenwire.protocol.limits import MAX_REQUEST_ID_CHARS
from tokenwire.protocol.messages import JOURNAL, Recall, Recalled

from .errors import unavailable
from .link import Link, LinkState
from .pool import Pool
from .recalls import AWAY, TakeRecalled
from .reply import Reply
from .resume_errors import generation_not_found, replay_window_lost

__all__ = ["ENDED", "RUNNING", "Found", "Journals"]

RUNNING, ENDED, LOST = "running", "ended", "lost"
"""``Recalled.state`` of what a worker has, and of what it has no more."""

RECALL_TIMEOUT_S = 3.0
"""For an answer, which takes a millisecond: a worker that is silent for longer is about
to be given up as lost."""

_numbers = itertools.count(1)


@dataclass(slots=True, frozen=True)
class Found:
    """A generation, and whose worker keeps it."""

    generation_id: str
    owner: bytes
    link: Link
    state: str  # RUNNING or ENDED


class Journals:
    """Asks the workers of a pool."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def find(self, generation_id: str, owner: bytes) -> Found:
        """Return who keeps a generation.

        Raises:
            ApiError: 404, nobody does, or for somebody else; 410, its worker had to drop
                it; 503, a worker that may have it does not answer.
        """
        if not 0 < len(generation_id) <= MAX_REQUEST_ID_CHARS:
            raise generation_not_found(generation_id)
        links = [link for link in self._pool.links if _keeps(link)]
        asked = [self.ask(link, generation_id, owner, "look") for link in links]
        answers = list(zip(links, await asyncio.gather(*asked), strict=True))
        know = [one for one in answers if one[1].state in (RUNNING, ENDED, LOST)]
        if know:
            newest, answer = max(know, key=lambda one: one[1].epoch)
            for link, other in know:
                if link is not newest and other.state != LOST:
                    # It was given up, and does not know.
                    self._forget(link, generation_id, owner, other.epoch)
            if answer.state != LOST:
                return Found(generation_id, owner, newest, answer.state)
            why = "its worker kept it for as long, or as much, as it may (--journal-*)"
            raise replay_window_lost(generation_id, why)
        silent = [link for link, answer in answers if answer.state == AWAY]
        if silent:
            msg = f"worker {silent[0].worker_id}, which may keep it, does not answer"
            raise unavailable(msg, code="worker_silent")
        raise generation_not_found(generation_id)

    async def read(self, found: Found) -> Recalled:
        """Return all that is kept.

        Raises:
            ApiError: 404, 410 or 503: it is not there any more.
        """
        return await self._have(found, "read", None)

    async def follow(self, found: Found, take: TakeRecalled) -> Recalled:
        """Return all that is kept; what comes from then on comes here.

        Args:
            found: Of which generation.
            take: Is given the same, before anything else can come, and returns who
                hears that; not called where there is nothing to follow.

        Raises:
            ApiError: 404, 410 or 503: it is not there any more; nobody hears anything.
        """
        return await self._have(found, "follow", take)

    async def cancel(self, found: Found) -> None:
        """End it; what it has stays kept.

        Raises:
            ApiError: 404, 410 or 503: it is not there any more.
        """
        await self._have(found, "cancel", None)

    async def delete(self, found: Found) -> None:
        """End it, and have it forgotten.

        Raises:
            ApiError: 404, 410 or 503: it is not there any more.
        """
        await self._have(found, "delete", None)

    async def _have(
        self, found: Found, action: str, take: TakeRecalled | None
    ) -> Recalled:
        link, name = found.link, found.generation_id
        answer = await self.ask(link, name, found.owner, action, take)
        match answer.state:
            case "running" | "ended":
                return answer
            case "lost":
                raise replay_window_lost(name, "its worker had to drop it just now")
            case "away":
                msg = f"worker {link.worker_id}, which keeps it, does not answer"
                raise unavailable(msg, code="worker_silent")
            case _:
                raise generation_not_found(name)

    async def ask(
        self,
        link: Link,
        generation_id: str,
        owner: bytes,
        action: str,
        take: TakeRecalled | None = None,
    ) -> Recalled:
        """Return one worker's answer; AWAY if none comes in time.

        Args:
            link: That worker's.
            generation_id: Of what.
            owner: Who asks.
            action: What for, see ``Recall``.
            take: Given the answer at once if it is RUNNING or ENDED, and returns who
                hears what follows it: after any other, nothing does.
        """
        request_id = self._new_id()
        answered: asyncio.Future[Recalled] = asyncio.get_running_loop().create_future()

        def heard(answer: Recalled) -> Reply | None:
            if answered.done():  # too late
                if take is not None and answer.state == RUNNING:
                    link.disown(request_id)
                return None
            answered.set_result(answer)
            is_there = answer.state in (RUNNING, ENDED)
            return take(answer) if take is not None and is_there else None

        message = Recall(request_id, generation_id, owner, action)
        if not link.recall(message, heard):
            return Recalled(request_id, AWAY)
        try:
            async with asyncio.timeout(RECALL_TIMEOUT_S):
                return await answered
        except TimeoutError:
            return Recalled(request_id, AWAY)
        finally:
            if take is None:
                link.forget_recall(request_id)

    def _forget(self, link: Link, generation_id: str, owner: bytes, epoch: int) -> None:
        message = Recall(self._new_id(), generation_id, owner, "delete", epoch=epoch)
        link.recall(message, _unheard)

    def _new_id(self) -> str:
        return f"{self._pool.incarnation}-r{next(_numbers):x}"


def _keeps(link: Link) -> bool:
    """Return whether it may have one; a prefill worker, too: of a single token."""
    return link.state is LinkState.READY and link.can(JOURNAL)


def _unheard(answer: Recalled) -> None:
    """Have no use for an answer."""
    del answer
