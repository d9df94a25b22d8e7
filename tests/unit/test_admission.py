"""The gate: order, fairness, bounds and who is turned away, on a clock that is moved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import given

from tokenwire.frontend.admission import Bounds, Gate, Reason, State, Ticket

A, B, C = b"a", b"b", b"c"
LARGE = Bounds(max_sequences=100, max_tokens=1_000_000, max_wait_s=10.0)


@dataclass
class Bench:
    """A gate with a clock, a limit, and the order of who was decided on."""

    bounds: Bounds = LARGE
    limit: int = 1
    now: float = 0.0
    admitted: list[Ticket] = field(default_factory=list[Ticket])
    shed: list[Ticket] = field(default_factory=list[Ticket])

    def __post_init__(self) -> None:
        self.gate = Gate(self.bounds, lambda _: self.limit, lambda: self.now)

    def enter(
        self,
        tenant: bytes = A,
        priority: int = 0,
        num_sequences: int = 1,
        num_tokens: int = 10,
    ) -> Ticket:
        """Bring a request to the gate."""
        ticket = Ticket(tenant, priority, num_sequences, num_tokens, max_tokens=10_000)
        ticket.decided = lambda: self._decided(ticket)
        self.gate.enter(ticket)
        return ticket

    def _decided(self, ticket: Ticket) -> None:
        shed = ticket.state is State.SHED
        (self.shed if shed else self.admitted).append(ticket)

    def end(self, ticket: Ticket, after_s: float = 1.0, num_tokens: int = 10) -> None:
        """End all sequences of an admitted request."""
        self.now += after_s
        for _ in range(ticket.num_sequences):
            self.gate.ended(ticket, well=True)
        self.gate.leave(ticket, num_tokens)

    def drain(self, first: Ticket) -> list[Ticket]:
        """Serve one after the other; return who came in which order."""
        self.end(first)
        for ticket in self.admitted:  # which grows
            self.end(ticket)
        return self.admitted


def test_while_there_is_room_nobody_waits() -> None:
    """Admitted at once, without a call back; what ends makes room."""
    bench = Bench(limit=2)
    first, second = bench.enter(), bench.enter(B)
    assert first.state is second.state is State.ADMITTED
    assert not bench.admitted
    third = bench.enter()
    assert third.state is State.WAITING
    bench.end(first)
    assert (third.state, bench.admitted) == (State.ADMITTED, [third])
    assert (bench.gate.num_admitted, bench.gate.num_sequences) == (2, 0)
    assert third.admitted_at - third.arrived_at == 1.0


def test_a_tenants_requests_go_in_the_order_they_came() -> None:
    """First come, first served, among equals."""
    bench = Bench()
    first = bench.enter()
    waiting = [bench.enter() for _ in range(4)]
    assert bench.drain(first) == waiting


def test_lower_priority_values_go_first() -> None:
    """As in vLLM; among equals the order of arrival."""
    bench = Bench()
    first = bench.enter()
    late, usual, urgent, usual_too = (bench.enter(priority=p) for p in (5, 0, -1, 0))
    assert bench.drain(first) == [urgent, usual, usual_too, late]


def test_a_flood_of_one_tenant_does_not_delay_another() -> None:
    """Tenants take turns, however many requests each has."""
    bench = Bench()
    first = bench.enter(A)
    flood = [bench.enter(A) for _ in range(10)]
    quiet = [bench.enter(B) for _ in range(2)]
    order = bench.drain(first)
    assert order[:4] == [flood[0], quiet[0], flood[1], quiet[1]]


def test_turns_are_by_tokens() -> None:
    """A tenant with prompts of ten times the length has a tenth of the turns."""
    bench = Bench()
    first = bench.enter(C)
    for _ in range(20):
        bench.enter(A, num_tokens=1_000)
        bench.enter(B, num_tokens=100)
    bench.end(first, num_tokens=0)
    for ticket in bench.admitted:
        if len(bench.admitted) < 12:
            bench.end(ticket, num_tokens=0)
    assert sum(ticket.tenant == A for ticket in bench.admitted) in {1, 2}


def test_outputs_count_too() -> None:
    """A tenant whose answers are long has fewer turns, although its prompts are short."""
    bench = Bench()
    first = bench.enter(C)
    for _ in range(30):
        bench.enter(A)
        bench.enter(B)
    bench.end(first)
    for ticket in bench.admitted:
        if len(bench.admitted) < 30:
            bench.end(ticket, num_tokens=1_000 if ticket.tenant == A else 10)
    assert sum(ticket.tenant == A for ticket in bench.admitted) < 10


def test_a_tenant_that_comes_late_has_saved_nothing_up() -> None:
    """It takes turns with the others, and not all until it has had as much."""
    bench = Bench()
    first = bench.enter(A)
    for _ in range(20):
        bench.enter(A)
    bench.end(first)
    for ticket in bench.admitted:
        if len(bench.admitted) == 8:
            for _ in range(6):
                bench.enter(B)
        if len(bench.admitted) < 14:
            bench.end(ticket)
    tenants = [ticket.tenant for ticket in bench.admitted]
    assert tenants[:8] == [A] * 8
    assert sum(tenant == A for tenant in tenants[8:]) == 3


def test_a_full_queue_sheds_the_newcomer_of_the_largest_tenant() -> None:
    """Its own excess; nobody else is touched."""
    bench = Bench(Bounds(3, 1_000, 10))
    bench.enter()
    waiting = [bench.enter(A), bench.enter(A), bench.enter(B)]
    excess = bench.enter(A)
    assert (excess.state, excess.reason) == (State.SHED, Reason.REQUESTS)
    assert all(ticket.state is State.WAITING for ticket in waiting)


def test_a_full_queue_makes_room_for_a_smaller_tenant() -> None:
    """The newest of the tenant that holds the most has to go."""
    bench = Bench(Bounds(3, 1_000, 10))
    bench.enter()
    oldest, _, newest = (bench.enter(A) for _ in range(3))
    quiet = bench.enter(B)
    assert quiet.state is State.WAITING
    assert (bench.shed, newest.reason) == ([newest], Reason.EVICTED)
    assert oldest.state is State.WAITING


def test_a_full_queue_makes_room_for_what_is_urgent() -> None:
    """The least urgent goes, also its own tenant's; never one that is more urgent."""
    bench = Bench(Bounds(2, 1_000, 10))
    bench.enter()
    late = bench.enter(B, priority=9)
    usual = bench.enter(A)
    urgent = bench.enter(A, priority=-1)
    assert (urgent.state, bench.shed) == (State.WAITING, [late])
    assert bench.enter(B, priority=1).reason is Reason.REQUESTS
    assert bench.enter(A, priority=-1).state is State.WAITING
    assert bench.shed == [late, usual]


