"""Who goes to the workers now, who waits, and who is turned away; no I/O.

Laws:
- Each ticket is admitted, shed or leaves, once; an admitted one gives back what it took.
- The queue is bounded by sequences, by prompt tokens and by time.
- Order: lower ``priority`` first, as in vLLM; among equals the tenant that has been
  served the fewest tokens; within a tenant as they came. A tenant that floods the queue
  waits behind itself.
- When the queue is full, the newest request of the tenant that holds the most at the
  least urgent priority is turned away, which may be the one that has just come.

What a tenant has been served is counted while requests wait, as in "Fairness in Serving
Large Language Models" (OSDI '24): prompt tokens when it is admitted, and what its outputs
may have; corrected when they have ended. One that comes later starts where the others
are, so that nobody saves up. While there is room nothing is counted and nobody waits.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import msgspec

__all__ = ["Bounds", "Gate", "Reason", "State", "Ticket"]

REFRESH_S = 0.01
"""How old the workers' limit may be: looking at all of them costs microseconds each, and
a request's time is at least a step, 10 ms and more."""

OUTPUT_WEIGHT = 2
"""An output token costs an engine more than a prompt token (OSDI '24: twice)."""

MEAN_WEIGHT = 1 / 16
"""Of a new value in the running means: they follow within some tens of requests."""

MAX_TENANTS = 4_096
"""Whose service is remembered while requests wait; as many as requests may be here."""


Account = dict[bytes, float]
"""What each tenant has been served, in weighted tokens."""


class State(enum.Enum):
    """Where a ticket is."""

    WAITING = "waiting"
    ADMITTED = "admitted"
    SHED = "shed"
    LEFT = "left"


class Reason(enum.Enum):
    """Why a request was turned away."""

    REQUESTS = "requests"  # too many wait
    TOKENS = "tokens"  # too many prompt tokens wait
    EVICTED = "evicted"  # it waited, and had to make room
    EXPECTED_WAIT = "expected_wait"  # it would wait for too long
    TIMEOUT = "timeout"  # it has waited for too long
    CLOSED = "closed"  # this frontend stops


@dataclass(slots=True, frozen=True)
class Bounds:
    """What may wait."""

    max_sequences: int
    max_tokens: int  # of prompts
    max_wait_s: float


class Ticket(msgspec.Struct, eq=False):
    """One request at the gate.

    ``decided`` is called once, when one that waits is admitted or shed.
    """

    tenant: bytes
    priority: int
    num_sequences: int
    num_prompt_tokens: int  # of all sequences
    max_tokens: int = 1  # of one output
    state: State = State.WAITING
    reason: Reason | None = None  # why it was shed
    decided: Callable[[], None] | None = None
    num_running: int = 0  # sequences that hold a slot
    arrived_at: float = 0.0
    admitted_at: float = 0.0
    expected_output: int = 0  # tokens its tenant was charged for
    account: Account | None = None  # where; None: it did not wait


@dataclass(slots=True, eq=False)
class _Line:
    """What one tenant has waiting at one priority."""

    tickets: OrderedDict[Ticket, None] = field(
        default_factory=OrderedDict[Ticket, None]
    )
    num_sequences: int = 0
    num_tokens: int = 0


@dataclass(slots=True)
class _Level:
    """What waits at one priority."""

    lines: dict[bytes, _Line] = field(default_factory=dict[bytes, _Line])
    num_sequences: int = 0


