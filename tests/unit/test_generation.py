"""One sequence through its legs, on fake links: who hears what, and what is freed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from tokenwire.frontend.errors import ApiError
from tokenwire.frontend.generation import Generation
from tokenwire.frontend.job import End, Job
from tokenwire.frontend.link import Link
from tokenwire.frontend.metrics import Metrics
from tokenwire.frontend.pool import Pool, Route
from tokenwire.frontend.reply import Reply
from tokenwire.protocol.messages import (
    ErrorKind,
    Finished,
    FinishReason,
    JsonObject,
    Leg,
    Logprobs,
    Sampling,
    Submit,
    Tokens,
)
from tokenwire.protocol.tokens import pack_ids

PROMPT = [5, 6, 7]
KV: JsonObject = {"blocks": [1]}


@dataclass(eq=False)  # as hashable as a link
class FakeLink:
    """A worker that answers when it is told to."""

    worker_id: str
    weight_version: str | None = "default"
    submits: list[Submit] = field(default_factory=list[Submit])
    replies: list[Reply] = field(default_factory=list[Reply])
    cancelled: list[str] = field(default_factory=list[str])

    def submit(self, message: Submit, reply: Reply) -> None:
        """Keep the request."""
        self.submits.append(message)
        self.replies.append(reply)

    def cancel(self, request_id: str) -> None:
        """Keep the id."""
        self.cancelled.append(request_id)


@dataclass
class FakePool:
    """A pool of one route."""

    prefill: FakeLink | None
    decode: FakeLink
    incarnation: str = "test"
    released: list[JsonObject] = field(default_factory=list[JsonObject])

    def route(self, exclude: frozenset[Any]) -> Route:
        """Return the route, without what is excluded."""
        if self.decode in exclude:
            raise ApiError(503, "nobody is left")
        prefill = None if self.prefill in exclude else self.prefill
        return Route(cast("Link", self.decode), cast("Link | None", prefill))

    def release_kv(self, request_id: str, handover: JsonObject) -> bool:
        """Keep the hand-over."""
        del request_id
        self.released.append(handover)
        return True


@dataclass
class RecordingSink:
    """Keeps what a generation brings."""

    token_ids: list[int] = field(default_factory=list[int])
    ends: list[End] = field(default_factory=list[End])

    def tokens(
        self, token_ids: list[int], logprobs: Logprobs | None, end: End | None
    ) -> None:
        """Keep ids, and the end."""
        del logprobs
        self.token_ids += token_ids
        if end is not None:
            self.ends.append(end)

    def ended(self, end: End) -> None:
        """Keep the end."""
        self.ends.append(end)


@dataclass
class Run:
    """A generation that has begun, and everything around it."""

    generation: Generation
    sink: RecordingSink
    pool: FakePool

    @property
    def decode(self) -> FakeLink:
        """The worker of the output."""
        return self.pool.decode

    @property
    def prefill(self) -> FakeLink:
        """The worker of the prompt."""
        assert self.pool.prefill is not None
        return self.pool.prefill

    def handed_over(self) -> None:
        """Let the prefill leg end."""
        end = finished(FinishReason.LENGTH, 1, handover=KV)
        self.prefill.replies[-1].tokens(tokens(0, 9), end)


def begin(*, disaggregated: bool) -> Run:
    """Return a generation on one worker, or on two."""
    prefill = FakeLink("prefill") if disaggregated else None
    pool = FakePool(prefill, FakeLink("decode"))
    sink = RecordingSink()
    job = Job(PROMPT, Sampling(max_tokens=9, temperature=0.0), echo_prompt=True)
    generation = Generation(job, sink, cast("Pool", pool), Metrics())
    generation.start()
    return Run(generation, sink, pool)


def tokens(index: int, *token_ids: int) -> Tokens:
    """Return new ids."""
    return Tokens("r", index, pack_ids(token_ids))


def finished(reason: FinishReason, num_tokens: int, **fields: Any) -> Finished:
    """Return the end of a leg."""
    return Finished("r", reason, num_tokens, **fields)


@pytest.mark.parametrize("with_tokens", [False, True])
def test_a_stop_string_waits_for_what_the_worker_knows(with_tokens: bool) -> None:
    """The one end comes with the leg's, whatever else crosses the cancel."""
    run = begin(disaggregated=False)
    reply = run.decode.replies[0]
    reply.tokens(tokens(0, 8), None)

    assert run.generation.stop_here() is None
    assert run.decode.cancelled == [run.decode.submits[0].request_id]
    end = finished(FinishReason.ABORT, 2, num_cached_tokens=2)
    if with_tokens:
        reply.tokens(tokens(1, 9), end)
    else:
        reply.tokens(tokens(1, 9), None)
        reply.finished(end)

    assert run.sink.token_ids == [8]
    assert [end.num_cached_tokens for end in run.sink.ends] == [2]
    assert run.sink.ends[0].error is None
    assert run.sink.ends[0].prompt_token_ids == PROMPT


def test_a_stop_string_is_a_good_end_also_when_the_worker_dies() -> None:
    """All of the output was there: no error, and no other worker is tried."""
    run = begin(disaggregated=False)
    run.decode.replies[0].tokens(tokens(0, 8), None)
    run.generation.stop_here()
    run.decode.replies[0].lost("gone")

    [end] = run.sink.ends
    assert end.error is None
    assert end.prompt_token_ids == PROMPT
    assert len(run.decode.submits) == 1


def test_a_stop_string_behind_a_hand_over_waits_for_nobody() -> None:
    """The prefill worker has told everything before."""
    run = begin(disaggregated=True)
    run.handed_over()
    run.decode.replies[0].tokens(tokens(0, 8), None)

    assert run.generation.stop_here() is not None
    run.decode.replies[0].finished(finished(FinishReason.ABORT, 1))
    assert run.sink.ends == []


def test_the_engine_says_whether_a_first_token_ends_the_output() -> None:
    """Its stop tokens may be others than a config file names; then KV is freed."""
    run = begin(disaggregated=True)
    end = finished(FinishReason.STOP, 1, handover=KV, stop_reason=9)
    run.prefill.replies[0].tokens(tokens(0, 9), end)

    assert run.sink.token_ids == [9]
    assert [end.reason for end in run.sink.ends] == [FinishReason.STOP]
    assert run.pool.released == [KV]
    assert run.decode.submits == []


@pytest.mark.parametrize("kind", [ErrorKind.BUSY, ErrorKind.DRAINING])
def test_a_refusal_that_crosses_the_cancel_frees_the_kv(kind: ErrorKind) -> None:
    """A decode worker that never took the leg frees nothing: somebody else must."""
    run = begin(disaggregated=True)
    run.handed_over()
    assert run.decode.submits[0].leg is Leg.DECODE
    run.generation.cancel()

    run.decode.replies[0].finished(finished(FinishReason.ERROR, 0, error_kind=kind))

    assert run.pool.released == [KV]
    assert run.sink.ends == []
