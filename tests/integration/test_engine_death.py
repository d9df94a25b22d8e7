"""The real engine killed, stopped and refused: nobody waits, nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from support.awake import within
from support.vllm_engine import MODEL, EngineProcess, prompt
from support.worker_fakes import RecordingSink
from tokenwire.protocol.messages import ErrorKind, FinishReason, Role, Sampling
from tokenwire.worker.engine import EngineStartError
from tokenwire.worker.vllm.engine import VllmEngine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LONG = Sampling(max_tokens=1_500, temperature=0.0, ignore_eos=True)


async def test_killed_engine_core_ends_every_request() -> None:
    """After kill -9 every request ends as the engine's fault, then ``died`` comes."""
    engine = await EngineProcess.start(Role.AGGREGATED)
    streams = [engine.submit(prompt(10), LONG) for _ in range(3)]
    for stream in streams:
        await stream.have(1)
    ids = await engine.process_ids()
    core = next(pid for name, pid in ids.items() if "EngineCore" in name)
    os.kill(core, signal.SIGKILL)
    for stream in streams:
        end = await stream.end()
        assert (end.reason, end.error_kind) == (FinishReason.ERROR, ErrorKind.ENGINE)
        assert not engine.died.done() or stream.num_ends == 1
    async with within(60):
        assert "died" in await asyncio.shield(engine.died)
    late = await engine.submit(prompt(3), LONG).end()
    assert (late.reason, late.error_kind) == (FinishReason.ERROR, ErrorKind.ENGINE)
    assert await engine.stop() == []


async def test_death_of_an_idle_engine_is_noticed() -> None:
    """Nobody asks anything of it, and still its death is told; a stop leaves nothing."""
    engine = await EngineProcess.start(Role.AGGREGATED)
    ids = await engine.process_ids()
    worker = next(pid for name, pid in ids.items() if "Worker" in name)
    os.kill(worker, signal.SIGKILL)
    async with within(60):
        await asyncio.shield(engine.died)
    assert await engine.stop() == []


# In this process, which has vLLM imported: that takes longer than its refusal.
@pytest.mark.filterwarnings("ignore")  # torch and vLLM warn of themselves
@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--no-such-option"], "no-such-option"),
        (["--max-model-len", "many"], "max-model-len"),
        (["--model", "other"], "--model"),
        (["--max-model-len", "100000000"], "max_model_len"),
    ],
)
async def test_bad_engine_arguments_fail_the_start_in_a_sentence(
    arguments: list[str], word: str
) -> None:
    """VLLM's refusal of an argument is one line for the operator."""
    engine = VllmEngine(
        model=str(MODEL),
        served_name="demo",
        role=Role.AGGREGATED,
        engine_args=arguments,
    )
    with pytest.raises(EngineStartError) as caught:
        await engine.start(RecordingSink(), lambda _phase: None)
    assert word in str(caught.value).splitlines()[0]
