"""The worker's desk, with a fake engine, a recording link and a clock turned by hand."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from support.worker_desk import A, B, Desk, submit
from tokenwire.protocol.errors import SequenceError
from tokenwire.protocol.liveness import Liveness
from tokenwire.protocol.messages import (
    AGAIN,
    BY_PAUSE,
    CAPTURE,
    CAPTURE_TOLD,
    ORPHANED_KV,
    PROTOCOL_VERSION,
    STATUS,
    Admin,
    AdminDone,
    Bye,
    Cancel,
    Card,
    Discard,
    EngineDead,
    ErrorKind,
    Finished,
    FinishReason,
    FromFrontend,
    FromWorker,
    Hello,
    JsonObject,
    Leg,
    Load,
    Logprobs,
    MetricsText,
    OrphanedKV,
    Ping,
    Refused,
    ReleaseKV,
    Role,
    Sampling,
    ScrapeMetrics,
    Settled,
    Status,
    Submit,
    Told,
)
from tokenwire.protocol.numbering import Numbered
from tokenwire.protocol.tokens import pack_ids, unpack_ids
from tokenwire.worker import untold as untold_module
from tokenwire.worker.capture_files import Access
from tokenwire.worker.captures import Captures, CaptureSettings
from tokenwire.worker.engine import (
    AdminOutcome,
    EngineFinished,
    EngineLoad,
    EngineTokens,
)
from tokenwire.worker.frontends import Frontend
from tokenwire.worker.orphans import AGAIN_S, GRACE_S
from tokenwire.worker.requests import ABORT_GRACE_S
from tokenwire.worker.scrapes import MIN_SCRAPE_S
from tokenwire.worker.service import MAX_FRONTENDS
from tokenwire.worker.untold import MAX_UNTOLD_S, Untold

# -- hello ------------------------------------------------------------------------------


def test_hello_is_answered_by_the_card_and_the_load() -> None:
    """A router can use the worker at once."""
    desk = Desk()
    desk.say(A, Hello(PROTOCOL_VERSION, "a", "1"))
    card, load = desk.sender.take(A)
    assert card == desk.card
    assert isinstance(load, Load)


def test_another_protocol_version_is_refused_in_a_sentence() -> None:
    """And the peer stays unknown."""
    desk = Desk()
    desk.say(A, Hello(PROTOCOL_VERSION + 1, "a", "1"), Ping("1"))
    refused, unknown = desk.sender.take(A)
    assert isinstance(refused, Refused)
    assert "run the same tokenwire release" in refused.reason
    assert unknown == Refused("say hello first")


@pytest.mark.parametrize("message", [submit(), Cancel("r"), Ping("1")])
def test_who_has_not_said_hello_is_told_to(message: FromFrontend) -> None:
    """For example after the worker has given it up."""
    desk = Desk()
    desk.say(A, message)
    assert desk.sender.take(A) == [Refused("say hello first")]
    assert not desk.engine.submitted


def test_a_second_hello_of_the_same_start_begins_anew() -> None:
    """Its connection broke, so it has given up what it had open: that is aborted."""
    desk = Desk(A)
    name = desk.submit()
    desk.say(A, Hello(PROTOCOL_VERSION, "frontend-a", "1"))
    assert desk.sender.take(A)[0] == desk.card
    desk.tokens((name, [5]))
    desk.timers.settle()
    assert not desk.sender.items(A)[0]
    assert desk.engine.aborted == [name]


def numbers(messages: list[FromWorker]) -> list[object]:
    """Return the numbers of messages that have one."""
    return [message.seq for message in messages if isinstance(message, Numbered)]


def test_what_is_sent_is_numbered_from_the_card_on() -> None:
    """Each peer has its own count, and a Hello begins it anew."""
    desk = Desk(A, B)
    desk.tokens((desk.submit(), [5]))
    desk.timers.settle()
    assert numbers(desk.sender.take(A)) == [2]  # behind the load
    desk.say(A, Hello(PROTOCOL_VERSION, "frontend-a", "1"))
    assert desk.sender.take(A) == [desk.card, Load("w1", num_frontends=2, seq=1)]
    desk.service.drain()
    assert numbers(desk.sender.take(B)) == [2]


def test_a_message_that_is_missing_is_noticed_by_the_next() -> None:
    """A Submit that got lost would otherwise stay open for ever."""
    desk = Desk(A)
    desk.say(A, Ping("1", seq=1))
    with pytest.raises(SequenceError, match="1 messages are missing before Ping 3"):
        desk.say(A, Ping("1", seq=3))


def test_a_hello_of_a_new_start_aborts_what_the_old_one_had() -> None:
    """Nobody waits for it any more."""
    desk = Desk(A)
    name = desk.submit()
    desk.say(A, Hello(PROTOCOL_VERSION, "frontend-a", "2"))
    assert desk.engine.aborted == [name]
    assert desk.service.num_requests == 0


def test_a_hello_on_a_new_connection_ends_what_the_old_one_had() -> None:
    """The frontend gave that up, for example because this worker was frozen."""
    desk = Desk(A)
    name = desk.submit()
    desk.say(A, Ping("1"))  # sent before, and read only now
    desk.say(B, Hello(PROTOCOL_VERSION, "frontend-a", "1"))

    assert desk.engine.aborted == [name]
    assert desk.sender.take(B)[0] == desk.card
    desk.say(A, Ping("1"))
    assert desk.sender.take(A)[-1] == Refused("say hello first")


def test_two_links_of_one_frontend_leave_each_other_alone() -> None:
    """A worker may have two addresses, such as an IPv4 and an IPv6 one."""
    desk = Desk()
    desk.say(A, Hello(PROTOCOL_VERSION, "frontend-a", "1", link_id="x"))
    desk.submit()
    desk.say(B, Hello(PROTOCOL_VERSION, "frontend-a", "1", link_id="y"))

    assert desk.engine.aborted == []
    assert desk.service.num_requests == 1


def test_the_number_of_frontends_is_bounded() -> None:
    """The one above is refused."""
    desk = Desk()
    for n in range(MAX_FRONTENDS + 1):
        desk.say(str(n).encode(), Hello(PROTOCOL_VERSION, str(n), "1"))
    (answer,) = desk.sender.take(str(MAX_FRONTENDS).encode())
    assert isinstance(answer, Refused)


# -- submit -----------------------------------------------------------------------------


def test_a_request_reaches_the_engine_as_it_was_submitted() -> None:
    """Under an id of the worker's own, unique among all frontends."""
    desk = Desk(A, B, role=Role.DECODE)
    sampling = Sampling(max_tokens=5, temperature=0.0, seed=0)
    message = Submit(
        "r", pack_ids([7, 8]), sampling, leg=Leg.DECODE, handover={"k": [1]},
        kv_transfer_params={"x": 1}, priority=3, cache_salt="s",
        reasoning_ended=False, reasoning_parser_kwargs={"a": 1},
    )  # fmt: skip
    desk.say(A, message)
    desk.say(B, message)
    first, second = desk.engine.submitted
    assert first.request_id != second.request_id
    assert (first.token_ids, first.sampling, first.leg) == (
        [7, 8],
        sampling,
        Leg.DECODE,
    )
    assert (first.handover, first.kv_transfer_params) == ({"k": [1]}, {"x": 1})
    assert (first.priority, first.cache_salt) == (3, "s")
    assert first.reasoning_ended is False
    assert first.reasoning_parser_kwargs == {"a": 1}


