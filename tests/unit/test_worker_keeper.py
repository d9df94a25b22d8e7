"""Generations that are kept: who follows them, and what Recalls make of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.worker_desk import A, B, Desk, submit
from tokenwire.protocol.messages import (
    BY_PAUSE,
    CANCELLED,
    CAPTURE_TOLD,
    GOES_ON,
    PROTOCOL_VERSION,
    Admin,
    Bye,
    Cancel,
    ErrorKind,
    Finished,
    FinishReason,
    Hello,
    Keep,
    Leg,
    LetGo,
    Ping,
    Recall,
    Recalled,
    Role,
    Submit,
    Tokens,
)
from tokenwire.protocol.tokens import unpack_ids
from tokenwire.worker.capture_files import Access
from tokenwire.worker.captures import Captures, CaptureSettings
from tokenwire.worker.engine import AdminOutcome, EngineFinished
from tokenwire.worker.entry import ENTRY_BYTES
from tokenwire.worker.journal import Journal
from tokenwire.worker.requests import ABORT_GRACE_S

C = b"frontend-c"
OWNER = b"owner"
MAX_BYTES = 1_000_000
LIFE_S = 600.0


def keep(generation_id: str = "g", **fields: Any) -> Keep:
    """Return what a frontend asks for."""
    given: dict[str, Any] = {"owner": OWNER, "context": b"context", "ttl_s": 60.0}
    return Keep(generation_id, **{**given, **fields})


def kept(*, request_id: str = "r", **fields: Any) -> Submit:
    """Return a Submit of three ids that is to be kept."""
    return msgspec.structs.replace(submit(request_id), keep=keep(**fields))


def desk_of(*peers: bytes, max_bytes: int = MAX_BYTES, **options: Any) -> Desk:
    """Return a desk that keeps generations."""
    return Desk(*peers, journal=Journal(max_bytes, LIFE_S), **options)


def begin(desk: Desk, peer: bytes = A, **fields: Any) -> str:
    """Submit what is to be kept, as "r"; return the engine's id."""
    desk.say(peer, kept(**fields))
    return desk.engine.submitted[-1].request_id


def recall(desk: Desk, peer: bytes, action: str, **fields: Any) -> Recalled:
    """Recall, and return the answer; what else was sent stays to be taken."""
    given: dict[str, Any] = {"request_id": "x", "generation_id": "g", "owner": OWNER}
    desk.say(peer, Recall(action=action, **{**given, **fields}))
    last = desk.sender.sent.pop()
    assert last[0] == peer
    assert isinstance(last[1], Recalled)
    return last[1]


def sent(desk: Desk, peer: bytes) -> tuple[list[Tokens], list[Finished]]:
    """Let the iteration end; return what was sent to *peer*."""
    desk.timers.settle()
    return desk.sender.items(peer)


def ids(items: list[Tokens]) -> list[int]:
    """Return the ids of *items*."""
    return [one for item in items for one in unpack_ids(item.token_ids)]


def test_a_generation_is_found_before_its_first_token() -> None:
    """From its Submit on; a look tells nothing of what is in it."""
    desk = desk_of(A, B)
    begin(desk, epoch=3)
    looked = recall(desk, B, "look")
    assert (looked.state, looked.epoch) == ("running", 3)
    assert (looked.is_followed, looked.outlives) == (True, False)
    assert (looked.context, looked.token_ids) == (b"", b"")


def test_a_read_has_all_and_changes_nothing() -> None:
    """Also what is about to be sent."""
    desk = desk_of(A, B)
    engine_id = begin(desk)
    desk.tokens((engine_id, [5, 6]))
    read = recall(desk, B, "read")
    assert (read.state, read.context) == ("running", b"context")
    assert unpack_ids(read.token_ids) == [0, 1, 2, 5, 6]
    assert read.num_new_tokens == 2
    desk.tokens((engine_id, [7]))
    items, _ = sent(desk, A)
    assert ids(items) == [5, 6, 7]


