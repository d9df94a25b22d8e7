"""What is known of a sequence when it ends: where it ran, when, and what it cost."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TypeVar

from tokenwire.protocol.captures import saved_path
from tokenwire.protocol.messages import (
    BY_PAUSE,
    Finished,
    FinishReason,
    JsonObject,
    Recalled,
)
from tokenwire.protocol.tokens import TOKEN_BYTES, unpack_ids

from .checkpoint import Holder
from .continuation import prompt_rows
from .contract import holder_of
from .job import End, Job
from .kept import History
from .link import Link
from .router import Route

__all__ = ["Record", "discard"]

T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class Saved:
    """What a worker has saved of a request, for its client."""

    link: Link
    kv_transfer_params: JsonObject

    @property
    def path(self) -> str | None:
        """Where it is, if that is a file."""
        return saved_path(self.kv_transfer_params)

    def told(self) -> None:
        """Let it be the client's: it has heard of it."""
        if self.path is not None:
            self.link.client_knows(self.path)

    def discard(self) -> None:
        """Have it deleted: the client will not hear of it."""
        if self.path is not None:
            self.link.discard(self.path)


def discard(link: Link, end: Finished) -> None:
    """Have deleted what was saved for a client that has left."""
    if end.kv_transfer_params is not None:
        Saved(link, end.kv_transfer_params).discard()


