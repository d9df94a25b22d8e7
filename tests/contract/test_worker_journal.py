"""What a worker keeps, over the wire: a process, the simulated engine, three frontends."""

from __future__ import annotations

import json
from pathlib import Path

from support.awake import Awake
from support.worker_process import WAIT_S, Client, worker
from tokenwire.protocol.messages import (
    CANCELLED,
    GOES_ON,
    JOURNAL,
    Batch,
    Finished,
    FinishReason,
    Keep,
    Recall,
    Recalled,
    Sampling,
    Submit,
)
from tokenwire.protocol.tokens import pack_ids, unpack_ids

PROMPT = [1, 2, 3]
LONG = Sampling(max_tokens=90_000, temperature=0.0)  # a quarter of an hour
PATIENT = ("--heartbeat-timeout-s", "300")  # these frontends do not ping
ENGINE = ("--max-model-len", "100000", "--step-ms", "10")


def listen(client: Client, request_id: str, number: int = 0) -> list[int]:
    """Return the next ids of a request, *number* or more."""
    ids: list[int] = []
    while len(ids) < number:
        message = client.receive()
        if isinstance(message, Batch):
            for item in message.tokens:
                assert item.request_id == request_id
                ids += unpack_ids(item.token_ids)
    return ids


def until_end(client: Client) -> tuple[list[int], Finished]:
    """Return the ids that still come, and the end."""
    ids: list[int] = []
    while True:
        message = client.receive()
        if isinstance(message, Batch):
            ids += [one for new in message.tokens for one in unpack_ids(new.token_ids)]
            if message.finished:
                (end,) = message.finished
                return ids, end


def recall(client: Client, name: str, action: str) -> Recalled:
    """Recall; return the answer."""
    client.send(Recall(name, "g", b"owner", action))
    while True:
        message = client.receive()
        if isinstance(message, Recalled):
            assert message.request_id == name
            return message


def until_unfollowed(client: Client) -> None:
    """Look until its frontend's loss is noticed."""
    awake = Awake()
    while recall(client, "look", "look").is_followed:
        assert awake.seconds < WAIT_S, "the loss is not noticed"


async def test_a_generation_outlives_its_frontend_and_goes_from_hand_to_hand(
    tmp_path: Path,
) -> None:
    """Each has the ids that came, as one that never moved has them; a cancel ends it."""
    async with worker(tmp_path, *PATIENT, engine_args=ENGINE) as running:
        await running.until_line("serving m at tcp://127.0.0.1:")
        endpoint = json.loads(running.announce.read_text())["endpoint"]
        keep = Keep("g", b"owner", b"context", 300.0, outlives=True)
        with Client(endpoint) as first:
            assert JOURNAL in first.hello("first").capabilities
            first.send(Submit("a", pack_ids(PROMPT), LONG, keep=keep))
            heard = listen(first, "a", 5)
        with Client(endpoint) as second, Client(endpoint) as third:
            second.hello("second")
            third.hello("third")
            until_unfollowed(second)
            told = recall(second, "b", "follow")
            assert (told.state, told.context) == ("running", b"context")
            assert unpack_ids(told.token_ids)[:3] == PROMPT
            followed = unpack_ids(told.token_ids)[3:] + listen(second, "b", 5)
            assert followed[: len(heard)] == heard

            told = recall(third, "c", "follow")
            ids, end = until_end(second)
            followed += ids
            assert (end.reason, end.stop_reason) == (FinishReason.ABORT, GOES_ON)
            assert followed == unpack_ids(told.token_ids)[3:]
            assert end.num_output_tokens == told.num_new_tokens == len(followed)
            followed += listen(third, "c", 5)
            assert recall(second, "d", "cancel").is_followed
            ids, end = until_end(third)
            followed += ids
            assert (end.reason, end.stop_reason) == (FinishReason.ABORT, CANCELLED)
            assert end.num_output_tokens == len(followed)

            told = recall(second, "e", "read")
            assert (told.state, told.finished) == ("ended", end)
            assert unpack_ids(told.token_ids) == PROMPT + followed
            limit = Sampling(max_tokens=len(followed), temperature=0.0)
            third.send(Submit("f", pack_ids(PROMPT), limit))
            ids, end = until_end(third)
            assert (ids, end.reason) == (followed, FinishReason.LENGTH)
