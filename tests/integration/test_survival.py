"""One prefill and two decode workers on the real engine: what befalls them costs nothing.

The scenarios are those of ``scripts/survive.py``, which also runs them on other stacks.
Each waits for the workers it needs; their order saves loading an engine twice.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from survive_processes import TokenwireStack
from survive_scenarios import Outcome, Scenarios

from support.awake import Awake
from support.real_stack import LOAD_S, NAME
from support.up import up
from support.vllm_engine import MODEL

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]

ROLES = {"prefill": 1, "decode": 2}
NUM_TOKENS = 60
RECOVERED_S = 10.0
"""From a worker's last token to the next worker's first."""

FREE_S = 15.0
"""For KV that nobody reads to be free, and engines empty: half of the lease that would
also free it. On a machine of one's own it takes 1 s: ``scripts/survive.py`` measures."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def survivors(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Scenarios]:
    """The stack, and what 30 streams get from it when nothing befalls it."""
    async with up(
        MODEL,
        tmp_path_factory.mktemp("survival"),
        engine="vllm",
        workers=ROLES,
        timeout_s=LOAD_S,
        engine_arguments=(
            *("--dtype", "float32", "--max-model-len", "2048"),
            # Two prompts of 1,900 tokens do not block the streams for seconds.
            *("--max-num-batched-tokens", "256"),
        ),
        name=NAME,
        settings={
            # Every prompt goes through the prefill worker, however short.
            "TOKENWIRE_REMOTE_PREFILL_MIN_TOKENS": "0",
            # What a leaving worker still runs is moved, not waited for.
            "TOKENWIRE_SHUTDOWN_TIMEOUT_S": "0.5",
            # Traced for coverage, engines load half as fast, five times here; the other
            # modules trace what runs in them.
            "COVERAGE_PROCESS_CONFIG": "",
        },
    ) as running:
        stack = TokenwireStack(running.process.pid, running.url, running.log, ROLES)
        awake = Awake()  # a machine that stood still is no pause of the stack's
        scenarios = Scenarios(stack, NUM_TOKENS, lambda: awake.seconds)
        try:
            await stack.whole()
            yield scenarios
        finally:
            await scenarios.client.close()


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def calm(survivors: Scenarios) -> Outcome:
    """The undisturbed run, once."""
    if not survivors.undisturbed:
        survivors.undisturbed.append(await survivors.run_calm())
    return survivors.undisturbed[0]


def lossless(outcome: Outcome) -> None:
    """Assert that no client has noticed more than a pause, and nothing is held."""
    print(outcome)
    assert outcome.num_requests > 0
    assert outcome.errors == []
    assert (outcome.num_failed, outcome.num_wrong, outcome.num_wrong_usage) == (0, 0, 0)
    assert outcome.took_s < FREE_S


def stack_of(survivors: Scenarios) -> TokenwireStack:
    """Return the stack, for what only ours has."""
    assert isinstance(survivors.stack, TokenwireStack)
    return survivors.stack


def expired(survivors: Scenarios) -> float:
    """Return how many hand-overs only the lease has ended."""
    stack = stack_of(survivors)
    return sum(
        stack.counts(name)["expired"] for role in ROLES for name in stack.workers(role)
    )


async def test_thirty_streams_undisturbed(survivors: Scenarios, calm: Outcome) -> None:
    """Twice the same ids, and usage as asked for: the measure of what follows."""
    lossless(calm)
    for answer in survivors.calm.values():
        assert len(answer.token_ids) == NUM_TOKENS
        assert answer.usage is not None
        assert answer.usage["completion_tokens"] == NUM_TOKENS
        assert answer.usage["prompt_tokens"] == 40
        assert answer.usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert stack_of(survivors).metric("tokenwire_kv_handover_seconds_count") >= 30


@pytest.mark.pitfall(16)
async def test_a_hundred_clients_leave_between_prefill_and_decode(
    survivors: Scenarios,
) -> None:
    """The KV held for them is free at once: no lease has to end for it."""
    outcome = await survivors.leave_between()
    print(outcome)

    assert outcome.kv_peak > 0
    assert outcome.took_s < FREE_S
    assert expired(survivors) == 0


@pytest.mark.pitfall(17)
async def test_clients_leave_during_a_long_prefill(survivors: Scenarios) -> None:
    """Their prompts, computed or queued, are given up."""
    outcome = await survivors.leave_in_prefill(6, 1_900)
    print(outcome)

    assert outcome.took_s < FREE_S


@pytest.mark.pitfall(25)
async def test_a_frozen_decode_worker(survivors: Scenarios, calm: Outcome) -> None:
    """Its streams go on within 10 s; thawed, it repeats nothing, frees all and serves."""
    stack = stack_of(survivors)
    before = stack.metric("tokenwire_migration_pause_seconds_count")
    outcome = await survivors.freeze("decode-1")

    lossless(outcome)
    assert stack.metric("tokenwire_migration_pause_seconds_count") > before
    # What this machine, with others on it, pauses anyway is not the worker's loss.
    assert outcome.longest_pause_s < RECOVERED_S + calm.longest_pause_s


@pytest.mark.pitfall(25)
async def test_a_frozen_engine_behind_a_worker_that_beats(
    survivors: Scenarios,
) -> None:
    """No token comes, so its streams go on elsewhere: later, where steps are long."""
    await survivors.stack.whole()
    lossless(await survivors.freeze("decode-0", "engine"))


@pytest.mark.pitfall(19)
@pytest.mark.pitfall(26)
async def test_a_rolling_restart_of_both_roles(survivors: Scenarios) -> None:
    """Load that does not end meets no failure, also from engines that are new.

    ``make survive`` restarts all three workers; each takes a minute.
    """
    stack = stack_of(survivors)
    await stack.whole()
    names = ["decode-1", "prefill-0"]
    before = {name: stack.pid(name) for name in names}
    outcome = await survivors.roll(names, num_streams=3, think_s=8.0)

    lossless(outcome)
    assert all(stack.pid(name) not in (before[name], 0) for name in names)
    lossless(await survivors.run_calm())


@pytest.mark.pitfall(24)
async def test_a_decode_worker_is_killed(survivors: Scenarios, calm: Outcome) -> None:
    """With its engine, when all streams have begun: they go on, and usage is theirs."""
    stack = stack_of(survivors)
    await stack.whole()
    before = stack.metric("tokenwire_migration_pause_seconds_count")
    outcome = await survivors.kill("decode-1")

    lossless(outcome)
    assert stack.metric("tokenwire_migration_pause_seconds_count") > before
    assert outcome.longest_pause_s < RECOVERED_S + calm.longest_pause_s


@pytest.mark.pitfall(18)
async def test_the_prefill_worker_is_killed_with_kv_unread(
    survivors: Scenarios,
) -> None:
    """Streams that were to read from it are prefilled again; others notice nothing."""
    await survivors.stack.whole("decode-1")  # it may still be loading
    lossless(await survivors.kill_holding("prefill-0", ["decode-0"]))
