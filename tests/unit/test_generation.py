"""One sequence through its legs, on fake links: who hears what, and what is freed."""

from __future__ import annotations

import asyncio
import gc
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import pytest

from support.stack import eventually
from tokenwire.frontend import handover, legs, patience
from tokenwire.frontend.errors import ApiError, no_such_model
from tokenwire.frontend.flows import Flows
from tokenwire.frontend.generation import Generation
from tokenwire.frontend.job import Cached, End, Job
from tokenwire.frontend.link import Link
from tokenwire.frontend.metrics import Metrics
from tokenwire.frontend.pool import Pool
from tokenwire.frontend.prefixes import Chain, Prefixes
from tokenwire.frontend.reply import Reply
from tokenwire.frontend.router import Needs, Route
from tokenwire.protocol.errors import MessageTooLarge
from tokenwire.protocol.messages import (
    AGAIN,
    Card,
    ErrorKind,
    Finished,
    FinishReason,
    JsonObject,
    Leg,
    Logprobs,
    Role,
    Sampling,
    StructuredOutput,
    Submit,
    Tokens,
)
from tokenwire.protocol.tokens import pack_ids, unpack_ids

PROMPT = [5, 6, 7]
KV: JsonObject = {"blocks": [1]}
JOB_FIELDS = (
    "cached",
    "capture",
    "end_ids",
    "exactness",
    "migratable",
    "output_token_ids",
)


@dataclass(eq=False)  # as hashable as a link
class FakeLink:
    """A worker that answers when it is told to."""

    worker_id: str
    weight_version: str | None = "default"
    card: Card | None = None
    update: int = 0
    prefixes: Prefixes = field(default_factory=Prefixes)
    blocks: None = None
    promises: list[bytes] = field(default_factory=list[bytes])
    begun: list[str] = field(default_factory=list[str])
    expected: list[int] = field(default_factory=list[int])  # tokens that are cached
    submits: list[Submit] = field(default_factory=list[Submit])
    replies: list[Reply] = field(default_factory=list[Reply])
    cancelled: list[str] = field(default_factory=list[str])
    captures: bool = False
    exactness: str = ""
    discarded: list[str] = field(default_factory=list[str])
    told_of: list[str] = field(default_factory=list[str])
    watchers: dict[Callable[[str], None], None] = field(
        default_factory=dict["Callable[[str], None]", None]
    )

    def watch(self, lost: Callable[[str], None]) -> None:
        """Keep who is told of the loss."""
        self.watchers[lost] = None

    def unwatch(self, lost: Callable[[str], None]) -> None:
        """Drop who is told of the loss."""
        self.watchers.pop(lost, None)

    def discard(self, hidden_states_path: str) -> None:
        """Keep what is to be deleted."""
        self.discarded.append(hidden_states_path)

    def client_knows(self, hidden_states_path: str) -> None:
        """Keep what the client knows of."""
        self.told_of.append(hidden_states_path)

    def update_of(self, lora: str) -> int:
        """Return the update of the weights."""
        del lora
        return self.update

    def be_lost(self) -> None:
        """Tell who watches."""
        watchers, self.watchers = self.watchers, {}
        for lost in watchers:
            lost("frozen")

    def submit(self, message: Submit, reply: Reply, num_cached_tokens: int = 0) -> None:
        """Keep the request."""
        self.submits.append(message)
        self.replies.append(reply)
        self.expected.append(num_cached_tokens)

    def redirect(self, request_id: str, reply: Reply) -> None:
        """Let another hear what comes."""
        for number, message in enumerate(self.submits):
            if message.request_id == request_id:
                self.replies[number] = reply

    def can(self, capability: str) -> bool:
        """Return that it has all of them."""
        del capability
        return True

    def let_go(self, request_id: str) -> None:
        """Keep the id, as that of a cancel."""
        self.cancelled.append(request_id)

    def began(self, request_id: str) -> None:
        """Keep the id."""
        self.begun.append(request_id)

    def promised(self, chain: Chain, packed: bytes, now: float) -> None:
        """Keep what it is about to have."""
        del chain, now
        self.promises.append(packed)

    def cancel(self, request_id: str) -> None:
        """Keep the id."""
        self.cancelled.append(request_id)


@dataclass
class FakePool:
    """A pool of one route."""

    prefill: FakeLink | None
    decode: FakeLink
    incarnation: str = "test"
    wait_s: float = 60.0
    ready: bool = True
    others: list[FakeLink] = field(default_factory=list["FakeLink"])
    prefillers: list[FakeLink] = field(default_factory=list["FakeLink"])  # beside it
    waiting: list[Callable[[], None]] = field(
        default_factory=list["Callable[[], None]"]
    )
    released: list[JsonObject] = field(default_factory=list[JsonObject])
    asked: list[Needs] = field(default_factory=list[Needs])
    flows: Flows | None = None

    @property
    def router(self) -> FakePool:
        """It chooses, too."""
        return self

    def offers(self, exactness: str) -> bool:
        """Return whether some worker is as exact."""
        links = (self.decode, *self.others)
        return not exactness or any(link.exactness == exactness for link in links)

    def route(
        self, packed: bytes, chain: Chain, exclude: frozenset[Any], needs: Needs
    ) -> Route:
        """Return the route, without what is excluded."""
        self.asked.append(needs)
        chain.extend(packed)
        left = [link for link in (self.decode, *self.others) if link not in exclude]
        if not left:
            raise ApiError(503, "nobody is left")
        prefillers = [one for one in self.usable(Role.PREFILL) if one not in exclude]
        prefill = prefillers[0] if prefillers else None
        return Route(cast("Link", left[0]), cast("Link | None", prefill))

    def usable(self, role: Role) -> list[FakeLink]:
        """Return the prefill workers."""
        assert role is Role.PREFILL
        return [one for one in (self.prefill, *self.prefillers) if one is not None]

    def decode_for(
        self,
        prefill: Any,
        packed: bytes,
        chain: Chain,
        exclude: frozenset[Any],
        needs: Needs,
    ) -> Any:
        """Return who goes on after the prefill worker."""
        del prefill, packed, chain, needs
        left = [link for link in (self.decode, *self.others) if link not in exclude]
        return left[0] if left else None

    def wait(self, resume: Callable[[], None]) -> None:
        """Keep who waits."""
        self.waiting.append(resume)

    def forget(self, resume: Callable[[], None]) -> None:
        """Drop who waits."""
        self.waiting = [one for one in self.waiting if one != resume]

    def come_back(self) -> None:
        """Let all who wait go on."""
        waiting, self.waiting = self.waiting, []
        for resume in waiting:
            resume()

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
        num_cached_tokens = len(self.prefill.replies)  # more with every round
        end = finished(
            FinishReason.LENGTH, 1, handover=KV, num_cached_tokens=num_cached_tokens
        )
        self.prefill.replies[-1].tokens(tokens(0, 9), end)