def test_the_queue_is_bounded_by_prompt_tokens() -> None:
    """By all that wait; a prompt above the bound waits if it is the only one."""
    bench = Bench(Bounds(100, 100, 10))
    first = bench.enter()
    huge = bench.enter(A, num_tokens=1_000)
    assert huge.state is State.WAITING
    assert bench.enter(A, num_tokens=1).reason is Reason.TOKENS
    assert bench.enter(B, num_tokens=60).state is State.WAITING
    assert bench.shed == [huge]
    assert bench.enter(C, num_tokens=60).reason is Reason.TOKENS
    assert bench.enter(C, num_tokens=40).state is State.WAITING
    assert bench.gate.num_tokens == 100
    bench.end(first)
    assert bench.gate.num_tokens == 40


def test_choices_and_prompts_count_each() -> None:
    """Four sequences are four, in the queue and at the workers."""
    bench = Bench(Bounds(6, 1_000, 10), limit=4)
    four = bench.enter(num_sequences=4)
    assert (four.state, bench.gate.num_admitted) == (State.ADMITTED, 4)
    waiting = bench.enter(num_sequences=4)
    assert bench.enter(num_sequences=3).reason is Reason.REQUESTS
    bench.gate.ended(four, well=True)
    # Three are left, so there is room: a part of a request cannot wait.
    assert (waiting.state, bench.gate.num_admitted) == (State.ADMITTED, 7)
    bench.gate.leave(four)
    bench.gate.leave(four)
    assert bench.gate.num_admitted == 4


