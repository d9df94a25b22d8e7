"""``VllmEngine`` on the real engine, alone: ids, parameters, ends."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from support.awake import within
from support.vllm_engine import (
    PROMPTS,
    REFERENCE_TOKENS,
    EngineProcess,
    Stream,
    prompt,
    reference_ids,
)
from tokenwire.protocol.messages import (
    ErrorKind,
    FinishReason,
    Leg,
    Logprobs,
    Role,
    Sampling,
    StructuredOutput,
)
from tokenwire.protocol.tokens import unpack_floats, unpack_ids
from tokenwire.worker.engine import EngineLoad

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

GREEDY = Sampling(max_tokens=REFERENCE_TOKENS, temperature=0.0)
FREE_S = 15.0  # it takes a step of the engine or two, as in test_engine_pair


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[EngineProcess]:
    """An aggregated engine whose prefill is chunked above 512 tokens.

    Its model has a process of its own, as with several GPUs; the other modules' have not.
    """
    engine = await EngineProcess.start(
        Role.AGGREGATED,
        *("--max-num-batched-tokens", "512", "--max-num-seqs", "4"),
        *("--distributed-executor-backend", "mp"),
    )
    yield engine
    assert await engine.stop() == []  # also if the last test has done so


async def test_start_tells_its_phases_and_what_is_served(engine: EngineProcess) -> None:
    """A started engine says what it serves, after phases in a few words."""
    assert engine.phases[0] == "importing vLLM"
    assert engine.phases[-1] == "ready"
    info = engine.info
    assert (info.engine, info.max_model_len, info.vocab_size) == ("vllm", 2048, 49152)
    assert (info.dtype, info.max_num_seqs, info.connector) == ("float32", 4, "")
    assert info.num_kv_blocks * info.block_size >= info.max_model_len


@pytest.mark.parametrize(
    "index", range(len(PROMPTS)), ids=[str(len(p)) for p in PROMPTS]
)
async def test_greedy_ids_equal_plain_vllm(engine: EngineProcess, index: int) -> None:
    """What comes out is, to the token, what vLLM alone gives."""
    expected = (await reference_ids())[index]
    stream = engine.submit(PROMPTS[index], GREEDY)
    end = await stream.end()
    assert stream.token_ids == expected
    assert end.prompt_token_ids == PROMPTS[index]
    assert end.num_prompt_tokens == len(PROMPTS[index])
    assert end.handover is None
    assert end.kv_transfer_params is None


async def test_batched_streams_equal_single_ones(engine: EngineProcess) -> None:
    """Eight streams over four slots give the ids that each gives alone."""
    expected = await reference_ids()
    chosen = range(4, 12)
    streams = [engine.submit(PROMPTS[index], GREEDY) for index in chosen]
    for index, stream in zip(chosen, streams, strict=True):
        await stream.end()
        assert stream.token_ids == expected[index]


async def test_eos_is_among_the_ids(engine: EngineProcess) -> None:
    """The EOS that ends a request is its last id, and no stop reason is named."""
    eos = 2  # <|im_end|>
    stream = engine.submit(
        prompt(20), Sampling(max_tokens=8, allowed_token_ids=[eos], temperature=0.0)
    )
    end = await stream.end()
    assert stream.token_ids == [eos]
    assert (end.reason, end.stop_reason) == (FinishReason.STOP, None)


async def test_ignored_eos_does_not_stop(engine: EngineProcess) -> None:
    """With ``ignore_eos`` a request runs to its length."""
    stream = engine.submit(
        prompt(20),
        Sampling(max_tokens=5, allowed_token_ids=[2], ignore_eos=True, temperature=0.0),
    )
    assert (await stream.end()).reason is FinishReason.LENGTH
    assert stream.token_ids == [2] * 5


async def test_stop_token_is_included_and_named(engine: EngineProcess) -> None:
    """A stop token ends the request, is its last id, and is the stop reason."""
    expected = (await reference_ids())[3]
    stop = expected[4]
    first = expected.index(stop)
    stream = engine.submit(
        PROMPTS[3],
        Sampling(max_tokens=24, temperature=0.0, stop_token_ids=[stop]),
    )
    end = await stream.end()
    assert stream.token_ids == expected[: first + 1]
    assert (end.reason, end.stop_reason) == (FinishReason.STOP, stop)


@pytest.mark.parametrize("num_top", [0, 1, 5])
async def test_logprobs_are_rows_with_the_sampled_token_first(
    engine: EngineProcess, num_top: int
) -> None:
    """Each id has one row: itself, then the most likely, best first."""
    stream = engine.submit(
        PROMPTS[2], Sampling(max_tokens=6, temperature=0.0, logprobs=num_top)
    )
    await stream.end()
    rows = [row for batch in stream.batches for row in _rows(batch.logprobs)]
    assert len(rows) == len(stream.token_ids)
    for token_id, row in zip(stream.token_ids, rows, strict=True):
        assert len(row) == num_top + 1
        assert row[0][0] == token_id
        assert row[0][2] == 1  # greedy
        assert [rank for _, _, rank in row[1:]] == list(range(1, num_top + 1))
        values = [value for _, value, _ in row[1:]]
        assert values == sorted(values, reverse=True)


async def test_prompt_logprobs_have_a_row_for_all_but_the_first(
    engine: EngineProcess,
) -> None:
    """Prompt logprobs come with the end: the prompt's own token leads each row."""
    tokens = prompt(600)  # chunked
    stream = engine.submit(
        tokens, Sampling(max_tokens=2, temperature=0.0, prompt_logprobs=2)
    )
    end = await stream.end()
    rows = _rows(end.prompt_logprobs)
    assert [row[0][0] for row in rows] == tokens[1:]
    assert {len(row) for row in rows} == {3}


