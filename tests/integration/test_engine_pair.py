"""Two real engines, prefill and decode, with NIXL between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio
from ports import free_port

from support.vllm_engine import (
    PROMPTS,
    REFERENCE_TOKENS,
    EngineProcess,
    Stream,
    prompt,
    reference_ids,
)
from tokenwire.protocol.blocks import block_hashes, root_hash
from tokenwire.protocol.messages import (
    ErrorKind,
    FinishReason,
    JsonObject,
    Leg,
    Role,
    Sampling,
    StructuredOutput,
)
from tokenwire.protocol.tokens import pack_ids
from tokenwire.worker.engine import EngineFinished, EngineLoad

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]

GREEDY = Sampling(max_tokens=REFERENCE_TOKENS, temperature=0.0)
DIGITS = StructuredOutput("regex", "[0-9 ]{60}")
FREE_S = 15.0
"""Half of the lease that would also free the blocks of a request that died. It takes a
step of the engine or two, which two traced cores may need seconds for."""


@dataclass
class Pair:
    """A prefill engine and a decode engine."""

    prefill: EngineProcess
    decode: EngineProcess
    nixl_port: int  # of the prefill engine

    async def first_leg(
        self, token_ids: list[int], sampling: Sampling = GREEDY, num_prior: int = 0
    ) -> tuple[EngineFinished, JsonObject]:
        """Run a prefill leg; return its end and its hand-over."""
        end = await self.prefill.submit(
            token_ids, sampling, Leg.PREFILL, num_prior=num_prior
        ).end()
        assert end.error == ""
        assert end.handover is not None
        return end, end.handover

    def second_leg(
        self,
        token_ids: list[int],
        handover: JsonObject,
        sampling: Sampling = GREEDY,
        num_prior: int = 0,
    ) -> Stream:
        """Submit the decode leg."""
        return self.decode.submit(
            token_ids,
            sampling,
            Leg.DECODE,
            handover=handover,
            num_prior=num_prior,
        )

    async def both_idle(self) -> None:
        """Wait until neither engine holds anything."""
        await self.prefill.until_load(_idle, within_s=FREE_S)
        await self.decode.until_load(_idle, within_s=FREE_S)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair() -> AsyncIterator[Pair]:
    """Two engines in processes of their own; one slot too few for three requests."""
    nixl_port = free_port()
    pair = Pair(
        *await asyncio.gather(
            EngineProcess.start(Role.PREFILL, nixl_port=nixl_port),
            EngineProcess.start(Role.DECODE, "--max-num-seqs", "2"),
        ),
        nixl_port,
    )
    yield pair
    left = await asyncio.gather(pair.prefill.stop(), pair.decode.stop())
    assert list(left) == [[], []]


async def test_the_two_sides_agree(pair: Pair) -> None:
    """Both name the connector and the same compatibility."""
    prefill, decode = pair.prefill.info, pair.decode.info
    assert prefill.connector == decode.connector == "NixlConnector"
    assert prefill.connector_compatibility == decode.connector_compatibility != ""


@pytest.mark.parametrize(
    "index", range(len(PROMPTS)), ids=[str(len(p)) for p in PROMPTS]
)
async def test_greedy_ids_equal_plain_vllm(pair: Pair, index: int) -> None:
    """Prefill there and decode here give, to the token, what vLLM alone gives."""
    expected = (await reference_ids())[index]
    end, handover = await pair.first_leg(PROMPTS[index])
    assert end.reason in {FinishReason.LENGTH, FinishReason.STOP}
    assert end.kv_transfer_params is None  # all of it is the hand-over's
    stream = pair.second_leg(PROMPTS[index], handover)
    end = await stream.end()
    assert stream.token_ids == expected
    assert end.prompt_token_ids == PROMPTS[index]
    assert end.kv_transfer_params is None
    assert end.handover is None
    await pair.both_idle()


async def test_both_sides_tell_of_a_prompt_that_was_handed_over(pair: Pair) -> None:
    """What decode has read is cached there as if it had computed it."""
    tokens = prompt(300)
    _, handover = await pair.first_leg(tokens)
    await pair.second_leg(tokens, handover, Sampling(max_tokens=2)).end()
    for engine in (pair.prefill, pair.decode):
        size = engine.info.block_size
        hashes = block_hashes(pack_ids(tokens), size, root_hash())
        assert len(hashes) == 300 // size > 0
        await engine.until_cached(set(hashes), within_s=FREE_S)


async def test_seed_gives_the_ids_of_a_full_run(pair: Pair) -> None:
    """The prefill leg's draw does not shift the decode leg's."""
    tokens = prompt(40)
    sampling = Sampling(max_tokens=16, temperature=1.0, seed=3)
    _, handover = await pair.first_leg(tokens, sampling)
    handed = pair.second_leg(tokens, handover, sampling)
    await handed.end()
    full = pair.prefill.submit(tokens, sampling)
    await full.end()
    assert handed.token_ids == full.token_ids


@pytest.mark.parametrize("counts", [True, False], ids=["counts", "draws anew"])
async def test_a_handed_over_output_goes_on(pair: Pair, *, counts: bool) -> None:
    """Behind what there was of it, with the ids of a run that was never cut.

    Its prefill leg may know what the output is, or take it for a prompt.
    """
    tokens = prompt(120)
    sampling = Sampling(
        max_tokens=24,
        temperature=0.8,
        seed=5,
        frequency_penalty=0.7,
        structured_output=DIGITS,
    )
    whole = pair.decode.submit(tokens, sampling)
    await whole.end()
    for cut in (1, 8, 23):  # the second is a whole block with the prompt
        so_far = tokens + whole.token_ids[:cut]
        if counts:
            end, handover = await pair.first_leg(so_far, sampling, cut)
            first = pair.prefill.streams[end.request_id].token_ids
            assert first == whole.token_ids[cut : cut + 1]
        else:
            _, handover = await pair.first_leg(so_far)
        stream = pair.second_leg(so_far, handover, sampling, cut)
        end = await stream.end()
        assert stream.token_ids == whole.token_ids[cut:]
        assert end.prompt_token_ids == tokens
    await pair.both_idle()


async def test_min_tokens_is_lowered_on_the_prefill_leg_only(pair: Pair) -> None:
    """``min_tokens`` above one neither fails the prefill leg nor is lost."""
    tokens = prompt(20)
    sampling = Sampling(max_tokens=8, min_tokens=4, temperature=0.0)
    free = Sampling(max_tokens=8, temperature=0.0)
    _, handover = await pair.first_leg(tokens, free)
    second = pair.second_leg(tokens, handover, free)
    await second.end()
    stop = second.token_ids[1]  # would end it at its second token
    sampling = Sampling(
        max_tokens=8, min_tokens=4, temperature=0.0, stop_token_ids=[stop]
    )
    _, handover = await pair.first_leg(tokens, sampling)
    third = pair.second_leg(tokens, handover, sampling)
    await third.end()
    assert len(third.token_ids) >= 4
    assert stop not in third.token_ids[:4]


async def test_first_token_that_stops_still_holds_the_kv(pair: Pair) -> None:
    """A stop at the first token names a hand-over, to be released."""
    eos = Sampling(max_tokens=8, temperature=0.0, allowed_token_ids=[2])
    end, handover = await pair.first_leg(prompt(140), eos)
    assert end.reason is FinishReason.STOP
    assert (await pair.prefill.load()).kv_usage > 0
    pair.decode.release_kv(end.request_id, handover)
    await pair.prefill.until_load(_idle, within_s=FREE_S)


async def test_release_frees_what_is_held(pair: Pair) -> None:
    """KV of a request that died in between is free within 2 s, not after a lease."""
    end, handover = await pair.first_leg(prompt(200))
    assert (await pair.prefill.load()).kv_usage > 0
    pair.decode.release_kv(end.request_id, handover)
    await pair.both_idle()


async def test_repeated_and_foreign_releases_are_harmless(pair: Pair) -> None:
    """Releasing twice, or what is no hand-over, does not hurt either engine."""
    end, handover = await pair.first_leg(prompt(30))
    for _ in range(2):
        pair.decode.release_kv(end.request_id, handover)
    pair.decode.release_kv("nobody", {"neither": "here nor there"})
    await pair.both_idle()
    end, handover = await pair.first_leg(PROMPTS[2])
    stream = pair.second_leg(PROMPTS[2], handover)
    await stream.end()
    assert stream.token_ids == (await reference_ids())[2]


async def test_cached_tokens_are_those_of_the_prefill_side(pair: Pair) -> None:
    """The decode leg reports what the prefill engine had cached, not its transfer."""
    tokens = prompt(300)
    for cached in (0, 256):
        _, handover = await pair.first_leg(tokens)
        stream = pair.second_leg(tokens, handover)
        assert (await stream.end()).num_cached_tokens == cached


async def test_prompt_logprobs_come_with_the_prefill_leg(pair: Pair) -> None:
    """They exist where the prompt was computed; the decode leg does not repeat it."""
    tokens = prompt(20)
    sampling = Sampling(max_tokens=4, temperature=0.0, prompt_logprobs=1, logprobs=1)
    end, handover = await pair.first_leg(tokens, sampling)
    assert end.prompt_logprobs is not None
    stream = pair.second_leg(tokens, handover, sampling)
    second = await stream.end()
    assert second.prompt_logprobs is None
    assert stream.batches[0].logprobs is not None
    assert stream.batches[0].logprobs.width == 2


@pytest.mark.parametrize("num_tokens", [0, 1])
async def test_abort_of_a_prefill_leg_leaves_nothing_held(
    pair: Pair, num_tokens: int
) -> None:
    """Aborted before or at its token: free at once, or a hand-over to release."""
    stream = pair.prefill.submit(prompt(900), GREEDY, Leg.PREFILL)
    if num_tokens:
        await stream.have(1)
    pair.prefill.abort(stream)
    end = await stream.end()
    if end.handover is not None:
        pair.decode.release_kv(stream.request_id, end.handover)
    await pair.both_idle()


@pytest.mark.pitfall(23)
async def test_abort_during_the_transfer(pair: Pair) -> None:
    """A decode leg aborted at once ends as aborted; both engines are free, and live."""
    tokens = prompt(300)
    _, handover = await pair.first_leg(tokens)
    stream = pair.second_leg(tokens, handover, Sampling(max_tokens=500))
    pair.decode.abort(stream)
    assert (await stream.end()).reason is FinishReason.ABORT
    await pair.both_idle()


async def test_abort_of_a_queued_decode_leg_frees_the_prefill_side(pair: Pair) -> None:
    """A decode leg that never got a slot still releases what is held for it."""
    long = Sampling(max_tokens=1_000, temperature=0.0, ignore_eos=True)
    running = [pair.decode.submit(prompt(10), long) for _ in range(2)]
    for stream in running:
        await stream.have(1)
    tokens = prompt(200)
    _, handover = await pair.first_leg(tokens)
    queued = pair.second_leg(tokens, handover)
    pair.decode.abort(queued)
    assert (await queued.end()).reason is FinishReason.ABORT
    await pair.prefill.until_load(_idle, within_s=FREE_S)
    for stream in running:
        pair.decode.abort(stream)
        await stream.end()
    await pair.both_idle()


async def test_kv_that_cannot_be_loaded_is_a_failed_handover(pair: Pair) -> None:
    """A hand-over from an engine that is gone fails as such; the engine serves on."""
    tokens = prompt(200)
    end, handover = await pair.first_leg(tokens)
    gone = {**handover, "remote_engine_id": "gone", "remote_port": 1}
    failed = await pair.second_leg(tokens, gone).end()
    assert (failed.reason, failed.error_kind) == (
        FinishReason.ERROR,
        ErrorKind.HANDOVER,
    )
    pair.decode.release_kv(end.request_id, handover)
    await pair.both_idle()


@pytest.mark.pitfall(19)
async def test_a_prefill_engine_restarted_at_the_same_address(pair: Pair) -> None:
    """What the old one held is a failed hand-over; from the new one come the same ids."""
    _, stale = await pair.first_leg(PROMPTS[-1])
    assert stale["remote_port"] == pair.nixl_port
    await pair.prefill.kill()
    pair.prefill = await EngineProcess.start(Role.PREFILL, nixl_port=pair.nixl_port)

    end = await pair.second_leg(PROMPTS[-1], stale).end()
    assert (end.reason, end.error_kind) == (FinishReason.ERROR, ErrorKind.HANDOVER)
    _, handover = await pair.first_leg(PROMPTS[-1])
    assert handover["remote_port"] == pair.nixl_port
    stream = pair.second_leg(PROMPTS[-1], handover)
    await stream.end()
    assert stream.token_ids == (await reference_ids())[-1]
    await pair.both_idle()


def _idle(load: EngineLoad) -> bool:
    return not (load.num_running or load.num_waiting or load.kv_usage)
