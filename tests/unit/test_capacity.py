"""How many sequences go to the workers, from their cards and loads."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from tokenwire.frontend.capacity import UNLIMITED, Capacity
from tokenwire.protocol.messages import Card, Load, Role

SLOTS, HEADROOM = 16, 2


def _card(name: str, role: Role, max_num_seqs: int) -> Card:
    return Card(
        1, name, name, role, "m", 1024, 100, 16, "sim", "1", max_num_seqs=max_num_seqs
    )


@dataclass
class Worker:
    """What a link knows of a worker."""

    card: Card | None = field(
        default_factory=lambda: _card("a", Role.AGGREGATED, SLOTS)
    )
    load: Load = field(default_factory=lambda: Load("a"))
    num_open: int = 0
    num_open_at_load: int = 0
    usable: bool = True
    stands: bool = False

    def says(self, **counts: int) -> None:
        """Take a new Load."""
        self.load = msgspec.structs.replace(Load("a"), **counts)
        self.num_open_at_load = self.num_open


def worker(name: str, role: Role = Role.AGGREGATED, slots: int = SLOTS) -> Worker:
    """Return a worker of its own name."""
    return Worker(_card(name, role, slots))


def capacity(*workers: Worker) -> Capacity:
    """Return what is under test."""
    made = Capacity(lambda: workers)
    made.limit(0)
    return made


def test_the_card_says_where_a_window_begins() -> None:
    """All slots, and a few that wait in the engine, so that none idles."""
    assert capacity(Worker()).limit(0) == SLOTS + HEADROOM
    assert capacity(worker("a"), worker("b", slots=256)).limit(0) == 18 + 256 + 32
    assert capacity().limit(0) == 0


def test_without_a_number_on_the_card_there_is_no_limit() -> None:
    """Such a worker refuses by itself what it has no room for."""
    assert capacity(worker("a", slots=0)).limit(10_000) == UNLIMITED


def test_other_frontends_are_seen_in_the_load() -> None:
    """What a worker has beyond what this frontend had there then."""
    one = Worker(num_open=3)
    one.says(num_requests=10, num_frontends=2)
    one.num_open = 5
    assert capacity(one).limit(5) == 18 - 7


def test_an_equal_share_is_left_to_every_frontend() -> None:
    """Whatever the others have: else the first to fill the workers would keep them."""
    one = Worker()
    one.says(num_requests=18, num_frontends=3)
    assert capacity(one).limit(0) == 6
    one.says(num_requests=18)  # an older worker does not say how many there are
    assert capacity(one).limit(0) == 18


def test_a_standing_queue_in_the_engine_closes_the_window() -> None:
    """Its KV cache is full, or its prompts are long: it runs fewer than it has slots for."""
    one = Worker(num_open=18)
    known = capacity(one)
    one.says(num_running=5, num_waiting=13, num_requests=18)
    assert known.limit(18) == 18  # for a moment, every burst waits
    one.says(num_running=5, num_waiting=13, num_requests=18)
    assert known.limit(18) == 5 + HEADROOM
    one.says(num_running=0, num_waiting=18, num_requests=18)
    assert known.limit(18) == 1 + HEADROOM


def test_the_window_opens_again_while_it_is_too_small() -> None:
    """Only if requests wait here for it, and by a part with each Load."""
    one = Worker(num_open=7)
    known = capacity(one)
    for _ in range(2):
        one.says(num_running=5, num_waiting=13, num_requests=18)
        known.limit(18)
    one.says(num_running=7, num_requests=7)
    assert known.limit(7) == 7  # a moment without a queue is nothing yet
    one.says(num_running=7, num_requests=7)
    assert known.limit(7) == 7 + 7 // 4
    assert known.limit(8) == 8  # the same Load counts once
    one.says(num_running=6, num_waiting=2, num_requests=8)
    assert known.limit(8) == 8
    for _ in range(3):
        one.says(num_running=6, num_requests=6)
        assert known.limit(6) == 8  # nobody waits here for more


def test_an_engine_that_runs_more_than_its_card_says_gets_more() -> None:
    """With data-parallel ranks each has so many slots."""
    one = Worker()
    known = capacity(one)
    limit = known.limit(0)
    for _ in range(8):
        one.num_open = limit
        known.limit(limit)
        one.says(num_running=limit, num_requests=limit)
        limit = known.limit(limit)
    assert limit > 4 * SLOTS


def test_what_a_leaving_worker_still_runs_takes_nobodys_place() -> None:
    """It counts neither for the window of the others nor against it."""
    gone, other = worker("gone"), worker("other")
    gone.num_open, gone.usable = 10, False
    assert capacity(gone, other).limit(10) == 18 + 10
    unknown = Worker(card=None)
    assert capacity(unknown, other).limit(0) == 18


def test_a_restarted_worker_begins_anew() -> None:
    """A window belongs to one life of a worker."""
    one = Worker(num_open=18)
    known = capacity(one)
    for _ in range(2):
        one.says(num_running=1, num_waiting=17, num_requests=18)
        known.limit(18)
    assert known.limit(18) == 3
    one.card, one.load = _card("b", Role.AGGREGATED, SLOTS), Load("b")
    assert known.limit(0) == 18


def test_what_is_at_prefill_workers_will_need_a_decode_worker() -> None:
    """So it counts, of this frontend and of others; the prefill workers' slots do not."""
    prefill = worker("p", Role.PREFILL, slots=64)
    decode = worker("d", Role.DECODE)
    assert capacity(prefill, decode).limit(0) == 18
    prefill.num_open = 4
    prefill.says(num_requests=7)
    decode.says(num_frontends=2)
    assert capacity(prefill, decode).limit(4) == 15
