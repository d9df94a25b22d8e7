"""Where a sequence goes that was begun before: to who has it cached, if that can serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import pytest

from tokenwire.frontend.affinity import MIN_EXCESS
from tokenwire.frontend.disaggregation import PrefillPlace, RemotePrefill
from tokenwire.frontend.job import Cached
from tokenwire.frontend.link import Link
from tokenwire.frontend.prefixes import CHUNK_TOKENS, Chain, Prefixes
from tokenwire.frontend.router import Needs, Router
from tokenwire.frontend.weights import Weights
from tokenwire.protocol.messages import Card, Load, Role
from tokenwire.protocol.tokens import pack_ids

IDS = list(range(1_000, 1_000 + 5 * CHUNK_TOKENS + 40))
NUM_PROMPT = 2 * CHUNK_TOKENS
CARD = Card(1, "w", "w-1", Role.DECODE, "m", 4096, 100, 16, "sim", "1", connector="c")


@dataclass(eq=False)
class Worker:
    """A link, as far as a router looks at it."""

    card: Card
    num_open: int = 0
    num_queued_tokens: int = 0
    load: Load = field(default_factory=lambda: Load("w-1"))
    num_open_at_load: int = 0
    prefixes: Prefixes = field(default_factory=Prefixes)
    stands: bool = False
    exactness: str = "same_rng"
    captures: bool = False

    @property
    def worker_id(self) -> str:
        """Its name."""
        return self.card.worker_id

    @property
    def has(self) -> Cached:
        """That it has the sequence."""
        return Cached(self.worker_id, self.card.incarnation, len(IDS))

    def computed(self, num_tokens: int) -> None:
        """Have computed the beginning of the sequence, by request of this frontend."""
        chain = Chain()
        chain.extend(pack_ids(IDS[:num_tokens]))
        self.prefixes.add(chain)


def workers(role: Role, number: int) -> list[Worker]:
    """Return idle workers."""
    names = [f"{role.value}-{n}" for n in range(number)]
    replace = msgspec.structs.replace
    return [
        Worker(replace(CARD, worker_id=n, incarnation=f"{n}-1", role=role))
        for n in names
    ]


@dataclass
class Chosen:
    """A route, as the workers above."""

    decode: Worker
    prefill: Worker | None
    place: PrefillPlace


def router_of(usable: Sequence[Worker]) -> Router:
    """Return a router that knows *usable*."""
    return Router(
        usable=lambda role: [
            cast("Link", one) for one in usable if one.card.role is role
        ],
        check_adapter=lambda _: None,
        no_worker=lambda: pytest.fail("no worker"),
        weights=Weights(),
        remote_prefill=RemotePrefill(),
    )


def routed(
    usable: Sequence[Worker],
    *cached: Cached,
    num_tokens: int = len(IDS),
    exclude: Sequence[Worker] = (),
    **needs: Any,
) -> Chosen:
    """Return where the sequence goes on."""
    packed = pack_ids(IDS[:num_tokens])
    fields: dict[str, Any] = {"has_output": True, "cached": cached, **needs}
    excluded = frozenset(cast("Link", one) for one in exclude)
    route = router_of(usable).route(packed, Chain(), excluded, Needs(**fields))
    decode, prefill = cast("Worker", route.decode), cast("Worker | None", route.prefill)
    return Chosen(decode, prefill, route.place)


BOTH_ROLES = pytest.mark.parametrize("role", [Role.AGGREGATED, Role.DECODE])


@BOTH_ROLES
def test_it_goes_where_it_is_said_to_be(role: Role) -> None:
    """Though another one has less to do; and also before it has output."""
    links = workers(role, 3)
    links[2].num_open = MIN_EXCESS - 1

    assert routed(links, links[2].has).decode is links[2]
    assert routed(links, links[2].has, has_output=False).decode is links[2]
    assert routed(links).decode is links[0]


@BOTH_ROLES
def test_it_goes_where_this_frontend_had_it_computed(role: Role) -> None:
    """To who has most of it; before it has output, nobody looks."""
    links = workers(role, 3)
    links[1].computed(CHUNK_TOKENS)
    links[2].computed(3 * CHUNK_TOKENS)

    assert routed(links).decode is links[2]
    assert routed(links, has_output=False).decode is links[0]


def test_what_was_said_goes_before_what_is_estimated() -> None:
    """It is of all ids; and a session's preference comes behind both."""
    links = workers(Role.AGGREGATED, 3)
    links[1].computed(3 * CHUNK_TOKENS)
    session = next(
        name
        for name in map(str, range(99))
        if routed(links, session_id=name, has_output=False).decode is links[0]
    )

    assert routed(links, links[2].has, session_id=session).decode is links[2]
    assert routed(links, session_id=session).decode is links[1]