def begin(
    *, disaggregated: bool, others: int = 0, exact: str = "", **fields: Any
) -> Run:
    """Return a generation on one worker, or on two, with some more to go on at.

    Args:
        disaggregated: Whether there is a prefill worker.
        others: How many more bring output.
        exact: Which workers, by the beginning of their names, go on exactly.
        fields: Of the job or its sampling.
    """
    prefill = FakeLink("prefill") if disaggregated else None
    pool = FakePool(prefill, FakeLink("decode"))
    pool.others = [FakeLink(f"other-{n}") for n in range(others)]
    for link in (pool.decode, *pool.others, *pool.usable(Role.PREFILL)):
        if exact and link.worker_id.startswith(tuple(exact.split())):
            link.exactness = "same_rng"
    sink = RecordingSink()
    job_fields = {name: fields.pop(name) for name in JOB_FIELDS if name in fields}
    sampling = msgspec.structs.replace(
        Sampling(max_tokens=9, temperature=0.0), **fields
    )
    job = Job(PROMPT, sampling, echo_prompt=True, **job_fields)
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


async def test_a_stop_string_found_while_no_worker_is_there_ends_the_wait() -> None:
    """It is found late where a client reads slowly: nothing is asked for any more."""
    run = begin(disaggregated=False)
    run.decode.replies[0].tokens(tokens(0, 8), None)
    run.decode.replies[0].lost("gone")

    assert run.generation.stop_here() is not None
    run.pool.come_back()
    assert len(run.decode.submits) == 1
    assert run.sink.ends == []


def test_a_stop_string_found_while_the_prompt_is_computed_again_ends_it() -> None:
    """The prefill leg may end well before it hears the cancel: its KV is freed."""
    run = begin(disaggregated=True, others=1)
    run.handed_over()
    run.decode.replies[0].tokens(tokens(0, 8), None)
    run.decode.replies[0].lost("gone")
    [other] = run.pool.others

    assert run.generation.stop_here() is None
    run.handed_over()
    assert run.pool.released == [KV]
    assert other.submits == []
    assert [end.error for end in run.sink.ends] == [None]


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


# --- going on elsewhere --------------------------------------------------------------


def test_a_hand_over_that_makes_the_message_too_large_ends_the_request() -> None:
    """One clear error, and the KV is freed: nothing is raised into the link."""
    run = begin(disaggregated=True)

    def too_large(message: Submit, reply: Reply, num_cached_tokens: int = 0) -> None:
        del message, reply, num_cached_tokens
        raise MessageTooLarge("a message of 9 bytes is above the limit of 8")

    run.decode.submit = too_large  # type: ignore[method-assign]
    run.handed_over()
    [end] = run.sink.ends
    assert end.error is not None
    assert end.error.status == 400
    assert "above the limit" in end.error.message
    assert run.pool.released == [KV]


@pytest.mark.pitfall(21)
def test_a_decode_worker_that_takes_nothing_has_its_kv_released_once() -> None:
    """And the prompt is computed anew, elsewhere: the releases are counted."""
    run = begin(disaggregated=True, others=1)

    def busy(message: Submit, reply: Reply, num_cached_tokens: int = 0) -> None:
        raise ConnectionError("it does not take messages")

    run.decode.submit = busy  # type: ignore[method-assign]
    run.handed_over()

    assert run.pool.released == [KV]
    assert len(run.prefill.submits) == 2
    assert run.sink.ends == []


def test_a_prefill_answer_without_kv_is_a_failure() -> None:
    """The decode worker computes the prompt, and the prefill worker is avoided."""
    run = begin(disaggregated=True)
    run.prefill.replies[0].finished(finished(FinishReason.LENGTH, 1))

    [submit] = run.decode.submits
    assert submit.leg is Leg.FULL
    assert run.pool.released == []


def test_an_output_goes_on_at_another_worker() -> None:
    """It gets prompt and output as its prompt, and what is left of the bounds."""
    run = begin(disaggregated=False, others=1, min_tokens=5)
    first = Tokens("r", 0, pack_ids([8, 9]), num_cached_tokens=2)
    run.decode.replies[0].tokens(first, None)
    run.decode.replies[0].lost("gone")

    [other] = run.pool.others
    [submit] = other.submits
    assert unpack_ids(submit.token_ids) == [*PROMPT, 8, 9]
    assert (submit.sampling.max_tokens, submit.sampling.min_tokens) == (7, 3)
    assert submit.request_id != run.decode.submits[0].request_id
    assert not submit.echo_prompt
    other.replies[0].tokens(tokens(0, 4), None)
    end = finished(FinishReason.STOP, 2, num_cached_tokens=5, num_prompt_tokens=5)
    other.replies[0].tokens(tokens(1, 2), end)

    assert run.sink.token_ids == [8, 9, 4, 2]
    [end_] = run.sink.ends
    assert end_.error is None
    assert end_.worker_ids == {"decode_worker_id": "other-0"}
    assert end_.prompt_token_ids == PROMPT
    # What the lost worker had cached: the output's own blocks do not count.
    assert (end_.num_prompt_tokens, end_.num_cached_tokens) == (3, 2)


