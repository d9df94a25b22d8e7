"""Where a sequence goes that was begun before: to who has it cached, if that can serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import pytest

from tokenwire.frontend.affinity import ranked
from tokenwire.frontend.chooser import MANY, Chooser
from tokenwire.frontend.disaggregation import (
    MAX_QUEUED_TOKENS,
    PrefillPlace,
    RemotePrefill,
)
from tokenwire.frontend.job import Cached
from tokenwire.frontend.kv_index import KvIndex, Member
from tokenwire.frontend.link import Link
from tokenwire.frontend.peer import Peer
from tokenwire.frontend.prefixes import CHUNK_TOKENS, Chain, Prefixes
from tokenwire.frontend.router import Needs, Router
from tokenwire.frontend.routing import SESSION_TOKENS, Policy
from tokenwire.frontend.weights import Weights
from tokenwire.protocol.messages import KV_EVENTS, Card, Load, Role
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
    blocks: Member | None = None
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
    num_cached: int


def router_of(
    usable: Sequence[Worker],
    index: KvIndex | None = None,
    policy: Policy = Policy.KV,
) -> Router:
    """Return a router that knows *usable*."""
    return Router(
        usable=lambda role: [
            cast("Link", one) for one in usable if one.card.role is role
        ],
        check_adapter=lambda _: None,
        no_worker=lambda: pytest.fail("no worker"),
        weights=Weights(),
        index=index or KvIndex(),
        chooser=Chooser(policy),
        remote_prefill=RemotePrefill(),
    )


def routed(
    usable: Sequence[Worker],
    *cached: Cached,
    num_tokens: int = len(IDS),
    exclude: Sequence[Worker] = (),
    index: KvIndex | None = None,
    policy: Policy = Policy.KV,
    **needs: Any,
) -> Chosen:
    """Return where the sequence goes on."""
    packed = pack_ids(IDS[:num_tokens])
    fields: dict[str, Any] = {"has_output": True, "cached": cached, **needs}
    excluded = frozenset(cast("Link", one) for one in exclude)
    router = router_of(usable, index, policy)
    route = router.route(packed, Chain(), excluded, Needs(**fields))
    decode, prefill = cast("Worker", route.decode), cast("Worker | None", route.prefill)
    return Chosen(decode, prefill, route.place, route.num_cached)


BOTH_ROLES = pytest.mark.parametrize("role", [Role.AGGREGATED, Role.DECODE])


@BOTH_ROLES
def test_it_goes_where_it_is_said_to_be(role: Role) -> None:
    """Though another one has less to do; and also before it has output."""
    links = workers(role, 3)
    links[2].num_open = 3

    assert routed(links, links[2].has).decode is links[2]
    assert routed(links, links[2].has, has_output=False).decode is links[2]
    assert routed(links, links[2].has, policy=Policy.LOAD).decode is links[2]
    assert routed(links).decode in links[:2]


@BOTH_ROLES
def test_it_goes_where_this_frontend_had_it_computed(role: Role) -> None:
    """To who has most of it, whether or not it has output; by load, nobody looks."""
    links = workers(role, 3)
    links[1].computed(CHUNK_TOKENS)
    links[2].computed(3 * CHUNK_TOKENS)

    assert routed(links).decode is links[2]
    assert routed(links, has_output=False).decode is links[2]
    links[2].num_open = 1
    assert routed(links[1:], policy=Policy.LOAD).decode is links[1]


def test_what_was_said_goes_before_what_is_estimated() -> None:
    """It is of all ids; and a session's preference comes behind both."""
    links = workers(Role.AGGREGATED, 3)
    links[1].computed(3 * CHUNK_TOKENS)
    session = next(
        name
        for name in map(str, range(99))
        if routed(links, session_id=name, num_tokens=9).decode is links[0]
    )

    assert routed(links, links[2].has, session_id=session).decode is links[2]
    assert routed(links, session_id=session).decode is links[1]


def _busy(one: Worker) -> None:
    one.num_open = 8


def _full(one: Worker) -> None:
    one.num_open = 1
    one.card = msgspec.structs.replace(one.card, max_num_seqs=1)


@pytest.mark.parametrize("make", [_busy, _full])
def test_a_worker_with_too_much_to_do_is_left(make: Any) -> None:
    """More than what it has cached saves: another one takes it, or the session's."""
    links = workers(Role.AGGREGATED, 3)
    said = links[2].has
    make(links[2])

    assert routed(links, said).decode in links[:2]
    links[2].computed(3 * CHUNK_TOKENS)
    assert routed(links).decode in links[:2]
    of_session = {routed(links, said, session_id=str(n)).decode for n in range(20)}
    assert of_session == {links[0], links[1]}


