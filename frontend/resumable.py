"""What a resumable generation says of itself: numbers, offsets, checkpoints.

Laws:
- Every event of a generation has the next number, in its ``id:`` and, where it is a
  chunk, in ``seq``. That an answer is interrupted is none: the generation may go on.
- The ids of all chunks, joined, are the output; ``token_offset`` is how many of them the
  client has already. A chunk's delta is the fold of its ids, so whoever has seen the
  events up to a number has exactly the output of a checkpoint at that number.
- An end that is not the output's own leaves a checkpoint behind.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from tokenwire.protocol.messages import Logprobs
from tokenwire.protocol.tokens import pack_ids

from .checkpoint import (
    Checkpoint,
    Contract,
    Holder,
    Identity,
    Output,
    Prompt,
    Rng,
    SamplingParams,
    SeedSource,
    State,
    ids_sha256,
    json_sha256,
)
from .contract import Terms, environment_of, holder_of, on_worker, promise
from .errors import ApiError
from .kept import FORM, Context, Keeping
from .logprobs import sampled_logprobs
from .nvext import CheckpointOptions, ResumableOptions
from .peer import Peer
from .resume import Resume

__all__ = ["OWN_ENDS", "RETRY_MS", "Origin", "Resumable", "Source"]

KEPT_S = 600.0
"""For how long workers keep a generation unless its client says otherwise: longer than a
frontend's restart, and a person's patience."""

OWN_ENDS = frozenset({"cancelled", "disconnected"})
"""The errors' codes of early ends that are the generation's own: its worker keeps them."""

RETRY_MS = 2_000
"""When an EventSource is to come back: a worker's death is noticed and made up for in
less, a frontend's restart is not."""

INTERRUPTED = {502: "worker_lost", 503: "worker_lost", 504: "deadline"}
"""Why a generation ended early, by the error's status; what else fails would again."""

INTERRUPTIONS = OWN_ENDS | {"draining", "taken_over"}
"""The same by the error's code, where that says it."""


class Source(Protocol):
    """Who generates, as far as it is told; a ``Generation``."""

    @property
    def peer(self) -> Peer | None:
        """The worker of the output; None: there is none yet."""
        ...

    @property
    def num_cached_tokens(self) -> int:
        """Of prompt and earlier output: what did not have to be computed."""
        ...

    def holder(self, num_tokens: int) -> Holder | None:
        """Return who has computed the first *num_tokens* new ids; None: nobody yet."""
        ...

    def weight_version_of(self, num_tokens: int) -> str | None:
        """Return of which weights the last of *num_tokens* new ids is; None: of none."""
        ...


@dataclass(slots=True, frozen=True)
class Origin:
    """Where a generation comes from."""

    id: str
    root: str  # of the first of its line
    created: int  # Unix seconds
    expires: int
    parent: str | None = None  # what it resumes; None: nothing, or nobody has said
    seed_source: SeedSource | None = None
    cumulative_logprob: float | None = 0.0  # of the earlier output; None: not known


