"""Who follows which generation: what is kept as it runs, and what Recalls make of it.

Laws:
- A token is kept before it is sent.
- Each follower is sent each id that came while it followed once, and one Finished; what
  came before is in its Recalled. So no id is missing and none comes twice.
- What nobody follows is sent to nobody, and costs no longer than it was asked for.
No socket, no clock and no event loop in here.
"""

from __future__ import annotations

from collections.abc import Callable

from tokenwire.protocol.exchange import Exchange
from tokenwire.protocol.messages import (
    Finished,
    FinishReason,
    Hello,
    Keep,
    Leg,
    Recall,
    Recalled,
    Tokens,
)

from .delivery import Delivery
from .entry import Entry, State, Tombstone
from .frontends import Frontend, Request
from .journal import Journal, Lost
from .metrics import Metrics
from .requests import Requests
from .timers import Timers

__all__ = ["ACTIONS", "Keeper", "is_same"]

ACTIONS = frozenset({"look", "read", "follow", "cancel", "delete"})
"""What a Recall may ask for."""


class Keeper:
    """Joins the journal to the requests that it is of.

    Args:
        journal: What is kept.
        requests: What runs.
        delivery: The way to the frontends.
        timers: The clock.
        metrics: Where Recalls are counted.
        weight_version: Returns what the weights are called now.
    """

    def __init__(
        self,
        journal: Journal,
        requests: Requests,
        delivery: Delivery,
        timers: Timers,
        metrics: Metrics,
        weight_version: Callable[[], str],
    ) -> None:
        self._journal = journal
        self._requests = requests
        self._delivery = delivery
        self._timers = timers
        self._metrics = metrics
        self._weight_version = weight_version
        self._running: dict[str, Request] = {}  # by generation

    # -- as it runs -------------------------------------------------------------------

    def begin(self, request: Request, keep: Keep) -> None:
        """Keep what *request* brings, in the place of what an earlier one has."""
        leg = request.submit.leg
        if leg is Leg.PREFILL or not self._journal.takes(keep):
            return
        entry, earlier = self._journal.begin(keep, request.submit.token_ids)
        if earlier is not None:
            self._let_end(earlier)
        if entry is not None:
            request.entry = entry
            self._running[entry.generation_id] = request
        self._make_room()

    def tokens(self, request: Request, entry: Entry, item: Tokens) -> bool:
        """Keep *item*; return whether somebody is to be sent it."""
        if not self._journal.append(entry, item, self._weight_version()):
            self._let_go_on(entry)
        elif self._journal.num_bytes > self._journal.max_bytes:
            self._make_room()
        return request.is_followed

    def ended(self, request: Request, entry: Entry, end: Finished) -> None:
        """Keep how it ended. What failed is not: it goes on elsewhere, or nowhere."""
        request.entry = None
        del self._running[entry.generation_id]
        if end.reason is FinishReason.ERROR:
            self._journal.drop(entry, None if request.is_followed else Lost.FAILED)
        elif self._journal.end(entry, end, self._timers.time()):
            self._make_room()

    def tick(self) -> None:
        """Drop what nobody asked for in time."""
        for entry in self._journal.expire(self._timers.time()):
            self._let_go_on(entry)
        self._metrics.kept(
            {state.value: self._journal.num_in(state) for state in State},
            self._journal.num_bytes,
            self._journal.num_lost,
        )

    # -- who follows it ---------------------------------------------------------------

    def let_go(self, request: Request) -> None:
        """Let *request* go on with no frontend if it may; else have it ended."""
        entry = request.entry
        if entry is None or not entry.outlives:
            self._requests.cancel(request)
            return
        self._unfollow(request)
        self._journal.unfollow(entry, self._timers.time())

    def lose(self, frontend: Frontend, *, has_given_up: bool) -> None:
        """Let go on what outlives a lost *frontend*; abandon the rest.

        Args:
            frontend: Who is gone.
            has_given_up: It is alive, and has sent elsewhere whatever it had here.
        """
        now = self._timers.time()
        ending: list[Request] = []
        for request in list(frontend.requests.values()):
            entry = request.entry
            if entry is None or not entry.outlives:
                ending.append(request)
                continue
            del frontend.requests[request.request_id]
            request.is_followed = False
            request.is_left = True
            self._journal.unfollow(entry, now)
        self._abandon(ending)
        if has_given_up:
            self.given_up(lambda one: is_same(one.hello, frontend.hello))

    def given_up(self, concerns: Callable[[Frontend], bool]) -> None:
        """Abandon what such a frontend left by a loss, and nobody has followed since.

        It is alive, and has sent that elsewhere.
        """
        unfollowed = [
            self._running[one.generation_id] for one in self._journal.unfollowed()
        ]
        self._abandon(
            [one for one in unfollowed if one.is_left and concerns(one.frontend)]
        )

    # -- Recalls ----------------------------------------------------------------------

    def recall(self, frontend: Frontend, message: Recall) -> None:
        """Answer, and do what is asked for."""
        request_id, action = message.request_id, message.action
        if action not in ACTIONS or request_id in frontend.requests:
            self._answer(frontend, action, Recalled(request_id, "invalid"))
            return
        found = self._journal.find(message.generation_id, message.owner)
        if found is None:
            self._answer(frontend, action, Recalled(request_id, "unknown"))
            return
        if isinstance(found, Tombstone):
            self._answer(frontend, action, Recalled(request_id, "lost", found.epoch))
            if action == "delete":
                self._journal.forget_lost(message.generation_id)
            return
        if action == "delete" and message.epoch not in (0, found.epoch):
            action = "look"  # it has come back since: who asks does not mean this one
        is_whole = action in {"read", "follow"}
        answer = found.recalled(request_id, is_whole=is_whole)
        is_there = self._answer(frontend, action, answer)
        request = self._running.get(message.generation_id)
        if action == "delete":
            self._journal.drop(found)
            self._let_end(found, for_good=True)
        elif request is not None and action == "cancel":
            self._cancel_for_good(request)
        elif request is not None and action == "follow" and is_there:
            self._unfollow(request)
            self._follow(request, frontend, request_id)
            self._journal.follow(found)

    def _answer(self, frontend: Frontend, action: str, answer: Recalled) -> bool:
        known = action if action in ACTIONS else "other"
        self._metrics.recalled(known, answer.state)
        return self._delivery.send(frontend, answer)

    def _follow(self, request: Request, frontend: Frontend, request_id: str) -> None:
        request.frontend, request.request_id = frontend, request_id
        request.is_followed, request.is_left = True, False
        frontend.requests[request_id] = request

    def _unfollow(self, request: Request) -> None:
        """Tell its follower, if it has one, that it goes on without it.

        What waits in the outbox is that one's still, and goes before its end.
        """
        if not request.is_followed:
            return
        end = request.goes_on_end()
        request.exchange.finished(end)
        request.exchange = Exchange()
        request.exchange.num_tokens = end.num_output_tokens
        del request.frontend.requests[request.request_id]
        request.is_followed = False
        self._delivery.finished(request.frontend, end)

    # -- ends -------------------------------------------------------------------------

    def _cancel_for_good(self, request: Request) -> None:
        request.is_cancelled = True
        self._requests.cancel(request)

    def _make_room(self) -> None:
        for entry in self._journal.make_room():
            self._let_go_on(entry)

    def _let_go_on(self, entry: Entry) -> None:
        """Let what is not kept any more run on if it is followed."""
        request = self._detached(entry)
        if request is not None and not request.is_followed:
            self._requests.abandon([request])

    def _let_end(self, entry: Entry, *, for_good: bool = False) -> None:
        """Have what is not kept any more ended, if it runs."""
        request = self._detached(entry)
        if request is None:
            return
        if not request.is_followed:
            self._requests.abandon([request])
        elif for_good:
            self._cancel_for_good(request)
        else:
            self._requests.cancel(request)

    def _detached(self, entry: Entry) -> Request | None:
        request = self._running.pop(entry.generation_id, None)
        if request is not None:
            request.entry = None
        return request

    def _abandon(self, requests: list[Request]) -> None:
        """Have requests ended that nobody waits for; what is kept of them stays."""
        self._requests.abandon(requests)
        for request in requests:
            if request.entry is not None:
                end = request.made_up_end(FinishReason.ABORT)
                self.ended(request, request.entry, end)


def is_same(one: Hello, other: Hello) -> bool:
    """Return whether both are of the same start of the same frontend."""
    return (one.frontend_id, one.incarnation) == (other.frontend_id, other.incarnation)
