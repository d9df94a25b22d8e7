"""One admin action at every worker: sent to all at once, answered when all have ended.

Laws:
- Every worker's part ends: with its answer, with the worker, or with the time limit.
- What failed is named, with the state that each worker is in then.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tokenwire.protocol.admin import Action, Pause, Resume, Sleep, action_and_arguments
from tokenwire.protocol.messages import Admin, AdminDone, Role

from .link import Link

__all__ = [
    "ANSWER_GRACE_S",
    "Outcome",
    "OwnPauses",
    "everywhere",
    "participants",
    "standing",
]

ANSWER_GRACE_S = 5.0
"""What a worker gives up at the time limit is told a little later: its words are better
than "no answer"."""

LOOK_S = 0.02
"""How often what is handed over is looked at: a read takes about as long."""

_numbers = itertools.count(1)


@dataclass(slots=True, frozen=True)
class Outcome:
    """How an action ended at one worker."""

    link: Link  # to the worker, whose state may change later
    done: AdminDone

    @property
    def is_done(self) -> bool:
        """Whether it was done."""
        return not self.done.error


def participants(links: Iterable[Link]) -> list[Link]:
    """Return the workers that an action is for: who is connected and stays."""
    return [
        link
        for link in links
        if link.is_ready and not link.is_leaving and not link.load.draining
    ]


def standing(links: Iterable[Link]) -> list[Link]:
    """Return the workers that are to go on: whoever hears of it, though it leaves.

    A listed one that stood when its connection was lost is among them: that it cannot be
    told is its outcome.
    """
    return [
        link
        for link in links
        if link.is_ready
        or (not link.is_leaving and (link.status.paused or link.status.sleep_level))
    ]


class OwnPauses:
    """Workers that the plane paused for an update and could not resume.

    They are not paused by the user: the next update has to resume them.
    """

    def __init__(self) -> None:
        self._worker_ids: set[str] = set()

    def left(self, links: Iterable[Link]) -> list[Link]:
        """Return those of *links*, which are all there are, that may still stand."""
        found = [
            link
            for link in links
            if link.worker_id in self._worker_ids
            and (link.status.paused or not link.is_ready)
        ]
        self._worker_ids = {link.worker_id for link in found}
        return found

    def forget(self, outcomes: Iterable[Outcome]) -> None:
        """Take note of what the user has done: pauses are the user's from now on."""
        self._worker_ids -= {one.link.worker_id for one in outcomes if one.is_done}

    async def resume(self, links: Sequence[Link], timeout_s: float) -> list[Outcome]:
        """Resume what the plane has paused; keep in mind where that has failed."""
        outcomes = await everywhere(links, lambda _: Resume(), timeout_s)
        self._worker_ids |= {link.worker_id for link in links}
        self.forget(outcomes)
        return outcomes


async def everywhere(
    links: Sequence[Link], action: Callable[[Link], Action], timeout_s: float
) -> list[Outcome]:
    """Do an action at all *links*; return how it ended at each, in their order.

    Args:
        links: The workers.
        action: What each is to do.
        timeout_s: After which the workers give up.
    """
    outcomes: dict[Link, Outcome] = {}
    for phase in _phases(links, action):
        if outcomes and _waits(action(links[0])):
            await _begun(phase, timeout_s)
        sent = [(link, _send(link, action(link), timeout_s)) for link in phase]
        waited = await asyncio.gather(
            *(_answer(future, timeout_s) for _, future in sent)
        )
        for (link, _), done in zip(sent, waited, strict=True):
            outcomes[link] = Outcome(link, done)
    return [outcomes[link] for link in links]


def _phases(
    links: Sequence[Link], action: Callable[[Link], Action]
) -> list[Sequence[Link]]:
    """Return who does it at once, group after group.

    Prefill workers are paused first. What they have computed goes on at a decode worker,
    which must not stand still before it has read the KV: that would be held until its
    lease ends, and vLLM's prefill engine is not paused before.
    """
    if not links:
        return []
    first = [link for link in links if link.card and link.card.role is Role.PREFILL]
    rest = [link for link in links if link not in first]
    if not isinstance(action(links[0]), Pause | Sleep):
        return [links]
    return [group for group in (first, rest) if group]


def _waits(action: Action) -> bool:
    return isinstance(action, Pause | Sleep) and action.mode == "wait"


async def _begun(links: Sequence[Link], timeout_s: float) -> None:
    """Wait until what was handed over has begun at *links*.

    An engine that is to be paused begins nothing that waits in it.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while any(link.reads_any for link in links):
        if loop.time() > deadline:
            return
        await asyncio.sleep(LOOK_S)


def _send(link: Link, action: Action, timeout_s: float) -> asyncio.Future[AdminDone]:
    name, arguments = action_and_arguments(action)
    message = Admin(f"admin-{next(_numbers):x}", name, arguments, timeout_s)
    return link.administer(message)


async def _answer(future: asyncio.Future[AdminDone], timeout_s: float) -> AdminDone:
    try:
        async with asyncio.timeout(timeout_s + ANSWER_GRACE_S):
            return await future
    except TimeoutError:
        text = f"no answer within {timeout_s + ANSWER_GRACE_S:g} s"
        return AdminDone("", text, "timeout")