@pytest.mark.parametrize(
    ("role", "message", "kind", "text"),
    [
        (Role.AGGREGATED, submit(size=0), ErrorKind.INVALID, "empty"),
        (Role.AGGREGATED, submit(max_tokens=0), ErrorKind.INVALID, "at least 1, got 0"),
        (
            Role.AGGREGATED,
            submit(size=93),
            ErrorKind.INVALID,
            "maximum context length is 100 tokens",
        ),
        (Role.AGGREGATED, submit(leg=Leg.PREFILL), ErrorKind.INVALID, "no prefill leg"),
        (
            Role.PREFILL,
            submit(leg=Leg.DECODE, handover={}),
            ErrorKind.INVALID,
            "no decode leg",
        ),
        (Role.DECODE, submit(leg=Leg.PREFILL), ErrorKind.INVALID, "no prefill leg"),
        (
            Role.DECODE,
            submit(leg=Leg.DECODE),
            ErrorKind.HANDOVER,
            "without the hand-over",
        ),
        (Role.PREFILL, submit(size=100, leg=Leg.PREFILL), ErrorKind.INVALID, "maximum"),
    ],
)
def test_what_cannot_run_here_ends_at_once(
    role: Role, message: Submit, kind: ErrorKind, text: str
) -> None:
    """The engine never sees it; the end says whose fault it is."""
    desk = Desk(A, role=role)
    desk.say(A, message)
    (end,) = desk.ends()
    assert (end.reason, end.error_kind) == (FinishReason.ERROR, kind)
    assert text in end.error
    assert not desk.engine.submitted
    assert desk.metric("request_errors_total", kind=kind.value) == 1


@pytest.mark.parametrize(
    ("role", "leg"),
    [(Role.PREFILL, Leg.FULL), (Role.PREFILL, Leg.PREFILL), (Role.DECODE, Leg.FULL)],
)
def test_a_role_runs_what_it_can(role: Role, leg: Leg) -> None:
    """Whole requests run everywhere; a prefill leg needs room for one token only."""
    desk = Desk(A, role=role)
    size = 99 if leg is Leg.PREFILL else 92
    desk.say(A, submit(size=size, leg=leg))
    assert len(desk.engine.submitted) == 1


@pytest.mark.parametrize("leg", [Leg.FULL, Leg.PREFILL])
def test_output_that_a_sequence_has_had_is_not_its_prompt(leg: Leg) -> None:
    """The engine hears how much of the ids it is; the context holds it but once."""
    desk = Desk(A, role=Role.PREFILL, exactness="same_rng")
    full = msgspec.structs.replace(
        submit(size=97, leg=leg, max_tokens=8, echo_prompt=True), num_prior=5
    )
    desk.say(A, full)
    (request,) = desk.engine.submitted
    assert (request.num_prior, request.num_prompt_tokens) == (5, 92)
    assert request.prompt_token_ids == list(range(92))
    assert desk.service.num_requests == 1
    desk.tokens((request.request_id, [7]))
    desk.end(request.request_id)
    desk.timers.settle()
    (tokens,), (end,) = desk.sender.items(A)
    assert (tokens.index, end.num_output_tokens) == (0, 1)
    desk.say(A, full, Cancel("r"))
    desk.timers.advance(ABORT_GRACE_S + 1)
    desk.service.tick()
    assert desk.ends()[0].num_prompt_tokens == 92


