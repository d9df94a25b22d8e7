"""The real engine refuses its arguments."""

from __future__ import annotations

import pytest

from support.vllm_engine import MODEL
from support.worker_fakes import RecordingSink
from tokenwire.protocol.messages import Role
from tokenwire.worker.engine import EngineStartError
from tokenwire.worker.vllm.engine import VllmEngine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


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
