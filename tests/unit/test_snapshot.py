"""What the live page is told of several processes, and of requests at every stage."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from tokenwire.frontend.admission import State, Ticket
from tokenwire.frontend.flows import MAX_PAIRS, Flows
from tokenwire.frontend.session import Session
from tokenwire.frontend.snapshot import (
    MAX_REQUESTS,
    Frontend,
    Handovers,
    Process,
    RequestView,
    shortened,
    snapshot_of,
)
from tokenwire.frontend.stages import Stage
from tokenwire.frontend.visit import Visit

ABOUT = Frontend("1", "m", "f", 1, 3, [1.0], [1.0])


def process(number: int, **fields: Any) -> Process:
    """Return what a process has told."""
    given: dict[str, Any] = {
        "process": number,
        "ready": False,
        "draining": True,
        **dict.fromkeys(("inflight", "waiting", "waiting_tokens", "admitted"), 1),
        "limit": 4,
        "tokens": 10,
        "ttft": [1, 0],
        "itl": [2, 5],
        "stages": {"decode": 1},
        "requests": [],
        "open": {},
        "sent": {},
        "handovers": [],
        **fields,
    }
    return Process(**given)


def request(age_s: float, number: int = 0) -> RequestView:
    """Return a request that has been there for so long."""
    return RequestView("chatcmpl-1", "chat", "decode", age_s, process=number)


def test_processes_add_up() -> None:
    """Counts are sums, and requests are of all, the oldest first."""
    pair = Handovers("p", "d", 2)
    told = [
        process(1, requests=[request(1, 1)], handovers=[pair], ready=True),
        process(0, requests=[request(2), request(0.5)], handovers=[pair]),
    ]
    moment = snapshot_of(ABOUT, told, [], 7.0)

    assert moment.processes == [1, 0]
    assert (moment.inflight, moment.limit, moment.tokens) == (2, 8, 20)
    assert (moment.ttft, moment.itl) == ([2, 0], [4, 10])
    assert moment.stages == {"decode": 2}
    assert [one.age_s for one in moment.requests] == [2, 1, 0.5]
    assert moment.handovers == [Handovers("p", "d", 4)]
    assert moment.ready  # any can serve
    assert moment.draining  # all are about to end


def test_requests_are_bounded() -> None:
    """Those that have been there longest are told, and how many there are."""
    many = [request(age) for age in range(MAX_REQUESTS)]
    told = [process(n, requests=many, inflight=len(many)) for n in range(2)]
    moment = snapshot_of(ABOUT, told, [], 7.0)
    assert len(moment.requests) == MAX_REQUESTS
    assert moment.requests[0].age_s == moment.requests[1].age_s == MAX_REQUESTS - 1
    assert moment.inflight == 2 * MAX_REQUESTS


def test_what_a_process_tells_another_is_read_there() -> None:
    """As JSON, through their parent."""
    told = process(2, requests=[request(1)], handovers=[Handovers("p", "d", 1)])
    text = msgspec.json.encode([told])
    assert msgspec.json.decode(text, type=list[Process]) == [told]


def test_flows_are_bounded() -> None:
    """Beyond the bound, what is known goes on being counted."""
    flows = Flows()
    for number in range(MAX_PAIRS + 5):
        flows.was_sent(str(number))
        flows.was_handed_over(str(number), "d")
    flows.was_sent("0")
    flows.was_handed_over("0", "d")
    assert len(flows.sent) == len(flows.handovers) == MAX_PAIRS
    assert flows.sent["0"] == flows.handovers["0", "d"] == 2


@pytest.mark.parametrize(
    ("whole", "short"),
    [
        ("chatcmpl-4c7f01c5c9d34b8bb5b5a0e1", "chatcmpl-4c7f01c5"),
        ("cmpl-0e8c1b0c61a44c3f9a4b0d2c", "cmpl-0e8c1b0c"),
        ("something that a client has chosen", "somethin"),
    ],
)
def test_no_whole_id_is_told(whole: str, short: str) -> None:
    """Whoever knows a generation's id may read it where there are no keys."""
    assert shortened(whole) == short


def test_stages_are_in_order() -> None:
    """Before there is a session it is the body, then what is made of it; then the turn."""
    visit = Visit("/v1/completions")
    stages = [visit.stage]
    visit.is_read = True
    stages.append(visit.stage)
    ticket = Ticket(b"", 0, 1, 1)
    session = cast("Session", SimpleNamespace(stage=Stage.PREFILL))
    visit.runs(session, ticket)
    stages.append(visit.stage)
    ticket.state = State.ADMITTED
    stages.append(visit.stage)
    assert stages == [
        *(Stage.RECEIVING, Stage.TOKENIZING, Stage.QUEUED, Stage.PREFILL),
    ]