async def test_seed_zero_is_a_seed(engine: EngineProcess) -> None:
    """``seed=0`` is not lost: the same ids twice, others with another seed."""
    tokens = prompt(30)
    runs = [
        engine.submit(tokens, Sampling(max_tokens=16, temperature=1.0, seed=seed))
        for seed in (0, 0, 1)
    ]
    for stream in runs:
        await stream.end()
    first, again, other = (stream.token_ids for stream in runs)
    assert first == again
    assert first != other


async def test_seeded_chunked_prefill_survives(engine: EngineProcess) -> None:
    """A seed and a prompt above the batch size: the engine lives, the ids are right.

    vLLM 0.32 on a CPU dies of it (``CPU Generator does not use offset``). The second
    run finds five blocks cached, so it is not chunked: the draws must be the same.
    """
    tokens = prompt(700)
    sampling = Sampling(max_tokens=12, temperature=1.0, seed=7)
    chunked = engine.submit(tokens, sampling)
    assert (await chunked.end()).reason in {FinishReason.LENGTH, FinishReason.STOP}
    whole = engine.submit(tokens, sampling)
    assert (await whole.end()).num_cached_tokens == 640
    assert chunked.token_ids == whole.token_ids


async def test_cache_salt_separates_prefixes(engine: EngineProcess) -> None:
    """A prefix is found again under its own salt only."""
    tokens = prompt(200)
    cached: list[int] = []
    for salt in ("a", "a", "b"):
        stream = engine.submit(tokens, Sampling(max_tokens=1), cache_salt=salt)
        cached.append((await stream.end()).num_cached_tokens)
    assert cached == [0, 128, 0]