@pytest.mark.parametrize("follower", [A, B])
def test_a_follower_gets_each_id_once(follower: bytes) -> None:
    """What waits in the outbox is the earlier one's, and goes before its end.

    Whoever of the two frontends follows it then.
    """
    desk = desk_of(A, B)
    engine_id = begin(desk)
    desk.tokens((engine_id, [5]))
    desk.timers.settle()
    desk.tokens((engine_id, [6, 7]))  # waits in the outbox
    told = recall(desk, follower, "follow")
    desk.tokens((engine_id, [8]))
    desk.end(engine_id, FinishReason.STOP)
    desk.timers.settle()

    items, ends = desk.sender.items(A)
    mine = [item for item in items if item.request_id == "r"]
    assert [(item.index, ids([item])) for item in mine] == [(0, [5]), (1, [6, 7])]
    assert ends[0].request_id == "r"
    assert (ends[0].reason, ends[0].stop_reason) == (FinishReason.ABORT, GOES_ON)
    assert ends[0].num_output_tokens == 3
    assert unpack_ids(told.token_ids) == [0, 1, 2, 5, 6, 7]
    assert told.num_new_tokens == 3
    if follower == B:
        items, ends = desk.sender.items(B)
    theirs = [item for item in items if item.request_id == "x"]
    assert [(item.index, ids([item])) for item in theirs] == [(3, [8])]
    assert (ends[-1].request_id, ends[-1].num_output_tokens) == ("x", 4)
    assert ends[-1].reason is FinishReason.STOP
    assert desk.service.num_requests == 0


def test_a_cancel_by_another_frontend_ends_it_for_good() -> None:
    """What it has stays; a second cancel finds it ended."""
    desk = desk_of(A, B)
    engine_id = begin(desk)
    desk.tokens((engine_id, [5]))
    assert recall(desk, B, "cancel").state == "running"
    assert desk.engine.aborted == [engine_id]
    desk.end(engine_id, FinishReason.ABORT)
    _, (end,) = sent(desk, A)
    assert (end.reason, end.stop_reason) == (FinishReason.ABORT, CANCELLED)
    read = recall(desk, B, "read")
    assert (read.state, read.finished) == ("ended", end)
    assert recall(desk, B, "cancel").state == "ended"
    assert desk.engine.aborted == [engine_id]


def test_what_is_let_go_goes_on_and_is_sent_to_nobody() -> None:
    """Until somebody follows it."""
    desk = desk_of(A, B)
    engine_id = begin(desk, outlives=True)
    desk.tokens((engine_id, [5]))
    desk.say(A, LetGo("r"))
    items, (end,) = sent(desk, A)
    assert (ids(items), end.stop_reason, end.num_output_tokens) == ([5], GOES_ON, 1)
    desk.tokens((engine_id, [6]))
    desk.timers.settle()
    assert not desk.sender.sent
    told = recall(desk, B, "follow")
    assert not told.is_followed
    desk.tokens((engine_id, [7]))
    desk.end(engine_id)
    items, (end,) = sent(desk, B)
    assert unpack_ids(told.token_ids)[3:] + ids(items) == [5, 6, 7]
    assert (end.request_id, end.num_output_tokens) == ("x", 3)


def test_what_does_not_outlive_its_client_ends_when_it_is_let_go() -> None:
    """As by Cancel."""
    desk = desk_of(A)
    engine_id = begin(desk)
    desk.say(A, LetGo("r"))
    assert desk.engine.aborted == [engine_id]


# -- recalls ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({"generation_id": "h"}, "unknown"),
        ({"owner": b"other"}, "unknown"),
        ({"action": "peek"}, "invalid"),
        ({"request_id": "r"}, "invalid"),  # it is open
    ],
)
@pytest.mark.parametrize("action", ["look", "read", "follow", "cancel", "delete"])
def test_what_cannot_be_recalled_is_said_in_one_word(
    action: str, fields: dict[str, Any], state: str
) -> None:
    """And nothing happens."""
    desk = desk_of(A)
    engine_id = begin(desk)
    answer = recall(desk, A, **{"action": action, **fields})
    assert msgspec.structs.replace(answer, seq=msgspec.UNSET) == Recalled(
        fields.get("request_id", "x"), state
    )
    desk.tokens((engine_id, [5]))
    items, ends = sent(desk, A)
    assert ([item.request_id for item in items], ends) == (["r"], [])
    assert not desk.engine.aborted
    known = fields.get("action", action)
    label = "other" if known == "peek" else known
    assert desk.metric("recalls_total", action=label, state=state) == 1


