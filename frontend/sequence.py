"""A sequence as it stands: prompt and output, and what its next worker is asked for."""

from __future__ import annotations

import time

from tokenwire.protocol.messages import (
    JOURNAL,
    JsonObject,
    Leg,
    Logprobs,
    Recalled,
    Submit,
    Trace,
)
from tokenwire.protocol.tokens import TOKEN_BYTES, pack_ids, unpack_ids

from . import legs
from .continuation import Ended, ended_by, is_plain, meets, needed
from .job import Cached, Job
from .kept import History
from .link import Link
from .prefixes import Chain
from .record import Record
from .router import Needs
from .rows import joined
from .submission import submission

__all__ = ["Sequence"]


class Sequence:
    """Grows by what its workers bring.

    Args:
        job: What was asked for.
    """

    __slots__ = (
        "_cached",
        "_job",
        "_num_submits",
        "chain",
        "logprobs",
        "output",
        "record",
    )

    def __init__(self, job: Job) -> None:
        self.record = Record(job)
        self.output = bytearray(pack_ids(job.output_token_ids))
        """(num_tokens,) packed: the ids so far, from whichever workers; the same object
        for as long as the sequence lives."""
        self.logprobs: list[Logprobs] = []
        """Of the new ids, where they are kept and were asked for."""
        ahead = job.ahead
        made = None if ahead is None else ahead.chain.copy()
        self.chain = made or Chain(job.cache_salt, job.lora)
        self._job = job
        # Who has computed it so far, the newest first: two prefill workers at most.
        self._cached = [] if job.cached is None else [job.cached]
        self._num_submits = 0  # to those who keep it

    @property
    def num_tokens(self) -> int:
        """Ids of the output so far, from whichever workers, and before them."""
        return len(self.output) // TOKEN_BYTES

    @property
    def num_new(self) -> int:
        """Ids that this generation has brought."""
        return self.num_tokens - len(self._job.output_token_ids)

    @property
    def new_token_ids(self) -> list[int]:
        """The same ids, (num_new,)."""
        return unpack_ids(bytes(self.output))[len(self._job.output_token_ids) :]

    @property
    def packed(self) -> bytes:
        """The whole sequence so far, packed."""
        ahead = self._job.ahead
        prompt = pack_ids(self._job.prompt_token_ids) if ahead is None else ahead.packed
        return prompt + self.output

    @property
    def ended(self) -> Ended | None:
        """Why it needs nothing more, as its ids say; None: it does."""
        job = self._job
        return ended_by(job.sampling, unpack_ids(bytes(self.output)), job.end_ids)

    @property
    def wants_capture(self) -> bool:
        """Whether the prompt's hidden states are still to be saved."""
        return self._job.capture and self.record.saved is None

    def needs(self) -> Needs:
        """Return what its next worker must be able to do."""
        job, has_output = self._job, bool(self.num_tokens)
        return Needs(
            job.session_id,
            job.lora,
            captures=self.wants_capture,
            exactness=needed(job) if has_output else "",
            prefers_exact=has_output and not is_plain(job.sampling),
            has_output=has_output,
            cached=tuple(self._cached),
        )

    def is_last(self, link: Link, needs: Needs) -> bool:
        """Return whether *link*'s worker can bring the one token that is left."""
        if self._job.sampling.max_tokens - self.num_tokens != 1:
            return False
        fits = bool(link.exactness) or not needs.prefers_exact
        return fits and meets(link.exactness, needs.exactness)

    def submit(
        self,
        leg: legs.Leg,
        kind: Leg,
        packed: bytes,
        handover: JsonObject | None,
        handover_update: int | None,
        trace: Trace | None = None,
    ) -> Submit:
        """Return the message for one leg.

        Args:
            leg: Whose it is.
            kind: Which leg that is.
            packed: The whole sequence so far.
            handover: See ``Submit``.
            handover_update: See ``Submit``.
            trace: See ``Submit``.
        """
        link, keeping = leg.link, self._job.keeping
        keep = None
        if keeping is not None and kind is not Leg.PREFILL and link.can(JOURNAL):
            self._num_submits += 1
            logprobs = joined(self.logprobs)
            keep = keeping.keep(self._num_submits, self.record.history, logprobs)
        return submission(
            self._job,
            leg.request_id,
            link,
            kind,
            packed,
            self.num_tokens,
            handover=handover,
            handover_update=handover_update,
            captures=self.wants_capture and kind is not Leg.DECODE and link.captures,
            keep=keep,
            trace=trace,
        )

    def follow(self, link: Link, kept: Recalled, history: History) -> None:
        """Take what another frontend had, and what the worker has brought since.

        Args:
            link: Of the worker.
            kept: All that it has.
            history: What others had brought before.
        """
        num_prompt_bytes = len(self._job.prompt_token_ids) * TOKEN_BYTES
        self.output[:] = kept.token_ids[num_prompt_bytes:]
        self.logprobs = [] if kept.logprobs is None else [kept.logprobs]
        self.record.restore(history, link, kept)
        self._num_submits = kept.epoch

    def sent(self, link: Link, packed: bytes) -> None:
        """Note that *link*'s worker was sent all of it: its cache is about to have it."""
        link.promised(self.chain, packed, time.monotonic())

    def remember(self, link: Link) -> None:
        """Note that *link*'s worker has all of it in its cache now."""
        if link.blocks is not None or link.prefixes is None:
            return  # the worker tells, or it does not matter
        if self.chain.hashes or self._job.comes_back:  # else nobody looks for it
            self.chain.extend(self.packed)
            link.prefixes.add(self.chain)

    def computed_by(self, link: Link) -> None:
        """Note that *link*'s worker has computed all of it: it may go on from there."""
        card = link.card
        if card is not None:
            num_tokens = len(self._job.prompt_token_ids) + self.num_tokens
            new = Cached(card.worker_id, card.incarnation, num_tokens)
            self._cached = [new, *self._cached[:1]]
