"""The laws of ``Engine``, on every engine.

The simulated one runs in this process. The real one takes part with the marker
``engine``: its fixture gives the same ``Bench``, and no test here knows which it is.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from support.awake import within
from support.worker_fakes import RecordingSink, engine_request
from tokenwire.protocol.admin import Action, ResetPrefixCache
from tokenwire.protocol.blocks import block_hashes, root_hash
from tokenwire.protocol.messages import (
    ErrorKind,
    FinishReason,
    JsonObject,
    Leg,
    Role,
    Sampling,
)
from tokenwire.protocol.tokens import pack_ids
from tokenwire.worker.engine import (
    AdminOutcome,
    Engine,
    EngineFinished,
    EngineInfo,
    EngineLoad,
    EngineTokens,
)
from tokenwire.worker.kv_blocks import CachedBlocks
from tokenwire.worker.sim.engine import SimEngine
from tokenwire.worker.sim.options import parse_options

pytestmark = pytest.mark.asyncio(loop_scope="session")

GREEDY = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
LONG = Sampling(max_tokens=400, temperature=0.0, ignore_eos=True)
PROMPT = list(range(1000, 1021))
GOOD_ENDS = {FinishReason.STOP, FinishReason.LENGTH}
IDLE_S = 30.0


@dataclass
class Bench:
    """A started engine and what it has said."""

    engine: Engine
    sink: RecordingSink
    info: EngineInfo
    blocks: CachedBlocks

    async def knows(self, expected: set[int]) -> None:
        """Return once exactly these blocks are known to be cached."""
        async with within(IDLE_S):
            while set(self.blocks) != expected:
                await asyncio.sleep(0.01)

    async def do(self, action: Action) -> AdminOutcome:
        """Do *action*; return how it ended."""
        done: asyncio.Future[AdminOutcome] = asyncio.get_running_loop().create_future()
        self.engine.administer(action, 0.0, done.set_result)
        return await done

    async def idle(self) -> EngineLoad:
        """Return the load once nothing runs, waits or is held."""
        async with within(IDLE_S):
            while True:
                load = self.engine.load()
                if not (load.num_running or load.num_waiting or load.kv_usage):
                    return load
                await asyncio.sleep(0.01)


class Sims:
    """Starts simulated engines, and stops them in the end."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack

    async def start(self, role: Role = Role.AGGREGATED) -> Bench:
        """Return a started engine."""
        options = ("--step-ms", "1", "--prefill-tokens-per-s", "0")
        blocks = CachedBlocks()
        engine = SimEngine(
            model="no-folder", role=role, options=parse_options(options), blocks=blocks
        )
        sink = RecordingSink()
        info = await engine.start(sink, lambda _phase: None)
        self._stack.push_async_callback(engine.stop)
        return Bench(engine, sink, info, blocks)


class Relay:
    """A sink that passes on to another one: an engine keeps the sink it started with."""

    def __init__(self) -> None:
        self.to = RecordingSink()

    def outputs(
        self, tokens: list[EngineTokens], finished: list[EngineFinished]
    ) -> None:
        """Pass on."""
        self.to.outputs(tokens, finished)

    def died(self, reason: str) -> None:
        """Pass on."""
        self.to.died(reason)


class Vllms(Sims):
    """The real engine on the demo model, in this process: loaded once for all tests."""

    def __init__(self, stack: AsyncExitStack) -> None:
        super().__init__(stack)
        self._relay = Relay()
        self._bench: Bench | None = None

    async def start(self, role: Role = Role.AGGREGATED) -> Bench:
        """Return the engine, with a new sink."""
        assert role is Role.AGGREGATED
        if self._bench is None:
            self._bench = await self._load(role)
        sink = self._relay.to = RecordingSink()
        return Bench(self._bench.engine, sink, self._bench.info, self._bench.blocks)

    async def _load(self, role: Role) -> Bench:
        from tokenwire.worker.vllm.engine import VllmEngine

        folder = os.environ.get(
            "TOKENWIRE_DEMO_MODEL",
            str(Path.home() / ".cache/tokenwire/smollm2-135m-instruct"),
        )
        blocks = CachedBlocks()
        engine = VllmEngine(
            model=folder,
            served_name="demo",
            role=role,
            engine_args=["--dtype", "float32", "--max-model-len", "2048"],
            blocks=blocks,
        )
        info = await engine.start(self._relay, lambda _phase: None)
        self._stack.push_async_callback(engine.stop)
        return Bench(engine, self._relay.to, info, blocks)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def real() -> AsyncIterator[Vllms]:
    """The real engine, started by the first test that asks, stopped after the last."""
    async with AsyncExitStack() as stack:
        yield Vllms(stack)