@pytest.mark.parametrize(
    ("exactness", "num_prior", "max_tokens", "text"),
    [
        ("same_rng", 3, 8, "a prompt must be left"),
        ("same_rng", 4, 8, "a prompt must be left"),
        ("same_rng", -1, 8, "a prompt must be left"),
        ("same_rng", 2, 2, "2 of 2 output tokens (max_tokens) are there"),
        ("", 2, 8, "worker w goes on behind no earlier output"),
    ],
)
def test_output_that_cannot_be_a_sequence_s_is_refused(
    exactness: str, num_prior: int, max_tokens: int, text: str
) -> None:
    """A prompt and a token must be left, and the engine must know how."""
    desk = Desk(A, exactness=exactness)
    asked = submit(max_tokens=max_tokens, echo_prompt=True)
    desk.say(A, msgspec.structs.replace(asked, num_prior=num_prior))
    (end,) = desk.ends()
    assert (end.error_kind, text in end.error) == (ErrorKind.INVALID, True)
    size = 3 - num_prior if 0 <= num_prior <= 3 else 3
    assert (end.num_prompt_tokens, end.prompt_token_ids) == (
        size,
        pack_ids(list(range(size))),
    )
    assert not desk.engine.submitted


def test_output_to_be_computed_again_counts_in_the_queue() -> None:
    """It costs what a prompt costs."""
    desk = Desk(A, max_queued_tokens=10, exactness="same_rng")
    desk.say(A, msgspec.structs.replace(submit("a", size=8), num_prior=7))
    desk.say(A, submit("b", size=3))
    assert [end.error_kind for end in desk.ends()] == [ErrorKind.BUSY]


def test_an_id_that_is_open_is_not_taken_twice() -> None:
    """By the same frontend; another one's ids are its own."""
    desk = Desk(A, B)
    desk.submit("r", A)
    desk.submit("r", B)
    desk.say(A, submit("r"))
    (end,) = desk.ends(A)
    assert end.error_kind is ErrorKind.INVALID
    assert not desk.ends(B)
    assert len(desk.engine.submitted) == 2


def test_an_id_can_be_used_again_after_its_end() -> None:
    """Only open ones must be unique."""
    desk = Desk(A)
    for _ in range(2):
        desk.end(desk.submit("r"))
        assert len(desk.ends()) == 1


def test_requests_above_the_bound_are_busy() -> None:
    """Until one ends."""
    desk = Desk(A, max_requests=2)
    first = desk.submit("1")
    desk.submit("2")
    desk.say(A, submit("3"))
    assert [end.error_kind for end in desk.ends()] == [ErrorKind.BUSY]
    desk.end(first)
    desk.say(A, submit("4"))
    assert len(desk.engine.submitted) == 3


def test_queued_prompt_tokens_above_the_bound_are_busy() -> None:
    """They are queued until their first output token, or their end."""
    desk = Desk(A, max_queued_tokens=50)
    first = desk.submit("1", size=30)
    desk.say(A, submit("2", size=30))
    assert [end.error_kind for end in desk.ends()] == [ErrorKind.BUSY]
    desk.tokens((first, [5]))
    second = desk.submit("3", size=30)
    assert len(desk.engine.submitted) == 2
    desk.end(second)
    desk.submit("4", size=30)
    assert len(desk.engine.submitted) == 3


def test_one_prompt_above_the_bound_is_taken_when_nothing_waits() -> None:
    """Else it would be busy for ever."""
    desk = Desk(A, max_queued_tokens=10)
    desk.submit("1", size=30)
    assert len(desk.engine.submitted) == 1


# -- outputs ----------------------------------------------------------------------------


def test_a_step_is_one_batch_per_frontend() -> None:
    """With all tokens and ends of the iteration, however many calls brought them."""
    desk = Desk(A, B)
    one, two, other = desk.submit("1"), desk.submit("2"), desk.submit("1", B)
    desk.tokens((one, [5]), (two, [6]), (other, [7]))
    desk.tokens((one, [8]))
    desk.end(one)
    desk.timers.settle()
    (batch,) = desk.sender.batches(A)
    sent = [(t.request_id, t.index, unpack_ids(t.token_ids)) for t in batch.tokens]
    assert sent == [("1", 0, [5]), ("2", 0, [6]), ("1", 1, [8])]
    assert [end.request_id for end in batch.finished] == ["1"]
    (batch,) = desk.sender.batches(B)
    assert [unpack_ids(t.token_ids) for t in batch.tokens] == [[7]]
    assert desk.metric("batches_total") == 2
    assert desk.metric("generation_tokens_total") == 4


def test_the_index_of_tokens_is_absolute() -> None:
    """It counts ids, not messages."""
    desk = Desk(A)
    name = desk.submit()
    for ids in ([5, 6], [7], [8, 9, 10]):
        desk.tokens((name, ids))
        desk.timers.settle()
    assert [item.index for item in desk.sender.items(A)[0]] == [0, 2, 3]


def test_the_end_carries_what_the_engine_said() -> None:
    """Field by field, and the count of the ids that were sent."""
    desk = Desk(A)
    desk.say(A, submit(echo_prompt=True))
    name = desk.engine.submitted[-1].request_id
    logprobs = Logprobs(1, pack_ids([1]), bytes(4), pack_ids([1]))
    desk.service.outputs(
        [EngineTokens(name, [5, 6])],
        [
            EngineFinished(
                name, FinishReason.STOP, 3, 2, 6, prompt_token_ids=[0, 1, 2],
                handover={"h": 1}, kv_transfer_params={"k": 2},
                prompt_logprobs=logprobs, queue_s=0.5, prefill_s=0.25,
            )
        ],
    )  # fmt: skip
    assert desk.ends() == [
        Finished(
            "r", FinishReason.STOP, 2, 3, 2, 6, prompt_token_ids=pack_ids([0, 1, 2]),
            handover={"h": 1}, kv_transfer_params={"k": 2}, prompt_logprobs=logprobs,
            queue_s=0.5, prefill_s=0.25,
        )
    ]  # fmt: skip