def test_a_worker_that_cannot_serve_is_left() -> None:
    """It is gone, has failed, was restarted, or does not go on as exactly."""
    links = workers(Role.AGGREGATED, 3)
    last = links[2]
    said = last.has

    assert routed(links, said).decode is last
    assert routed(links[:2], said).decode in links[:2]
    assert routed(links, said, exclude=[last]).decode in links[:2]
    last.exactness = ""
    assert routed(links, said, exactness="same_rng").decode in links[:2]
    last.exactness, last.num_open = "same_rng", 1
    last.card = msgspec.structs.replace(last.card, incarnation="decode-2-2")
    assert routed(links, said).decode in links[:2]


# --- what workers have told ----------------------------------------------------------------


def telling(
    role: Role, number: int, index: KvIndex, block_size: int = 16
) -> list[Worker]:
    """Return idle workers that tell of their blocks."""
    links = workers(role, number)
    for link in links:
        link.card = msgspec.structs.replace(link.card, block_size=block_size)
        link.blocks = index.join()
    return links


def stored(
    link: Worker, num_tokens: int, salt: str | None = None, lora: str = ""
) -> None:
    """Have it tell that it has the beginning of the sequence."""
    assert link.blocks is not None
    packed = pack_ids(IDS[:num_tokens])
    link.blocks.stored(Chain(salt, lora).blocks(link.card.block_size, packed))


@pytest.mark.parametrize("block_size", [16, 0])
def test_blocks_of_no_ids_are_not_asked_for(block_size: int) -> None:
    """Every choice of a worker would divide by their size."""
    peer = Peer("tcp://w:1", KvIndex())
    capable = {"capabilities": [KV_EVENTS], "block_size": block_size}
    peer.told_card(msgspec.structs.replace(CARD, **capable))
    assert (peer.blocks is not None) == bool(block_size)


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("role", Role)
def test_what_no_policy_asks_is_not_kept(policy: Policy, role: Role) -> None:
    """By what a decode worker has, each decides where a prompt is computed; the rest only by the policy."""
    for capabilities in ([], [KV_EVENTS]):
        peer = Peer("tcp://w:1", KvIndex(), policy)
        given: dict[str, Any] = {"capabilities": capabilities, "role": role}
        peer.told_card(msgspec.structs.replace(CARD, block_size=16, **given))
        matters = policy is Policy.KV or role is Role.DECODE
        assert (peer.blocks is not None) == (matters and bool(capabilities))
        assert (peer.prefixes is not None) == matters


@BOTH_ROLES
def test_it_goes_where_most_of_it_is_told_to_be(role: Role) -> None:
    """Though others are idle; and what is expected there is what was told."""
    index = KvIndex()
    links = telling(role, 3, index)
    links[2].num_open = 1 if role is Role.AGGREGATED else 0
    stored(links[1], 160)
    stored(links[2], 352)
    links[0].prefixes = links[1].prefixes  # an estimate is nothing beside what is told
    route = routed(links, has_output=False, index=index)

    assert (route.decode, route.num_cached) == (links[2], 352)
    links[2].num_open = 3  # more than the difference
    route = routed(links, has_output=False, index=index)
    assert route.decode is not links[2]


def test_another_salt_or_adapter_shares_nothing() -> None:
    """The same ids of another tenant, or through another adapter, are not cached."""
    index = KvIndex()
    links = telling(Role.AGGREGATED, 2, index)
    links[1].num_open = 1
    stored(links[1], 352, salt="tenant")
    assert routed(links, has_output=False, index=index).num_cached == 0
    stored(links[1], 352, lora="adapter")
    assert routed(links, has_output=False, index=index).num_cached == 0
    stored(links[1], 352)
    assert routed(links, has_output=False, index=index).num_cached == 352


def test_a_hit_is_never_the_whole_prompt() -> None:
    """An engine computes the last id in any case, and with it a block."""
    index = KvIndex()
    links = telling(Role.AGGREGATED, 2, index)
    stored(links[1], 352)
    route = routed(links, num_tokens=352, has_output=False, index=index)
    assert (route.decode, route.num_cached) == (links[1], 336)


def test_block_sizes_may_differ_and_some_workers_tell_nothing() -> None:
    """Each is asked in its own blocks, or estimated."""
    index = KvIndex()
    small, large = (
        telling(Role.AGGREGATED, 1, index),
        telling(Role.AGGREGATED, 1, index, block_size=64),
    )
    old = workers(Role.AGGREGATED, 1)
    links = [*small, *large, *old]
    for name, link in zip("abc", links, strict=True):
        link.card = msgspec.structs.replace(link.card, worker_id=name)
    stored(small[0], 160)
    assert routed(links, has_output=False, index=index).decode is small[0]
    stored(large[0], 192)
    route = routed(links, has_output=False, index=index)
    assert (route.decode, route.num_cached) == (large[0], 192)
    old[0].computed(4 * CHUNK_TOKENS)
    route = routed(links, has_output=False, index=index)
    assert (route.decode, route.num_cached) == (old[0], 4 * CHUNK_TOKENS)


