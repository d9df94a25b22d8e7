"""Workers in virtual time: what a router decides meets their caches and queues.

A worker is the simulated engine's ``BlockPool`` under a continuous-batching loop: in each
step it computes up to ``PREFILL_BUDGET`` prompt tokens, first come first served, and one
token of each running sequence. Its times are those of an 8B model on one large GPU, in
round numbers. Everything is an event of one queue: arrivals, ends of steps, Loads.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from routing_workloads import Turn, Workload

from tokenwire.frontend.prefixes import Chain
from tokenwire.protocol.limits import HEARTBEAT_INTERVAL_S
from tokenwire.worker.kv_blocks import CachedBlocks, Changes
from tokenwire.worker.kv_watch import PERIOD_S
from tokenwire.worker.sim.blocks import BlockPool

__all__ = ["BLOCK", "Policy", "Request", "Result", "SimWorker", "balance", "run"]

BLOCK = 16
MAX_NUM_SEQS = 64
PREFILL_BUDGET = 2_048
"""Prompt tokens in one step, as engines bound them."""

STEP_S = 0.010
SEQUENCE_S = 0.0001
"""What a sequence makes a step longer by."""

PREFILL_TOKENS_PER_S = 20_000.0


@dataclass(slots=True, eq=False)
class Request:
    """One request on its way."""

    turn: Turn
    frontend: int
    hashes: list[int]  # of its full prompt blocks
    arrived_at: float
    chain: Chain
    num_tokens: int
    num_cached: int = 0
    num_computed: int = 0
    num_output: int = 0
    worker: int = -1
    blocks: list[int] = field(default_factory=list[int])
    first_token_at: float = 0.0


class SimWorker:
    """An engine; see the module."""

    def __init__(self, number: int, num_blocks: int) -> None:
        self.number = number
        self.blocks = CachedBlocks(num_blocks)  # that can be found
        self.blocks.on_change = _nothing  # somebody takes the changes
        self.pool = BlockPool(num_blocks, told=self.blocks)
        self.waiting: deque[Request] = deque()
        self.prefilling: deque[Request] = deque()
        self.decoding: list[Request] = []
        self.stepping = False
        self.tells = False  # soon, what has changed
        self.busy_s = 0.0
        self.num_requests = 0  # that it has had
        self.num_computed = 0  # prompt tokens
        self.area = 0.0  # requests x seconds
        self._area_at = 0.0
        self._chunks: list[tuple[Request, int]] = []

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self.waiting) + len(self.prefilling) + len(self.decoding)

    @property
    def num_uncached(self) -> int:
        """Prompt tokens that wait to be computed, as far as it is known by now."""
        return sum(
            one.num_tokens - max(one.num_computed, self.cached(one.hashes))
            for one in (*self.waiting, *self.prefilling)
        )

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of requests without a token, as a Load has them."""
        return sum(one.num_tokens for one in (*self.waiting, *self.prefilling))

    def cached(self, hashes: list[int]) -> int:
        """Return how many tokens of a prompt it has, as it is."""
        count = 0
        for block in hashes:
            if block not in self.blocks:
                break
            count += 1
        return count * BLOCK

    def note(self, now: float) -> None:
        """Count what it has until *now*."""
        self.area += self.num_open * (now - self._area_at)
        self._area_at = now

    def plan(self) -> float:
        """Begin a step; return how long it takes, 0 if there is nothing to do."""
        while self.waiting and len(self.prefilling) + len(self.decoding) < MAX_NUM_SEQS:
            request = self.waiting[0]
            total = request.num_tokens + request.turn.num_output
            # The last id is always computed.
            most = (request.num_tokens - 1) // BLOCK
            got = self.pool.acquire(request.hashes[:most], -(-total // BLOCK))
            if got is None:
                break
            request.blocks, num_hits = got
            request.num_cached = request.num_computed = num_hits * BLOCK
            self.prefilling.append(self.waiting.popleft())
        left = PREFILL_BUDGET
        self._chunks = []
        for request in self.prefilling:
            chunk = min(left, request.num_tokens - request.num_computed)
            if chunk <= 0:
                break
            self._chunks.append((request, chunk))
            left -= chunk
        num_prefill = PREFILL_BUDGET - left
        if not num_prefill and not self.decoding:
            return 0.0
        took = STEP_S + num_prefill / PREFILL_TOKENS_PER_S
        took += SEQUENCE_S * len(self.decoding)
        self.busy_s += took
        return took

    def commit(self, now: float) -> tuple[list[Request], list[Request]]:
        """End a step; return who has the first token, and who has ended."""
        begun: list[Request] = []
        ended: list[Request] = []
        running: list[Request] = []
        for request in self.decoding:
            request.num_output += 1
            if request.num_output >= request.turn.num_output:
                ended.append(request)
            else:
                running.append(request)
        for request, chunk in self._chunks:
            request.num_computed += chunk
            self.num_computed += chunk
            if request.num_computed < request.num_tokens:
                continue
            self.prefilling.popleft()
            request.first_token_at = now
            request.num_output = 1
            for block, name in zip(request.blocks, request.hashes, strict=False):
                self.pool.register(block, name)
            begun.append(request)
            (ended if request.turn.num_output == 1 else running).append(request)
        for request in ended:
            turn = request.turn
            names = request.chain.blocks(BLOCK, turn.packed + turn.answer)
            # The last token has no KV.
            num_full = (request.num_tokens + turn.num_output - 1) // BLOCK
            names = names[:num_full]
            for block, name in zip(request.blocks, names, strict=False):
                self.pool.register(block, name)
            self.pool.release(request.blocks)
        self.decoding = running
        return begun, ended


class Policy(Protocol):
    """Who decides; one for all frontends, which it may keep apart."""

    def choose(self, request: Request, now: float) -> int:
        """Return the number of the worker."""
        ...

    def begun(self, request: Request) -> None:
        """Hear of a first token."""

    def ended(self, request: Request) -> None:
        """Hear of an end."""

    def told(self, worker: SimWorker, changes: Changes) -> None:
        """Hear what a worker has cached, and what no more."""

    def beat(self, workers: list[SimWorker]) -> None:
        """Hear a Load of all workers."""


@dataclass(slots=True)
class Result:
    """What came of a workload."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list[float])
    took_s: float = 0.0
    requests: list[int] = field(default_factory=list[int])  # by worker
    busy_s: list[float] = field(default_factory=list[float])
    area: list[float] = field(default_factory=list[float])

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were cached."""
        return self.num_cached_tokens / self.num_prompt_tokens

    def ttft(self, share: float) -> float:
        """Return a quantile of the time to the first token, in s."""
        return sorted(self.ttft_s)[int(share * (len(self.ttft_s) - 1))]


def _nothing() -> None:
    """Be told of a change, and look later."""


def balance(loads: list[float] | list[int]) -> float:
    """Return the largest load in mean loads."""
    mean = sum(loads) / len(loads)
    return max(loads) / mean if mean else 1.0


def run(
    workload: Workload,
    make: Callable[[list[SimWorker]], Policy],
    *,
    num_workers: int,
    num_blocks: int,
    num_frontends: int = 1,
) -> Result:
    """Return what comes of *workload* under a policy."""
    workers = [SimWorker(number, num_blocks) for number in range(num_workers)]
    policy = make(workers)
    result = Result()
    order = itertools.count()
    queue: list[tuple[float, int, Callable[[float], None]]] = []
    num_open = len(workload.turns())

    def at(when: float, action: Callable[[float], None]) -> None:
        heapq.heappush(queue, (when, next(order), action))

    def arrive(turn: Turn) -> Callable[[float], None]:
        def action(now: float) -> None:
            chain = Chain()
            hashes = list(chain.blocks(BLOCK, turn.packed))
            request = Request(
                turn,
                result.num_requests % num_frontends,
                hashes,
                now,
                chain,
                len(turn.packed) // 4,
            )
            result.num_requests += 1
            worker = workers[policy.choose(request, now)]
            request.worker = worker.number
            worker.note(now)
            worker.num_requests += 1
            worker.waiting.append(request)
            if not worker.stepping:
                begin(worker, now)

        return action

    def begin(worker: SimWorker, now: float) -> None:
        took = worker.plan()
        worker.stepping = bool(took)
        if took:
            at(now + took, lambda then: end(worker, then))

    def end(worker: SimWorker, now: float) -> None:
        nonlocal num_open
        worker.note(now)
        begun, ended = worker.commit(now)
        for request in begun:
            policy.begun(request)
            result.ttft_s.append(now - request.arrived_at)
            result.num_prompt_tokens += request.num_tokens
            result.num_cached_tokens += request.num_cached
        for request in ended:
            policy.ended(request)
            num_open -= 1
            for child in request.turn.children:
                at(now + child.after_s, arrive(child))
        begin(worker, now)
        if not worker.tells:
            worker.tells = True
            at(now + PERIOD_S, lambda _: tell(worker))
        result.took_s = now

    def tell(worker: SimWorker) -> None:
        worker.tells = False
        changes = worker.blocks.take_changes()
        if changes:
            policy.told(worker, changes)

    def beat(now: float) -> None:
        policy.beat(workers)
        if num_open:
            at(now + HEARTBEAT_INTERVAL_S, beat)

    beat(0.0)
    for root in workload.roots:
        at(root.after_s, arrive(root))
    while queue:
        now, _, action = heapq.heappop(queue)
        action(now)
    for worker in workers:
        worker.note(result.took_s)
    result.requests = [worker.num_requests for worker in workers]
    result.busy_s = [worker.busy_s for worker in workers]
    result.area = [worker.area for worker in workers]
    return result
