"""Generations that are kept: who follows them, and what Recalls make of them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from support.worker_desk import A, B, Desk, submit
from tokenwire.protocol.messages import (
    CANCELLED,
    GOES_ON,
    Finished,
    FinishReason,
    Keep,
    LetGo,
    Recall,
    Recalled,
    Submit,
    Tokens,
)
from tokenwire.protocol.tokens import unpack_ids
from tokenwire.worker.journal import Journal

OWNER = b"owner"
MAX_BYTES = 1_000_000
LIFE_S = 600.0


def keep(generation_id: str = "g", **fields: Any) -> Keep:
    """Return what a frontend asks for."""
    given: dict[str, Any] = {"owner": OWNER, "context": b"context", "ttl_s": 60.0}
    return Keep(generation_id, **{**given, **fields})


def kept(request_id: str = "r", **fields: Any) -> Submit:
    """Return a Submit of three ids that is to be kept."""
    return msgspec.structs.replace(submit(request_id), keep=keep(**fields))


def desk_of(*peers: bytes, max_bytes: int = MAX_BYTES, **options: Any) -> Desk:
    """Return a desk that keeps generations."""
    return Desk(*peers, journal=Journal(max_bytes, LIFE_S), **options)


def begin(desk: Desk, peer: bytes = A, **fields: Any) -> str:
    """Submit what is to be kept; return the engine's id."""
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