def test_a_worker_without_a_journal_knows_of_nothing() -> None:
    """It runs what it is asked to keep; what is let go ends."""
    desk = Desk(A)
    engine_id = begin(desk, outlives=True)
    assert recall(desk, A, "look").state == "unknown"
    desk.say(A, LetGo("r"))
    assert desk.engine.aborted == [engine_id]


def test_a_prefill_leg_is_not_kept() -> None:
    """It brings no output."""
    desk = desk_of(A, role=Role.PREFILL)
    desk.say(A, msgspec.structs.replace(kept(), leg=Leg.PREFILL))
    assert recall(desk, A, "look").state == "unknown"


def test_a_decode_leg_is_kept_and_its_context_once() -> None:
    """The journal has it; the open request does not."""
    desk = desk_of(A, role=Role.DECODE)
    desk.say(A, msgspec.structs.replace(kept(), leg=Leg.DECODE, handover={}))
    assert recall(desk, A, "read").context == b"context"
    (request,) = desk.service._requests  # pyright: ignore[reportPrivateUsage]
    assert request.submit.keep is None


def test_who_follows_may_change_again_and_again() -> None:
    """Each has what it followed, and its own end, in order."""
    desk = desk_of(A, B, C)
    engine_id = begin(desk)
    prefixes, number = {("r", A): 0}, 0
    for turn, peer in enumerate([B, A, A, C, B]):
        desk.tokens((engine_id, [number, number + 1]))
        number += 2
        told = recall(desk, peer, "follow", request_id=f"x{turn}")
        assert told.is_followed
        assert unpack_ids(told.token_ids)[3:] == list(range(number))
        prefixes[f"x{turn}", peer] = number
    desk.tokens((engine_id, [number]))
    desk.end(engine_id)
    desk.timers.settle()

    for peer in (A, B, C):
        items, ends = desk.sender.items(peer)
        names = [name for name, of in prefixes if of == peer]
        assert [end.request_id for end in ends] == names
        for name, end in zip(names, ends, strict=True):
            mine = [item for item in items if item.request_id == name]
            first = prefixes[name, peer]
            assert ids(mine) == list(range(first, end.num_output_tokens))
            assert end.reason is (
                FinishReason.LENGTH if name == "x4" else FinishReason.ABORT
            )
    assert desk.service.num_requests == 0


def test_a_follower_that_cannot_be_told_takes_nothing_over() -> None:
    """Its link has just broken; who followed goes on."""
    desk = desk_of(A, B)
    engine_id = begin(desk)
    desk.sender.unreachable.add(B)
    desk.say(B, Recall("x", "g", OWNER, "follow"))
    desk.tokens((engine_id, [5]))
    items, ends = sent(desk, A)
    assert (ids(items), ends) == ([5], [])


def test_weights_are_told_where_they_changed() -> None:
    """Tokens before an update are of the old ones."""
    desk = desk_of(A)
    engine_id = begin(desk)
    desk.tokens((engine_id, [5, 6]))
    arguments = {"weight_version": "v2", "update": 7, "weight_dir": "/w"}
    desk.say(A, Admin("a", "update_weights", arguments))
    desk.engine.administered[-1][1](AdminOutcome())
    desk.tokens((engine_id, [7]))
    read = recall(desk, A, "read")
    assert read.weight_versions == [(0, "default"), (2, "v2")]


# -- ends ---------------------------------------------------------------------------------


def test_a_frontend_s_own_cancel_keeps_what_there_is() -> None:
    """Its client may come back."""
    desk = desk_of(A, B)
    engine_id = begin(desk)
    desk.tokens((engine_id, [5]))
    desk.say(A, Cancel("r"))
    desk.end(engine_id, FinishReason.ABORT)
    (end,) = desk.ends()
    assert end.stop_reason is None
    read = recall(desk, B, "follow")
    assert (read.state, read.finished, read.is_followed) == ("ended", end, False)
    assert desk.service.num_requests == 0