def test_the_prompt_comes_back_only_if_it_was_asked_for() -> None:
    """It may be long."""
    desk = Desk(A)
    name = desk.submit()
    end = EngineFinished(name, FinishReason.STOP, prompt_token_ids=[1, 2])
    desk.service.outputs([], [end])
    assert desk.ends()[0].prompt_token_ids is None


def test_a_second_end_of_the_engine_is_not_sent() -> None:
    """One Finished per Submit, whatever the engine does."""
    desk = Desk(A)
    name = desk.submit()
    desk.end(name)
    desk.end(name)
    desk.tokens((name, [5]))
    assert len(desk.ends()) == 1


def test_an_end_that_cannot_be_encoded_is_an_error_and_not_silence() -> None:
    """A connector's object may hold anything; the others of the batch are sent."""
    desk = Desk(A)
    bad, good = desk.submit("bad"), desk.submit("good")
    desk.tokens((good, [5]))
    end = EngineFinished(bad, FinishReason.STOP, kv_transfer_params={"x": object()})
    desk.service.outputs([], [end, EngineFinished(good, FinishReason.STOP)])
    ends = {end.request_id: end for end in desk.ends()}
    assert ends["bad"].error_kind is ErrorKind.ENGINE
    assert ends["good"].reason is FinishReason.STOP


# -- cancel, release, loss ----------------------------------------------------------------


def test_a_cancel_aborts_and_the_end_follows() -> None:
    """Once, however often it is said; unknown ids are ignored."""
    desk = Desk(A, B)
    name = desk.submit()
    desk.say(A, Cancel("r"), Cancel("r"), Cancel("unknown"))
    desk.say(B, Cancel("r"))
    assert desk.engine.aborted == [name]
    assert not desk.ends()
    desk.end(name, FinishReason.ABORT)
    assert [end.reason for end in desk.ends()] == [FinishReason.ABORT]
    assert desk.metric("request_cancels_total") == 1


def test_an_engine_that_does_not_end_what_is_aborted_is_not_waited_for() -> None:
    """After a grace the end is made up; the engine's own comes to nothing."""
    desk = Desk(A)
    name = desk.submit()
    desk.tokens((name, [5]))
    desk.say(A, Cancel("r"))
    desk.timers.advance(ABORT_GRACE_S - 0.1)
    desk.say(A, Ping("1"))
    desk.service.tick()
    assert not desk.ends()
    desk.timers.advance(0.2)
    desk.service.tick()
    (end,) = desk.ends()
    assert (end.reason, end.num_output_tokens) == (FinishReason.ABORT, 1)
    desk.end(name, FinishReason.ABORT)
    assert not desk.ends()


def test_a_release_reaches_the_engine() -> None:
    """With the hand-over as it is."""
    desk = Desk(A, role=Role.DECODE)
    desk.say(A, ReleaseKV("p", {"remote": 1}))
    assert desk.engine.released == [("p", {"remote": 1})]
    assert desk.metric("kv_releases_total") == 1


def lose_by_bye(desk: Desk) -> None:
    """The frontend says bye."""
    desk.say(A, Bye())


def lose_by_silence(desk: Desk) -> None:
    """It is silent, while another one is not."""
    for _ in range(3):
        desk.timers.advance(1.5)
        desk.say(B, Ping("1"))
        desk.service.tick()


def test_a_worker_that_slept_gives_no_frontend_up() -> None:
    """After SIGCONT what they have sent meanwhile is still to be read."""
    desk = Desk(A)
    desk.submit()
    desk.timers.advance(60.0)
    desk.service.tick()
    assert not desk.engine.aborted
    for _ in range(3):
        desk.timers.advance(1.5)
        desk.service.tick()
    assert desk.engine.aborted


def lose_by_send(desk: Desk) -> None:
    """Nothing can be sent to it."""
    desk.sender.unreachable.add(A)
    desk.tokens((desk.engine.submitted[0].request_id, [5]))
    desk.timers.settle()


def lose_by_garbage(desk: Desk) -> None:
    """It breaks the protocol."""
    desk.service.broken(A, "not a message")


@pytest.mark.parametrize(
    "lose", [lose_by_bye, lose_by_silence, lose_by_send, lose_by_garbage]
)
def test_what_a_lost_frontend_had_open_is_aborted(lose: object) -> None:
    """All of it, and nothing of another frontend's; nothing more is sent to it."""
    desk = Desk(A, B)
    one, two = desk.submit("1"), desk.submit("2")
    kept = desk.submit("1", B)
    assert callable(lose)
    lose(desk)
    assert desk.engine.aborted == [one, two]
    desk.sender.unreachable.clear()
    desk.tokens((one, [5]), (kept, [6]))
    desk.end(one, FinishReason.ABORT)
    desk.timers.settle()
    assert not desk.sender.items(A)[0]
    assert desk.sender.items(B)[0]
    assert desk.service.num_requests == 1
    assert desk.metric("request_cancels_total") == 2


def test_anything_heard_keeps_a_frontend() -> None:
    """Not only a Ping."""
    desk = Desk(A)
    for _ in range(5):
        desk.timers.advance(3.0)
        desk.say(A, Cancel("unknown"))
        desk.service.tick()
    desk.submit()
    assert len(desk.engine.submitted) == 1


def test_a_peer_that_broke_the_protocol_is_counted() -> None:
    """Also one that never said hello."""
    desk = Desk()
    desk.service.broken(A, "not a message")
    assert desk.metric("protocol_errors_total") == 1


# -- load, death, leaving -------------------------------------------------------------------