def test_of_many_workers_who_has_it_is_among_those_looked_at() -> None:
    """Whoever is named, is the session's, or has most; else some free one."""
    index = KvIndex()
    links = telling(Role.AGGREGATED, 3 * MANY, index)
    for link in links:
        stored(link, 64)  # a system prompt that all have
        link.num_open = 1
    free = links[::7]
    for link in free:
        link.num_open = 0
    for place in (0, MANY, 2 * MANY + 5):
        route = routed(links, links[place].has, index=index)
        assert route.decode is links[place]
        stored(links[place], 352)
        route = routed(links, has_output=False, index=index)
        assert (route.decode, route.num_cached) == (links[place], 352)
        links[place].blocks = index.join()
    taken = {
        routed(links, index=index, num_tokens=n).decode.worker_id for n in range(40, 80)
    }
    assert taken <= {link.worker_id for link in free}
    assert len(taken) > 10
    session = ranked("s", links)[0]
    session.num_open = 2
    assert routed(links, index=index, session_id="s").decode is session


def test_in_turns_nobody_looks() -> None:
    """Round robin is there to be compared with."""
    index = KvIndex()
    links = telling(Role.AGGREGATED, 3, index)
    stored(links[1], 352)
    router = router_of(links, index, Policy.ROUND_ROBIN)
    packed = pack_ids(IDS)
    chosen = [
        router.route(packed, Chain(), frozenset(), Needs()).decode for _ in range(6)
    ]
    assert sorted(chosen, key=lambda one: one.worker_id) == [
        cast("Link", link) for link in links for _ in range(2)
    ]


def test_frontends_that_share_workers_do_not_herd() -> None:
    """A request more or less is not known: equals share what comes, by sequence."""
    links = workers(Role.AGGREGATED, 4)
    for number, link in enumerate(links):
        link.load = Load("w", num_frontends=2)
        link.num_open = 1 if number else 0
    router = router_of(links)
    taken: set[str] = set()
    for first in range(40):
        packed = pack_ids([first, *IDS[:20]])
        route = router.route(packed, Chain(), frozenset(), Needs())
        taken.add(route.decode.worker_id)
    assert len(taken) == 4
    for link in links:
        link.load = Load("w", num_frontends=1)
    route = router.route(pack_ids(IDS), Chain(), frozenset(), Needs())
    assert cast("Worker", route.decode) is links[0]


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
        assert route.decode is decoders[1]
        assert route.prefill in prefillers


def test_another_decode_worker_has_it_computed_apart() -> None:
    """The one that has it is gone: nothing is known of this one."""
    prefillers, decoders = pairs()
    route = routed([*prefillers, decoders[0]], decoders[1].has)

    assert route.decode is decoders[0]
    assert route.prefill in prefillers


def test_the_prompt_is_computed_by_the_prefill_worker_that_has_it() -> None:
    """Unless more waits there than it would save."""
    prefillers, decoders = pairs()
    one = prefillers[1]
    said = Cached(one.worker_id, one.card.incarnation, NUM_PROMPT)
    one.num_queued_tokens = NUM_PROMPT

    assert routed([*prefillers, *decoders], said).prefill is one
    one.num_queued_tokens = NUM_PROMPT + SESSION_TOKENS + 1
    assert routed([*prefillers, *decoders], said).prefill is prefillers[0]
    one.num_queued_tokens = 0
    assert routed(prefillers[:1] + decoders, said).prefill is prefillers[0]


def test_a_prefill_worker_above_the_bound_is_left_whatever_it_has() -> None:
    """Else the decode worker would compute the prompt, with a prefill worker free."""
    index = KvIndex()
    prefillers = telling(Role.PREFILL, 2, index)
    decoders = workers(Role.DECODE, 1)
    stored(prefillers[1], 352)
    links = [*prefillers, *decoders]
    assert routed(links, index=index, has_output=False).prefill is prefillers[1]
    prefillers[1].num_queued_tokens = MAX_QUEUED_TOKENS + 1
    prefillers[0].num_queued_tokens = MAX_QUEUED_TOKENS
    assert routed(links, index=index, has_output=False).prefill is prefillers[0]


def test_behind_its_prefill_who_has_it_reads_the_least() -> None:
    """It was too busy at the beginning, and a prefill worker had it computed."""
    prefillers, decoders = pairs()
    router, prefill = router_of(decoders), cast("Link", prefillers[0])
    said = Needs(cached=(prefillers[0].has, decoders[1].has))
    sequence = pack_ids(IDS), Chain(), frozenset[Link]()

    chosen = router.decode_for(prefill, *sequence, said)
    assert chosen is cast("Link", decoders[1])
    decoders[1].num_open = 1
    assert router.decode_for(prefill, *sequence, said) is chosen
    chosen = router.decode_for(prefill, *sequence, Needs())
    assert chosen is cast("Link", decoders[0])