@pytest.mark.parametrize("is_followed", [True, False])
def test_what_failed_is_not_kept(is_followed: bool) -> None:
    """Its frontend moves it elsewhere; if nobody does, it is lost."""
    desk = desk_of(A)
    engine_id = begin(desk, outlives=True)
    if not is_followed:
        desk.say(A, LetGo("r"))
    desk.end(engine_id, FinishReason.ERROR)
    assert recall(desk, A, "look").state == ("unknown" if is_followed else "lost")
    desk.service.tick()
    assert desk.metric("journal_lost_total", reason="failed") == (not is_followed)
    assert desk.service.num_requests == 0


def test_a_pause_that_aborts_is_an_end_to_be_told() -> None:
    """Also of what nobody follows."""
    desk = desk_of(A)
    engine_id = begin(desk, outlives=True)
    desk.tokens((engine_id, [5]))
    desk.say(A, LetGo("r"), Admin("a", "pause", {"mode": "abort"}))
    desk.end(engine_id, FinishReason.ABORT)
    told = recall(desk, A, "follow")
    assert told.state == "ended"
    assert told.finished is not None
    assert (told.finished.reason, told.finished.stop_reason) == (
        FinishReason.ABORT,
        BY_PAUSE,
    )


def evict(desk: Desk, engine_id: str) -> None:
    """The worker leaves, and the engine obeys."""
    desk.service.evict_all()
    desk.end(engine_id, FinishReason.ABORT)


def leave(desk: Desk, engine_id: str) -> None:
    """The worker leaves, and the engine does not obey."""
    del engine_id
    desk.service.evict_all()
    desk.service.end_all()


def outwait(desk: Desk, engine_id: str) -> None:
    """The engine does not obey."""
    del engine_id
    desk.timers.advance(ABORT_GRACE_S + 1)
    for peer in (A, B):
        desk.say(peer, Ping("1"))
    desk.service.tick()


def die(desk: Desk, engine_id: str) -> None:
    """The engine dies."""
    del engine_id
    desk.service.died("dead")


def fail(desk: Desk, engine_id: str) -> None:
    """The request fails."""
    desk.end(engine_id, FinishReason.ERROR)


def new_weights(desk: Desk) -> None:
    """The KV that it would use is of no use any more."""
    arguments = {"weight_version": "v2", "update": 7, "weight_dir": "/w"}
    desk.say(B, Admin("a", "update_weights", arguments))
    desk.engine.administered[-1][1](AdminOutcome())


@pytest.mark.parametrize("end_it", [evict, leave, outwait, die, fail])
def test_what_is_cancelled_goes_on_nowhere(
    end_it: Callable[[Desk, str], None],
) -> None:
    """Whatever else would have sent it elsewhere."""
    desk = desk_of(A, B)
    engine_id = begin(desk)
    recall(desk, B, "cancel")
    end_it(desk, engine_id)
    (end,) = desk.ends()
    assert (end.reason, end.stop_reason) == (FinishReason.ABORT, CANCELLED)
    assert recall(desk, B, "look").state == "ended"


def give_all_up(desk: Desk) -> None:
    """The worker leaves."""
    desk.service.evict_all()


def unload(desk: Desk) -> None:
    """Its adapter is unloaded."""
    desk.say(B, Admin("a", "unload_lora_adapter", {"lora_name": "a"}))


@pytest.mark.parametrize("give_up", [new_weights, give_all_up, unload])
@pytest.mark.parametrize(
    "outcome", [FinishReason.STOP, FinishReason.ABORT, FinishReason.ERROR, None]
)
def test_a_cancel_counts_also_behind_what_sends_it_elsewhere(
    give_up: Callable[[Desk], None], outcome: FinishReason | None
) -> None:
    """Until it has ended; an output that is whole all the same is one."""
    desk = desk_of(A, B)
    adapter = {"lora_name": "a", "lora_path": "/a", "update": 1}
    desk.say(B, Admin("a", "load_lora_adapter", adapter))
    desk.engine.administered[-1][1](AdminOutcome())
    desk.say(A, msgspec.structs.replace(kept(), lora="a"))
    engine_id = desk.engine.submitted[-1].request_id
    give_up(desk)
    assert desk.engine.aborted == [engine_id]
    recall(desk, B, "cancel")
    if outcome is None:
        outwait(desk, engine_id)
    else:
        desk.end(engine_id, outcome)
    (end,) = desk.ends()
    is_whole = outcome is FinishReason.STOP and give_up is not new_weights
    assert (end.reason, end.stop_reason) == (
        (FinishReason.STOP, None) if is_whole else (FinishReason.ABORT, CANCELLED)
    )
    assert recall(desk, B, "look").state == "ended"