def test_every_frontend_hears_the_load_once_per_interval() -> None:
    """However often the clock is looked at."""
    desk = Desk(A, B)
    desk.engine.current_load = EngineLoad(2, 3, 0.5)
    desk.submit(size=7)
    for _ in range(8):
        desk.timers.advance(0.25)
        desk.service.tick()
    loads = [message for message in desk.sender.take(B) if isinstance(message, Load)]
    assert loads[-1] == Load("w1", 2, 3, 0.5, 7, num_requests=1, num_frontends=2, seq=3)
    assert len(loads) in {2, 3}
    assert desk.metric("num_requests_running") == 2
    assert desk.metric("kv_cache_usage_perc") == 0.5


def test_a_dead_engine_ends_everything_and_every_frontend_is_told() -> None:
    """The ends first, then EngineDead; nothing is taken afterwards."""
    desk = Desk(A, B)
    desk.submit("1")
    desk.tokens((desk.engine.submitted[0].request_id, [5]))
    changes: list[str] = []
    desk.service.on_change = lambda: changes.append("changed")
    desk.service.died("it died")
    *batches, dead = desk.sender.take(A)
    assert dead == EngineDead("it died", seq=3)
    assert len(batches) == 1
    assert desk.sender.take(B) == [EngineDead("it died", seq=2)]
    assert desk.service.dead_reason == "it died"
    assert desk.service.num_requests == 0
    assert changes
    desk.say(A, submit("2"))
    assert [end.error_kind for end in desk.ends()] == [ErrorKind.DRAINING]


def test_a_draining_worker_says_so_and_takes_nothing_new() -> None:
    """What runs goes on; when the last has ended, that is told."""
    desk = Desk(A)
    name = desk.submit()
    changes: list[str] = []
    desk.service.on_change = lambda: changes.append("changed")
    desk.service.drain()
    (load,) = desk.sender.take(A)
    assert isinstance(load, Load)
    assert load.draining
    desk.say(A, submit("late"))
    assert [end.error_kind for end in desk.ends()] == [ErrorKind.DRAINING]
    assert not changes
    desk.end(name)
    assert changes == ["changed"]


def test_leaving_sends_what_runs_elsewhere() -> None:
    """Every Submit has its Finished, as ``draining``; a good end stays one."""
    desk = Desk(A)
    names = [desk.submit(n) for n in "123"]
    desk.service.evict_all()
    assert desk.engine.aborted == names
    desk.end(names[0], FinishReason.ABORT)
    desk.end(names[1], FinishReason.STOP)
    desk.service.end_all()
    assert [(end.reason, end.error_kind) for end in desk.ends()] == [
        (FinishReason.ERROR, ErrorKind.DRAINING),
        (FinishReason.STOP, None),
        (FinishReason.ERROR, ErrorKind.DRAINING),
    ]


def test_latencies_are_observed() -> None:
    """First token, whole request, and the hand-over of decode legs."""
    desk = Desk(A, role=Role.DECODE)
    desk.say(A, submit(leg=Leg.DECODE, handover={}))
    name = desk.engine.submitted[-1].request_id
    desk.timers.advance(0.5)
    desk.tokens((name, [5]))
    desk.timers.advance(1.0)
    desk.end(name)
    assert desk.metric("kv_handover_seconds_sum") == pytest.approx(0.5)
    assert desk.metric("time_to_first_token_seconds_sum") == pytest.approx(0.5)
    assert desk.metric("e2e_request_latency_seconds_sum") == pytest.approx(1.5)
    assert desk.metric("request_success_total", finished_reason="length") == 1


def test_who_comes_and_goes_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """With the frontend's name and why."""
    caplog.set_level(logging.INFO)
    desk = Desk(A)
    desk.say(A, Bye("restart"))
    assert caplog.messages == [
        "frontend frontend-a is here",
        "frontend frontend-a is gone: restart",
    ]


# -- metrics ------------------------------------------------------------------------------


def test_a_scrape_is_answered_even_with_nothing_to_say() -> None:
    """Who asks waits for no answer that never comes; and only it gets one."""
    desk = Desk(A, B)
    desk.say(A, ScrapeMetrics())
    assert desk.sender.take(A) == [MetricsText("", seq=2)]
    assert not desk.sender.take(B)


def test_a_frontend_that_scrapes_too_often_is_not_answered() -> None:
    """Its answers would fill the link; another's question is no question of it."""
    desk = Desk(A, B)
    desk.say(A, *[ScrapeMetrics()] * 50)
    desk.say(B, ScrapeMetrics())
    assert len(desk.sender.take(A)) == len(desk.sender.take(B)) == 1
    desk.timers.advance(MIN_SCRAPE_S)
    desk.say(A, ScrapeMetrics())
    assert len(desk.sender.take(A)) == 1


# -- hand-overs whose frontend is gone -----------------------------------------------------


@pytest.mark.parametrize("is_late", [False, True])
def test_the_kv_of_a_lost_frontend_is_offered_to_another(is_late: bool) -> None:
    """Whether its prefill leg had ended, or ends although it was aborted."""
    desk = Desk(role=Role.PREFILL)
    for peer in (A, B):
        desk.say(
            peer, Hello(PROTOCOL_VERSION, peer.decode(), peer.hex(), [ORPHANED_KV])
        )
    desk.say(A, submit(leg=Leg.PREFILL))
    name = desk.engine.submitted[-1].request_id
    end = EngineFinished(name, FinishReason.LENGTH, handover={"e": 1})
    if is_late:
        desk.say(A, Bye())
    desk.service.outputs([EngineTokens(name, [5])], [end])
    desk.timers.settle()
    if not is_late:
        desk.say(A, Bye())
    desk.sender.take(B)
    desk.timers.advance(GRACE_S)
    desk.service.tick()
    told = [one for one in desk.sender.take(B) if isinstance(one, OrphanedKV)]
    assert [(one.request_id, one.handover) for one in told] == [(name, {"e": 1})]
    assert desk.metric("kv_orphans_total") == 1
    desk.say(B, Settled(name, seq=1))
    desk.timers.advance(AGAIN_S)
    desk.say(B, Ping("1", seq=2))
    desk.service.tick()
    assert not any(isinstance(one, OrphanedKV) for one in desk.sender.take(B))