@pytest.mark.parametrize("kind", [ErrorKind.HANDOVER, ErrorKind.DRAINING])
def test_what_no_request_can_cause_is_not_held_against_it(kind: ErrorKind) -> None:
    """Two workers may be lost besides; only a third one ends it."""
    run = begin(disaggregated=kind is ErrorKind.HANDOVER, others=3)
    heard: list[object] = []

    def tried() -> Reply:
        links = [run.decode, *run.pool.others]
        [reply] = [one for link in links for one in link.replies if one not in heard]
        heard.append(reply)
        return reply

    if kind is ErrorKind.HANDOVER:
        run.handed_over()
    tried().finished(finished(FinishReason.ERROR, 0, error_kind=kind, error="no KV"))
    tried().lost("gone")
    tried().lost("gone")
    assert run.sink.ends == []
    tried().lost("gone")
    assert [end.error is None for end in run.sink.ends] == [False]


def again(kind: ErrorKind, **fields: Any) -> Finished:
    """Return the end of what an Admin had sent again."""
    return finished(FinishReason.ERROR, 0, error_kind=kind, stop_reason=AGAIN, **fields)


@pytest.mark.parametrize("others", [0, 1])
def test_what_is_to_be_sent_again_is_sent_to_the_same_worker(others: int) -> None:
    """At once, as often as it is asked: nobody has failed."""
    run = begin(disaggregated=False, others=others)
    for _ in range(5):
        run.decode.replies[-1].finished(again(ErrorKind.DRAINING, error="old"))
    assert [len(link.submits) for link in (run.decode, *run.pool.others)] == [
        6, *[0] * others
    ]  # fmt: skip
    assert len({submit.request_id for submit in run.decode.submits}) == 6
    assert run.pool.waiting == []
    assert run.sink.ends == []
    end = finished(FinishReason.STOP, 1)
    run.decode.replies[-1].tokens(tokens(0, 8), end)
    assert [one.error for one in run.sink.ends] == [None]


def test_a_pair_is_asked_again_on_both_sides() -> None:
    """KV of a prefill leg that had just ended is released; both stay in use."""
    run = begin(disaggregated=True)
    run.prefill.replies[0].finished(again(ErrorKind.DRAINING, handover=KV))
    assert run.pool.released == [KV]
    run.handed_over()
    run.decode.replies[0].finished(again(ErrorKind.HANDOVER))
    assert run.pool.released == [KV, KV]
    run.handed_over()
    assert len(run.prefill.submits) == 3
    assert [one.leg for one in run.decode.submits] == [Leg.DECODE] * 2


async def test_an_adapter_that_is_gone_is_said_to_be_gone() -> None:
    """Not that workers are busy: to ask again would be of no use."""
    run = begin(disaggregated=False, others=0)
    run.decode.replies[0].tokens(tokens(0, 8), None)
    failed = finished(FinishReason.ERROR, 1, error_kind=ErrorKind.DRAINING, error="no")
    run.decode.replies[0].finished(failed)
    assert run.sink.ends == []  # another worker may have it

    def gone(*_: object, **__: object) -> Route:
        raise no_such_model("a", ["m"])

    run.pool.route = gone  # type: ignore[method-assign]
    run.pool.come_back()
    [end] = run.sink.ends
    assert end.error is not None
    assert (end.error.status, end.error.code) == (404, "model_not_found")
    assert run.pool.waiting == []


def test_a_worker_that_reads_no_kv_costs_two_prefill_workers() -> None:
    """Then it computes the prompt itself, however many prefill workers there are."""
    run = begin(disaggregated=True)
    run.pool.prefillers = [FakeLink(f"prefill-{n}") for n in range(1, 4)]
    failed = finished(FinishReason.ERROR, 0, error_kind=ErrorKind.HANDOVER, error="no")
    for prefill in (run.prefill, run.pool.prefillers[0]):
        end = finished(FinishReason.LENGTH, 1, handover=KV)
        prefill.replies[0].tokens(tokens(0, 9), end)
        run.decode.replies[-1].finished(failed)

    assert [submit.leg for submit in run.decode.submits] == [
        Leg.DECODE, Leg.DECODE, Leg.FULL
    ]  # fmt: skip
    assert run.pool.prefillers[1].submits == run.pool.prefillers[2].submits == []


def test_an_output_goes_on_through_a_hand_over() -> None:
    """A pair's prefill worker computes prompt and output, the decode worker goes on."""
    run = begin(disaggregated=True, others=1)
    run.handed_over()
    run.decode.replies[0].tokens(tokens(0, 8), None)
    run.decode.replies[0].lost("gone")

    assert unpack_ids(run.prefill.submits[1].token_ids) == [*PROMPT, 8]
    run.handed_over()
    [other] = run.pool.others
    assert other.submits[0].leg is Leg.DECODE
    assert unpack_ids(other.submits[0].token_ids) == [*PROMPT, 8]
    assert other.submits[0].sampling.max_tokens == 8
    assert run.pool.released == []
    other.replies[0].tokens(tokens(0, 4), finished(FinishReason.STOP, 1))
    assert [end.num_cached_tokens for end in run.sink.ends] == [1]  # of the first round


