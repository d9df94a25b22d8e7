"""What a worker keeps of generations: what it tells of them, and its bounds."""

from __future__ import annotations

from typing import Any

import pytest

from tokenwire.protocol.codec import encode
from tokenwire.protocol.limits import MAX_CONTROL_BYTES, MAX_MESSAGE_BYTES
from tokenwire.protocol.messages import (
    Finished,
    FinishReason,
    Keep,
    Logprobs,
    Tokens,
)
from tokenwire.protocol.tokens import pack_floats, pack_ids, unpack_ids
from tokenwire.worker import journal as journal_module
from tokenwire.worker.entry import ENTRY_BYTES, Entry, State, Tombstone
from tokenwire.worker.journal import Journal, Lost

OWNER = b"owner"
LIFE_S = 600.0


def keep(generation_id: str = "g", **fields: Any) -> Keep:
    """Return what a frontend asks for."""
    given: dict[str, Any] = {"owner": OWNER, "context": b"", "ttl_s": 60.0}
    return Keep(generation_id, **{**given, **fields})


def begun(journal: Journal, generation_id: str = "g", **fields: Any) -> Entry:
    """Keep a generation with a prompt of three ids."""
    wanted = keep(generation_id, **fields)
    assert journal.takes(wanted)
    entry, _ = journal.begin(wanted, pack_ids([1, 2, 3]))
    assert entry is not None
    return entry


def rows(*values: float, width: int = 1) -> Logprobs:
    """Return records of as many candidates as *values*, *width* a row."""
    ids = pack_ids(list(range(len(values))))
    return Logprobs(width, ids, pack_floats(values), ids)


def tokens(
    index: int, *token_ids: int, logprobs: Logprobs | None = None, num_cached: int = 0
) -> Tokens:
    """Return new tokens."""
    return Tokens("r", index, pack_ids(token_ids), logprobs, num_cached)


def end(num_tokens: int = 0, **fields: Any) -> Finished:
    """Return an end."""
    return Finished("r", FinishReason.STOP, num_tokens, **fields)


def states(journal: Journal) -> dict[str, int]:
    """Return how many are in which state."""
    return {state.value: journal.num_in(state) for state in State}


def lost(journal: Journal) -> dict[str, int]:
    """Return how many were lost, without the zeros."""
    return {reason: number for reason, number in journal.num_lost.items() if number}


# -- what is told -----------------------------------------------------------------------


def test_all_that_came_is_told() -> None:
    """Ids behind the Submit's, logprobs behind the Keep's, versions where they changed."""
    journal = Journal(1_000_000, LIFE_S)
    before = rows(-1.0, -2.0)
    entry = begun(journal, context=b"c", outlives=True, epoch=2, logprobs=before)
    assert journal.append(
        entry, tokens(0, 4, 5, logprobs=rows(-3.0, -4.0), num_cached=2), "a"
    )
    assert journal.append(entry, tokens(2, 6, logprobs=rows(-5.0)), "a")
    assert journal.append(entry, tokens(3, 7, logprobs=rows(-6.0)), "b")
    assert journal.end(entry, end(4), 0.0)

    told = entry.recalled("x", is_whole=True)
    assert (told.request_id, told.state, told.epoch) == ("x", "ended", 2)
    assert (told.is_followed, told.outlives, told.context) == (False, True, b"c")
    assert unpack_ids(told.token_ids) == [1, 2, 3, 4, 5, 6, 7]
    assert (told.num_new_tokens, told.num_cached_tokens) == (4, 2)
    assert told.weight_versions == [(0, "a"), (3, "b")]
    assert told.finished == end(4)
    assert told.logprobs is not None
    assert told.logprobs.width == 1
    assert told.logprobs.logprobs == pack_floats([-1.0, -2.0, -3.0, -4.0, -5.0, -6.0])
    assert told.logprobs.token_ids == told.logprobs.ranks
    assert unpack_ids(told.logprobs.ranks) == [0, 1, 0, 1, 0, 0]