@pytest_asyncio.fixture(
    loop_scope="session",
    params=[
        pytest.param(Sims, id="sim"),
        pytest.param(
            Vllms,
            id="vllm",
            marks=[
                pytest.mark.engine,
                pytest.mark.timeout(600),
                # torch and vLLM warn of themselves in this process; not ours to mend
                pytest.mark.filterwarnings("ignore"),
            ],
        ),
    ],
)
async def engines(request: pytest.FixtureRequest, real: Vllms) -> AsyncIterator[Sims]:
    """Start engines of one kind."""
    if request.param is Vllms:
        yield real
        return
    async with AsyncExitStack() as stack:
        yield Sims(stack)


async def test_a_request_gets_its_tokens_and_one_end(engines: Sims) -> None:
    """As many ids as asked for, the prompt as the engine saw it, nothing left over."""
    bench = await engines.start()
    bench.engine.submit(engine_request("r", PROMPT, sampling=GREEDY))
    end = await bench.sink.end("r")
    assert end.reason is FinishReason.LENGTH
    assert len(bench.sink.ids["r"]) == GREEDY.max_tokens
    assert all(0 <= i < bench.info.vocab_size for i in bench.sink.ids["r"])
    assert end.prompt_token_ids == PROMPT
    assert (end.num_prompt_tokens, end.handover) == (len(PROMPT), None)
    await bench.idle()


async def test_equal_requests_get_equal_ids_alone_or_together(engines: Sims) -> None:
    """Greedy ids depend on the prompt only."""
    bench = await engines.start()
    for n in range(4):
        bench.engine.submit(engine_request(f"r{n}", PROMPT, sampling=GREEDY))
    for n in range(4):
        await bench.sink.end(f"r{n}")
    assert all(bench.sink.ids[f"r{n}"] == bench.sink.ids["r0"] for n in range(4))


async def test_a_prompt_goes_on_where_an_earlier_output_was_cut(engines: Sims) -> None:
    """Prompt and output as a new prompt give the rest of the ids."""
    bench = await engines.start()
    bench.engine.submit(engine_request("whole", PROMPT, sampling=GREEDY))
    await bench.sink.end("whole")
    whole = bench.sink.ids["whole"]
    rest = Sampling(max_tokens=5, temperature=0.0, ignore_eos=True)
    bench.engine.submit(engine_request("rest", PROMPT + whole[:3], sampling=rest))
    await bench.sink.end("rest")
    assert bench.sink.ids["rest"] == whole[3:]


SEEDED = {"temperature": 0.8, "seed": 11}
PENALIZED = {
    "presence_penalty": 0.6,
    "frequency_penalty": 0.4,
    "repetition_penalty": 1.2,
}


@pytest.mark.parametrize(
    "params",
    [{"temperature": 0.0}, SEEDED, SEEDED | PENALIZED, {"min_tokens": 8}],
    ids=["greedy", "seeded", "penalized", "min_tokens"],
)
async def test_output_goes_on_behind_what_there_was(
    engines: Sims, params: dict[str, float]
) -> None:
    """With the ids of a request that was never cut; what was there is not told again."""
    bench = await engines.start()
    assert bench.info.exactness == "same_rng"
    fields = {"max_tokens": 8, "temperature": 0.0, "logprobs": 1, **params}
    sampling = msgspec.convert(fields, Sampling)
    bench.engine.submit(engine_request("whole", PROMPT, sampling=sampling))
    whole = await bench.sink.end("whole")
    ids = bench.sink.ids["whole"]
    for cut in (1, len(ids) - 1):
        name = f"from {cut}"
        prompt = PROMPT + ids[:cut]
        bench.engine.submit(
            engine_request(name, prompt, sampling=sampling, num_prior=cut)
        )
        end = await bench.sink.end(name)
        assert bench.sink.ids[name] == ids[cut:]
        assert (end.reason, end.stop_reason) == (whole.reason, whole.stop_reason)
        assert (end.num_prompt_tokens, end.prompt_token_ids) == (len(PROMPT), PROMPT)
        rows = [batch.logprobs for batch in bench.sink.batches[name]]
        assert sum(len(row.ranks) for row in rows if row) == 4 * 2 * len(ids[cut:])
    await bench.idle()