def test_who_has_computed_it_is_told_to_routing() -> None:
    """Where it was begun, then each prefill worker, as far as they have come."""
    begun = Cached("begun", "1", 4)
    run = begin(disaggregated=True, others=1, output_token_ids=[4], cached=begun)
    run.prefill.card = Card(
        1, "prefill", "p1", Role.PREFILL, "m", 99, 99, 16, "sim", "1"
    )
    run.handed_over()
    run.decode.replies[0].tokens(tokens(0, 8), None)
    run.decode.replies[0].lost("gone")

    first, second = run.pool.asked
    assert (first.has_output, first.cached) == (True, (begun,))
    assert second.cached == (Cached("prefill", "p1", 4), begun)


def test_a_worker_lost_before_it_read_the_kv_leaves_none_behind() -> None:
    """Also in the second round, when there is output already."""
    run = begin(disaggregated=True, others=2)
    run.handed_over()
    run.decode.replies[0].tokens(tokens(0, 8), None)
    run.decode.replies[0].lost("gone")
    run.handed_over()
    run.pool.others[0].replies[0].lost("gone too")

    assert run.pool.released == [KV]


@pytest.mark.pitfall(18)
async def test_a_read_from_a_lost_prefill_worker_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The decode worker computes the prompt; what the old leg still says is nothing."""
    monkeypatch.setattr(handover, "READ_GRACE_S", 0.0)
    run = begin(disaggregated=True)
    run.handed_over()
    [reading] = run.decode.submits
    run.prefill.be_lost()
    await eventually(lambda: len(run.decode.submits) == 2)

    assert run.decode.cancelled == [reading.request_id]
    assert run.decode.submits[1].leg is Leg.FULL  # the prefill worker is avoided
    assert run.pool.released == [KV]
    old, new = run.decode.replies
    old.tokens(tokens(0, 99), None)
    old.finished(finished(FinishReason.ABORT, 1))
    old.lost("late")
    new.tokens(tokens(0, 8), finished(FinishReason.STOP, 1))
    assert run.sink.token_ids == [8]
    assert [end.reason for end in run.sink.ends] == [FinishReason.STOP]


async def test_a_read_that_ends_in_time_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All KV was there: the output goes on, also if its prefill worker is lost."""
    monkeypatch.setattr(handover, "READ_GRACE_S", 0.0)
    run = begin(disaggregated=True)
    run.handed_over()
    run.prefill.be_lost()
    run.decode.replies[0].tokens(tokens(0, 8), None)
    await asyncio.sleep(0.01)  # the grace is over
    assert not run.decode.cancelled

    other = begin(disaggregated=True)
    other.handed_over()
    other.decode.replies[0].tokens(tokens(0, 8), None)
    assert not other.prefill.watchers

    left = begin(disaggregated=True)
    left.handed_over()
    left.generation.cancel()
    assert not left.prefill.watchers


@pytest.mark.parametrize("disaggregated", [True, False])
async def test_what_watched_over_a_generation_is_gone_with_it(
    disaggregated: bool,
) -> None:
    """Its read of KV, and its waits: they would keep it, and its prompt, in a cycle."""
    run = begin(disaggregated=disaggregated)
    if disaggregated:
        run.handed_over()
    else:
        run.decode.replies[0].lost("gone")
        run.pool.come_back()
    gc.collect()
    gc.disable()
    try:
        run.decode.replies[-1].tokens(tokens(0, 8), finished(FinishReason.STOP, 1))
        assert [end.error for end in run.sink.ends] == [None]
        over = weakref.ref(run.generation)
        for link in (run.pool.prefill, run.decode):
            if link is not None:
                link.replies.clear()  # those of requests that have ended
        del run
        assert over() is None
    finally:
        gc.enable()


async def test_without_a_worker_an_output_waits_for_one() -> None:
    """It goes on at the one that comes back, though that has failed before."""
    run = begin(disaggregated=False)
    run.pool.ready = False
    run.decode.replies[0].tokens(tokens(0, 8), None)
    run.decode.replies[0].lost("gone")
    assert run.sink.ends == []
    run.pool.come_back()

    assert unpack_ids(run.decode.submits[1].token_ids) == [*PROMPT, 8]
    run.decode.replies[1].tokens(tokens(0, 4), finished(FinishReason.STOP, 1))
    assert run.sink.token_ids == [8, 4]
    assert run.sink.ends[0].error is None


def test_who_failed_before_a_token_may_be_the_one_that_is_left() -> None:
    """A rolling restart: all others have failed since, and this one has come back."""
    run = begin(disaggregated=False, others=1)
    first, second = run.decode, run.pool.others[0]
    first.replies[0].tokens(tokens(0, 8), None)
    first.replies[0].lost("restarts")
    second.replies[0].tokens(tokens(0, 9), None)
    second.replies[0].lost("restarts")

    assert unpack_ids(first.submits[1].token_ids) == [*PROMPT, 8, 9]
    assert run.sink.ends == []


async def test_who_failed_is_asked_again_where_no_other_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It came back before the other failed: nobody will become ready."""
    monkeypatch.setattr(patience, "LOOK_AGAIN_S", 0.0)
    run = begin(disaggregated=False, others=1)
    run.decode.replies[0].lost("restarts")
    run.pool.others[0].replies[0].lost("restarts")
    await eventually(lambda: len(run.decode.submits) == 2)
    run.decode.replies[1].tokens(tokens(0, 8), finished(FinishReason.STOP, 1))

    assert [end.error for end in run.sink.ends] == [None]
    assert run.pool.waiting == []


async def test_nobody_is_asked_while_none_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that stalled may be trusted again without becoming ready anew."""
    monkeypatch.setattr(patience, "LOOK_AGAIN_S", 0.0)
    run = begin(disaggregated=False)
    run.pool.ready = False
    run.decode.replies[0].lost("stalled")
    await asyncio.sleep(0.02)  # many looks
    assert len(run.decode.submits) == 1
    run.pool.ready = True
    await eventually(lambda: len(run.decode.submits) == 2)
    run.generation.cancel()


