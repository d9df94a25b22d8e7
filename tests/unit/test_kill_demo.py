"""What ``kill_demo`` finds: every difference between two streams of a tool call."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from kill_demo import Seen, row
from resume_client import Outcome
from resume_state import Message

ARGUMENTS = '{"x": 1}'


def chunk(offset: int, ids: list[int], arguments: str) -> dict[str, Any]:
    """Return a chunk of a call."""
    call = {"index": 0, "function": {"arguments": arguments}}
    nvext = {"token_offset": offset, "completion_token_ids": ids}
    return {"choices": [{"delta": {"tool_calls": [call]}}], "nvext": nvext}


def seen(generation_id: str = "g") -> Seen:
    """Return what a client had that saw a call of two tokens."""
    found = Seen(generation_id)
    found.take(chunk(0, [5], '{"x"'))
    found.take(chunk(1, [6], ": 1}"))
    digest = hashlib.sha256(f"{generation_id}/0/0".encode()).hexdigest()
    call = {
        "id": f"chatcmpl-tool-{digest[:32]}",
        "function": {"name": "f", "arguments": ARGUMENTS},
    }
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    message = Message("assistant", "", "", [call])
    found.outcome = Outcome([5, 6], message, "stop", usage, [], 0, 0, [])
    return found


def test_streams_that_are_the_same() -> None:
    """Though their generations have other names, and the usage is in two parts."""
    other = seen("h")
    assert other.outcome is not None
    usage: dict[str, Any] = {"prompt_tokens": 3, "completion_tokens": 1}
    usage["completion_tokens_details"] = {"resumed_prefix_tokens": 1}
    other.outcome = replace(other.outcome, usage=usage, num_resumes=1)

    line, good = row("both", other, seen())

    assert good
    assert "DIFFERS" not in line
    assert "| resume |" in line
    assert other.num_arguments == [0, 4, 8]


def outcome(**fields: Any) -> Callable[[Seen], None]:
    """Return what changes the outcome."""

    def change(found: Seen) -> None:
        assert found.outcome is not None
        found.outcome = replace(found.outcome, **fields)

    return change


def message(**fields: Any) -> Callable[[Seen], None]:
    """Return what changes the call."""

    def change(found: Seen) -> None:
        assert found.outcome is not None
        found.outcome.message.tool_calls[0].update(fields)

    return change


def chunks(*more: dict[str, Any]) -> Callable[[Seen], None]:
    """Return what brings more chunks."""

    def change(found: Seen) -> None:
        for one in more:
            found.take(one)

    return change


def second_id(other: int | None) -> Callable[[Seen], None]:
    """Return what changes the second id; None: it is lost."""

    def change(found: Seen) -> None:
        del found.ids[1]
        if other is not None:
            found.ids[1] = other

    return change


@pytest.mark.parametrize(
    "change",
    [
        outcome(token_ids=[5]),
        outcome(finish_reason="length"),
        outcome(usage={"prompt_tokens": 3, "completion_tokens": 3}),
        message(id="chatcmpl-tool-other"),
        message(function={"name": "g", "arguments": ARGUMENTS}),
        message(function={"name": "f", "arguments": "{}"}),
        chunks(chunk(1, [6], "")),
        chunks(chunk(2, [], " ")),
        second_id(None),
        second_id(7),
    ],
)
def test_each_difference_is_found(change: Callable[[Seen], None]) -> None:
    """Of ids, calls, ends and counts; and what comes twice."""
    found = seen()
    change(found)

    assert not row("both", found, seen())[1]