def test_eviction_for_several_sequences_is_all_or_nothing() -> None:
    """Where too little can be freed nobody goes but the newcomer."""
    bench = Bench(Bounds(4, 1_000, 10))
    bench.enter()
    waiting = [bench.enter(A), bench.enter(A), bench.enter(A), bench.enter(B)]
    assert bench.enter(C, num_sequences=3).reason is Reason.REQUESTS
    assert bench.enter(C, num_sequences=2).reason is Reason.REQUESTS
    assert not bench.shed
    assert all(ticket.state is State.WAITING for ticket in waiting)


def test_what_would_wait_for_too_long_is_shed_at_once() -> None:
    """The rate is what is at the workers by how long each stays there."""
    bench = Bench(Bounds(100, 10_000, 10), limit=2)
    first, second = bench.enter(), bench.enter()
    waiting = bench.enter()
    bench.end(first, after_s=4)  # two at once, four seconds each
    assert waiting.state is State.ADMITTED
    accepted = [bench.enter() for _ in range(5)]
    late = bench.enter()
    assert [ticket.state for ticket in accepted] == [State.WAITING] * 5
    assert late.reason is Reason.EXPECTED_WAIT
    assert bench.gate.expected_wait_s(late) == 12.0
    # Another tenant would be served next, and an urgent request before all.
    assert bench.enter(B).state is State.WAITING
    assert bench.enter(A, priority=-1).state is State.WAITING
    bench.end(second)


def test_failures_say_nothing_of_the_rate() -> None:
    """A worker that refuses at once is not a fast one."""
    bench = Bench(limit=1)
    first = bench.enter()
    waiting = [bench.enter() for _ in range(3)]
    bench.now += 0.1
    bench.gate.ended(first, well=False)
    bench.gate.leave(first)
    assert waiting[0].state is State.ADMITTED
    assert bench.gate.expected_wait_s(waiting[1]) == 0.0


def test_what_has_waited_for_too_long_is_shed() -> None:
    """Each by its own time of arrival."""
    bench = Bench()
    bench.enter()
    old = bench.enter()
    bench.now = 5.0
    young = bench.enter()
    bench.now = 9.9
    bench.gate.tick()
    assert not bench.shed
    bench.now = 10.0
    bench.gate.tick()
    assert (bench.shed, old.reason) == ([old], Reason.TIMEOUT)
    assert young.state is State.WAITING


def test_one_that_leaves_the_queue_is_forgotten_at_once() -> None:
    """Its place is free, it is never admitted, and nobody calls it back."""
    bench = Bench(Bounds(1, 1_000, 10))
    first, gone = bench.enter(), bench.enter()
    bench.gate.leave(gone)
    assert (gone.state, bench.gate.num_sequences, bench.gate.num_tokens) == (
        State.LEFT, 0, 0,
    )  # fmt: skip
    after = bench.enter()
    bench.end(first)
    assert bench.admitted == [after]


def test_a_higher_limit_is_noticed() -> None:
    """By the tick, for those that wait, and by the next request."""
    bench = Bench()
    bench.enter()
    waiting = bench.enter()
    bench.limit = 2
    bench.now += 1
    bench.gate.tick()
    assert waiting.state is State.ADMITTED
    later = bench.enter()
    bench.limit = 4
    bench.now += 1
    assert bench.enter().state is State.ADMITTED
    assert later.state is State.ADMITTED
    assert bench.admitted == [waiting, later]


def test_a_lower_limit_takes_nothing_back() -> None:
    """What runs goes on; the next waits until there is room below the new limit."""
    bench = Bench(limit=3)
    running = [bench.enter() for _ in range(3)]
    bench.limit = 1
    bench.now += 1
    waiting = bench.enter()
    for ticket in running:
        assert waiting.state is State.WAITING
        bench.end(ticket)
    assert waiting.state is State.ADMITTED


def test_a_limit_that_has_changed_can_count_at_once() -> None:
    """A pause is not to be missed by what comes in the same moment."""
    bench = Bench(limit=3)
    bench.enter()
    bench.limit = 0
    assert bench.enter().state is State.ADMITTED  # the limit is read every so often
    bench.gate.look_anew()
    assert bench.enter().state is State.WAITING


def test_closing_sheds_all_that_waits() -> None:
    """What runs is not touched."""
    bench = Bench()
    first = bench.enter()
    waiting = [bench.enter(), bench.enter(B, priority=3)]
    bench.gate.close()
    assert bench.shed == waiting
    assert {ticket.reason for ticket in waiting} == {Reason.CLOSED}
    assert first.state is State.ADMITTED