def test_a_dead_engine_takes_what_ran_with_it() -> None:
    """What had ended is there until the worker exits."""
    desk = desk_of(A)
    desk.end(begin(desk, generation_id="ended"))
    begin(desk, request_id="s")
    desk.service.died("dead")
    assert recall(desk, A, "look").state == "unknown"
    assert recall(desk, A, "look", generation_id="ended").state == "ended"


@pytest.mark.parametrize("is_followed", [True, False])
def test_what_is_deleted_was_never_there(is_followed: bool) -> None:
    """It ends, and its follower is told why."""
    desk = desk_of(A, B)
    engine_id = begin(desk, outlives=True)
    desk.tokens((engine_id, [5]))
    if not is_followed:
        desk.say(A, LetGo("r"))
    desk.ends()
    assert recall(desk, B, "delete").state == "running"
    assert desk.engine.aborted == [engine_id]
    assert recall(desk, B, "look").state == "unknown"
    desk.tokens((engine_id, [6]))
    desk.end(engine_id, FinishReason.ABORT)
    assert [end.stop_reason for end in desk.ends()] == [CANCELLED] * is_followed
    assert recall(desk, B, "look").state == "unknown"
    assert desk.service.num_requests == 0


def test_an_older_one_is_not_deleted_any_more() -> None:
    """It has come back since: the epoch of who asks is not the one that runs."""
    desk = desk_of(A, B)
    begin(desk, epoch=3)

    assert recall(desk, B, "delete", epoch=2).epoch == 3
    assert recall(desk, B, "look").state == "running"
    assert recall(desk, B, "delete", epoch=3).state == "running"
    assert recall(desk, B, "look").state == "unknown"


def test_what_has_ended_or_is_lost_can_be_deleted() -> None:
    """Nothing of it is told any more."""
    desk = desk_of(A)
    for reason, state in ((FinishReason.STOP, "ended"), (FinishReason.ERROR, "lost")):
        engine_id = begin(desk, outlives=True)
        desk.say(A, LetGo("r"))
        desk.end(engine_id, reason)
        assert recall(desk, A, "delete").state == state
        assert recall(desk, A, "look").state == "unknown"


# -- one after the other ------------------------------------------------------------------


@pytest.mark.parametrize("epoch", [1, 2])
@pytest.mark.parametrize("is_followed", [True, False])
def test_a_later_submit_ends_an_earlier_one(epoch: int, is_followed: bool) -> None:
    """Its frontend thought it lost here; who still follows that one is told an end."""
    desk = desk_of(A, B)
    earlier = begin(desk, epoch=1, outlives=True)
    if not is_followed:
        desk.say(A, LetGo("r"))
        desk.ends()
    later = begin(desk, B, epoch=epoch)
    assert desk.engine.aborted == [earlier]
    desk.tokens((earlier, [5]), (later, [6]))
    desk.end(earlier, FinishReason.ABORT)
    assert [end.stop_reason for end in desk.ends()] == [None] * is_followed
    read = recall(desk, A, "read")
    assert (read.epoch, unpack_ids(read.token_ids)[3:]) == (epoch, [6])
    desk.end(later)
    assert recall(desk, A, "look").state == "ended"
    assert desk.service.num_requests == 0


def test_an_earlier_submit_that_comes_late_is_not_kept() -> None:
    """It runs, as its frontend asks; the later one is what counts."""
    desk = desk_of(A)
    later = begin(desk, epoch=2)
    earlier = begin(desk, epoch=1, request_id="s")
    desk.tokens((earlier, [5]), (later, [6]))
    assert not desk.engine.aborted
    assert unpack_ids(recall(desk, A, "read").token_ids)[3:] == [6]
    assert len(sent(desk, A)[0]) == 2