class Record:
    """The history of one sequence, over all its legs.

    The prompt's part of an end comes from whoever computed the prompt alone. What goes
    on elsewhere computes it again, and finds the request's own blocks in a cache.
    """

    __slots__ = (
        "_first_token_at",
        "_handover_at",
        "_holders",
        "_job",
        "_kept_params",
        "_num_cached_tokens",
        "_origin",
        "_started_at",
        "_weight_versions",
        "moved",
        "prefill_end",
        "prefill_worker_id",
        "route",
        "saved",
        "weight_version",
    )

    def __init__(self, job: Job) -> None:
        self._job = job
        self._origin: Finished | None = None  # of the prompt alone
        self._num_cached_tokens = 0  # where the output began
        self._kept_params: JsonObject | None = (
            None  # of what is no longer ours to delete
        )
        self._started_at = time.monotonic()
        self._handover_at = 0.0
        self._first_token_at: float | None = None
        self._weight_versions: list[tuple[int, str]] = []
        self._holders: list[tuple[int, Holder]] = []  # from which id on who has them
        self.weight_version: str | None = None  # of the newest id
        self.route: Route | None = None  # of the newest legs
        self.prefill_end: Finished | None = None  # whose KV the decode leg reads
        self.saved: Saved | None = None  # until its client is told, or has left
        self.moved = False  # the output has gone on at another worker
        self.prefill_worker_id = ""  # of what another frontend had

    @property
    def num_cached_tokens(self) -> int:
        """What did not have to be computed before the first token."""
        origin = self._origin
        return self._num_cached_tokens if origin is None else origin.num_cached_tokens

    def prefilled(self, link: Link, end: Finished, *, is_prompt_alone: bool) -> None:
        """Take note that a prefill leg has ended well."""
        self.prefill_end = end
        if end.kv_transfer_params is not None:
            self.saved = Saved(link, end.kv_transfer_params)
        self._handover_at = time.monotonic()
        if is_prompt_alone:
            self._origin = end

    def told(self) -> None:
        """Take note that the client has been told of what was saved: it is its own."""
        saved, self.saved = self.saved, None
        if saved is not None:
            saved.told()
            self._kept_params = saved.kv_transfer_params

    def discard(self) -> None:
        """Have deleted what was saved, unless the client has been told of it."""
        saved, self.saved = self.saved, None
        if saved is not None:
            saved.discard()

    def first_token(self, num_cached_tokens: int, *, handed_over: bool) -> float | None:
        """Take note of a leg's first token; return what its hand-over took, in s.

        None: nothing was handed over, or this is not the output's first token.
        """
        if self._first_token_at is not None:
            return None
        self._num_cached_tokens = num_cached_tokens
        self._first_token_at = time.monotonic()
        return self._first_token_at - self._handover_at if handed_over else None

    def computed_by(self, first_index: int, link: Link) -> None:
        """Take note of whose ids come from *first_index* on."""
        holder = holder_of(link)
        if holder is not None:
            self._holders.append((first_index, holder))

    def holder(self, num_tokens: int) -> Holder | None:
        """Return who has computed the first *num_tokens* new ids; None: nobody yet."""
        return _at(self._holders, num_tokens)

    def weight_version_of(self, num_tokens: int) -> str | None:
        """Return of which weights the last of *num_tokens* new ids is; None: of none."""
        return _at(self._weight_versions, num_tokens)

    def weights(self, first_index: int, weight_version: str | None) -> None:
        """Take note that ids from *first_index* on are of other weights than before."""
        self.weight_version = weight_version
        if weight_version is not None:
            self._weight_versions.append((first_index, weight_version))

    @property
    def history(self) -> History:
        """What is known before the next leg brings anything."""
        return History(
            num_cached_tokens=(
                None if self._first_token_at is None else self._num_cached_tokens
            ),
            origin=self._origin,
            saved=(
                self._kept_params
                if self.saved is None
                else self.saved.kv_transfer_params
            ),
            moved=self.moved,
            prefill_worker_id=self._prefill_worker_id,
            weight_versions=list(self._weight_versions),
            holders=list(self._holders),
        )

    def restore(self, history: History, link: Link, kept: Recalled) -> None:
        """Take what another frontend knew, and what the worker has brought since.

        Args:
            history: As it was when the worker was asked.
            link: That worker's.
            kept: What it has brought.
        """
        self.route = Route(link)
        self.prefill_worker_id = history.prefill_worker_id
        self._origin = history.origin
        self.moved = history.moved
        self._kept_params = history.saved
        if history.num_cached_tokens is not None:
            self.first_token(history.num_cached_tokens, handed_over=False)
        elif kept.num_new_tokens:
            self.first_token(kept.num_cached_tokens, handed_over=False)
        num_tokens = len(kept.token_ids) // TOKEN_BYTES
        num_earlier = len(self._job.prompt_token_ids) + len(self._job.output_token_ids)
        first = num_tokens - kept.num_new_tokens - num_earlier
        since = [(first + index, version) for index, version in kept.weight_versions]
        self._holders = list(history.holders)
        if kept.num_new_tokens:
            self.computed_by(first, link)
        for index, version in [*history.weight_versions, *since]:
            if version != self.weight_version:
                self.weights(index, version)

    def worker_ids(self, *, is_prefilling: bool) -> tuple[str, str]:
        """Return the workers of its prompt, where another one has that, and of its output.

        Args:
            is_prefilling: The worker of the output is yet to be chosen.
        """
        decode = "" if self.route is None else self.route.decode.worker_id
        prefill = self._prefill_worker_id
        return prefill, "" if is_prefilling or prefill == decode else decode

    @property
    def _prefill_worker_id(self) -> str:
        route = self.route
        if route is not None and route.prefill is not None:
            return route.prefill.worker_id
        return self.prefill_worker_id

    def good_end(self, finished: Finished | None, link: Link | None = None) -> End:
        """Return the end of an output that a worker, or a stop string, completed.

        Args:
            finished: What the worker said; None if nobody waited for that.
            link: That worker's.
        """
        if link is not None and finished is not None and finished.kv_transfer_params:
            self.saved = Saved(link, finished.kv_transfer_params)
        end = self.end(finished.reason if finished is not None else FinishReason.STOP)
        if finished is not None:
            if finished.stop_reason != BY_PAUSE:
                end.stop_reason = finished.stop_reason
            end.kv_transfer_params = finished.kv_transfer_params
        source = self._origin or finished
        if source is not None:
            num_prompt_tokens = len(self._job.prompt_token_ids)
            end.num_cached_tokens = source.num_cached_tokens
            if self.moved and self._origin is None:
                end.num_cached_tokens = self._num_cached_tokens
            end.prompt_logprobs = prompt_rows(source.prompt_logprobs, num_prompt_tokens)
            end.timing["queue_ms"] = 1e3 * source.queue_s
            end.timing["prefill_ms"] = 1e3 * source.prefill_s
            if source.prompt_token_ids is not None:
                end.prompt_token_ids = unpack_ids(source.prompt_token_ids)
        if end.prompt_token_ids is None and self._job.echo_prompt:
            end.prompt_token_ids = self._job.prompt_token_ids  # no worker said it
        if self.saved is not None and end.kv_transfer_params is None:
            end.kv_transfer_params = self.saved.kv_transfer_params
        if end.kv_transfer_params is None:
            end.kv_transfer_params = self._kept_params
        return end

    def end(self, reason: FinishReason) -> End:
        """Return an end with what is known at any time."""
        now = time.monotonic()
        end = End(reason, num_prompt_tokens=len(self._job.prompt_token_ids))
        end.timing["total_ms"] = 1e3 * (now - self._started_at)
        if self._first_token_at is not None:
            end.timing["ttft_ms"] = 1e3 * (self._first_token_at - self._started_at)
        if self.route is not None:
            prefill_worker_id = self._prefill_worker_id
            if prefill_worker_id:
                end.worker_ids["prefill_worker_id"] = prefill_worker_id
            decode = self.route.decode
            end.worker_ids["decode_worker_id"] = decode.worker_id
            end.weight_version = self.weight_version or decode.weight_version
        end.weight_versions = self._weight_versions
        return end


def _at(changes: list[tuple[int, T]], num_tokens: int) -> T | None:
    """Return what holds for the last of *num_tokens* ids, the first if there is none."""
    found = [value for index, value in changes if not index or index < num_tokens]
    return found[-1] if found else None