def test_a_refusal_is_foretold_without_effect() -> None:
    """The same answer as at the gate, before the prompt is tokenized."""
    bench = Bench(Bounds(2, 1_000, 10))
    bench.enter()
    waiting = [bench.enter(A), bench.enter(A)]
    assert bench.gate.refusal(Ticket(A, 0, 1, 0)) is Reason.REQUESTS
    assert bench.gate.refusal(Ticket(B, 0, 1, 0)) is None
    assert bench.gate.refusal(Ticket(A, -1, 1, 0)) is None
    assert all(ticket.state is State.WAITING for ticket in waiting)


def test_the_accounts_are_bounded() -> None:
    """However many tenants come by while one waits; whoever waits keeps its account."""
    bench = Bench(Bounds(10_000, 10**9, 10**9), limit=1)
    last = bench.enter()
    waiting = bench.enter(A, priority=1)
    for number in range(10_000):
        bench.enter(b"%d" % number)
        bench.end(last)
        last = bench.admitted[-1]
    assert len(bench.gate._served) <= 4_096  # pyright: ignore[reportPrivateUsage]
    bench.end(last)
    assert bench.admitted[-1] is waiting


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("enter"),
            st.sampled_from([A, B, C]),
            st.integers(-1, 1),
            st.integers(1, 3),
            st.integers(1, 60),
        ),
        st.tuples(st.just("end"), st.integers(0, 30), st.booleans()),
        st.tuples(st.just("leave"), st.integers(0, 30)),
        st.tuples(st.just("tick"), st.floats(0, 6)),
        st.tuples(st.just("limit"), st.integers(0, 6)),
        st.tuples(st.just("close")),
    ),
    max_size=60,
)


@given(STEPS)
def test_nothing_is_lost(steps: list[tuple[object, ...]]) -> None:
    """Whatever happens: each ticket is admitted, shed or leaves, once; sums agree."""
    bench = Bench(Bounds(5, 100, 5.0), limit=2)
    tickets: list[Ticket] = []
    calls: dict[int, int] = {}
    for name, *arguments in steps:
        match name, arguments:
            case "enter", [bytes(tenant), int(priority), int(number), int(tokens)]:
                ticket = Ticket(tenant, priority, number, tokens)
                ticket.decided = _counting(calls, len(tickets))
                bench.gate.enter(ticket)
                calls.setdefault(len(tickets), 0)
                tickets.append(ticket)
            case "end", [int(which), bool(well)] if tickets:
                bench.gate.ended(tickets[which % len(tickets)], well=well)
            case "leave", [int(which)] if tickets:
                bench.gate.leave(tickets[which % len(tickets)], 20)
            case "tick", [float(seconds)]:
                bench.now += seconds
                bench.gate.tick()
            case "limit", [int(limit)]:
                bench.limit = limit
            case "close", []:
                bench.gate.close()
            case _:
                pass
        _check(bench.gate, tickets, calls)
    bench.limit = 1_000
    bench.now += 1
    bench.gate.tick()
    assert all(ticket.state is not State.WAITING for ticket in tickets)
    for ticket in tickets:
        bench.gate.leave(ticket, 1)
    assert (bench.gate.num_admitted, bench.gate.num_sequences) == (0, 0)
    assert bench.gate.num_tokens == 0


def _counting(calls: dict[int, int], number: int) -> Callable[[], None]:
    def decided() -> None:
        calls[number] = calls.get(number, 0) + 1

    return decided


def _check(gate: Gate, tickets: list[Ticket], calls: dict[int, int]) -> None:
    waiting = [ticket for ticket in tickets if ticket.state is State.WAITING]
    assert gate.num_sequences == sum(ticket.num_sequences for ticket in waiting)
    assert gate.num_tokens == sum(ticket.num_prompt_tokens for ticket in waiting)
    assert gate.num_admitted == sum(ticket.num_running for ticket in tickets)
    assert len(waiting) <= 5
    assert gate.num_tokens <= 100 or len(waiting) == 1
    for number, ticket in enumerate(tickets):
        assert calls[number] <= 1
        assert (ticket.reason is not None) is (ticket.state is State.SHED)
