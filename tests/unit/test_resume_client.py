"""What a client of resumable generations keeps: events, ids, the message, its patience."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from resume_state import (
    BadStream,
    Event,
    EventParser,
    GaveUp,
    Message,
    Patience,
    Progress,
    Retries,
)

# --- events ------------------------------------------------------------------------------


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_the_same_however_bytes_are_cut(size: int, newline: str) -> None:
    """Comments bring nothing, inside of an event neither; ``retry`` is remembered."""
    text = (
        "retry: 2000\nid: g:1\ndata: {1}\n\n: ping\nid: g:2\n: ping\ndata: ü\n: ping\ndata:two\n\n"
        "event: x\nretry: soon\nid: g:3\ndata: [DONE]\n\n"
    )
    data = text.replace("\n", newline).encode()
    parser = EventParser()
    pieces = [data[at : at + size] for at in range(0, len(data), size)]

    events = [event for piece in pieces for event in parser.feed(piece)]

    assert events == [
        Event("g:1", "{1}"),
        Event("g:2", "ü\ntwo"),
        Event("g:3", "[DONE]"),
    ]
    assert parser.retry_s == 2.0


def test_an_event_that_is_cut_never_comes() -> None:
    """What the connection broke in is asked for again: half of it would be no JSON."""
    parser = EventParser()

    assert parser.feed(b"id: g:1\ndata: a\n\nid: g:2\ndata: b\n") == [Event("g:1", "a")]


def test_a_line_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded."""
    monkeypatch.setattr("resume_state.MAX_EVENT_BYTES", 10)
    parser = EventParser()
    parser.feed(b"data: 7890")

    with pytest.raises(BadStream, match="above 10 bytes"):
        parser.feed(b"1")


# --- what has come -----------------------------------------------------------------------


def chunk(seq: int, offset: int, ids: list[int], **fields: Any) -> Event:
    """Return a chunk of a completion; *fields* are ``text``, ``finish_reason``, nvext."""
    choice = {"text": fields.pop("text", "")}
    choice["finish_reason"] = fields.pop("finish_reason", None)
    nvext = {"token_offset": offset, "completion_token_ids": ids, **fields}
    return Event(f"g:{seq}", json.dumps({"choices": [choice], "nvext": nvext}))


def first(**generation: Any) -> Event:
    """Return the first chunk."""
    told = {"contract": "sha256:c", **generation}
    return chunk(1, 0, [], prompt_token_ids=[1, 2], generation=told)


def checkpoint(ids: list[int]) -> dict[str, Any]:
    """Return what matters of one."""
    return {"state": {"output": {"ids": ids}}}


def taken(*events: Event) -> Progress:
    """Return what a client has after these."""
    progress = Progress()
    for event in events:
        progress.take(event)
    return progress


def test_ids_text_and_the_end_are_kept() -> None:
    """And whatever it takes to go on; [DONE] and the usage have numbers, too."""
    usage = {"completion_tokens": 3}
    progress = taken(
        first(),
        chunk(2, 0, [5, 6], text="a"),
        chunk(3, 2, [7], text="b", finish_reason="stop"),
        Event("g:4", json.dumps({"choices": [], "usage": usage})),
        Event("g:5", "[DONE]"),
    )

    assert progress.token_ids == [5, 6, 7]
    assert progress.prompt_token_ids == [1, 2]
    assert progress.message.content == "ab"
    assert (progress.finish_reason, progress.usage) == ("stop", usage)
    assert (progress.generation_id, progress.seq, progress.is_done) == ("g", 5, True)


@pytest.mark.parametrize(
    "event",
    [
        chunk(4, 2, [7]),  # a number is missing
        chunk(2, 2, [7]),  # it came already
        dataclasses.replace(chunk(3, 2, [7]), id="other:3"),
        dataclasses.replace(chunk(3, 2, [7]), id=""),
        dataclasses.replace(chunk(3, 2, [7]), id="g:x"),
        chunk(3, 3, [8]),  # ids are missing
        chunk(3, 1, [6, 7]),  # one came already
        chunk(3, 2, [7], prompt_token_ids=[1, 3]),
    ],
)
def test_a_gap_or_a_repeat_is_an_error(event: Event) -> None:
    """Of events, of ids; and another generation's, or another prompt."""
    progress = taken(first(), chunk(2, 0, [5, 6]))

    with pytest.raises(BadStream):
        progress.take(event)
    assert progress.token_ids == [5, 6]


def test_another_generation_begins_at_one_and_goes_on() -> None:
    """Its first chunk says how many ids there are, and how exact it is."""
    progress = taken(first(), chunk(2, 0, [5, 6], text="a"))
    progress.begin("h")
    resume = {"prefix_tokens": 2, "exactness": "same_rng"}
    event = chunk(1, 2, [7], text="b", prompt_token_ids=[1, 2], resume=resume)

    assert progress.take(dataclasses.replace(event, id="h:1")) is not None
    assert progress.token_ids == [5, 6, 7]
    assert progress.message.content == "ab"
    assert progress.claims == [resume]