class Gate:
    """The queue in front of the workers.

    Args:
        bounds: What may wait.
        limit: Returns how many sequences may be at the workers, given how many are.
        clock: Seconds, steady.
    """

    def __init__(
        self, bounds: Bounds, limit: Callable[[int], int], clock: Callable[[], float]
    ) -> None:
        self._bounds = bounds
        self._read_limit = limit
        self._clock = clock
        self._limit_at = float("-inf")
        self._levels: dict[int, _Level] = {}
        self._waiting: OrderedDict[Ticket, None] = OrderedDict()  # as they came
        self._served: Account = {}  # since the queue began
        self._floor = 0.0  # where a tenant that comes now begins
        self._mean_s = 0.0  # how long a sequence holds its slot; 0: not known
        self._mean_output = 0.0  # tokens
        self.limit = 0
        """Sequences that may be there, as last read; at most ``REFRESH_S`` old if asked."""
        self.num_admitted = 0
        """Sequences at the workers."""
        self.num_sequences = 0
        """Sequences that wait."""
        self.num_tokens = 0
        """Prompt tokens that wait."""

    def enter(self, ticket: Ticket) -> None:
        """Admit *ticket*, let it wait, or shed it: its state says which."""
        now = ticket.arrived_at = self._clock()
        if now - self._limit_at >= REFRESH_S:
            self._refresh(now)
            self._fill(now)
        if self.num_admitted < self.limit:  # so nobody waits
            self._admit(ticket, now)
            return
        reason, victims = self._judged(ticket)
        if reason is not None:
            ticket.state, ticket.reason = State.SHED, reason
            return
        for victim in victims:
            self._shed(victim, Reason.EVICTED)
        self._put(ticket)

    def look_anew(self) -> None:
        """Take note that the limit has changed, and is to be read again at once."""
        self._limit_at = float("-inf")

    def refusal(self, ticket: Ticket) -> Reason | None:
        """Return why *ticket* would be shed; before more is known of it, or spent on it."""
        if not self._waiting:
            return None
        return self._judged(ticket)[0]

    def leave(self, ticket: Ticket, num_output_tokens: int | None = None) -> None:
        """Forget *ticket*: its client has left, or all has ended. Harmless when repeated.

        Args:
            ticket: One that has entered.
            num_output_tokens: What all its outputs have had, if that is known.
        """
        if ticket.state is State.WAITING:
            self._take_out(ticket)
            ticket.state = State.LEFT
        elif ticket.state is State.ADMITTED:
            ticket.state = State.LEFT
            if num_output_tokens is not None:
                self._settle(ticket, num_output_tokens)
            self._free(ticket, ticket.num_running)

    def ended(self, ticket: Ticket, *, well: bool) -> None:
        """Give back the slot of one sequence that has ended, *well* or not."""
        if ticket.num_running:
            if well:  # what fails at once says nothing of how fast the workers are
                held_s = self._clock() - ticket.admitted_at
                self._mean_s = _moved(self._mean_s, held_s)
            self._free(ticket, 1)

    def tick(self) -> None:
        """Shed what has waited for too long, and look for room. Call while some wait."""
        now = self._clock()
        while self._waiting:
            oldest = next(iter(self._waiting))
            if now - oldest.arrived_at < self._bounds.max_wait_s:
                break
            self._shed(oldest, Reason.TIMEOUT)
        self._refresh(now)
        self._fill(now)

    def close(self) -> None:
        """Shed all that waits."""
        while self._waiting:
            self._shed(next(iter(self._waiting)), Reason.CLOSED)

    def expected_wait_s(self, ticket: Ticket) -> float:
        """Return how long a ticket like this would wait; 0 if that is not known.

        By Little's law, what is at the workers by how long each stays is their rate.
        """
        if not self._mean_s or not self.num_admitted:
            return 0.0
        rate = self.num_admitted / self._mean_s
        num_ahead = 1  # who runs, until the first of them has ended
        for priority, level in self._levels.items():
            if priority > ticket.priority:
                continue
            num_level = level.num_sequences
            if priority == ticket.priority:
                own = level.lines.get(ticket.tenant)
                num_own = own.num_sequences if own is not None else 0
                num_lines = len(level.lines) + (own is None)
                # Of each other tenant about as many are served before it.
                num_level = min(num_level, (num_own + 1) * num_lines)
            num_ahead += num_level
        return num_ahead / rate

    # --- the queue -----------------------------------------------------------------

    def _judged(self, new: Ticket) -> tuple[Reason | None, list[Ticket]]:
        """Return why *new* is shed, or None and who must leave for it."""
        if self.expected_wait_s(new) > self._bounds.max_wait_s:
            return Reason.EXPECTED_WAIT, []
        bounds = self._bounds
        sequences = self.num_sequences + new.num_sequences - bounds.max_sequences
        tokens = self.num_tokens + new.num_prompt_tokens - bounds.max_tokens
        victims: list[Ticket] = []
        if sequences > 0 or tokens > 0:
            candidates = self._worst(new, by_tokens=sequences <= 0)
            # One that is above a bound by itself waits if nobody else does.
            while len(victims) < len(self._waiting) and (sequences > 0 or tokens > 0):
                victim = next(candidates, None)
                if victim is None:
                    reason = Reason.REQUESTS if sequences > 0 else Reason.TOKENS
                    return reason, []
                victims.append(victim)
                sequences -= victim.num_sequences
                tokens -= victim.num_prompt_tokens
        return None, victims

    def _worst(self, new: Ticket, *, by_tokens: bool) -> Iterator[Ticket]:
        """Yield who leaves for *new*, the first first; ends before *new* itself."""
        for priority in sorted(self._levels, reverse=True):
            if priority < new.priority:
                return
            lines = self._levels[priority].lines
            held = {
                tenant: line.num_tokens if by_tokens else line.num_sequences
                for tenant, line in lines.items()
            }
            own = 0
            if priority == new.priority:
                own = held.get(new.tenant, 0)
                own += new.num_prompt_tokens if by_tokens else new.num_sequences
            num_taken = dict.fromkeys(lines, 0)
            while True:
                tenant = max(held, key=held.__getitem__)
                if held[tenant] <= own:
                    break
                newest = reversed(lines[tenant].tickets)
                victim = next(islice(newest, num_taken[tenant], None))
                num_taken[tenant] += 1
                held[tenant] -= (
                    victim.num_prompt_tokens if by_tokens else victim.num_sequences
                )
                yield victim

    def _put(self, ticket: Ticket) -> None:
        level = self._levels.get(ticket.priority)
        if level is None:
            level = self._levels[ticket.priority] = _Level()
        line = level.lines.get(ticket.tenant)
        if line is None:
            line = level.lines[ticket.tenant] = _Line()
            served = self._served.get(ticket.tenant, 0.0)
            self._served[ticket.tenant] = max(served, self._floor)
        line.tickets[ticket] = None
        line.num_sequences += ticket.num_sequences
        line.num_tokens += ticket.num_prompt_tokens
        level.num_sequences += ticket.num_sequences
        self._waiting[ticket] = None
        self.num_sequences += ticket.num_sequences
        self.num_tokens += ticket.num_prompt_tokens

    def _take_out(self, ticket: Ticket) -> None:
        level = self._levels[ticket.priority]
        line = level.lines[ticket.tenant]
        del line.tickets[ticket]
        line.num_sequences -= ticket.num_sequences
        line.num_tokens -= ticket.num_prompt_tokens
        level.num_sequences -= ticket.num_sequences
        if not line.tickets:
            del level.lines[ticket.tenant]
            if not level.lines:
                del self._levels[ticket.priority]
        del self._waiting[ticket]
        self.num_sequences -= ticket.num_sequences
        self.num_tokens -= ticket.num_prompt_tokens
        if not self._waiting:
            self._served = {}  # a new one: what was charged in this one is past
            self._floor = 0.0
        elif len(self._served) > MAX_TENANTS:
            self._forget_tenants()

    def _next(self) -> Ticket:
        lines = self._levels[min(self._levels)].lines
        tenant = min(lines, key=self._served.__getitem__)
        return next(iter(lines[tenant].tickets))

    def _forget_tenants(self) -> None:
        """Forget who owes nothing, then whoever does not wait."""
        waiting = {tenant for level in self._levels.values() for tenant in level.lines}
        for floor in (self._floor, float("inf")):
            for tenant, served in list(self._served.items()):
                if served <= floor and tenant not in waiting:
                    del self._served[tenant]
            if len(self._served) <= MAX_TENANTS // 2:
                return

    # --- the slots -----------------------------------------------------------------

    def _refresh(self, now: float) -> None:
        self.limit = self._read_limit(self.num_admitted)
        self._limit_at = now

    def _fill(self, now: float) -> None:
        """Admit who waits while there is room."""
        if self._waiting and now - self._limit_at >= REFRESH_S:
            self._refresh(now)
        while self._waiting and self.num_admitted < self.limit:
            ticket = self._next()
            # Charged before it is taken out: the last one's leaving ends the account.
            self._charge(ticket)
            self._take_out(ticket)
            self._admit(ticket, now)
            if ticket.decided is not None:
                ticket.decided()

    def _admit(self, ticket: Ticket, now: float) -> None:
        """Give *ticket* its slots; all of them, also above the limit: it would starve."""
        ticket.state = State.ADMITTED
        ticket.admitted_at = now
        ticket.num_running = ticket.num_sequences
        self.num_admitted += ticket.num_sequences

    def _free(self, ticket: Ticket, number: int) -> None:
        ticket.num_running -= number
        self.num_admitted -= number
        if self._waiting:
            self._fill(self._clock())

    def _shed(self, ticket: Ticket, reason: Reason) -> None:
        """Turn one away that has waited."""
        self._take_out(ticket)
        ticket.state, ticket.reason = State.SHED, reason
        if ticket.decided is not None:
            ticket.decided()

    def _charge(self, ticket: Ticket) -> None:
        served = self._served[ticket.tenant]
        self._floor = max(self._floor, served)
        expected = min(self._mean_output, ticket.max_tokens)
        ticket.expected_output = int(expected * ticket.num_sequences)
        cost = ticket.num_prompt_tokens + OUTPUT_WEIGHT * ticket.expected_output
        self._served[ticket.tenant] = served + cost
        ticket.account = self._served

    def _settle(self, ticket: Ticket, num_output_tokens: int) -> None:
        """Correct what its tenant was charged for by what it has had."""
        self._mean_output = _moved(
            self._mean_output, num_output_tokens / ticket.num_sequences
        )
        if ticket.account is self._served and ticket.tenant in self._served:
            surplus = num_output_tokens - ticket.expected_output
            self._served[ticket.tenant] += OUTPUT_WEIGHT * surplus


def _moved(mean: float, value: float) -> float:
    """Return a running mean with a new value; the first one is it."""
    return mean + (value - mean) * MEAN_WEIGHT if mean else value