async def test_cached_ids_count_with_the_output_that_there_was(engines: Sims) -> None:
    """Also where they are more than the prompt has."""
    bench = await engines.start()
    ids = [2000, *PROMPT * 10]
    cached: list[int] = []
    for num_prior in (0, len(ids) - 1):
        sampling = Sampling(max_tokens=num_prior + 1, temperature=0.0, ignore_eos=True)
        name = f"r{num_prior}"
        bench.engine.submit(
            engine_request(name, ids, sampling=sampling, num_prior=num_prior)
        )
        end = await bench.sink.end(name)
        assert bench.sink.batches[name][0].num_cached_tokens == end.num_cached_tokens
        cached.append(end.num_cached_tokens)
    whole = (len(ids) - 1) // bench.info.block_size * bench.info.block_size
    assert cached == [0, whole]
    await bench.idle()


async def test_an_abort_ends_what_goes_on_and_frees_it(engines: Sims) -> None:
    """At once and while it decodes."""
    bench = await engines.start()
    bench.engine.submit(engine_request("r", PROMPT, sampling=LONG, num_prior=20))
    bench.engine.submit(engine_request("s", PROMPT, sampling=LONG, num_prior=20))
    bench.engine.abort("s")
    await bench.sink.until(lambda: "r" in bench.sink.ids)
    bench.engine.abort("r")
    for name in ("r", "s"):
        assert (await bench.sink.end(name)).reason is FinishReason.ABORT
    await bench.idle()


async def test_a_stop_id_is_among_the_ids_and_is_the_reason(engines: Sims) -> None:
    """Stopping includes what stopped."""
    bench = await engines.start()
    bench.engine.submit(engine_request("first", PROMPT, sampling=GREEDY))
    await bench.sink.end("first")
    ids = bench.sink.ids["first"]
    at = max(ids.index(token_id) for token_id in ids)
    sampling = Sampling(
        max_tokens=8, temperature=0.0, ignore_eos=True, stop_token_ids=[ids[at]]
    )
    bench.engine.submit(engine_request("stopped", PROMPT, sampling=sampling))
    end = await bench.sink.end("stopped")
    assert (end.reason, end.stop_reason) == (FinishReason.STOP, ids[at])
    assert bench.sink.ids["stopped"] == ids[: at + 1]


async def test_logprobs_have_a_row_for_every_id(engines: Sims) -> None:
    """One-to-one, the sampled id first, and the width that was asked for and one."""
    bench = await engines.start()
    sampling = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=2)
    bench.engine.submit(engine_request("r", PROMPT, sampling=sampling))
    await bench.sink.end("r")
    for batch in bench.sink.batches["r"]:
        rows = batch.logprobs
        assert rows is not None
        assert rows.width == 3
        size = 4 * rows.width * len(batch.token_ids)
        assert len(rows.token_ids) == len(rows.logprobs) == len(rows.ranks) == size
        sampled = [
            int.from_bytes(rows.token_ids[at : at + 4], "little")
            for at in range(0, size, 4 * rows.width)
        ]
        assert sampled == batch.token_ids


async def test_a_repeated_prompt_is_cached_by_whole_blocks(engines: Sims) -> None:
    """And another salt shares nothing."""
    bench = await engines.start()
    prompt = PROMPT * 10
    cached: list[int] = []
    for name, salt in (("one", None), ("two", None), ("salted", "s")):
        bench.engine.submit(
            engine_request(name, prompt, sampling=GREEDY, cache_salt=salt)
        )
        cached.append((await bench.sink.end(name)).num_cached_tokens)
    whole = (len(prompt) - 1) // bench.info.block_size * bench.info.block_size
    assert cached == [0, whole, 0]