# -- frontends that are gone --------------------------------------------------------------


def by_silence(desk: Desk) -> None:
    """It is silent, while the others are not."""
    for _ in range(3):
        desk.timers.advance(1.5)
        for peer in (B, C):
            desk.say(peer, Ping("1"))
        desk.service.tick()


def by_send(desk: Desk) -> None:
    """Nothing can be sent to it."""
    desk.sender.unreachable.add(A)
    desk.service.drain()
    desk.sender.unreachable.clear()


def by_garbage(desk: Desk) -> None:
    """It breaks the protocol."""
    desk.service.broken(A, "not a message")


def by_expulsion(desk: Desk) -> None:
    """Its key is no longer allowed."""
    desk.service.expelled(A, "its key is no longer allowed")


def by_another_start(desk: Desk) -> None:
    """Its process has begun anew: the one before is dead."""
    desk.say(A, Hello(PROTOCOL_VERSION, A.decode(), "2"))


def by_bye(desk: Desk) -> None:
    """It leaves, and has sent its requests elsewhere."""
    desk.say(A, Bye())


def by_hello(desk: Desk) -> None:
    """Its connection broke, and it has sent its requests elsewhere."""
    desk.say(A, Hello(PROTOCOL_VERSION, A.decode(), "1"))


def by_hello_elsewhere(desk: Desk) -> None:
    """The same, on a connection of another identity."""
    desk.say(b"new", Hello(PROTOCOL_VERSION, A.decode(), "1"))


LOSSES = [by_silence, by_send, by_garbage, by_expulsion, by_another_start]
GIVEN_UP = [by_bye, by_hello, by_hello_elsewhere]


@pytest.mark.parametrize("lose", LOSSES)
def test_what_outlives_its_frontend_goes_on(lose: Callable[[Desk], None]) -> None:
    """The rest of what that had open ends, and stays kept."""
    desk = desk_of(A, B, C)
    outlives = begin(desk, outlives=True)
    ends = begin(desk, generation_id="ends", request_id="s")
    plain = desk.submit("plain")
    desk.tokens((outlives, [5]), (ends, [6]), (plain, [7]))
    desk.timers.settle()
    lose(desk)
    assert sorted(desk.engine.aborted) == sorted([ends, plain])
    assert desk.service.num_requests == 1
    desk.sender.take(A)
    desk.tokens((outlives, [8]), (ends, [9]))
    desk.end(ends, FinishReason.ABORT)
    desk.timers.settle()
    assert not desk.sender.batches(A)

    read = recall(desk, B, "read", generation_id="ends")
    assert (read.state, unpack_ids(read.token_ids)[3:]) == ("ended", [6])
    assert read.finished == Finished("s", FinishReason.ABORT, 1, 3)
    told = recall(desk, B, "follow")
    assert (told.is_followed, unpack_ids(told.token_ids)[3:]) == (False, [5, 8])
    desk.tokens((outlives, [10]))
    desk.end(outlives)
    items, (end,) = sent(desk, B)
    assert (ids(items), end.num_output_tokens) == ([10], 3)
    assert desk.service.num_requests == 0


@pytest.mark.parametrize("lose", [*LOSSES[:-1], None])
@pytest.mark.parametrize("give_up", GIVEN_UP)
def test_who_is_alive_has_sent_its_requests_elsewhere(
    give_up: Callable[[Desk], None], lose: Callable[[Desk], None] | None
) -> None:
    """So they end here, also if its loss was noticed before; what is kept stays.

    What was let go by itself goes on, and what somebody follows.
    """
    desk = desk_of(A, B, C)
    left = begin(desk, outlives=True)
    begin(desk, generation_id="let_go", request_id="s", outlives=True)
    begin(desk, generation_id="followed", request_id="t", outlives=True)
    desk.tokens((left, [5]))
    desk.say(A, LetGo("s"))
    if lose is not None:
        lose(desk)
    recall(desk, B, "follow", generation_id="followed")
    assert not desk.engine.aborted
    give_up(desk)
    assert desk.engine.aborted == [left]
    read = recall(desk, C, "read")
    assert (read.state, unpack_ids(read.token_ids)[3:]) == ("ended", [5])
    for name in ("let_go", "followed"):
        assert recall(desk, C, "look", generation_id=name).state == "running"