def refuse_as_busy(link: FakeLink) -> None:
    """Let the newest request at *link* be refused."""
    end = finished(FinishReason.ERROR, 0, error_kind=ErrorKind.BUSY, error="full")
    link.replies[-1].finished(end)


async def tried(run: Run, num_submits: int) -> None:
    """Wait until the worker has got so many requests, or all is over."""
    await eventually(
        lambda: bool(run.sink.ends) or len(run.decode.submits) == num_submits
    )


async def test_an_output_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not lost because the only worker left is full: refusals are no failures."""
    monkeypatch.setattr(patience, "LOOK_AGAIN_S", 0.0)
    run = begin(disaggregated=False)
    run.decode.replies[0].tokens(tokens(0, 8), None)
    run.decode.replies[0].lost("gone")
    run.pool.come_back()
    for num_submits in range(3, 8):
        refuse_as_busy(run.decode)
        await tried(run, num_submits)
    run.decode.replies[-1].tokens(tokens(0, 9), finished(FinishReason.STOP, 1))

    assert run.sink.token_ids == [8, 9]
    assert [end.reason for end in run.sink.ends] == [FinishReason.STOP]
    assert run.pool.waiting == []


async def test_waiting_for_room_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same bound as for a worker, however often it was tried."""
    monkeypatch.setattr(patience, "LOOK_AGAIN_S", 0.0)
    run = begin(disaggregated=False)
    run.pool.wait_s = 0.2
    run.decode.replies[0].tokens(tokens(0, 8), None)
    refuse_as_busy(run.decode)
    for num_submits in itertools.count(2):
        await tried(run, num_submits)
        if run.sink.ends:
            break
        refuse_as_busy(run.decode)

    [end] = run.sink.ends
    assert end.error is not None
    assert end.error.status == 503
    assert len(run.decode.submits) > 1


async def test_waiting_is_bounded() -> None:
    """After the bound the client hears of it."""
    run = begin(disaggregated=False)
    run.pool.wait_s = 0.0
    run.decode.replies[0].tokens(tokens(0, 8), None)
    run.decode.replies[0].lost("gone")
    await eventually(lambda: bool(run.sink.ends), "the bound")

    [end] = run.sink.ends
    assert end.error is not None
    assert end.error.status == 502
    assert "nobody is left" in end.error.message
    assert run.pool.waiting == []


async def test_a_client_that_leaves_while_waiting_is_forgotten() -> None:
    """Nothing is sent when the worker comes back."""
    run = begin(disaggregated=False)
    run.decode.replies[0].lost("gone")
    run.generation.cancel()
    run.pool.come_back()

    assert len(run.decode.submits) == 1
    assert run.sink.ends == []


def test_failures_without_a_token_are_counted() -> None:
    """The third in a row ends the request; a token between begins a new series."""
    run = begin(disaggregated=False, others=3)
    first, second, third, _ = [run.decode, *run.pool.others]
    first.replies[0].lost("gone")
    second.replies[0].tokens(tokens(0, 8), None)
    second.replies[0].lost("gone")
    first.replies[1].lost("gone")
    assert run.sink.ends == []
    third.replies[0].lost("gone for good")

    [end] = run.sink.ends
    assert end.error is not None
    assert "gone for good" in end.error.message


def test_an_output_whose_last_token_came_is_complete() -> None:
    """Nothing is left to compute: the end is made here."""
    run = begin(disaggregated=False, others=1, max_tokens=2)
    run.decode.replies[0].tokens(tokens(0, 8, 9), None)
    run.decode.replies[0].lost("gone")

    assert [end.reason for end in run.sink.ends] == [FinishReason.LENGTH]
    assert run.pool.others[0].submits == []


@pytest.mark.parametrize(
    ("fields", "is_end", "stop_reason"),
    [
        ({}, True, None),
        ({"stop_token_ids": [9]}, True, 9),
        ({"ignore_eos": True}, False, None),
        ({"min_tokens": 3}, False, None),
    ],
)
def test_an_output_whose_end_token_came_is_complete(
    fields: dict[str, Any], is_end: bool, stop_reason: int | None
) -> None:
    """Nothing may follow an EOS, although its worker was lost before it could say so."""
    end_ids = frozenset[int]() if stop_reason else frozenset({9})
    run = begin(disaggregated=False, others=1, end_ids=end_ids, **fields)
    run.decode.replies[0].tokens(tokens(0, 8, 9), None)
    run.decode.replies[0].lost("gone")

    ends = [(end.reason, end.stop_reason) for end in run.sink.ends]
    assert ends == ([(FinishReason.STOP, stop_reason)] if is_end else [])
    assert len(run.pool.others[0].submits) == (not is_end)