def test_an_end_that_comes_again_adds_nothing() -> None:
    """Where its usage had been lost: a resumed generation tells the end once more."""
    progress = taken(first(), chunk(2, 0, [5], text="a", finish_reason="stop"))
    progress.begin("h")
    event = chunk(1, 1, [], text="!", finish_reason="stop", prompt_token_ids=[1, 2])

    assert progress.take(dataclasses.replace(event, id="h:1")) is None
    assert progress.message.content == "a"


def test_a_message_is_its_deltas_joined() -> None:
    """Reasoning and calls, each in its place."""
    message = Message()
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"reasoning": "hm"},
        {"reasoning": "m"},
        {"content": "yes"},
        {},
        {"tool_calls": [{"index": 0, "id": "a", "type": "function",
                         "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"x"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}},
                        {"index": 1, "id": "b", "function": {"name": "g"}}]},
    ]  # fmt: skip
    for delta in deltas:
        message.add({"delta": delta})

    assert message == Message(
        "assistant",
        "yes",
        "hmm",
        [
            {
                "id": "a",
                "type": "function",
                "function": {"name": "f", "arguments": '{"x": 1}'},
            },
            {"id": "b", "function": {"name": "g", "arguments": ""}},
        ],
    )


# --- what is asked for -------------------------------------------------------------------

BODY: dict[str, Any] = {"prompt": "x", "nvext": {"checkpoint": {"every_tokens": 16}}}


def test_before_the_first_chunk_the_request_is_made_anew() -> None:
    """There is nothing to go on behind; what the caller gave is not changed."""
    progress = Progress()
    progress.begin("g")

    asked = progress.request(BODY)

    assert "resume_from" not in asked["nvext"]
    assert asked["nvext"]["checkpoint"] == {"every_tokens": 16}
    assert asked["stream"] is True
    assert set(BODY) == {"prompt", "nvext"}


def test_a_checkpoint_that_covers_all_ids_is_preferred() -> None:
    """It knows the seed and the sums; one that is older would repeat ids."""
    progress = taken(first(), chunk(2, 0, [5, 6], checkpoint=checkpoint([5, 6])))
    assert progress.request(BODY)["nvext"]["resume_from"] == {
        "checkpoint": checkpoint([5, 6])
    }

    progress.take(chunk(3, 2, [7]))
    assert progress.request(BODY)["nvext"]["resume_from"] == {
        "output_token_ids": [5, 6, 7],
        "prompt_token_ids": [1, 2],
        "contract": "sha256:c",
    }


def test_a_seed_that_a_frontend_chose_is_repeated_with_ids() -> None:
    """Ids do not have it; one of the request's own is in the request."""
    chosen = taken(first(seed=7, seed_source="frontend"), chunk(2, 0, [5]))
    given = taken(first(seed=7, seed_source="request"), chunk(2, 0, [5]))

    assert chosen.request(BODY)["seed"] == 7
    assert "seed" not in given.request(BODY)


# --- patience ----------------------------------------------------------------------------


def test_another_frontend_is_tried_at_once() -> None:
    """Then they take turns, after ever longer waits."""
    patience = Patience(max_attempts=9, first_s=1.0, longest_s=4.0)
    retries = Retries(["a", "b"], patience, jitter=lambda: 1.0)
    now, turns = 100.0, list[tuple[str, float]]()
    for _ in range(8):
        retries.failed(now)
        wait_s = retries.turn(now)
        turns.append((retries.url, wait_s))
        now += wait_s

    assert turns == [
        ("b", 0.0), ("a", 1.0), ("b", 0.0), ("a", 2.0),
        ("b", 0.0), ("a", 4.0), ("b", 0.0), ("a", 4.0),
    ]  # fmt: skip


def test_attempts_are_bounded_until_an_id_comes() -> None:
    """Over all frontends together."""
    retries = Retries(["a", "b"], Patience(max_attempts=3))
    for _ in range(2):
        retries.failed(0.0)
    retries.progressed()
    for _ in range(2):
        retries.failed(0.0)
    with pytest.raises(GaveUp):
        retries.failed(0.0)


def test_a_wish_to_be_left_alone_is_granted_within_a_bound() -> None:
    """Of one frontend, or of all."""
    patience = Patience(first_s=0.1, longest_asked_s=60.0)
    retries = Retries(["a", "b"], patience, jitter=lambda: 1.0)
    retries.failed(0.0, 5.0)
    assert (retries.turn(0.0), retries.url) == (0.0, "b")
    retries.failed(0.0, 30.0, everywhere=True)
    assert (retries.turn(0.0), retries.url) == (30.0, "a")
    retries.failed(30.0, 1e9)
    assert (retries.turn(30.0), retries.url) == (0.0, "b")
    retries.failed(30.0, 1e9, everywhere=True)
    assert retries.turn(30.0) == 60.0


def test_one_frontend_alone_is_waited_for() -> None:
    """As long as its stream asked (``retry``)."""
    retries = Retries(["a"], Patience(first_s=0.1))
    assert retries.turn(0.0) == 0.0
    retries.failed(0.0, 2.0)
    assert retries.turn(0.0) == 2.0
    assert retries.turn(1.5) == 0.5
