"""Continuous batching, step by step; no clock, no socket, no event loop.

Laws:
- ``plan`` and ``commit`` alternate: the first decides what a step computes, the second
  has computed it. Between them requests may come and go.
- A sequence is in exactly one of ``waiting``, ``loading``, ``prefilling``, ``decoding``,
  or it has ended. ``loading`` waits for KV from a prefill engine and has its blocks;
  they are not freed before the read is over, even if the request is.
- Blocks are the only thing that can run out: then the youngest sequence goes back to
  the waiting ones, and its ids are computed again later (vLLM's recompute preemption).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Protocol

from tokenwire.protocol.messages import ErrorKind, FinishReason, JsonObject, Leg
from tokenwire.worker.engine import (
    EngineFinished,
    EngineLoad,
    EngineRequest,
    EngineTokens,
)
from tokenwire.worker.kv_blocks import CachedBlocks

from .blocks import BlockPool
from .options import SimOptions
from .sampler import Rule
from .script import Script
from .sequence import Sequence
from .weights import Weights

__all__ = ["HeldKV", "KVSource", "Scheduler", "StepOutput"]

_SPARE_QUEUE_ENTRIES = 64
"""Heap entries of ended requests that are left where they are; more, and at least as
many as there are live ones, and the heap is built anew: O(1) each, and bounded."""


class KVSource(Protocol):
    """Where KV of a decode leg comes from."""

    def read(self, request_id: str, handover: JsonObject, prompt_crc: int) -> None:
        """Begin to read; its end is told to ``Scheduler.kv_arrived``."""

    def free(self, handover: JsonObject) -> None:
        """Read nothing, so that the prefill engine frees what it holds."""

    def offer(self, request_id: str, num_tokens: int, blocks: list[int]) -> JsonObject:
        """Return the hand-over for KV that is held here."""
        ...


@dataclass(slots=True)
class HeldKV:
    """Blocks of a prefill leg, kept until they are read or the lease is over."""

    blocks: list[int]
    prompt_crc: int
    num_tokens: int
    expires_at: float


@dataclass(slots=True)
class StepOutput:
    """What one step brought."""

    tokens: list[EngineTokens]
    finished: list[EngineFinished]


class Scheduler:
    """The sequences of one engine and their blocks. *now* is the engine's clock, in s."""

    def __init__(
        self,
        options: SimOptions,
        rule: Rule,
        script: Script,
        max_model_len: int,
        source: KVSource,
        weights: Weights,
        told: CachedBlocks | None = None,
    ) -> None:
        self._options = options
        self._weights = weights
        self._rule = rule
        self._script = script
        self._max_model_len = max_model_len
        self._source = source
        self._pool = BlockPool(
            options.num_blocks, caching=options.prefix_caching, told=told
        )
        self._arrivals = 0
        self._queue: list[tuple[tuple[int, int], str]] = []  # heap over ``waiting``
        self._waiting: dict[str, Sequence] = {}
        self._loading: dict[str, Sequence] = {}
        self._abandoned: dict[str, Sequence] = {}  # ended, but still being read into
        self._prefilling: dict[str, Sequence] = {}
        self._decoding: dict[str, Sequence] = {}
        self.held: dict[str, HeldKV] = {}  # in the order of their expiry
        self.admits = True  # whether a step may begin what waits
        self.num_preempted = 0
        self.num_kv_expired = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything, as far as is known."""
        return bool(self._decoding or self._prefilling or self._waiting)

    @property
    def num_queue_entries(self) -> int:
        """How long the queue is, with the entries of ended requests: it is bounded."""
        return len(self._queue)

    def load(self) -> EngineLoad:
        """Return the counts that vLLM reports too."""
        return EngineLoad(
            num_running=len(self._prefilling) + len(self._decoding),
            num_waiting=len(self._waiting) + len(self._loading),
            kv_usage=self._pool.usage,
            num_kv_expired=self.num_kv_expired,
        )

    def add(self, request: EngineRequest, now: float) -> EngineFinished | None:
        """Take *request*; return its end if it cannot be run."""
        error = self._fault_of(request)
        if error is not None:
            return EngineFinished(
                request_id=request.request_id,
                reason=FinishReason.ERROR,
                num_prompt_tokens=request.num_prompt_tokens,
                error_kind=ErrorKind.INVALID,
                error=error,
                prompt_token_ids=request.prompt_token_ids,
            )
        self._arrivals += 1
        priority = request.priority if self._options.by_priority else 0
        sequence = Sequence(
            request,
            rule=self._rule,
            script=self._script,
            max_model_len=self._max_model_len,
            now=now,
            order=(priority, self._arrivals),
            weights=self._weights.of(request.lora) or 0,
        )
        self._enqueue(sequence)
        return None

    def abort(self, request_id: str, now: float) -> EngineFinished | None:
        """End a request; return its end, or None if it is not open."""
        sequence = self._take_out(request_id)
        return None if sequence is None else sequence.end(FinishReason.ABORT, now)

    def end_all(
        self, reason: FinishReason, now: float, error: str = ""
    ) -> list[EngineFinished]:
        """End everything, because the engine stops or is dead; return the ends."""
        groups = (self._waiting, self._loading, self._prefilling, self._decoding)
        open_ids = [request_id for group in groups for request_id in group]
        kind = ErrorKind.ENGINE if reason is FinishReason.ERROR else None
        ends: list[EngineFinished] = []
        for request_id in open_ids:
            sequence = self._take_out(request_id)
            if sequence is not None:
                ends.append(sequence.end(reason, now, error_kind=kind, error=error))
        return ends

    def plan(self, now: float) -> int | None:
        """Decide on a step; return its prompt tokens, or None if there is nothing."""
        left = budget = self._options.max_num_batched_tokens
        for sequence in self._prefilling.values():
            sequence.chunk = min(left, sequence.num_to_compute)
            left -= sequence.chunk
        while left and self._queue and self.admits:
            head = self._waiting.get(self._queue[0][1])
            if head is None or head.order != self._queue[0][0]:  # ended meanwhile
                heapq.heappop(self._queue)
                continue
            if not self._has_slot() or not self._admit(head, now):
                break
            if head.request.request_id in self._prefilling:
                head.chunk = min(left, head.num_to_compute)
                left -= head.chunk
        if left == budget and not self._decoding:
            return None
        return budget - left

    def commit(self, now: float) -> StepOutput:
        """Return what the planned step computed."""
        output = StepOutput([], [])
        per_step = self._options.tokens_per_step
        sampled: list[Sequence] = []
        full: list[Sequence] = []
        append = output.tokens.append
        for request_id, sequence in self._decoding.items():
            sampler = sequence.sampler
            new_ids = sampler.take(per_step)
            if new_ids:  # none while a script holds it
                append(EngineTokens(request_id, new_ids, sampler.logprobs))
            if sampler.reason is not None:
                sampled.append(sequence)
            elif sequence.num_prompt + sampler.num_output > sequence.capacity:
                full.append(sequence)
        for sequence in self._prefilled():
            new_ids = self._first_token(sequence, now)
            if new_ids:
                append(
                    EngineTokens(
                        sequence.request.request_id,
                        new_ids,
                        sequence.sampler.logprobs,
                        sequence.num_cached,
                    )
                )
            if sequence.sampler.reason is not None:
                sampled.append(sequence)
            elif sequence.length > sequence.capacity:
                full.append(sequence)
        for sequence in sampled:
            output.finished.append(self._finish(sequence, now))
        for sequence in full:
            self._grow(sequence)
        return output

    def kv_arrived(
        self, request_id: str, error: str | None, now: float
    ) -> EngineFinished | None:
        """Take note that a read is over; return the request's end if it failed."""
        abandoned = self._abandoned.pop(request_id, None)
        if abandoned is not None:
            abandoned.release(self._pool)
            return None
        sequence = self._loading.pop(request_id, None)
        if sequence is None:
            return None
        if error is not None:
            sequence.release(self._pool)
            return sequence.end(
                FinishReason.ERROR, now, error_kind=ErrorKind.HANDOVER, error=error
            )
        sequence.loaded = True
        # As in vLLM: all came from elsewhere, and only the last id is computed again.
        sequence.num_cached = sequence.length
        sequence.num_computed = sequence.length - 1
        self._prefilling[request_id] = sequence
        return None

    def kv_taken(self, request_id: str) -> None:
        """Free what is held for *request_id*: it was read, or will not be."""
        held = self.held.pop(request_id, None)
        if held is not None:
            self._pool.release(held.blocks)

    def expire(self, now: float) -> None:
        """Free what nobody has read within its lease."""
        while self.held:
            request_id, held = next(iter(self.held.items()))
            if held.expires_at > now:
                break
            self.kv_taken(request_id)
            self.num_kv_expired += 1

    # -- what the operator does -------------------------------------------------------

    @property
    def num_under_way(self) -> int:
        """How many sequences have begun and not ended."""
        return len(self._prefilling) + len(self._decoding) + len(self._loading)

    def reweigh(self) -> None:
        """Go on with other weights."""
        groups = (self._waiting, self._loading, self._prefilling, self._decoding)
        for sequence in (one for group in groups for one in group.values()):
            sequence.sampler.reweigh(self._weights.of(sequence.request.lora) or 0)

    def reset_cache(self, *, reset_running: bool) -> None:
        """Find no block again that was computed before now.

        Args:
            reset_running: Whether running sequences are computed anew as well.
        """
        self._forget(None)
        if reset_running:
            running = (*self._prefilling.values(), *self._decoding.values())
            for sequence in running:
                self._preempt(sequence)

    def forget_adapter(self, lora: str) -> None:
        """Find no block again that was computed with this adapter before now."""
        self._forget(lora)

    def _forget(self, lora: str | None) -> None:
        self._pool.forget(lora)
        for group in (self._loading, self._prefilling, self._decoding):
            for sequence in group.values():
                if lora is None or sequence.request.lora == lora:
                    sequence.is_old = True

    # -- inside ---------------------------------------------------------------------

    def _fault_of(self, request: EngineRequest) -> str | None:
        size = len(request.token_ids)
        if not size:
            return "The prompt is empty"
        if size >= self._max_model_len:
            return (
                f"The prompt has {size} tokens, the maximum context length is "
                f"{self._max_model_len} tokens"
            )
        if request.num_prior and request.sampling.max_tokens <= request.num_prior:
            return (
                f"{request.num_prior} output tokens are there, max_tokens are not more"
            )
        if request.sampling.max_tokens < 1:
            return f"max_tokens must be at least 1, got {request.sampling.max_tokens}"
        if request.leg is Leg.DECODE and request.handover is None:
            return "A decode leg needs the hand-over of its prefill leg"
        if self._weights.of(request.lora) is None:
            return f"The model {request.lora!r} does not exist"
        return None

    def _has_slot(self) -> bool:
        num_slots = len(self._prefilling) + len(self._decoding) + len(self._loading)
        return num_slots < self._options.max_num_seqs

    def _enqueue(self, sequence: Sequence) -> None:
        request_id = sequence.request.request_id
        self._waiting[request_id] = sequence
        heapq.heappush(self._queue, (sequence.order, request_id))

    def _admit(self, sequence: Sequence, now: float) -> bool:
        """Move the first waiting sequence on; return whether there were blocks."""
        if not sequence.allocate(self._pool, self._options.block_size, now):
            return False
        heapq.heappop(self._queue)
        request_id = sequence.request.request_id
        del self._waiting[request_id]
        handover = sequence.request.handover
        if sequence.is_remote and handover is not None:
            self._loading[request_id] = sequence
            self._source.read(request_id, handover, sequence.given_crc)
        else:
            self._prefilling[request_id] = sequence
        return True

    def _prefilled(self) -> list[Sequence]:
        done: list[Sequence] = []
        for sequence in self._prefilling.values():
            sequence.num_computed += sequence.chunk
            sequence.chunk = 0
            if not sequence.num_to_compute:
                done.append(sequence)
        for sequence in done:
            del self._prefilling[sequence.request.request_id]
        return done

    def _first_token(self, sequence: Sequence, now: float) -> list[int]:
        sequence.computed(self._pool)
        if sequence.first_token_at is None:
            sequence.first_token_at = now
        self._decoding[sequence.request.request_id] = sequence
        return sequence.sampler.take(self._options.tokens_per_step)

    def _finish(self, sequence: Sequence, now: float) -> EngineFinished:
        request_id = sequence.request.request_id
        del self._decoding[request_id]
        sequence.register_full(self._pool, self._options.block_size)
        reason = sequence.sampler.reason or FinishReason.STOP
        handover = None
        if sequence.request.leg is Leg.PREFILL:
            handover = self._hold(sequence, now)
        else:
            sequence.release(self._pool)
        return sequence.end(reason, now, rule=self._rule, handover=handover)

    def _hold(self, sequence: Sequence, now: float) -> JsonObject:
        request_id = sequence.request.request_id
        num_tokens = len(sequence.request.token_ids)
        self.held[request_id] = HeldKV(
            blocks=sequence.blocks,
            prompt_crc=sequence.given_crc,
            num_tokens=num_tokens,
            expires_at=now + self._options.kv_lease_s,
        )
        return self._source.offer(request_id, num_tokens, list(sequence.blocks))

    def _grow(self, sequence: Sequence) -> None:
        while sequence.request.request_id in self._decoding:
            if sequence.grow(self._pool, self._options.block_size):
                return
            self._preempt_youngest()

    def _preempt_youngest(self) -> None:
        running = (*self._prefilling.values(), *self._decoding.values())
        self._preempt(max(running, key=lambda sequence: sequence.order))

    def _preempt(self, sequence: Sequence) -> None:
        request_id = sequence.request.request_id
        self._prefilling.pop(request_id, None)
        self._decoding.pop(request_id, None)
        sequence.release(self._pool)
        self._enqueue(sequence)
        self.num_preempted += 1

    def _take_out(self, request_id: str) -> Sequence | None:
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            handover = waiting.request.handover
            if waiting.is_remote and handover is not None:
                self._source.free(handover)
            if len(self._queue) > 2 * len(self._waiting) + _SPARE_QUEUE_ENTRIES:
                self._queue = [(s.order, i) for i, s in self._waiting.items()]
                heapq.heapify(self._queue)
            return waiting
        loading = self._loading.pop(request_id, None)
        if loading is not None:
            self._abandoned[request_id] = loading
            return loading
        running = self._prefilling.pop(request_id, None) or self._decoding.pop(
            request_id, None
        )
        if running is not None:
            running.release(self._pool)
        return running
