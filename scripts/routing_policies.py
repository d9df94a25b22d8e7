"""Policies for the simulated workers: the product's own, perfect knowledge, the peers'.

The peers' are written from their documentation, with their default settings:

- ``cache-aware`` (SGLang's router and vLLM's, which descends from it): a tree of the
  prompts that it has sent to each worker, kept up to a size. While the numbers of open
  requests are even (``balance_abs_threshold``, ``balance_rel_threshold``), a prompt goes
  where the longest match is if that is above ``cache_threshold`` of it, else where the
  tree is smallest; while they are not, to the least busy.
- ``overlap`` (Dynamo's KV router): cost = ``overlap_score_weight`` x blocks to prefill + blocks
  in use by running requests; blocks known by the workers' events; the least cost wins.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, cast

import msgspec
from routing_sim import BLOCK, MAX_NUM_SEQS, Request, SimWorker

from tokenwire.frontend.cached import Holdings
from tokenwire.frontend.chooser import Chooser
from tokenwire.frontend.disaggregation import RemotePrefill
from tokenwire.frontend.errors import ApiError
from tokenwire.frontend.kv_index import KvIndex
from tokenwire.frontend.link import Link
from tokenwire.frontend.opened import OpenRequests
from tokenwire.frontend.peer import Peer
from tokenwire.frontend.reply import Reply
from tokenwire.frontend.router import Needs, Router
from tokenwire.frontend.routing import CostWeights, Policy, cheapest, cost
from tokenwire.frontend.weights import Weights
from tokenwire.protocol.blocks import pack_hashes
from tokenwire.protocol.messages import (
    KV_EVENTS,
    Card,
    KVBlocks,
    Load,
    Role,
    Sampling,
    Submit,
)
from tokenwire.worker.kv_blocks import Changes

__all__ = ["CacheAware", "Oracle", "Ours", "Overlap", "SimLink"]

CARD: dict[str, Any] = {
    "model": "m",
    "max_model_len": 131_072,
    "vocab_size": 32_000,
    "block_size": BLOCK,
    "engine": "sim",
    "engine_version": "1",
    "max_num_seqs": MAX_NUM_SEQS,
    "capabilities": [KV_EVENTS],
}

NO_REPLY = cast("Reply", None)
"""Nothing comes of a request in a Batch here."""


class Ours:
    """The product's router, index and cost, one set for each frontend."""

    def __init__(
        self,
        workers: list[SimWorker],
        policy: Policy = Policy.KV,
        weights: CostWeights | None = None,
        num_frontends: int = 1,
        *,
        sessions: bool = False,
    ) -> None:
        self._sessions = sessions
        self._frontends = [
            _Frontend(workers, policy, weights, num_frontends)
            for _ in range(num_frontends)
        ]
        self.num_predicted = 0  # tokens that were expected in caches
        self._expected: dict[Request, int] = {}

    def choose(self, request: Request, now: float) -> int:
        """Return the number of the worker."""
        session = str(request.turn.session) if self._sessions else None
        number, expected = self._frontends[request.frontend].choose(
            request, now, session
        )
        self.num_predicted += expected
        return number

    def begun(self, request: Request) -> None:
        """Hear of a first token."""
        self._frontends[request.frontend].links[request.worker].opened.began(
            str(id(request))
        )

    def ended(self, request: Request) -> None:
        """Hear of an end."""
        link = self._frontends[request.frontend].links[request.worker]
        link.opened.forget(str(id(request)))

    def told(self, worker: SimWorker, changes: Changes) -> None:
        """Hear what a worker has cached."""
        message = KVBlocks(
            stored=pack_hashes(changes.stored), removed=pack_hashes(changes.removed)
        )
        for frontend in self._frontends:
            frontend.links[worker.number].told_blocks(message)

    def beat(self, workers: list[SimWorker]) -> None:
        """Hear the Loads."""
        for frontend in self._frontends:
            for worker, link in zip(workers, frontend.links, strict=True):
                load = Load(
                    "1",
                    num_running=len(worker.decoding) + len(worker.prefilling),
                    num_waiting=len(worker.waiting),
                    kv_usage=worker.pool.usage,
                    num_waiting_tokens=worker.num_waiting_tokens,
                    num_requests=worker.num_open,
                    num_frontends=len(self._frontends),
                )
                link.told_load(load, link.num_open, link.opened.num_prompt_tokens)