REFUSING: list[tuple[dict[str, Any], str]] = [
    ({"migratable": False}, "migratable"),
    ({"structured_output": StructuredOutput("regex", "a")}, "structured output"),
    ({"exactness": "same_rng", "seed": 1, "temperature": 1.0}, "seed"),
    ({"exactness": "same_rng", "presence_penalty": 0.5}, "presence_penalty"),
    ({"exactness": "same_rng", "frequency_penalty": 0.5}, "frequency_penalty"),
    ({"exactness": "same_rng", "bad_words": ["a"]}, "bad_words"),
    ({"exactness": "bitwise"}, "no worker goes on bitwise"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSING)
def test_what_may_not_go_on_fails_clearly(fields: dict[str, Any], words: str) -> None:
    """Rather an error that says why than other tokens than asked for."""
    run = begin(disaggregated=False, others=1, **fields)
    run.decode.replies[0].tokens(tokens(0, 8), None)
    run.decode.replies[0].lost("gone")

    [end] = run.sink.ends
    assert end.error is not None
    assert words in end.error.message
    assert run.pool.others[0].submits == []


EXACT_NEEDS: list[dict[str, Any]] = [
    {},
    {"seed": 1, "temperature": 1.0},
    {"structured_output": StructuredOutput("regex", "a")},
    {"presence_penalty": 0.5, "min_tokens": 4},
    {"exactness": "same_rng", "bad_words": ["a"]},
]


@pytest.mark.parametrize("fields", EXACT_NEEDS)
def test_an_exact_worker_is_told_what_is_output(fields: dict[str, Any]) -> None:
    """It gets the whole request's parameters, and says how it goes on."""
    run = begin(disaggregated=False, others=1, exact="other", **fields)
    [first] = run.decode.submits
    assert first.num_prior == 0
    run.decode.replies[0].tokens(tokens(0, 8, 9), None)
    run.decode.replies[0].lost("gone")

    [again] = run.pool.others[0].submits
    assert unpack_ids(again.token_ids) == [*PROMPT, 8, 9]
    assert again.num_prior == 2
    assert again.sampling == first.sampling
    end = finished(FinishReason.LENGTH, 7)
    run.pool.others[0].replies[0].tokens(tokens(0, *range(7)), end)
    assert run.sink.token_ids == [8, 9, *range(7)]
    assert [end.reason for end in run.sink.ends] == [FinishReason.LENGTH]


@pytest.mark.parametrize("fields", EXACT_NEEDS)
def test_an_exact_pair_counts_the_prefill_s_draw(fields: dict[str, Any]) -> None:
    """A stop token that it draws behind the output ends it there."""
    exact = "prefill other decode"
    run = begin(disaggregated=True, others=1, exact=exact, **fields)
    end = finished(FinishReason.LENGTH, 1, handover=KV)
    run.prefill.replies[0].tokens(tokens(0, 8), end)
    run.decode.replies[0].tokens(tokens(0, 8, 9), None)
    run.decode.replies[0].lost("gone")

    again = run.prefill.submits[1]
    assert (again.num_prior, again.leg) == (2, Leg.PREFILL)
    assert again.sampling == run.prefill.submits[0].sampling
    stop = finished(FinishReason.STOP, 1, handover=KV)
    run.prefill.replies[1].tokens(tokens(0, 2), stop)
    assert run.sink.token_ids == [8, 9, 2]
    assert [end.reason for end in run.sink.ends] == [FinishReason.STOP]


def test_a_prefill_worker_that_is_not_exact_computes_alone() -> None:
    """Its draw knows neither grammar nor penalties; the decode worker's counts."""
    grammar = StructuredOutput("regex", "a")
    run = begin(disaggregated=True, others=1, exact="other", structured_output=grammar)
    end = finished(FinishReason.LENGTH, 1, handover=KV)
    run.prefill.replies[0].tokens(tokens(0, 8), end)
    run.decode.replies[0].tokens(tokens(0, 8), None)
    run.decode.replies[0].lost("gone")

    again = run.prefill.submits[1]
    assert (again.num_prior, again.sampling.structured_output) == (0, None)
    assert again.sampling.ignore_eos
    run.prefill.replies[1].tokens(tokens(0, 2), end)
    [decode] = run.pool.others[0].submits
    assert (decode.num_prior, decode.leg) == (1, Leg.DECODE)
    assert decode.sampling.structured_output == grammar
    assert run.sink.token_ids == [8]


@pytest.mark.parametrize(
    ("exact", "kinds"),
    [("other", [Leg.PREFILL, Leg.PREFILL]), ("prefill", [Leg.PREFILL, Leg.FULL])],
)
def test_the_last_token_comes_from_who_can_draw_it(
    exact: str, kinds: list[Leg]
) -> None:
    """A prefill worker that is not exact would begin the grammar again."""
    run = begin(
        disaggregated=True,
        others=1,
        exact=exact,
        max_tokens=2,
        seed=1,
        temperature=1.0,
    )
    end = finished(FinishReason.LENGTH, 1, handover=KV)
    run.prefill.replies[0].tokens(tokens(0, 8), end)
    run.decode.replies[0].tokens(tokens(0, 8), None)
    run.decode.replies[0].lost("gone")

    assert [submit.leg for submit in run.prefill.submits] == kinds


def test_a_sequence_begins_behind_output_it_had_before() -> None:
    """Only what is new is brought, and the bound is the whole output's."""
    run = begin(disaggregated=False, exact="decode", output_token_ids=[8, 9])
    [submit] = run.decode.submits
    assert unpack_ids(submit.token_ids) == [*PROMPT, 8, 9]
    assert (submit.num_prior, submit.sampling.max_tokens) == (2, 9)
    end = finished(FinishReason.LENGTH, 7)
    run.decode.replies[0].tokens(tokens(0, *range(7)), end)
    assert run.sink.token_ids == [*range(7)]
    assert run.sink.ends[0].prompt_token_ids == PROMPT


@pytest.mark.parametrize(("fields", "words"), REFUSING)
def test_before_the_first_token_all_may_begin_again(
    fields: dict[str, Any], words: str
) -> None:
    """Nothing was drawn yet, so that nothing can drift."""
    del words
    run = begin(disaggregated=False, others=1, **fields)
    run.decode.replies[0].lost("gone")

    assert len(run.pool.others[0].submits) == 1


# --- hidden states --------------------------------------------------------------------

SAVED: JsonObject = {"hidden_states_path": "/d/capture-1.safetensors"}


def capturing(
    *,
    disaggregated: bool,
    others: int = 0,
    capture: bool = True,
    sampling: Sampling | None = None,
) -> Run:
    """Return a generation on workers that save hidden states."""
    run = begin(disaggregated=disaggregated, others=others, capture=capture)
    run.generation.cancel()  # begun before the links could say so
    for link in (run.prefill if disaggregated else run.decode, *run.pool.others):
        link.captures = True
        link.submits.clear()
        link.replies.clear()
    run.sink = RecordingSink()
    sampling = sampling or Sampling(9, temperature=0.0)
    job = Job(PROMPT, sampling, echo_prompt=True, capture=capture)
    run.generation = Generation(job, run.sink, cast("Pool", run.pool), Metrics())
    run.generation.start()
    return run


def prefilled(run: Run) -> None:
    """Let the prefill leg end, with a file."""
    end = finished(FinishReason.LENGTH, 1, handover=KV, kv_transfer_params=SAVED)
    run.prefill.replies[-1].tokens(tokens(0, 9), end)


@pytest.mark.parametrize("capture", [False, True])
def test_only_who_can_see_the_path_has_states_saved(capture: bool) -> None:
    """A request that did not ask costs no file."""
    run = capturing(disaggregated=False, capture=capture)
    wanted = len(PROMPT) if capture else 0
    assert run.decode.submits[0].capture_tokens == wanted
    assert run.pool.asked[-1].captures is capture


def test_the_prompt_s_states_come_from_the_prefill_leg() -> None:
    """The decode leg saves nothing, and the end has the path all the same."""
    run = capturing(disaggregated=True)
    prefilled(run)
    run.decode.replies[0].tokens(tokens(0, 9), finished(FinishReason.LENGTH, 1))

    assert run.prefill.submits[0].capture_tokens == len(PROMPT)
    assert run.decode.submits[0].capture_tokens == 0
    assert [end.kv_transfer_params for end in run.sink.ends] == [SAVED]
    assert run.prefill.discarded == []


def test_a_worker_that_saves_none_is_asked_for_none() -> None:
    """It would be a peer of an older release, or have no folder."""
    run = begin(disaggregated=False, capture=True)
    assert run.decode.submits[0].capture_tokens == 0


def test_the_prompt_alone_is_saved_when_an_output_goes_on() -> None:
    """Prompt and output are the new prompt; the states asked for are the client's."""
    run = capturing(disaggregated=False, others=1)
    run.decode.replies[0].tokens(tokens(0, 8), None)
    run.decode.replies[0].lost("gone")

    [again] = run.pool.others[0].submits
    assert unpack_ids(again.token_ids) == [*PROMPT, 8]
    assert again.capture_tokens == len(PROMPT)


def test_what_is_saved_is_not_saved_again() -> None:
    """The decode worker is lost; the prompt is prefilled anew, and has its file."""
    run = capturing(disaggregated=True, others=1)
    prefilled(run)
    run.decode.replies[0].tokens(tokens(0, 8), None)
    run.decode.replies[0].lost("gone")
    assert run.prefill.submits[1].capture_tokens == 0

    end = finished(FinishReason.LENGTH, 1, handover=KV)
    run.prefill.replies[-1].tokens(tokens(0, 9), end)
    run.pool.others[0].replies[0].tokens(tokens(0, 9), finished(FinishReason.STOP, 1))
    assert [end.kv_transfer_params for end in run.sink.ends] == [SAVED]


@pytest.mark.parametrize("when", ["prefill", "decode", "crossing"])
def test_a_client_that_leaves_leaves_no_file(when: str) -> None:
    """Whichever leg runs, and also when the end crosses the cancel."""
    run = capturing(disaggregated=True)
    if when == "prefill":
        run.generation.cancel()
        prefilled(run)
    else:
        prefilled(run)
        run.generation.cancel()
    if when == "crossing":
        run.decode.replies[0].finished(finished(FinishReason.LENGTH, 1))
    assert run.prefill.discarded == [SAVED["hidden_states_path"]]
    assert run.sink.ends == []


@pytest.mark.parametrize("is_told", [False, True])
@pytest.mark.parametrize("disaggregated", [False, True])
def test_an_output_that_has_ended_leaves_its_file_to_who_is_told(
    disaggregated: bool, is_told: bool
) -> None:
    """Its response may wait for other choices, and its client leave meanwhile."""
    run = capturing(disaggregated=disaggregated)
    source = run.prefill if disaggregated else run.decode
    if disaggregated:
        prefilled(run)
    end = finished(
        FinishReason.LENGTH, 1, kv_transfer_params=None if disaggregated else SAVED
    )
    run.decode.replies[0].tokens(tokens(0, 9), end)
    assert (source.told_of, source.discarded) == ([], [])  # nothing said yet
    if is_told:
        run.generation.told()
    for _ in range(2):  # a second time is none
        run.generation.cancel()

    assert [one.kv_transfer_params for one in run.sink.ends] == [SAVED]
    path = SAVED["hidden_states_path"]
    assert source.told_of == ([path] if is_told else [])
    assert source.discarded == ([] if is_told else [path])


def test_a_full_leg_that_crosses_the_cancel_leaves_no_file() -> None:
    """Its worker had ended it before it heard."""
    run = capturing(disaggregated=False)
    run.generation.cancel()
    end = finished(FinishReason.LENGTH, 1, kv_transfer_params=SAVED)
    run.decode.replies[0].tokens(tokens(0, 9), end)
    assert run.decode.discarded == [SAVED["hidden_states_path"]]


def test_a_request_that_fails_leaves_no_file() -> None:
    """Its prompt was saved, its output could not be completed."""
    run = capturing(disaggregated=True)
    prefilled(run)
    error = finished(FinishReason.ERROR, 0, error_kind=ErrorKind.INVALID, error="no")
    run.decode.replies[0].finished(error)
    assert [end.error is not None for end in run.sink.ends] == [True]
    assert run.prefill.discarded == [SAVED["hidden_states_path"]]


def unsaved(reply: Reply, **fields: Any) -> None:
    """Let a leg end without its file."""
    reply.finished(
        finished(
            FinishReason.ERROR, 0, error_kind=ErrorKind.CAPTURE, error="full", **fields
        )
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_output_is_not_drawn_again_for_its_file(temperature: float) -> None:
    """Its end was drawn; drawing it anew elsewhere would make ends too rare."""
    sampling = Sampling(9, temperature=temperature)
    run = capturing(disaggregated=False, others=1, sampling=sampling)
    run.decode.replies[0].tokens(tokens(0, 8), None)
    unsaved(run.decode.replies[0])

    [end] = run.sink.ends
    assert end.error is not None
    assert (end.error.status, end.error.code) == (502, "capture_failed")
    assert end.error.message == (
        "full; it cannot go on elsewhere: its last token would be drawn again"
    )
    assert run.pool.others[0].submits == []


def test_a_first_token_that_was_an_end_is_not_drawn_again() -> None:
    """Nothing was delivered, and yet the draw is known to have been a stop token."""
    sampling = Sampling(9, temperature=1.0)
    run = capturing(disaggregated=False, others=1, sampling=sampling)
    unsaved(run.decode.replies[0])
    assert [end.error is not None for end in run.sink.ends] == [True]
    assert run.pool.others[0].submits == []


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1, temperature=1.0),
        Sampling(9, temperature=0.0),
        Sampling(9, temperature=1.0, seed=0),
    ],
    ids=["one token", "greedy", "seeded"],
)
def test_what_leads_to_no_other_end_is_saved_elsewhere(sampling: Sampling) -> None:
    """Once: where two workers cannot write, a third is not troubled."""
    run = capturing(disaggregated=False, others=2, sampling=sampling)
    unsaved(run.decode.replies[0])
    assert run.sink.ends == []
    [again] = run.pool.others[0].submits
    assert again.capture_tokens == len(PROMPT)

    unsaved(run.pool.others[0].replies[0])
    assert [end.error is not None for end in run.sink.ends] == [True]
    assert run.pool.others[1].submits == []