def test_another_start_of_a_frontend_does_not_end_what_the_first_left() -> None:
    """It has not sent that elsewhere: it knows nothing of it."""
    desk = desk_of(A)
    begin(desk, outlives=True)
    by_garbage(desk)
    desk.say(A, Hello(PROTOCOL_VERSION, A.decode(), "2"), Bye())
    assert not desk.engine.aborted


def test_who_came_back_and_is_lost_again_has_left_it_again() -> None:
    """A follower by a Recall counts as the first one."""
    desk = desk_of(A, B)
    engine_id = begin(desk, outlives=True)
    desk.say(A, LetGo("r"))
    recall(desk, B, "follow")
    desk.service.broken(B, "not a message")
    assert not desk.engine.aborted
    desk.say(B, Hello(PROTOCOL_VERSION, B.decode(), "1"))
    assert desk.engine.aborted == [engine_id]


def test_what_was_left_and_then_let_go_is_not_given_up() -> None:
    """Its last follower has said that it goes on."""
    desk = desk_of(A, B)
    begin(desk, outlives=True)
    by_garbage(desk)
    recall(desk, B, "follow")
    desk.say(B, LetGo("x"), Hello(PROTOCOL_VERSION, B.decode(), "1"), Bye())
    assert not desk.engine.aborted


def test_a_frontend_that_leaves_has_given_up_what_its_other_link_left() -> None:
    """A worker may have two addresses, and a frontend a link to each."""
    desk = desk_of()
    for peer, link_id in ((A, "x"), (B, "y")):
        desk.say(peer, Hello(PROTOCOL_VERSION, "f", "1", link_id=link_id))
    engine_id = begin(desk, outlives=True)
    by_garbage(desk)
    assert not desk.engine.aborted
    desk.say(B, Bye())
    assert desk.engine.aborted == [engine_id]


def test_what_is_followed_again_does_not_expire() -> None:
    """Until its follower has left, too."""
    desk = desk_of(A, B)
    begin(desk, outlives=True, ttl_s=2.0)
    desk.say(A, LetGo("r"))
    recall(desk, A, "follow")
    assert recall(desk, B, "look").is_followed
    for _ in range(3):
        desk.timers.advance(2.0)
        desk.say(A, Ping("1"))
        desk.say(B, Ping("1"))
        desk.service.tick()
    assert recall(desk, B, "look").state == "running"
    assert not desk.engine.aborted


# -- room, time, leaving ------------------------------------------------------------------


@pytest.mark.parametrize("is_followed", [True, False])
def test_what_has_to_make_room_goes_on_if_it_is_followed(is_followed: bool) -> None:
    """As if it had never been kept; else it ends: nobody will ever ask for it."""
    desk = desk_of(A, max_bytes=2 * ENTRY_BYTES + 200)
    first = begin(desk, outlives=True)
    if not is_followed:
        desk.say(A, LetGo("r"))
    second = begin(desk, generation_id="h", request_id="s", outlives=True)
    if not is_followed:
        desk.say(A, LetGo("s"))
    desk.ends()
    desk.tokens((first, [5]))
    desk.tokens((second, [5] * 50), (first, [6]))
    items, _ = sent(desk, A)
    assert recall(desk, A, "look").state == "lost"
    if is_followed:
        assert [ids([item]) for item in items if item.request_id == "r"] == [[5], [6]]
        assert not desk.engine.aborted
        desk.end(first)
        assert len(desk.ends()) == 1
    else:
        assert desk.engine.aborted == [first]
        assert not items
    assert recall(desk, A, "look", generation_id="h").state == "running"
    desk.service.tick()
    assert desk.metric("journal_lost_total", reason="bytes") == 1
    assert desk.service.num_requests == 1


