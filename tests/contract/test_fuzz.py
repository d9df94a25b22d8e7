"""A short `make fuzz`: the same cases each time, on a stack of the test's own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from api_document import ApiDocument
from fuzz import Findings, check_end, fuzz_cases, fuzz_schema
from fuzz_bodies import MODEL_NAME as FUZZED
from fuzz_checks import answer_faults, fetch, leaks, plain_tokens
from fuzz_http import Answer, Case

from support.stack import MODEL_NAME, Stack, stack
from tokenwire.protocol.messages import Role

pytestmark = pytest.mark.untraced

OPTIONS = ("--step-ms", "0", "--mean-output-tokens", "60", "--max-model-len", "512")
ARGUMENTS = ("--client-read-timeout-s", "2")


@pytest_asyncio.fixture
async def served(tiny_model: Path) -> AsyncIterator[Stack]:
    """A pair of workers behind a frontend."""
    roles = (Role.PREFILL, Role.DECODE)
    async with stack(tiny_model, roles, OPTIONS, ARGUMENTS) as running:
        yield running


def port_of(served: Stack) -> int:
    """Return where the frontend listens."""
    return int(served.url.rpartition(":")[2])


def fuzz(port: int, *, with_schema: bool) -> list[str]:
    """Return what a short run finds."""
    findings = Findings()
    document = ApiDocument(json.loads(fetch(port, "/openapi.json")))
    tokens = plain_tokens(port, document)
    if with_schema:
        fuzz_schema(port, findings, seed=1, examples=10)
    else:
        fuzz_cases(port, document, findings, seed=1, examples=200)
        assert findings.num_cases >= 200
    check_end(port, document, findings, tokens)
    return findings.texts


@pytest.mark.parametrize("with_schema", [False, True])
async def test_a_short_run_finds_nothing(served: Stack, with_schema: bool) -> None:
    """No server error, no answer outside the document, no hang, nothing left behind."""
    assert MODEL_NAME == FUZZED
    found = await asyncio.to_thread(fuzz, port_of(served), with_schema=with_schema)

    assert found == []


async def test_what_is_held_is_noticed(served: Stack) -> None:
    """A request that still runs is a leak, to the check that the runs end with."""
    held = asyncio.create_task(
        served.complete(prompt=[5] * 9, min_tokens=400, max_tokens=400, n=128)
    )
    port = port_of(served)
    while not any(worker.service.num_requests for worker in served.workers):
        await asyncio.sleep(0)
    found = await asyncio.to_thread(leaks, port, settle_s=0.0)
    held.cancel()

    assert any("inflight" in leak for leak in found)


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (Answer(500, {}, "x"), "status 500"),
        (Answer(502, {"content-type": "application/json"}, "{}"), "status 502"),
        (Answer(0, failure="TimeoutError"), "no answer"),
        (Answer(200, {"content-type": "text/plain"}, "x"), "type 'text/plain'"),
        (Answer(400, {"content-type": "application/json"}, "{}"), "ErrorAnswer"),
        (Answer(418, {"content-type": "application/json"}, "{}"), "status 418"),
        (
            Answer(200, {"content-type": "text/event-stream"}, "data: [DONE]\n\n"),
            "without a finish_reason",
        ),
        (
            Answer(200, {"content-type": "text/event-stream"}, 'data: {"id": 1}\n\n'),
            "does not end with [DONE]",
        ),
        (
            Answer(200, {"content-type": "application/json"}, '{"choices": []}'),
            "Completion at",
        ),
        (Answer(200, {}, "", seconds=99.0), "it took 99.0 s"),
    ],
)
async def test_wrong_answers_are_noticed(
    served: Stack, answer: Answer, fault: str
) -> None:
    """Each kind of wrong answer is a finding: the checks can fail."""
    document = ApiDocument((await served.get("/openapi.json")).json)
    faults = answer_faults(document, Case("POST", "/v1/completions"), answer)

    assert any(fault in text for text in faults), faults