async def test_what_is_cached_is_told_by_our_hashes(engines: Sims) -> None:
    """Each full block of prompt and output once, by salt; none behind a reset."""
    bench = await engines.start()
    assert bench.info.tells_blocks
    await bench.do(ResetPrefixCache())
    await bench.knows(set())
    size = bench.info.block_size
    expected: set[int] = set()
    hashes: list[int] = []
    # A second equal request, at the same time, fills blocks that are equal.
    for name, salt in (("one", None), ("two", None), ("salted", "s")):
        bench.engine.submit(
            engine_request(name, PROMPT * 10, sampling=GREEDY, cache_salt=salt)
        )
    for name, salt in (("one", None), ("two", None), ("salted", "s")):
        await bench.sink.end(name)
        # The last id has no KV: nothing was computed behind it.
        packed = pack_ids(PROMPT * 10 + bench.sink.ids[name][:-1])
        hashes = block_hashes(packed, size, root_hash(salt))
        assert len(hashes) == len(packed) // 4 // size > 0
        expected.update(hashes)
    assert len(expected) == 2 * len(hashes)
    await bench.knows(expected)
    assert not (await bench.do(ResetPrefixCache())).error
    assert not len(bench.blocks)
    # And those that come behind it are told as before.
    bench.engine.submit(engine_request("again", PROMPT * 10, max_tokens=1))
    await bench.sink.end("again")
    packed = pack_ids(PROMPT * 10)
    await bench.knows(set(block_hashes(packed, size, root_hash())))


async def test_an_abort_ends_the_request_once_and_frees_it(engines: Sims) -> None:
    """While it decodes; a second abort and an unknown id do nothing."""
    bench = await engines.start()
    bench.engine.submit(engine_request("r", PROMPT, sampling=LONG))
    await bench.sink.until(lambda: "r" in bench.sink.ids)
    bench.engine.abort("r")
    bench.engine.abort("r")
    bench.engine.abort("unknown")
    assert (await bench.sink.end("r")).reason is FinishReason.ABORT
    await bench.idle()


async def test_an_abort_right_after_the_submit_ends_it_too(engines: Sims) -> None:
    """Whether or not the engine has seen it yet."""
    bench = await engines.start()
    bench.engine.submit(engine_request("r", PROMPT, sampling=LONG))
    bench.engine.abort("r")
    assert (await bench.sink.end("r")).reason is FinishReason.ABORT
    await bench.idle()


async def test_a_prompt_that_does_not_fit_is_the_caller_s_fault(engines: Sims) -> None:
    """It arrives as an end, not as an exception."""
    bench = await engines.start()
    prompt = [1000] * (bench.info.max_model_len + 1)
    bench.engine.submit(engine_request("r", prompt, sampling=GREEDY))
    end = await bench.sink.end("r")
    assert (end.reason, end.error_kind) == (FinishReason.ERROR, ErrorKind.INVALID)
    assert end.error
    await bench.idle()


async def test_an_id_outside_the_vocabulary_is_the_caller_s_fault(
    engines: Sims,
) -> None:
    """As above; the engine lives on."""
    bench = await engines.start()
    bench.engine.submit(engine_request("r", [bench.info.vocab_size], sampling=GREEDY))
    assert (await bench.sink.end("r")).error_kind is ErrorKind.INVALID
    bench.engine.submit(engine_request("next", PROMPT, sampling=GREEDY))
    assert (await bench.sink.end("next")).reason is FinishReason.LENGTH


async def test_many_at_once_each_end_once(engines: Sims) -> None:
    """Some aborted on the way; the sink checks order and ends."""
    bench = await engines.start()
    names = [f"r{n}" for n in range(24)]
    for n, name in enumerate(names):
        sampling = Sampling(max_tokens=4 + n % 5, temperature=0.0, ignore_eos=True)
        bench.engine.submit(
            engine_request(name, [1000 + n] * (n + 1), sampling=sampling)
        )
    for name in names[::4]:
        bench.engine.abort(name)
    for name in names:
        await bench.sink.end(name)
    reasons = {name: bench.sink.ends[name].reason for name in names}
    assert all(reasons[n] in GOOD_ENDS for n in names if n not in names[::4])
    await bench.idle()


async def test_stopping_ends_what_runs(engines: Sims) -> None:
    """With an end for each request that was taken."""
    bench = await engines.start()
    bench.engine.submit(engine_request("r", PROMPT, sampling=LONG))
    await bench.sink.until(lambda: "r" in bench.sink.ids)
    await bench.engine.stop()
    assert "r" in bench.sink.ends


# -- the hand-over; two real engines need two processes: see tests/integration --------------


@pytest_asyncio.fixture(loop_scope="session")
async def pair() -> AsyncIterator[tuple[Bench, Bench]]:
    """Give a simulated prefill engine and a simulated decode engine."""
    async with AsyncExitStack() as stack:
        sims = Sims(stack)
        yield await sims.start(Role.PREFILL), await sims.start(Role.DECODE)