def test_what_is_too_large_runs_unkept() -> None:
    """Nothing else is lost for it; to let go of it ends it."""
    desk = desk_of(A, max_bytes=2 * ENTRY_BYTES)
    begin(desk)
    large = begin(
        desk, generation_id="h", request_id="s", context=bytes(2_000), outlives=True
    )
    assert recall(desk, A, "look", generation_id="h").state == "lost"
    assert recall(desk, A, "look").state == "running"
    desk.tokens((large, [5]))
    assert ids(sent(desk, A)[0]) == [5]
    desk.say(A, LetGo("s"))
    assert desk.engine.aborted == [large]


def test_nobody_runs_for_ever_for_nobody() -> None:
    """Its time over, it ends, and is lost."""
    desk = desk_of(A)
    engine_id = begin(desk, outlives=True, ttl_s=60.0)
    desk.say(A, LetGo("r"))
    for wait_s, state in ((59.0, "running"), (1.0, "lost")):
        desk.timers.advance(wait_s)
        desk.say(A, Ping("1"))
        desk.service.tick()
        assert recall(desk, A, "look").state == state
    assert desk.engine.aborted == [engine_id]
    assert desk.service.num_requests == 0
    desk.end(engine_id, FinishReason.ABORT)
    assert desk.metric("journal_lost_total", reason="expired") == 1


def test_a_worker_that_leaves_waits_for_what_nobody_follows() -> None:
    """As for the rest; then it is lost with the worker."""
    desk = desk_of(A)
    changes: list[str] = []
    desk.service.on_change = lambda: changes.append("changed")
    first = begin(desk, outlives=True)
    second = begin(desk, generation_id="h", request_id="s", outlives=True)
    desk.say(A, LetGo("r"), LetGo("s"))
    desk.service.drain()
    desk.end(first)
    assert (desk.service.num_requests, changes) == (1, [])
    desk.service.evict_all()
    assert desk.engine.aborted == [second]
    desk.end(second, FinishReason.ABORT)
    assert changes == ["changed"]
    assert recall(desk, A, "look").state == "ended"
    assert recall(desk, A, "look", generation_id="h").state == "lost"


def test_what_nobody_follows_counts_as_any_other() -> None:
    """In the bounds of the worker, until it has ended."""
    desk = desk_of(A, max_requests=1, max_queued_tokens=3)
    engine_id = begin(desk, outlives=True)
    desk.say(A, LetGo("r"))
    desk.ends()
    desk.say(A, submit("s"))
    assert [end.error_kind for end in desk.ends()] == [ErrorKind.BUSY]
    desk.tokens((engine_id, [5]))
    desk.end(engine_id)
    assert not desk.ends()
    desk.say(A, submit("s"))
    assert len(desk.engine.submitted) == 2
    assert desk.metric("request_success_total", finished_reason="length") == 1


def test_what_is_kept_is_counted() -> None:
    """By state, in bytes, and what was asked."""
    desk = desk_of(A)
    desk.end(begin(desk))
    begin(desk, generation_id="h", outlives=True)
    desk.say(A, LetGo("r"))
    begin(desk, generation_id="i")
    recall(desk, A, "look")
    desk.service.tick()
    for state in ("running", "unfollowed", "ended"):
        assert desk.metric("journal_generations", state=state) == 1
    assert desk.metric("journal_bytes") > 3 * ENTRY_BYTES
    assert desk.metric("recalls_total", action="look", state="ended") == 1


@pytest.mark.parametrize("is_followed", [True, False])
def test_a_file_of_what_nobody_follows_ages(tmp_path: Path, is_followed: bool) -> None:
    """No frontend will say that its client knows of it."""
    captures = Captures(CaptureSettings(str(tmp_path), (2,), Access(0o600), 60.0))
    desk = desk_of(captures=captures)
    desk.say(A, Hello(PROTOCOL_VERSION, "a", "1", [CAPTURE_TOLD]))
    engine_id = begin(desk, outlives=True)
    if not is_followed:
        desk.say(A, LetGo("r"))
    path = captures.new_path()
    saved = {"hidden_states_path": path}
    end = EngineFinished(engine_id, FinishReason.STOP, kv_transfer_params=saved)
    desk.service.outputs([], [end])
    assert captures.untold(desk.timers.now) == [path] * is_followed
    assert captures.usage.num_discarded == 0
    told = recall(desk, A, "follow")
    assert told.finished is not None
    assert told.finished.kv_transfer_params == saved
