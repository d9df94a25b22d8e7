"""One sequence in the simulated engine: its ids, its blocks, its times."""

from __future__ import annotations

from zlib import crc32

from tokenwire.protocol.blocks import block_hashes, next_hash, root_hash
from tokenwire.protocol.messages import (
    ErrorKind,
    FinishReason,
    JsonObject,
    Leg,
    Logprobs,
)
from tokenwire.protocol.tokens import pack_ids
from tokenwire.worker.engine import EngineFinished, EngineRequest

from .blocks import BlockPool
from .sampler import Rule, Sampler, prompt_logprobs
from .script import Script

__all__ = ["Sequence"]


class Sequence:
    """A request on its way. The scheduler moves it; it keeps its own books."""

    __slots__ = (
        "arrived_at",
        "blocks",
        "capacity",
        "chunk",
        "first_token_at",
        "given_crc",
        "hashes",
        "is_old",
        "loaded",
        "num_cached",
        "num_computed",
        "num_prompt",
        "order",
        "request",
        "root",
        "sampler",
        "scheduled_at",
    )

    def __init__(
        self,
        request: EngineRequest,
        *,
        rule: Rule,
        script: Script,
        max_model_len: int,
        now: float,
        order: tuple[int, int],
        weights: int = 0,
    ) -> None:
        prompt = request.prompt_token_ids
        prompt_crc = crc32(pack_ids(prompt))
        self.request = request
        self.order = order  # priority, then arrival
        self.num_prompt = request.num_prompt_tokens
        self.given_crc = crc32(
            pack_ids(request.token_ids[self.num_prompt :]), prompt_crc
        )
        self.sampler = Sampler(
            rule,
            request,
            prompt_crc,
            max_model_len,
            script.answer(prompt) if len(script) else None,
            weights,
        )
        # Sequences with different ones share no blocks.
        self.root = root_hash(request.cache_salt, request.lora)
        self.is_old = False  # its KV was to be forgotten: no new block is found
        self.hashes: list[int] = []  # of the blocks that are full and computed
        self.blocks: list[int] = []
        self.capacity = 0  # ids that the blocks have room for
        self.chunk = 0  # ids to compute in the step under way
        self.num_computed = 0
        self.num_cached = 0
        self.loaded = False  # whether the KV has come from the prefill engine
        self.arrived_at = now
        self.scheduled_at: float | None = None
        self.first_token_at: float | None = None

    @property
    def length(self) -> int:
        """How many ids there are, prompt and output."""
        return self.num_prompt + self.sampler.num_output

    def ids(self, start: int, stop: int) -> list[int]:
        """Return some of the ids, prompt and output."""
        num_prompt = self.num_prompt
        if start >= num_prompt:
            return self.sampler.output(start - num_prompt, stop - num_prompt)
        prompt = self.request.token_ids[start : min(stop, num_prompt)]
        return prompt + self.sampler.output(0, max(0, stop - num_prompt))

    @property
    def is_remote(self) -> bool:
        """Whether the prompt's KV is still to come from another engine."""
        return self.request.leg is Leg.DECODE and not self.loaded

    @property
    def num_to_compute(self) -> int:
        """How many ids have no KV yet."""
        return self.length - self.num_computed

    def allocate(self, pool: BlockPool, block_size: int, now: float) -> bool:
        """Take blocks for all ids, cached ones first; return whether there were any."""
        length = self.length
        num_reusable = (length - 1) // block_size  # the last id is always computed
        if len(self.hashes) != num_reusable:  # else it has been tried before
            reusable = self.ids(0, num_reusable * block_size)
            self.hashes = block_hashes(pack_ids(reusable), block_size, self.root)
        got = pool.acquire(self.hashes, -(-length // block_size))
        if got is None:
            return False
        self.blocks, num_hits = got
        self.capacity = len(self.blocks) * block_size
        self.num_computed = num_hits * block_size
        if self.scheduled_at is None:
            self.scheduled_at = now
            self.num_cached = self.num_computed
        return True

    def computed(self, pool: BlockPool) -> None:
        """Note that all ids have KV: from now on the full blocks can be found."""
        self.num_computed = self.length
        if self.is_old:
            return
        for block, block_hash in zip(self.blocks, self.hashes, strict=False):
            pool.register(block, block_hash, self.request.lora)

    def grow(self, pool: BlockPool, block_size: int) -> bool:
        """Take blocks for ids beyond the capacity; return whether there were any."""
        while self.length > self.capacity:
            self.register_full(pool, block_size)
            block = pool.grow()
            if block is None:
                return False
            self.blocks.append(block)
            self.capacity += block_size
        return True

    def register_full(self, pool: BlockPool, block_size: int) -> None:
        """Let the last block be found, if the ids have outgrown it: it is computed."""
        index = len(self.hashes)
        if index == len(self.blocks) or self.length <= self.capacity:
            return
        parent = self.hashes[-1] if self.hashes else self.root
        start = index * block_size
        block_hash = next_hash(parent, pack_ids(self.ids(start, start + block_size)))
        self.hashes.append(block_hash)
        if not self.is_old:
            pool.register(self.blocks[index], block_hash, self.request.lora)

    def release(self, pool: BlockPool) -> None:
        """Give all blocks back."""
        pool.release(self.blocks)
        self.blocks = []
        self.capacity = 0
        self.chunk = 0
        self.num_computed = 0
        self.is_old = False  # it is computed anew, or not at all

    def end(
        self,
        reason: FinishReason,
        now: float,
        *,
        rule: Rule | None = None,
        handover: JsonObject | None = None,
        error_kind: ErrorKind | None = None,
        error: str = "",
    ) -> EngineFinished:
        """Return the end of this sequence.

        Args:
            reason: Why it ends.
            now: The engine's clock.
            rule: Given where prompt log probabilities are due.
            handover: Of a prefill leg whose blocks are held.
            error_kind: With ``FinishReason.ERROR``.
            error: One sentence, likewise.
        """
        request = self.request
        width = request.sampling.prompt_logprobs
        wanted: Logprobs | None = None
        if rule is not None and width is not None:
            wanted = prompt_logprobs(request.prompt_token_ids, width, rule)
        scheduled_at = now if self.scheduled_at is None else self.scheduled_at
        first_token_at = now if self.first_token_at is None else self.first_token_at
        return EngineFinished(
            request_id=request.request_id,
            reason=reason,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=self.num_cached,
            stop_reason=self.sampler.stop_reason,
            error_kind=error_kind,
            error=error,
            prompt_token_ids=request.prompt_token_ids,
            handover=handover,
            prompt_logprobs=wanted,
            queue_s=scheduled_at - self.arrived_at,
            prefill_s=max(0.0, first_token_at - scheduled_at),
        )