class Resumable:
    """One generation that can be resumed.

    Args:
        terms: Its request; also has the prompt and the output before it.
        params: Its sampling parameters.
        origin: Where it comes from.
        options: When and how it is to tell checkpoints.
        sign: Signs them for its client.
        resume: What it goes on from; None: nothing.
    """

    def __init__(
        self,
        terms: Terms,
        params: SamplingParams,
        origin: Origin,
        options: CheckpointOptions,
        sign: Callable[[Checkpoint], Checkpoint],
        resume: Resume | None = None,
    ) -> None:
        self.origin = origin
        self.source: Source | None = None
        """Set by who runs it; None: no worker is asked."""
        self._terms = terms
        self._params = params
        self._options = options
        self._sign = sign
        self._resume = resume
        self.told_seq = 0
        """Of the last event that its client has from another answer: none up to it is
        sent."""
        self._seq = 0  # of the last event
        self._contract: Contract | None = None  # hashed once
        self._prompt: Prompt | None = None
        self._is_begun = False  # the first chunk is out
        prior = terms.job.output_token_ids
        self._token_ids = list(prior)
        self._hash = hashlib.sha256(pack_ids(prior))
        self._logprob = origin.cumulative_logprob
        self._due_at = self._next_due()

    @property
    def headers(self) -> dict[str, str]:
        """Those of its answer."""
        return {"X-Generation-Id": self.origin.id}

    @property
    def num_events(self) -> int:
        """How many there have been."""
        return self._seq

    @property
    def outlives(self) -> bool:
        """Whether it goes on when its client is gone."""
        options = self._options_of_life
        return options is not None and options.on_disconnect == "continue"

    def keeping(self, route: str, body: bytes, owner: bytes) -> Keeping:
        """Return how workers are to keep it.

        Args:
            route: Of its request.
            body: The same.
            owner: Whose it is.
        """
        job, origin, options = self._terms.job, self.origin, self._options_of_life
        nvext = self._terms.request.nvext
        given = nvext.resume_from if nvext is not None else None
        resumed = None
        if self._resume is not None and given is not None and given.generation_id:
            resumed = self._resume.checkpoint
        ttl_s = options.ttl_s if options is not None else None
        return Keeping(
            owner,
            ttl_s or KEPT_S,
            self.outlives,
            Context(
                FORM,
                route,
                body,
                origin.id,
                origin.created,
                origin.expires,
                job.sampling.max_tokens,
                len(job.prompt_token_ids),
                len(job.output_token_ids),
                job.sampling.seed,
                origin.seed_source,
                self._terms.adapter_update,
                resumed,
            ),
        )

    @property
    def _options_of_life(self) -> ResumableOptions | None:
        nvext = self._terms.request.nvext
        given = nvext.resumable if nvext is not None else None
        return given if isinstance(given, ResumableOptions) else None

    # --- events ----------------------------------------------------------------------

    def event(self, data: bytes) -> bytes:
        """Return an event with its number, the next one; empty if its client has it.

        ``retry:`` stands in the first: alone it would be an event without data, which
        OpenAI's client cannot read.
        """
        self._seq += 1
        if self._seq <= self.told_seq:
            return b""
        retry = b"retry: %d\n" % RETRY_MS if self._seq == 1 else b""
        return b"%sid: %s:%d\n%s" % (retry, self.origin.id.encode(), self._seq, data)

    def aside(self, data: bytes) -> bytes:
        """Return an event that is none of the generation's, with the last one's number.

        Who comes back with that misses nothing of what the generation may bring yet.
        """
        seq = max(self._seq, self.told_seq)
        return b"id: %s:%d\n%s" % (self.origin.id.encode(), seq, data)

    def chunk(
        self, token_ids: list[int], logprobs: Logprobs | None, *, is_last: bool = False
    ) -> dict[str, object]:
        """Return what ``nvext`` of the next chunk says; to be sent by ``event``.

        Args:
            token_ids: Those that the chunk adds.
            logprobs: Theirs, if there are any.
            is_last: It has the finish reason.
        """
        nvext = self._body(token_ids, logprobs)
        nvext["seq"] = self._seq + 1
        if is_last or len(self._token_ids) >= self._due_at:
            self._due_at = self._next_due()
            if self._seq >= self.told_seq:
                nvext["checkpoint"] = self.checkpoint(self._seq + 1)
        return nvext

    def whole(
        self, token_ids: list[int], logprobs: Logprobs | None
    ) -> dict[str, object]:
        """Return what ``nvext`` of an answer that is not streamed says."""
        nvext = self._body(token_ids, logprobs)
        return {**nvext, "checkpoint": self.checkpoint(0)}

    def interruption(self, error: ApiError) -> ApiError | None:
        """Return what a client is told of an end that is not the output's own.

        None: *error* is the request's doing, or a bug; it would come again.
        """
        reason = INTERRUPTED.get(error.status)
        if error.code in INTERRUPTIONS:
            reason = error.code
        if reason is None:
            return None
        retry_after_s = float(error.headers.get("Retry-After", "1"))
        return ApiError(
            error.status,
            error.message,
            kind=error.kind,
            code="generation_interrupted",
            headers=error.headers,
            nvext={
                "reason": reason,
                "resumable": True,
                "retry_after_ms": round(1000 * retry_after_s),
                "checkpoint": self.checkpoint(self._seq),
            },
        )

    def _body(
        self, token_ids: list[int], logprobs: Logprobs | None
    ) -> dict[str, object]:
        nvext: dict[str, object] = {
            "completion_token_ids": token_ids,
            "token_offset": len(self._token_ids),
        }
        if not self._is_begun:
            self._is_begun = True
            nvext["generation"] = self._generation()
            nvext["prompt_token_ids"] = self._terms.job.prompt_token_ids
            if self._resume is not None:
                nvext["resume"] = self._resumed(self._resume)
        self.add(token_ids, logprobs)
        return nvext

    def _generation(self) -> dict[str, object]:
        """Return ``nvext.generation``; what there is not has no key."""
        sampling, peer = self._terms.job.sampling, self._peer
        told: dict[str, object | None] = {
            "id": self.origin.id,
            "parent": self.origin.parent,
            "seed": sampling.seed,
            "seed_source": self.origin.seed_source,
            "prompt_tokens": len(self._terms.job.prompt_token_ids),
            "contract": f"sha256:{json_sha256(self.contract())}",
            "exactness": promise(sampling, peer.exactness if peer is not None else ""),
        }
        return {name: value for name, value in told.items() if value is not None}

    def _resumed(self, resume: Resume) -> dict[str, object]:
        """Return ``nvext.resume``."""
        job, source, peer = self._terms.job, self.source, self._peer
        how = resume.resumed(job, peer)
        num_prior = len(job.output_token_ids)
        num_cached = num_recomputed = 0
        if peer is not None and source is not None:
            num_cached = source.num_cached_tokens
            num_recomputed = len(job.prompt_token_ids) + num_prior - num_cached
        return {
            "prefix_tokens": num_prior,
            "exactness": how.exactness,
            "downgrades": how.downgrades,
            "cached_tokens": num_cached,
            "recomputed_tokens": num_recomputed,
        }

    # --- the state -------------------------------------------------------------------

    @property
    def _peer(self) -> Peer | None:
        return self.source.peer if self.source is not None else None

    def add(self, token_ids: list[int], logprobs: Logprobs | None) -> None:
        """Take note of output that the client is about to have."""
        self._token_ids += token_ids
        self._hash.update(pack_ids(token_ids))
        if token_ids and logprobs is None:
            self._logprob = None
        elif self._logprob is not None and logprobs is not None:
            for logprob in sampled_logprobs(logprobs):  # one sum, whatever the batches
                self._logprob += logprob

    def _next_due(self) -> float:
        """Return how many output ids bring the next checkpoint."""
        every = self._options.every_tokens
        if every is None:
            return float("inf")
        return (len(self._token_ids) // every + 1) * every

    @property
    def request_contract(self) -> Contract:
        """What must be equal where this goes on, but for what is the worker's."""
        if self._contract is None:
            self._contract = self._terms.contract()
        return self._contract

    def contract(self) -> Contract:
        """Return what must be equal where this goes on."""
        source, contract = self.source, self.request_contract
        if source is None or source.peer is None:
            return contract
        contract = on_worker(contract, source.peer)
        # Since then the worker may have got others.
        weight_version = source.weight_version_of(self._num_new)
        if weight_version is None:
            return contract
        return msgspec.structs.replace(contract, weight_version=weight_version)

    @property
    def _holder(self) -> Holder | None:
        source = self.source
        if source is None:
            return None
        return source.holder(self._num_new) or holder_of(source.peer)

    @property
    def _num_new(self) -> int:
        """Ids that this generation has brought."""
        return len(self._token_ids) - len(self._terms.job.output_token_ids)

    def checkpoint(self, seq: int) -> Checkpoint:
        """Return where it stands after event *seq*."""
        job, origin = self._terms.job, self.origin
        token_ids, prompt = list(self._token_ids), job.prompt_token_ids
        if self._prompt is None:
            with_ids = self._options.prompt == "ids"
            self._prompt = Prompt(
                len(prompt), ids_sha256(prompt), prompt if with_ids else None
            )
        is_greedy = job.sampling.temperature == 0
        is_seeded = job.sampling.seed is not None
        return self._sign(
            Checkpoint(
                identity=Identity(
                    id=origin.id,
                    seq=seq,
                    created=origin.created,
                    expires=origin.expires,
                    parent=origin.parent,
                    root=origin.root,
                ),
                contract=self.contract(),
                environment=environment_of(self._peer),
                holder=self._holder,
                sampling=self._params,
                state=State(
                    prompt=self._prompt,
                    output=Output(len(token_ids), self._hash.hexdigest(), token_ids),
                    cumulative_logprob=self._logprob if token_ids else None,
                    rng=Rng(
                        kind="greedy"
                        if is_greedy
                        else ("seeded" if is_seeded else "unseeded"),
                        seed=job.sampling.seed,
                        seed_source=origin.seed_source,
                        draws=0 if is_greedy else len(token_ids),
                    ),
                ),
            )
        )