# -- hidden states -------------------------------------------------------------------------


def keeper(folder: Path) -> Captures:
    """Return who keeps *folder*."""
    return Captures(CaptureSettings(str(folder), (2,), Access(0o600), 60.0, 1_000))


def test_a_request_says_whose_states_are_saved() -> None:
    """As many tokens of its prompt as it asks for."""
    desk = Desk(A)
    desk.say(A, Submit("r", pack_ids([1, 2]), Sampling(1), capture_tokens=2))
    assert desk.engine.submitted[-1].capture_tokens == 2


def test_a_frontend_has_files_deleted(tmp_path: Path) -> None:
    """Ours in our folder; a worker that saves none has none to delete."""
    captures = keeper(tmp_path)
    desk = Desk(A, captures=captures)
    desk.say(A, Discard(captures.new_path()), Discard("/etc/passwd"))
    desk.service.tick()
    assert desk.metric("capture_discards_total") == 1
    Desk(A).say(A, Discard(captures.new_path()))


def test_the_file_of_a_lost_frontend_s_request_goes(tmp_path: Path) -> None:
    """Its engine had ended it before it heard of the abort."""
    captures = keeper(tmp_path)
    desk = Desk(A, captures=captures)
    name = desk.submit()
    desk.say(A, Bye())
    saved = {"hidden_states_path": captures.new_path()}
    end = EngineFinished(name, FinishReason.LENGTH, kv_transfer_params=saved)
    desk.service.outputs([], [end])
    desk.service.tick()
    assert desk.metric("capture_discards_total") == 1


def told_desk(folder: Path, *capabilities: str) -> tuple[Desk, Captures, str]:
    """Return a desk, who keeps its folder, and the path that frontend A was told."""
    captures = keeper(folder)
    desk = Desk(captures=captures)
    desk.say(A, Hello(PROTOCOL_VERSION, "a", "1", list(capabilities)))
    path = captures.new_path()
    saved = {"hidden_states_path": path}
    end = EngineFinished(desk.submit(), FinishReason.LENGTH, kv_transfer_params=saved)
    desk.service.outputs([], [end])
    return desk, captures, path


def test_a_file_is_kept_until_its_client_is_told(tmp_path: Path) -> None:
    """Or it is deleted, or its frontend is lost; an operator sees how many are."""
    desk, captures, path = told_desk(tmp_path, CAPTURE_TOLD)
    assert captures.untold(desk.timers.now) == [path]
    desk.service.tick()
    assert desk.metric("capture_untold") == 1
    desk.say(A, Told(captures.new_path()))  # another
    assert captures.untold(desk.timers.now) == [path]
    desk.say(A, Told(path))
    assert captures.untold(desk.timers.now) == []

    desk, captures, path = told_desk(tmp_path, CAPTURE_TOLD)
    desk.say(A, Discard(path))
    assert captures.untold(desk.timers.now) == []
    assert captures.usage.num_discarded == 1

    desk, captures, path = told_desk(tmp_path, CAPTURE_TOLD)
    desk.say(B, Hello(PROTOCOL_VERSION, "b", "1", [CAPTURE_TOLD]), Told(path))
    assert captures.untold(desk.timers.now) == [path]  # it is not B's
    desk.say(A, Bye())
    assert captures.untold(desk.timers.now) == []
    assert captures.usage.num_discarded == 0  # it may be there, and its link broken


def test_an_older_frontend_s_files_age_from_the_start(tmp_path: Path) -> None:
    """It will never say that a client was told."""
    desk, captures, _ = told_desk(tmp_path)
    assert captures.untold(desk.timers.now) == []