async def test_structured_output_is_kept(engine: EngineProcess) -> None:
    """A choice leaves the engine no other ids."""
    stream = engine.submit(
        prompt(12),
        Sampling(
            max_tokens=8,
            structured_output=StructuredOutput("choice", '["yes"]'),
            logprobs=1,
        ),
    )
    assert (await stream.end()).reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("token_ids", "sampling", "word"),
    [
        ([1, 2], Sampling(max_tokens=4, temperature=-1.0), "temperature"),
        ([1, 2], Sampling(max_tokens=4, top_p=0.0), "top_p"),
        ([1, 2], Sampling(max_tokens=4, logprobs=50), "logprobs"),
        ([1, 2], Sampling(max_tokens=2, min_tokens=3), "min_tokens"),
        ([1, 2], Sampling(max_tokens=4, logit_bias={99_999: 1.0}), "99999"),
        (
            [1, 2],
            Sampling(max_tokens=4, structured_output=StructuredOutput("regex", "(")),
            "",
        ),
        (
            [1, 2],
            Sampling(max_tokens=4, structured_output=StructuredOutput("json", "{")),
            "",
        ),
        ([], Sampling(max_tokens=4), "empty"),
        ([60_000], Sampling(max_tokens=4), "60000"),
        ([1] * 2100, Sampling(max_tokens=4), "2048"),
    ],
)
async def test_what_vllm_refuses_is_the_callers_fault(
    engine: EngineProcess, token_ids: list[int], sampling: Sampling, word: str
) -> None:
    """An invalid request ends as such, with vLLM's words, and the engine serves on."""
    end = await engine.submit(token_ids, sampling).end()
    assert (end.reason, end.error_kind) == (FinishReason.ERROR, ErrorKind.INVALID)
    assert word in end.error
    assert end.error
    after = engine.submit([1, 2, 3], Sampling(max_tokens=1))
    assert (await after.end()).error == ""


async def test_abort_while_decoding_frees_all(engine: EngineProcess) -> None:
    """An aborted stream ends as aborted; slots and blocks are free within 2 s."""
    stream = engine.submit(
        prompt(20), Sampling(max_tokens=1500, temperature=0.0, ignore_eos=True)
    )
    await stream.have(3)
    engine.abort(stream)
    assert (await stream.end()).reason is FinishReason.ABORT
    await engine.until_load(_idle, within_s=FREE_S)


async def test_abort_in_the_queue(engine: EngineProcess) -> None:
    """A request that still waits for a slot is aborted too, without a token."""
    long = Sampling(max_tokens=1500, temperature=0.0, ignore_eos=True)
    running = [engine.submit(prompt(10), long) for _ in range(4)]
    for stream in running:
        await stream.have(1)
    queued = engine.submit(prompt(10), long)
    await engine.until_load(lambda load: load.num_waiting == 1, within_s=30)
    engine.abort(queued)
    assert (await queued.end()).reason is FinishReason.ABORT
    assert queued.token_ids == []
    for stream in running:
        engine.abort(stream)
        await stream.end()
    await engine.until_load(_idle, within_s=FREE_S)


async def test_abort_of_an_unknown_request_is_ignored(engine: EngineProcess) -> None:
    """The end and the abort may cross."""
    stream = engine.submit([1, 2, 3], Sampling(max_tokens=1))
    await stream.end()
    engine.abort(stream)
    engine.abort(Stream("never-there"))
    assert _idle(await engine.until_load(_idle, within_s=FREE_S))


async def test_prefill_leg_without_a_connector_is_a_failed_handover(
    engine: EngineProcess,
) -> None:
    """An engine that keeps no KV says so, instead of ending well without a hand-over."""
    end = await engine.submit(prompt(8), GREEDY, Leg.PREFILL).end()
    assert (end.reason, end.error_kind) == (FinishReason.ERROR, ErrorKind.HANDOVER)
    assert end.handover is None


async def test_the_death_of_an_idle_engine_is_noticed(engine: EngineProcess) -> None:
    """Nobody asks anything of it, and still its death is told; a stop leaves nothing.

    The last of these tests: the engine is gone.
    """
    ids = await engine.process_ids()
    worker = next(pid for name, pid in ids.items() if "Worker" in name)
    os.kill(worker, signal.SIGKILL)
    async with within(60):
        await asyncio.shield(engine.died)
    assert await engine.stop() == []


def _idle(load: EngineLoad) -> bool:
    return not (load.num_running or load.num_waiting or load.kv_usage)


def _rows(logprobs: Logprobs | None) -> list[list[tuple[int, float, int]]]:
    """Return rows of (id, logprob, rank)."""
    assert logprobs is not None
    cells = list(
        zip(
            unpack_ids(logprobs.token_ids),
            unpack_floats(logprobs.logprobs),
            unpack_ids(logprobs.ranks),
            strict=True,
        )
    )
    width = logprobs.width
    return [cells[i : i + width] for i in range(0, len(cells), width)]