def test_a_prefill_leg_s_draw_is_none() -> None:
    """Of an unseeded request: the next prefill worker saves the states, and KV goes."""
    sampling = Sampling(9, temperature=1.0)
    run = capturing(disaggregated=True, sampling=sampling)
    run.pool.prefillers = [FakeLink("prefill-1", captures=True)]
    unsaved(run.prefill.replies[0], handover=KV)
    assert run.sink.ends == []
    assert run.pool.released == [KV]
    assert run.pool.prefillers[0].submits[0].capture_tokens == len(PROMPT)


def test_nobody_waits_for_a_disk() -> None:
    """Where no other worker is, the request fails at once: waiting mends no disk."""
    run = capturing(disaggregated=False, sampling=Sampling(1))
    unsaved(run.decode.replies[0])
    assert [end.error is not None for end in run.sink.ends] == [True]
    assert run.pool.waiting == []


def test_a_manifest_without_a_path_is_nothing_to_discard() -> None:
    """Only our own files are ours to delete."""
    run = capturing(disaggregated=False)
    run.generation.cancel()
    end = finished(FinishReason.LENGTH, 1, kv_transfer_params={"hidden_states_path": 5})
    run.decode.replies[0].finished(end)
    assert run.decode.discarded == []


class ShortWay:
    """A shorter way, which keeps its beginnings."""

    def __init__(self) -> None:
        self.begun: list[tuple[bytearray, legs.OutputLeg]] = []

    def begin(self, output: bytearray, leg: legs.OutputLeg) -> None:
        """Keep a beginning."""
        self.begun.append((output, leg))

    def tokens(self, item: Tokens, end: Finished | None) -> None:
        """Take tokens."""

    def finished(self, end: Finished) -> None:
        """Take an end."""

    def lost(self, reason: str) -> None:
        """Take a loss."""