def test_what_was_told_does_not_grow() -> None:
    """It is of its moment."""
    journal = Journal(1_000_000, LIFE_S)
    entry = begun(journal)
    journal.append(entry, tokens(0, 4), "a")
    told = entry.recalled("x", is_whole=True)
    journal.append(entry, tokens(1, 5), "b")
    assert unpack_ids(told.token_ids) == [1, 2, 3, 4]
    assert told.weight_versions == [(0, "a")]


def test_a_look_tells_of_nothing_within() -> None:
    """Not even how long it is."""
    journal = Journal(1_000_000, LIFE_S)
    entry = begun(journal, context=b"c", epoch=1)
    journal.append(entry, tokens(0, 4, logprobs=rows(-1.0)), "a")
    looked = entry.recalled("x", is_whole=False)
    assert (looked.state, looked.epoch, looked.is_followed) == ("running", 1, True)
    assert (looked.context, looked.token_ids, looked.num_new_tokens) == (b"", b"", 0)
    assert (looked.logprobs, looked.weight_versions) == (None, [])


def test_another_s_generation_is_unknown() -> None:
    """Also when it is lost."""
    journal = Journal(1_000_000, LIFE_S)
    entry = begun(journal, epoch=4)
    assert journal.find("g", OWNER) is entry
    assert journal.find("g", b"other") is None
    assert journal.find("h", OWNER) is None
    journal.drop(entry, Lost.BYTES)
    assert journal.find("g", OWNER) == Tombstone(OWNER, 4)
    assert journal.find("g", b"other") is None


def test_what_is_dropped_without_a_reason_never_was() -> None:
    """And what was lost can be forgotten, too."""
    journal = Journal(1_000_000, LIFE_S)
    entry = begun(journal)
    journal.drop(entry)
    journal.drop(entry)  # as before
    assert journal.find("g", OWNER) is None
    journal.drop(begun(journal), Lost.FAILED)
    journal.forget_lost("g")
    assert journal.find("g", OWNER) is None
    journal.drop(begun(journal), Lost.FAILED)
    journal.drop(begun(journal))
    assert journal.find("g", OWNER) is None
    assert (journal.num_bytes, len(journal)) == (0, 0)


# -- epochs -------------------------------------------------------------------------------


@pytest.mark.parametrize(("epoch", "is_taken"), [(2, False), (3, True), (4, True)])
@pytest.mark.parametrize("is_lost", [False, True])
def test_an_earlier_submit_is_replaced_and_a_later_one_stays(
    epoch: int, is_taken: bool, is_lost: bool
) -> None:
    """Submits of one generation may cross; also behind one that was lost."""
    journal = Journal(1_000_000, LIFE_S)
    earlier = begun(journal, epoch=3)
    if is_lost:
        journal.drop(earlier, Lost.COUNT)
    wanted = keep(epoch=epoch)
    assert journal.takes(wanted) is is_taken
    if not is_taken:
        return
    entry, replaced = journal.begin(wanted, b"")
    assert replaced is (None if is_lost else earlier)
    assert journal.find("g", OWNER) is entry
    assert states(journal) == {"running": 1, "unfollowed": 0, "ended": 0}


def test_another_s_generation_is_not_replaced() -> None:
    """Whatever its epoch."""
    journal = Journal(1_000_000, LIFE_S)
    begun(journal)
    assert not journal.takes(keep(owner=b"other", epoch=9))


# -- bounds -------------------------------------------------------------------------------


def test_nothing_is_kept_where_there_is_no_journal() -> None:
    """Nor said to be lost."""
    journal = Journal(0, LIFE_S)
    assert not journal.takes(keep())


def test_every_byte_is_counted_and_given_back() -> None:
    """Context, ids, logprobs, versions and the end."""
    journal = Journal(1_000_000, LIFE_S)
    entry = begun(journal, context=bytes(100), logprobs=rows(-1.0))
    size = ENTRY_BYTES + 1 + len(OWNER) + 100 + 12 + 12
    assert journal.num_bytes == entry.num_bytes == size
    journal.append(entry, tokens(0, 4, logprobs=rows(-1.0)), "v" * 50)
    assert journal.num_bytes >= size + 4 + 12 + 50
    size = journal.num_bytes
    journal.append(entry, tokens(1, 5, 6, logprobs=rows(-1.0, -1.0)), "v" * 50)
    assert journal.num_bytes == size + 2 * 16
    size = journal.num_bytes
    journal.end(entry, end(3, prompt_token_ids=bytes(400)), 0.0)
    assert journal.num_bytes > size + 400
    assert entry.num_bytes == journal.num_bytes
    journal.drop(entry)
    assert journal.num_bytes == 0