class SimLink(Peer):
    """A link without its socket: what is known of a worker, and what was sent there."""

    def __init__(self, number: int, index: KvIndex, num_blocks: int) -> None:
        super().__init__(str(number), index)
        self.number = number
        self.opened = OpenRequests()
        card = Card(1, f"w{number}", f"w{number}-1", Role.AGGREGATED, **CARD)
        self.told_card(msgspec.structs.replace(card, num_kv_blocks=num_blocks))

    @property
    def num_open(self) -> int:
        """As a link's."""
        return len(self.opened)

    @property
    def num_queued_tokens(self) -> int:
        """As a link's."""
        others = round(self.num_others_tokens * self.opened.uncached_share)
        return self.opened.num_uncached_tokens + others


class _Frontend:
    def __init__(
        self,
        workers: list[SimWorker],
        policy: Policy,
        weights: CostWeights | None,
        num_frontends: int,
    ) -> None:
        self.index = KvIndex()
        self.links = [
            SimLink(one.number, self.index, one.pool.num_blocks) for one in workers
        ]
        usable = cast("list[Link]", self.links)
        self._router = Router(
            usable=lambda role: usable if role is Role.AGGREGATED else [],
            check_adapter=lambda _: None,
            no_worker=lambda: ApiError(503, "no worker"),
            weights=Weights(),
            index=self.index,
            chooser=Chooser(policy, weights),
            remote_prefill=RemotePrefill(),
        )

    def choose(
        self, request: Request, now: float, session: str | None
    ) -> tuple[int, int]:
        packed = request.turn.packed
        needs = Needs(session_id=session)
        route = self._router.route(packed, request.chain, frozenset(), needs)
        link = cast("SimLink", route.decode)
        submit = Submit(str(id(request)), packed, Sampling(request.turn.num_output))
        link.opened.add(submit, NO_REPLY, route.num_cached)
        link.promised(request.chain, packed, now)
        self.index.expire(now)
        return link.number, route.num_cached


class Oracle:
    """Perfect knowledge: the same cost, of what each worker truly has at that moment.

    Cached is what is in the worker's pool, and what those before it in its queue are about
    to put there; queued is what the worker will truly compute; all frontends are one.
    """

    def __init__(
        self, workers: list[SimWorker], weights: CostWeights | None = None
    ) -> None:
        self._workers = workers
        self._weights = weights or CostWeights()

    def choose(self, request: Request, now: float) -> int:
        """Return the number of the worker."""
        del now
        costs = [self._cost(one, request) for one in self._workers]
        held = Holdings(KvIndex(), request.turn.packed, request.chain)
        return cheapest(range(len(costs)), costs, held.seed)

    def _cost(self, worker: SimWorker, request: Request) -> float:
        cached = worker.cached(request.hashes)
        for other in (*worker.waiting, *worker.prefilling):
            cached = max(cached, _common(request.hashes, other.hashes) * BLOCK)
        return cost(
            self._weights,
            request.num_tokens - min(cached, request.num_tokens - 1),
            worker.num_uncached,
            worker.num_open,
            MAX_NUM_SEQS,
            worker.pool.usage,
        )

    def begun(self, request: Request) -> None:
        """Nothing is to be remembered."""

    def ended(self, request: Request) -> None:
        """Nothing is to be remembered."""

    def told(self, worker: SimWorker, changes: Changes) -> None:
        """It is known."""

    def beat(self, workers: list[SimWorker]) -> None:
        """It is known."""