def test_what_is_kept_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In number, the oldest first, and in time; only files of this folder count."""
    monkeypatch.setattr(untold_module, "MAX_UNTOLD", 2)
    captures = keeper(tmp_path)
    untold = Untold(captures)
    hello = Hello(PROTOCOL_VERSION, "a", "1", [CAPTURE_TOLD])
    frontend = Frontend(A, hello, Liveness(0.0))
    paths = [captures.new_path() for _ in range(3)]
    for number, path in enumerate([*paths, "/etc/passwd", 5, None]):
        end = Finished(
            "r", FinishReason.STOP, 1, kv_transfer_params={"hidden_states_path": path}
        )
        untold.given(frontend, end, float(number))
    untold.given(frontend, Finished("r", FinishReason.STOP, 1), 9.0)
    assert untold.paths(9.0) == paths[1:]
    assert untold.paths(1.0 + MAX_UNTOLD_S) == paths[2:]
    assert len(untold) == 1


@pytest.mark.parametrize(
    ("capabilities", "kind"), [([CAPTURE], ErrorKind.CAPTURE), ([], ErrorKind.ENGINE)]
)
def test_a_file_that_failed_is_told_in_words_that_are_known(
    capabilities: list[str], kind: ErrorKind
) -> None:
    """A frontend of an older release has no such kind: it would drop the link."""
    desk = Desk()
    desk.say(A, Hello(PROTOCOL_VERSION, "a", "1", capabilities))
    name = desk.submit()
    end = EngineFinished(
        name, FinishReason.ERROR, error_kind=ErrorKind.CAPTURE, error="full"
    )
    desk.service.outputs([], [end])
    [told] = desk.ends()
    assert (told.error_kind, told.error) == (kind, "full")


def test_the_file_of_a_request_that_is_sent_again_goes(tmp_path: Path) -> None:
    """Its engine had ended it when the weights changed; its client hears of the next."""
    captures = keeper(tmp_path)
    desk = Desk(A, captures=captures)
    name = desk.submit()
    updated(desk)
    saved = {"hidden_states_path": captures.new_path()}
    ended = EngineFinished(name, FinishReason.LENGTH, kv_transfer_params=saved)
    desk.service.outputs([], [ended])
    desk.service.tick()
    assert desk.metric("capture_discards_total") == 1
    assert [end.kv_transfer_params for end in desk.ends()] == [None]


def test_what_is_in_the_folder_is_shown(tmp_path: Path) -> None:
    """Files, bytes, writes, failures and sweeps by reason."""
    captures = keeper(tmp_path)
    desk = Desk(A, captures=captures)
    captures.written(300)
    captures.failed("No space left on device")
    desk.service.tick()
    desk.service.tick()
    names = ("files", "bytes", "writes_total", "failures_total")
    assert [desk.metric(f"capture_{name}") for name in names] == [1, 300, 1, 1]
    assert desk.metric("capture_swept_total", reason="age") == 0


def test_the_status_follows_the_card_where_it_is_understood() -> None:
    """And comes again, to all who understand it, when it changes."""
    desk = Desk()
    desk.say(A, Hello(PROTOCOL_VERSION, "a", "1", [STATUS]))
    desk.say(B, Hello(PROTOCOL_VERSION, "b", "1"))
    kinds = [type(message) for message in desk.sender.take(A)]
    assert kinds == [Card, Status, Load]
    assert [type(message) for message in desk.sender.take(B)] == [Card, Load]

    desk.say(A, Admin("x", "reset_prefix_cache", seq=1))
    desk.engine.administered[0][1](AdminOutcome())

    told = desk.sender.take(A)
    assert [type(message) for message in told] == [Status, Status, AdminDone]
    assert numbers(told) == [3, 4, 5]
    assert desk.sender.take(B) == []


def test_an_answer_that_no_message_can_carry_is_an_error() -> None:
    """It was done: only its result is lost."""
    desk = Desk(A)
    desk.say(A, Admin("x", "collective_rpc", {"method": "m"}))
    desk.engine.administered[0][1](AdminOutcome(result={"results": ["x" * 100_000]}))
    (answer,) = desk.sender.take(A)
    assert isinstance(answer, AdminDone)
    assert answer.error.startswith("it is done, but its result cannot be sent")


def test_a_pause_that_aborts_ends_requests_on_purpose() -> None:
    """Their frontends are told that it was so; what a client cancelled is not."""
    desk = Desk(A)
    ours, theirs = desk.submit("r"), desk.submit("c")
    desk.say(A, Cancel("c"))
    desk.say(A, Admin("x", "pause", {"mode": "abort"}))
    assert desk.engine.aborted == [theirs, ours]
    for one in (ours, theirs):
        desk.end(one, FinishReason.ABORT)
    ends = {end.request_id: end.stop_reason for end in desk.ends()}
    assert ends == {"r": BY_PAUSE, "c": None}


def test_an_engine_that_does_not_end_what_a_pause_aborts_is_not_waited_for() -> None:
    """The made-up end says the same."""
    desk = Desk(A)
    desk.submit("r")
    desk.say(A, Admin("x", "pause"))
    desk.sender.take(A)
    desk.timers.now += ABORT_GRACE_S + 1
    desk.say(A, Ping("1"))
    desk.service.tick()
    desk.service.flush()
    (end,) = desk.ends()
    assert (end.reason, end.stop_reason) == (FinishReason.ABORT, BY_PAUSE)


def updated(desk: Desk) -> None:
    """Have the weights updated to number 7."""
    arguments = {"weight_version": "v", "update": 7, "weight_dir": "/w"}
    desk.say(A, Admin("x", "update_weights", arguments))
    desk.engine.administered[-1][1](AdminOutcome())


def test_kv_of_other_weights_is_not_read() -> None:
    """What comes with it is refused, what has it and has not begun ends: as hand-overs."""
    desk = Desk(A, role=Role.DECODE)
    handover: dict[str, object] = {"kv": 1}
    old = msgspec.structs.replace(
        submit("old", leg=Leg.DECODE, handover=handover), handover_update=0
    )
    begun = msgspec.structs.replace(old, request_id="begun")
    desk.say(A, old, begun)
    engine_ids = [request.request_id for request in desk.engine.submitted]
    desk.tokens((engine_ids[1], [5]))
    updated(desk)
    assert desk.engine.aborted == engine_ids[:1]
    desk.end(engine_ids[0], FinishReason.ABORT)
    late = msgspec.structs.replace(old, request_id="late")
    fitting = msgspec.structs.replace(old, request_id="new", handover_update=7)
    desk.say(A, late, fitting)
    desk.service.flush()

    kinds = {end.request_id: end.error_kind for end in desk.ends()}
    assert kinds == {"old": ErrorKind.HANDOVER, "late": ErrorKind.HANDOVER}
    assert len(desk.engine.submitted) == 3


@pytest.mark.parametrize("role", [Role.AGGREGATED, Role.PREFILL])
@pytest.mark.parametrize(
    "reason", [FinishReason.ABORT, FinishReason.LENGTH, FinishReason.STOP]
)
def test_what_has_not_begun_is_sent_again_behind_an_update(
    role: Role, reason: FinishReason
) -> None:
    """However the engine ends it, it has brought nothing; KV that is held is told of."""
    desk = Desk(A, role=role)
    leg = Leg.PREFILL if role is Role.PREFILL else Leg.FULL
    for name in ("waits", "runs"):
        desk.say(A, msgspec.structs.replace(submit(name), leg=leg))
    engine_ids = [request.request_id for request in desk.engine.submitted]
    desk.tokens((engine_ids[1], [5]))
    updated(desk)
    assert desk.engine.aborted == engine_ids[:1]
    desk.tokens((engine_ids[0], [6]), (engine_ids[1], [7]))
    is_held = leg is Leg.PREFILL and reason is not FinishReason.ABORT
    handover: JsonObject | None = {"kv": 1} if is_held else None
    ended = EngineFinished(engine_ids[0], reason, handover=handover)
    desk.service.outputs([], [ended])
    desk.service.flush()

    tokens, ends = desk.sender.items(A)
    assert {item.request_id for item in tokens} == {"runs"}
    (end,) = ends
    assert (end.request_id, end.reason, end.num_output_tokens) == (
        "waits", FinishReason.ERROR, 0
    )  # fmt: skip
    assert (end.error_kind, end.stop_reason) == (ErrorKind.DRAINING, AGAIN)
    assert end.handover == handover


def loaded(desk: Desk, name: str, update: int) -> None:
    """Have an adapter loaded."""
    arguments = {
        "lora_name": name,
        "lora_path": "/a",
        "update": update,
        "load_inplace": True,
    }
    desk.say(A, Admin("x", "load_lora_adapter", arguments))
    desk.engine.administered[-1][1](AdminOutcome())


def of_adapters(desk: Desk, *names: str) -> list[str]:
    """Submit a request for each adapter, called as it; return the engine's ids."""
    for name in names:
        desk.say(A, msgspec.structs.replace(submit(f"for-{name}"), lora=name))
    return [one.request_id for one in desk.engine.submitted[-len(names) :]]