def test_what_has_ended_makes_room_first_then_what_is_followed() -> None:
    """The oldest of each; what nobody follows has nobody else."""
    room = ENTRY_BYTES + 100
    journal = Journal(6 * room, LIFE_S)
    size = room - ENTRY_BYTES - 1 - len(OWNER) - 12
    entries = {name: begun(journal, name, context=bytes(size)) for name in "uvefrs"}
    assert journal.num_bytes == 6 * room
    assert not journal.is_over
    for name in "uv":
        journal.unfollow(entries[name], 0.0)
    for name in "fe":
        journal.end(entries[name], end(), 0.0)
    assert journal.num_bytes > journal.max_bytes
    order: list[str] = []
    for _ in range(6):
        over = journal.num_bytes - 1
        journal.max_bytes = over
        running = [one.generation_id for one in journal.make_room()]
        (gone,) = (
            entries.keys()
            - order
            - {name for name in entries if journal.find(name, OWNER) is entries[name]}
        )
        assert running == ([] if gone in "fe" else [gone])
        order.append(gone)
    assert order == ["f", "e", "r", "s", "u", "v"]
    assert lost(journal) == {"bytes": 6}
    assert journal.num_bytes == 0
    assert isinstance(journal.find("f", OWNER), Tombstone)


def test_who_follows_anew_is_the_last_to_go() -> None:
    """Its client has just come back."""
    journal = Journal(1_000_000, LIFE_S)
    first, second = begun(journal, "a"), begun(journal, "b")
    journal.follow(first)
    journal.max_bytes = journal.num_bytes - 1
    assert journal.make_room() == [second]


