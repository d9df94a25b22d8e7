"""A request that goes on from output it has had: what it brings, and whether it may.

Laws:
- Output is taken as ids, and is never tokenized anew.
- What differs from where the output came is refused by its name, before a worker hears
  of it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from tokenwire.protocol.messages import Role

from .checkpoint import (
    Checkpoint,
    Contract,
    SamplingParams,
    check_hashes,
    ids_sha256,
    json_sha256,
    read_checkpoint,
)
from .continuation import drifts, meets, needed
from .contract import (
    check_contract,
    check_sampling,
    differences,
    environment_of,
    on_worker,
    promise,
)
from .job import Cached, Job
from .kept import Known
from .nvext import Nvext
from .peer import Peer
from .policy import Policy
from .pool import Pool
from .resume_errors import (
    PARAM,
    checkpoint_forbidden,
    exactness_unavailable,
    invalid_resume,
    mismatch,
    resume_too_large,
)
from .tokenizer import TextModel

__all__ = ["Resume", "Resumed", "read_resume"]


HELD_S = 30 * 60
"""From a generation's beginning on, for how long its KV is looked for where it was. On a
busy worker others have taken its place by then. A guess that is wrong has a decode worker
compute what a prefill worker should."""

MAX_ID = 2**32 - 1
"""The largest that the wire has a form for; the vocabulary is looked at later."""


@dataclass(slots=True, frozen=True)
class Resumed:
    """How exactly an output goes on: of ``nvext.resume``."""

    exactness: str
    downgrades: list[str]  # what it is less exact for


@dataclass(slots=True, frozen=True)
class Resume:
    """What a request goes on from; right by itself, not yet compared with the request."""

    output_token_ids: list[int]  # (num_output_tokens,)
    checkpoint: Checkpoint | None = None
    prompt_token_ids: list[int] | None = None  # (num_prompt_tokens,)
    contract: str | None = None  # the hash

    @property
    def frontends_seed(self) -> int | None:
        """The seed that a frontend had chosen; None: none had."""
        if self.checkpoint is None:
            return None
        is_ours = self.checkpoint.state.rng.seed_source == "frontend"
        return self.checkpoint.sampling.seed if is_ours else None

    @property
    def cumulative_logprob(self) -> float | None:
        """Of the output; None: nobody knows."""
        if not self.output_token_ids:
            return 0.0
        if self.checkpoint is None:
            return None
        return self.checkpoint.state.cumulative_logprob

    def cached(self, num_prompt_tokens: int, now: float) -> Cached | None:
        """Return who may have all of it cached; None: nobody knows.

        Args:
            num_prompt_tokens: Of the prompt before the output.
            now: Unix seconds.
        """
        checkpoint = self.checkpoint
        if checkpoint is None or checkpoint.holder is None:
            return None
        if now - checkpoint.identity.created > HELD_S:
            return None
        num_tokens = num_prompt_tokens + len(self.output_token_ids)
        holder = checkpoint.holder
        return Cached(holder.worker_id, holder.incarnation, num_tokens)

    def check(
        self, job: Job, contract: Contract, params: SamplingParams, pool: Pool
    ) -> None:
        """Refuse to go on with something else than what was begun.

        Args:
            job: The request's sequence.
            contract: What the request itself says of it.
            params: Its sampling parameters.
            pool: Its workers; each that may serve it must fit.

        Raises:
            ApiError: 400, 409, 413; 503: there is no worker to compare with.
        """
        peers = candidates(pool, job.lora)
        if not peers:
            raise pool.no_worker()
        limit = pool.max_model_len or 0
        if len(self.output_token_ids) > limit:
            raise resume_too_large(len(self.output_token_ids), limit)
        for peer in peers:
            self._check_contract(on_worker(contract, peer))
        self._check_prompt(job.prompt_token_ids)
        if self.checkpoint is not None:
            check_sampling(self.checkpoint.sampling, params, "checkpoint.sampling")
        if len(self.output_token_ids) > params.max_tokens:
            msg = (
                f"{len(self.output_token_ids)} output tokens are to be resumed, "
                f"max_tokens is {params.max_tokens} of the whole output"
            )
            raise invalid_resume(msg)
        self._check_ids(contract.vocab_size)
        self._check_exactness(job, pool, peers)

    def resumed(self, job: Job, peer: Peer | None) -> Resumed:
        """Return how exactly *job* goes on at a worker; None: it is complete already."""
        if peer is None:
            return Resumed("bitwise", [])
        differs: list[str] = []
        if self.checkpoint is not None:
            differs = differences(self.checkpoint.environment, environment_of(peer))
        exactness = promise(job.sampling, peer.exactness, differs)
        why = [] if peer.exactness else drifts(job.sampling)
        if job.sampling.temperature > 0 and job.sampling.seed is None:
            why.append("unseeded")
        return Resumed(exactness, [*differs, *why])

    def _check_contract(self, ours: Contract) -> None:
        if self.checkpoint is not None:
            check_contract(self.checkpoint.contract, ours, "checkpoint.contract")
        if self.contract is not None:
            found = f"sha256:{json_sha256(ours)}"
            if self.contract != found:
                raise mismatch("contract_mismatch", "contract", self.contract, found)

    def _check_prompt(self, prompt_token_ids: list[int]) -> None:
        if self.checkpoint is not None:
            prompt = self.checkpoint.state.prompt
            found = ids_sha256(prompt_token_ids)
            if prompt.sha256 != found:
                field = "checkpoint.state.prompt"
                raise mismatch("prompt_mismatch", field, prompt.sha256, found)
        given = self.prompt_token_ids
        if given is not None and given != prompt_token_ids:
            pairs = zip(given, prompt_token_ids, strict=False)
            agree = next(
                (n for n, (one, other) in enumerate(pairs) if one != other),
                min(len(given), len(prompt_token_ids)),
            )
            raise mismatch(
                "prompt_mismatch",
                "prompt_token_ids",
                f"{len(given)} ids",
                f"{len(prompt_token_ids)} ids, the same until index {agree}",
            )

    def _check_ids(self, vocab_size: int) -> None:
        ids = self.output_token_ids
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            bad = next(one for one in ids if not 0 <= one < vocab_size)
            msg = f"Token id {bad} is out of vocabulary (0..{vocab_size - 1})"
            raise invalid_resume(msg)

    def _check_exactness(self, job: Job, pool: Pool, peers: Sequence[Peer]) -> None:
        if not self.output_token_ids:
            return  # it is a beginning
        level = needed(job)
        if not pool.offers(level):
            what = f"{level} is needed"
            if job.sampling.structured_output is not None:
                what = "a grammar would begin again"
            msg = f"no worker goes on exactly behind output: {what}"
            raise exactness_unavailable(msg)
        asked = job.exactness
        offers = [self.resumed(job, peer) for peer in peers]
        if not any(meets(one.exactness, asked) for one in offers):
            why = sorted({name for one in offers for name in one.downgrades})
            msg = f"no worker goes on {asked}" + (f": {', '.join(why)}" if why else "")
            raise exactness_unavailable(msg)


def candidates(pool: Pool, lora: str) -> list[Peer]:
    """Return the workers that may bring the output, with an adapter if it has one."""
    links = [*pool.usable(Role.AGGREGATED), *pool.usable(Role.DECODE)]
    return [link for link in links if pool.weights.has(link, lora)]


async def read_resume(
    nvext: Nvext | None,
    policy: Policy,
    authorization: str | None,
    model: TextModel,
    known: Known,
) -> Resume | None:
    """Return what a request goes on from; None: it begins.

    Args:
        nvext: The request's.
        policy: Has the keys: which checkpoints are believed.
        authorization: The header of the request.
        model: Has the threads, where long ones are read.
        known: The checkpoint of a generation that it names; and whether all of it was
            accepted before.

    Raises:
        ApiError: 400, it makes no sense; 403, the checkpoint is not this client's, or
            altered; 409, 412, its hashes are not those of its ids.
    """
    given = nvext.resume_from if nvext is not None else None
    if given is None:
        return None
    alone = given.output_token_ids
    body = given.checkpoint
    if [alone, body, given.generation_id].count(None) != 2:
        msg = f"{PARAM} needs one of checkpoint, generation_id and output_token_ids"
        raise invalid_resume(msg)
    if given.generation_id is None and given.seq is not None:
        msg = f"{PARAM}.seq belongs to generation_id"
        raise invalid_resume(msg, f"{PARAM}.seq")
    if alone is not None:
        if alone and not 0 <= min(alone) <= max(alone) <= MAX_ID:
            msg = f"{PARAM}.output_token_ids has a number that is no token id"
            raise invalid_resume(msg)
        return Resume(alone, None, given.prompt_token_ids, given.contract)
    for name in ("prompt_token_ids", "contract"):
        if getattr(given, name) is not None:
            msg = (
                f"{PARAM}.{name} belongs to output_token_ids: a checkpoint has its own"
            )
            raise invalid_resume(msg, f"{PARAM}.{name}")
    if known.checkpoint is not None:
        return Resume(known.checkpoint.state.output.ids, known.checkpoint)
    keys = policy.resume_keys
    keys.refresh()

    def read() -> Checkpoint:
        checkpoint = read_checkpoint(body)
        if known.context is None:
            keys.check(checkpoint, authorization, time.time())
        check_hashes(checkpoint.state)
        return checkpoint

    checkpoint = await model.threads.run(True, read)
    if checkpoint.identity.choice:
        msg = "only the first choice of an answer can be resumed"
        raise checkpoint_forbidden(msg)
    return Resume(checkpoint.state.output.ids, checkpoint)