@pytest.mark.parametrize("answers", [True, False])
def test_requests_end_before_their_adapter_is_unloaded(answers: bool) -> None:
    """With what they have, to go on elsewhere; new ones are sent there, others stay."""
    desk = Desk(A)
    for update, name in enumerate("abc", 1):
        loaded(desk, name, update)
    engine_ids = of_adapters(desk, "a", "b")
    desk.tokens((engine_ids[0], [5]), (engine_ids[1], [5]))
    desk.say(A, Admin("x", "unload_lora_adapter", {"lora_name": "a"}))
    assert desk.engine.aborted == engine_ids[:1]
    if answers:
        desk.end(engine_ids[0], FinishReason.ABORT)
    else:
        desk.timers.advance(16.0)
        desk.say(A, Ping("1"))
        desk.service.tick()
    (end,) = desk.ends()
    assert (end.request_id, end.num_output_tokens) == ("for-a", 1)
    assert (end.error_kind, end.stop_reason) == (ErrorKind.DRAINING, None)
    assert "'a' is unloaded here" in end.error
    num_submitted = len(desk.engine.submitted)
    of_adapters(desk, "a", "c")
    assert [one.lora for one in desk.engine.submitted[num_submitted:]] == ["c"]
    (end,) = desk.ends()
    assert (end.request_id, end.error_kind) == ("for-a", ErrorKind.DRAINING)


def test_an_adapter_in_the_place_of_another_is_begun_with_anew() -> None:
    """By its own requests, that have brought nothing; those that have go on."""
    desk = Desk(A)
    for update, name in enumerate("ab", 1):
        loaded(desk, name, update)
    engine_ids = of_adapters(desk, "a", "b")
    desk.say(A, msgspec.structs.replace(submit("second"), lora="a"))
    desk.tokens((desk.engine.submitted[-1].request_id, [5]))
    loaded(desk, "a", 7)
    assert desk.engine.aborted == engine_ids[:1]


def test_a_request_of_an_unknown_adapter_goes_elsewhere() -> None:
    """This worker may have been restarted; another may have it."""
    desk = Desk(A)
    desk.say(A, msgspec.structs.replace(submit(), lora="a"))
    desk.service.flush()
    (end,) = desk.ends()
    assert end.error_kind is ErrorKind.DRAINING
    loaded = {"lora_name": "a", "lora_path": "/a", "update": 3}
    desk.say(A, Admin("x", "load_lora_adapter", loaded))
    desk.engine.administered[-1][1](AdminOutcome())
    desk.say(A, msgspec.structs.replace(submit(), lora="a"))
    assert [request.lora for request in desk.engine.submitted] == ["a"]


def test_broken_weights_send_what_runs_elsewhere_and_take_nothing() -> None:
    """Until an update succeeds."""
    desk = Desk(A)
    engine_id = desk.submit("r")
    arguments = {"weight_version": "v", "update": 7, "weight_dir": "/w"}
    desk.say(A, Admin("x", "update_weights", arguments))
    desk.engine.administered[-1][1](AdminOutcome("half", "failed", is_broken=True))
    assert desk.engine.aborted == [engine_id]
    desk.end(engine_id, FinishReason.ABORT)
    desk.say(A, submit("late"))
    desk.service.flush()
    kinds = {end.request_id: end.error_kind for end in desk.ends()}
    assert kinds == {"r": ErrorKind.DRAINING, "late": ErrorKind.DRAINING}
    updated(desk)
    desk.say(A, submit("well"))
    assert len(desk.engine.submitted) == 2