def _common(one: list[int], other: list[int]) -> int:
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count


class CacheAware:
    """See the module; one router."""

    def __init__(
        self,
        workers: list[SimWorker],
        *,
        cache_threshold: float = 0.3,
        balance_abs: int = 64,
        balance_rel: float = 1.5,
        max_tree_blocks: int = 4_194_304,
    ) -> None:
        self._cache_threshold = cache_threshold
        self._balance_abs = balance_abs
        self._balance_rel = balance_rel
        self._max_blocks = max_tree_blocks
        self._trees: list[OrderedDict[int, None]] = [OrderedDict() for _ in workers]
        self._open = [0] * len(workers)

    def choose(self, request: Request, now: float) -> int:
        """Return the number of the worker."""
        del now
        most, least = max(self._open), min(self._open)
        if most - least > self._balance_abs and most > self._balance_rel * least:
            chosen = self._open.index(least)
        else:
            matched = [self._match(tree, request.hashes) for tree in self._trees]
            best = max(range(len(matched)), key=matched.__getitem__)
            if matched[best] * BLOCK > self._cache_threshold * request.num_tokens:
                chosen = best
            else:
                sizes = [len(tree) for tree in self._trees]
                chosen = sizes.index(min(sizes))
        tree = self._trees[chosen]
        for name in reversed(request.hashes):
            tree[name] = None
            tree.move_to_end(name)
        while len(tree) > self._max_blocks:
            tree.popitem(last=False)
        self._open[chosen] += 1
        return chosen

    @staticmethod
    def _match(tree: OrderedDict[int, None], hashes: list[int]) -> int:
        count = 0
        for name in hashes:
            if name not in tree:
                break
            count += 1
        return count

    def begun(self, request: Request) -> None:
        """It does not look at that."""

    def ended(self, request: Request) -> None:
        """Count the open ones."""
        self._open[request.worker] -= 1

    def told(self, worker: SimWorker, changes: Changes) -> None:
        """It does not hear that."""

    def beat(self, workers: list[SimWorker]) -> None:
        """It does not hear that."""


class Overlap:
    """See the module; one router."""

    def __init__(
        self, workers: list[SimWorker], *, overlap_weight: float = 1.0
    ) -> None:
        self._weight = overlap_weight
        self._blocks: list[set[int]] = [set() for _ in workers]
        self._active = [0.0] * len(workers)  # blocks of running requests
        self._prefill = [0.0] * len(workers)  # blocks that are to be computed
        self._uncached: dict[Request, float] = {}

    def choose(self, request: Request, now: float) -> int:
        """Return the number of the worker."""
        del now
        num_blocks = request.num_tokens / BLOCK
        costs: list[float] = []
        uncached: list[float] = []
        for number, blocks in enumerate(self._blocks):
            count = 0
            for name in request.hashes:
                if name not in blocks:
                    break
                count += 1
            uncached.append(num_blocks - count)
            prefill = self._prefill[number] + uncached[-1]
            costs.append(self._weight * prefill + self._active[number] + num_blocks)
        chosen = costs.index(min(costs))
        self._uncached[request] = uncached[chosen]
        self._prefill[chosen] += uncached[chosen]
        self._active[chosen] += num_blocks
        return chosen

    def begun(self, request: Request) -> None:
        """Its prefill is over."""
        self._prefill[request.worker] -= self._uncached.pop(request)

    def ended(self, request: Request) -> None:
        """Its blocks are free."""
        self._active[request.worker] -= request.num_tokens / BLOCK

    def told(self, worker: SimWorker, changes: Changes) -> None:
        """Keep the blocks."""
        blocks = self._blocks[worker.number]
        blocks -= changes.removed
        blocks |= changes.stored

    def beat(self, workers: list[SimWorker]) -> None:
        """It counts for itself."""