async def prefilled(bench: Bench) -> JsonObject:
    """Run a prefill leg, and return its hand-over."""
    bench.engine.submit(engine_request("p", PROMPT, leg=Leg.PREFILL, sampling=GREEDY))
    end = await bench.sink.end("p")
    assert end.reason in GOOD_ENDS
    assert len(bench.sink.ids["p"]) == 1
    assert end.handover is not None
    assert bench.engine.load().kv_usage > 0
    return end.handover


async def test_a_handed_over_request_gets_the_ids_of_a_whole_one(
    pair: tuple[Bench, Bench],
) -> None:
    """And both sides are empty afterwards."""
    prefill, decode = pair
    handover = await prefilled(prefill)
    decode.engine.submit(
        engine_request("d", PROMPT, leg=Leg.DECODE, handover=handover, sampling=GREEDY)
    )
    prefill.engine.submit(engine_request("whole", PROMPT, sampling=GREEDY))
    await decode.sink.end("d")
    await prefill.sink.end("whole")
    assert decode.sink.ids["d"] == prefill.sink.ids["whole"]
    assert decode.sink.ids["d"][:1] == prefill.sink.ids["p"]
    await decode.idle()
    await prefill.idle()


async def test_a_handed_over_request_goes_on_behind_what_there_was(
    pair: tuple[Bench, Bench],
) -> None:
    """The prefill leg may count it or take it for a prompt: its KV is the same."""
    prefill, decode = pair
    prefill.engine.submit(engine_request("whole", PROMPT, sampling=GREEDY))
    await prefill.sink.end("whole")
    whole = prefill.sink.ids["whole"]
    for num_prior in (3, 0):
        name = f"p{num_prior}"
        prompt = PROMPT + whole[:3]
        prefill.engine.submit(
            engine_request(
                name, prompt, leg=Leg.PREFILL, sampling=GREEDY, num_prior=num_prior
            )
        )
        end = await prefill.sink.end(name)
        assert prefill.sink.ids[name] == whole[3:4]
        decode.engine.submit(
            engine_request(
                name,
                prompt,
                leg=Leg.DECODE,
                handover=end.handover,
                sampling=GREEDY,
                num_prior=3,
            )
        )
        await decode.sink.end(name)
        assert decode.sink.ids[name] == whole[3:]
    await decode.idle()
    await prefill.idle()


async def test_a_release_frees_what_no_decode_leg_comes_for(
    pair: tuple[Bench, Bench],
) -> None:
    """Sent to the decode engine, felt on the prefill engine."""
    prefill, decode = pair
    handover = await prefilled(prefill)
    decode.engine.release_kv("p", handover)
    await prefill.idle()


async def test_a_decode_leg_that_is_aborted_at_once_frees_both_sides(
    pair: tuple[Bench, Bench],
) -> None:
    """Before its read has begun."""
    prefill, decode = pair
    handover = await prefilled(prefill)
    decode.engine.submit(
        engine_request("d", PROMPT, leg=Leg.DECODE, handover=handover, sampling=LONG)
    )
    decode.engine.abort("d")
    assert (await decode.sink.end("d")).reason is FinishReason.ABORT
    await decode.idle()
    await prefill.idle()


@pytest.mark.pitfall(19)
async def test_kv_that_is_not_there_any_more_is_a_failed_hand_over(
    pair: tuple[Bench, Bench],
) -> None:
    """The end says to prefill again."""
    prefill, decode = pair
    handover = await prefilled(prefill)
    decode.engine.release_kv("p", handover)
    await prefill.idle()
    decode.engine.submit(
        engine_request("d", PROMPT, leg=Leg.DECODE, handover=handover, sampling=GREEDY)
    )
    end = await decode.sink.end("d")
    assert (end.reason, end.error_kind) == (FinishReason.ERROR, ErrorKind.HANDOVER)
    await decode.idle()


@pytest.mark.pitfall(18)
async def test_a_dead_prefill_engine_is_a_failed_hand_over(
    pair: tuple[Bench, Bench],
) -> None:
    """Soon, and not after a lease."""
    prefill, decode = pair
    handover = await prefilled(prefill)
    await prefill.engine.stop()
    decode.engine.submit(
        engine_request("d", PROMPT, leg=Leg.DECODE, handover=handover, sampling=GREEDY)
    )
    assert (await decode.sink.end("d")).error_kind is ErrorKind.HANDOVER
    await decode.idle()