def _busy(one: Worker) -> None:
    one.num_open = MIN_EXCESS


def _full(one: Worker) -> None:
    one.num_open = 1
    one.card = msgspec.structs.replace(one.card, max_num_seqs=1)


@pytest.mark.parametrize("make", [_busy, _full])
def test_a_worker_with_too_much_to_do_is_left(make: Any) -> None:
    """The least busy one takes it, or the session's."""
    links = workers(Role.AGGREGATED, 3)
    said = links[2].has
    make(links[2])

    assert routed(links, said).decode is links[0]
    links[2].computed(3 * CHUNK_TOKENS)
    assert routed(links).decode is links[0]
    of_session = {routed(links, said, session_id=str(n)).decode for n in range(20)}
    assert of_session == {links[0], links[1]}


def test_a_worker_that_cannot_serve_is_left() -> None:
    """It is gone, has failed, was restarted, or does not go on as exactly."""
    links = workers(Role.AGGREGATED, 3)
    last = links[2]
    said = last.has

    assert routed(links[:2], said).decode is links[0]
    assert routed(links, said, exclude=[last]).decode is links[0]
    last.exactness = ""
    assert routed(links, said, exactness="same_rng").decode is links[0]
    last.exactness = "same_rng"
    last.card = msgspec.structs.replace(last.card, incarnation="decode-2-2")
    assert routed(links, said).decode is links[0]


# --- prefill and decode ------------------------------------------------------------------


def pairs() -> tuple[list[Worker], list[Worker]]:
    """Return two prefill and two decode workers."""
    return workers(Role.PREFILL, 2), workers(Role.DECODE, 2)


def test_a_decode_worker_that_has_it_needs_no_prefill_worker() -> None:
    """All but a last part block is there: that is computed sooner than handed over."""
    prefillers, decoders = pairs()
    route = routed([*prefillers, *decoders], decoders[1].has)

    assert (route.decode, route.prefill) == (decoders[1], None)
    assert route.place is PrefillPlace.CACHED


@pytest.mark.parametrize("num_tokens", [5 * CHUNK_TOKENS + n for n in (0, 20, 40)])
def test_less_than_a_chunk_behind_what_is_known_is_known(num_tokens: int) -> None:
    """The estimate has no smaller parts; what was computed had no end there."""
    prefillers, decoders = pairs()
    decoders[1].computed(len(IDS))
    route = routed([*prefillers, *decoders], num_tokens=num_tokens)

    assert (route.decode, route.prefill) == (decoders[1], None)


def test_who_has_a_part_has_the_rest_computed_apart() -> None:
    """Of output that came elsewhere since, or of a prompt whose output is long."""
    prefillers, decoders = pairs()
    said = Cached(decoders[1].worker_id, decoders[1].card.incarnation, NUM_PROMPT)
    first = routed([*prefillers, *decoders], said)
    decoders[1].computed(NUM_PROMPT)
    second = routed([*prefillers, *decoders])

    for route in (first, second):
        assert (route.decode, route.prefill) == (decoders[1], prefillers[0])


def test_another_decode_worker_has_it_computed_apart() -> None:
    """The one that has it is gone: nothing is known of this one."""
    prefillers, decoders = pairs()
    route = routed([*prefillers, decoders[0]], decoders[1].has)

    assert (route.decode, route.prefill) == (decoders[0], prefillers[0])


def test_the_prompt_is_computed_by_the_prefill_worker_that_has_it() -> None:
    """Unless more waits there than it would save."""
    prefillers, decoders = pairs()
    one = prefillers[1]
    said = Cached(one.worker_id, one.card.incarnation, NUM_PROMPT)
    one.num_queued_tokens = NUM_PROMPT

    assert routed([*prefillers, *decoders], said).prefill is one
    one.num_queued_tokens = NUM_PROMPT + 1
    assert routed([*prefillers, *decoders], said).prefill is prefillers[0]
    one.num_queued_tokens = 0
    assert routed(prefillers[:1] + decoders, said).prefill is prefillers[0]


def test_behind_its_prefill_who_has_it_reads_the_least() -> None:
    """It was too busy at the beginning, and a prefill worker had it computed."""
    prefillers, decoders = pairs()
    router, prefill = router_of(decoders), cast("Link", prefillers[0])
    said = Needs(cached=(prefillers[0].has, decoders[1].has))

    assert router.decode_for(prefill, frozenset(), said) is cast("Link", decoders[1])
    assert router.decode_for(prefill, frozenset(), Needs()) is cast("Link", decoders[0])