def test_a_short_way_hears_the_leg_in_its_place() -> None:
    """It gets the output so far, to write what it takes behind, and the leg."""
    run = begin(disaggregated=False)
    leg = run.decode.replies[0]
    leg.tokens(tokens(0, 8), None)
    way = ShortWay()
    run.generation.straighten(way)

    assert run.decode.replies == [way]
    [(output, passed_on_to)] = way.begun
    assert passed_on_to is leg
    output += pack_ids([9])
    assert run.generation.new_token_ids == [8, 9]


@pytest.mark.parametrize("how", ["bend", "cancel", "leave", "stop_here"])
def test_a_short_way_ends_with_what_it_was_for(how: str) -> None:
    """Where nobody is to hear more, or not yet, the leg hears what comes, and is asked."""
    run = begin(disaggregated=False)
    leg = run.decode.replies[0]
    leg.tokens(tokens(0, 8), None)
    run.generation.straighten(ShortWay())
    assert run.decode.replies != [leg]
    getattr(run.generation, how)()

    assert run.decode.replies == [leg]
    if how != "bend":  # and there is none again
        run.generation.straighten(ShortWay())
        assert run.decode.replies == [leg]


def test_a_dropped_leg_has_no_short_way() -> None:
    """What it still brings is nobody's."""
    run = begin(disaggregated=False)
    leg = run.decode.replies[0]
    assert isinstance(leg, legs.OutputLeg)
    leg.tokens(tokens(0, 8), None)
    run.generation.straighten(ShortWay())
    leg.drop()

    assert run.decode.replies == [leg]
    leg.tokens(tokens(1, 9), None)
    assert run.sink.token_ids == [8]


def test_a_prompt_takes_no_short_way() -> None:
    """Nor does an output whose worker is lost: its next leg begins as the first did."""
    run = begin(disaggregated=True, others=1)
    [prefill] = run.prefill.replies
    run.generation.straighten(ShortWay())
    assert run.prefill.replies == [prefill]

    run = begin(disaggregated=False, others=1)
    run.decode.replies[0].tokens(tokens(0, 8), None)
    run.generation.straighten(ShortWay())
    cast("ShortWay", run.decode.replies[0]).begun[0][1].lost("gone")
    [other] = run.pool.others
    assert isinstance(other.replies[0], legs.OutputLeg)
    other.replies[0].tokens(tokens(0, 9), None)
    assert run.sink.token_ids == [8, 9]