def test_the_number_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the bytes are."""
    monkeypatch.setattr(journal_module, "MAX_KEPT", 2)
    journal = Journal(1_000_000, LIFE_S)
    first, *_ = [begun(journal, name) for name in "abc"]
    assert journal.make_room() == [first]
    assert lost(journal) == {"count": 1}
    assert len(journal) == 2


def test_what_is_too_large_by_itself_is_lost_at_once() -> None:
    """And takes nobody's room; at its Submit, or when it has grown."""
    journal = Journal(3 * ENTRY_BYTES, LIFE_S)
    other = begun(journal, "other")
    entry, _ = journal.begin(keep(context=bytes(3 * ENTRY_BYTES)), b"")
    assert entry is None
    assert isinstance(journal.find("g", OWNER), Tombstone)
    grows = begun(journal)
    ids = list(range(ENTRY_BYTES // 2))
    assert not journal.append(grows, tokens(0, *ids), "a")
    ends = begun(journal)
    text = bytes(2 * ENTRY_BYTES)
    assert not journal.end(ends, end(prompt_token_ids=text), 0.0)
    assert journal.make_room() == []
    assert journal.find("other", OWNER) is other
    assert (lost(journal), journal.num_bytes) == ({"too_large": 3}, other.num_bytes)


def test_what_is_kept_fits_into_a_message() -> None:
    """However much may be kept in all."""
    journal = Journal(1 << 40, LIFE_S)
    prompt = bytes(MAX_MESSAGE_BYTES - MAX_CONTROL_BYTES - ENTRY_BYTES - 300)
    entry, _ = journal.begin(keep(), prompt)
    assert entry is not None
    assert journal.append(entry, tokens(0, *range(30)), "a")
    encode(entry.recalled("x" * 64, is_whole=True))
    assert not journal.append(entry, tokens(30, *range(30)), "a")
    assert lost(journal) == {"too_large": 1}


@pytest.mark.parametrize(
    "items",
    [
        [tokens(0, 4, logprobs=rows(-1.0, -2.0, width=2))],  # the Keep's width is 1
        [tokens(0, 4, logprobs=rows(-1.0)), tokens(1, 5)],
        [tokens(0, 4)],
    ],
)
def test_logprobs_with_a_gap_or_another_width_cannot_be_kept(
    items: list[Tokens],
) -> None:
    """One record has one row for each of the last ids."""
    journal = Journal(1_000_000, LIFE_S)
    entry = begun(journal, logprobs=rows(-1.0))
    *well, last = items
    assert all(journal.append(entry, item, "a") for item in well)
    assert not journal.append(entry, last, "a")
    assert lost(journal) == {"unfit": 1}


def test_logprobs_that_begin_late_cannot_be_kept() -> None:
    """They would be taken for those of the ids before."""
    journal = Journal(1_000_000, LIFE_S)
    entry = begun(journal)
    journal.append(entry, tokens(0, 4), "a")
    assert not journal.append(entry, tokens(1, 5, logprobs=rows(-1.0)), "a")


def test_an_end_that_no_message_can_carry_is_not_kept() -> None:
    """Its follower is told of an error instead."""
    journal = Journal(1_000_000, LIFE_S)
    entry = begun(journal)
    assert not journal.end(entry, end(kv_transfer_params={"x": object()}), 0.0)
    assert lost(journal) == {"unfit": 1}


# -- time ---------------------------------------------------------------------------------


def test_what_has_ended_expires() -> None:
    """So long after its end; what runs and is followed never does."""
    journal = Journal(1_000_000, LIFE_S)
    entry = begun(journal, ttl_s=60.0)
    assert journal.expire(1e6) == []
    journal.end(entry, end(), 1000.0)
    assert journal.expire(1059.9) == []
    assert journal.find("g", OWNER) is entry
    assert journal.expire(1060.0) == []  # it does not run
    assert isinstance(journal.find("g", OWNER), Tombstone)
    assert lost(journal) == {"expired": 1}


def test_what_nobody_follows_expires_as_it_runs() -> None:
    """So long after its last follower left; its end gives it as long again."""
    journal = Journal(1_000_000, LIFE_S)
    left, ends, comes_back = (begun(journal, name, ttl_s=60.0) for name in "abc")
    for entry in (left, ends, comes_back):
        journal.unfollow(entry, 1000.0)
    journal.end(ends, end(), 1050.0)
    journal.follow(comes_back)
    assert journal.unfollowed() == [left]
    assert journal.expire(1060.0) == [left]
    assert journal.expire(1109.9) == []
    assert journal.find("b", OWNER) is ends
    journal.expire(1111.0)
    assert states(journal) == {"running": 1, "unfollowed": 0, "ended": 0}


def test_no_life_is_longer_than_the_worker_s() -> None:
    """Whatever a frontend asks for."""
    journal = Journal(1_000_000, 10.0)
    entry = begun(journal, ttl_s=1e9)
    journal.end(entry, end(), 0.0)
    journal.expire(10.0)
    assert len(journal) == 0


def test_a_short_life_is_not_overlooked() -> None:
    """Also if it begins when longer ones have just been looked at."""
    journal = Journal(1_000_000, LIFE_S)
    for name, ttl_s in (("a", 100.0), ("b", 5.0), ("c", 0.1)):
        journal.end(begun(journal, name, ttl_s=ttl_s), end(), 0.0)
        journal.expire(0.0)
    journal.expire(0.1 + journal_module.EXPIRY_STEP_S)
    assert states(journal)["ended"] == 2
    journal.expire(5.0 + journal_module.EXPIRY_STEP_S)
    assert states(journal)["ended"] == 1


def test_what_is_known_of_lost_ones_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest is forgotten; one that begins anew is lost no more."""
    monkeypatch.setattr(journal_module, "MAX_LOST", 2)
    journal = Journal(1_000_000, LIFE_S)
    for name in "abc":
        journal.drop(begun(journal, name), Lost.BYTES)
    assert journal.find("a", OWNER) is None
    assert isinstance(journal.find("b", OWNER), Tombstone)
    entry = begun(journal, "b")
    assert journal.find("b", OWNER) is entry
    journal.drop(begun(journal, "d"), Lost.BYTES)
    assert isinstance(journal.find("c", OWNER), Tombstone)
