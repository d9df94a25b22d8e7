"""What an engine needs to go on exactly, and how vLLM is told; stand-ins for vLLM."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from tokenwire.protocol.messages import (
    GRAMMAR_REJECTS_PREFIX,
    ErrorKind,
    FinishReason,
    Leg,
    Role,
    Sampling,
)
from tokenwire.worker.engine import EngineRequest, EngineStartError
from tokenwire.worker.vllm import resume
from tokenwire.worker.vllm.binding import Vllm
from tokenwire.worker.vllm.request import OpenRequest
from tokenwire.worker.vllm.resume import (
    CPU_WORKER_CLASS,
    GPU_WORKER_CLASS,
    NUM_PROMPT_KEY,
    SCHEDULER_CLASSES,
    check_runner_v2,
    is_resuming,
    use_resume,
)
from tokenwire.worker.vllm.sampling import sampling_params
from tokenwire.worker.vllm.trial import CUTS, NUM_TOKENS, exactness, give_token

STOCK_GPU_WORKER = "vllm.v1.worker.gpu_worker.Worker"


def config(**changes: Any) -> Any:
    """Return vLLM's configuration of an engine on a CPU, with *changes*."""
    made: dict[str, Any] = {
        "scheduler_config": SimpleNamespace(scheduler_cls=None, async_scheduling=True),
        "speculative_config": None,
        "model_config": SimpleNamespace(is_encoder_decoder=False),
        "parallel_config": SimpleNamespace(worker_cls=CPU_WORKER_CLASS),
        "kv_transfer_config": None,
        "use_v2_model_runner": False,
    }
    return SimpleNamespace(**made | changes)


def vllm(*, is_cpu: bool = True, version: str = "0.32.0", **names: Any) -> Vllm:
    """Return the names of vLLM."""
    return cast("Vllm", SimpleNamespace(is_cpu=is_cpu, version=version, **names))


def wrapped(function: Callable[[Any], None]) -> Callable[[Any], None]:
    """Stand before *function*, as vLLM's decorators do."""

    @wraps(function)
    def calling(self: Any) -> None:
        function(self)

    return calling


class Named:
    """Has what is looked for: as its own, or set on its instances."""

    @wrapped
    def __init__(self) -> None:
        self.set_on_it = 1

    def own(self) -> None:
        """Exist."""


@pytest.fixture
def _names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have vLLM's names be there."""
    module = ModuleType("stand_in")
    vars(module).update(Named=Named, __name__="stand_in")
    monkeypatch.setitem(sys.modules, "stand_in", module)
    monkeypatch.setattr(resume, "_NAMES", {"stand_in:Named": ("own", "set_on_it")})
    monkeypatch.setattr(resume, "_NAMES_V1", {})


@pytest.mark.usefixtures("_names")
@pytest.mark.parametrize("is_async", [True, False])
def test_the_scheduler_is_of_the_kind_that_vllm_would_take(*, is_async: bool) -> None:
    """Nothing else changes on a CPU."""
    made = config()
    made.scheduler_config.async_scheduling = is_async
    assert not is_resuming(made)
    assert use_resume(vllm(), made, Role.DECODE) == ""
    assert made.scheduler_config.scheduler_cls == SCHEDULER_CLASSES[is_async]
    assert made.parallel_config.worker_cls == CPU_WORKER_CLASS
    assert is_resuming(made)


@pytest.mark.usefixtures("_names")
@pytest.mark.parametrize(
    ("is_v2", "worker"), [(True, STOCK_GPU_WORKER), (False, GPU_WORKER_CLASS)]
)
def test_on_a_gpu_runner_v1_alone_needs_a_worker(worker: str, *, is_v2: bool) -> None:
    """Runner V2 is told all by the scheduler."""
    stock = SimpleNamespace(worker_cls=STOCK_GPU_WORKER)
    made = config(parallel_config=stock, use_v2_model_runner=is_v2)
    assert use_resume(vllm(is_cpu=False), made, Role.PREFILL) == ""
    assert made.parallel_config.worker_cls == worker


HOST = SimpleNamespace(kv_buffer_device="cpu")
OBSTACLES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"version": "0.31.9"}, {}, "not tried with vLLM 0.31.9"),
    (
        {},
        {"scheduler_config": SimpleNamespace(scheduler_cls="x.Y")},
        "another scheduler is asked for",
    ),
    (
        {},
        {"speculative_config": SimpleNamespace(method="ngram")},
        "speculative decoding",
    ),
    ({}, {"model_config": SimpleNamespace(is_encoder_decoder=True)}, "encoder"),
    (
        {},
        {"parallel_config": SimpleNamespace(worker_cls="x.Y")},
        "another worker class is in use (x.Y)",
    ),
    (
        {"is_cpu": False},
        {
            "kv_transfer_config": HOST,
            "parallel_config": SimpleNamespace(worker_cls=STOCK_GPU_WORKER),
        },
        "by way of the host",
    ),
]


@pytest.mark.usefixtures("_names")
@pytest.mark.parametrize(("names", "changes", "text"), OBSTACLES)
def test_what_is_in_the_way_is_said_and_nothing_is_changed(
    names: dict[str, Any], changes: dict[str, Any], text: str
) -> None:
    """An operator's own classes win."""
    made = config(**changes)
    before = (made.scheduler_config.scheduler_cls, made.parallel_config.worker_cls)
    assert text in use_resume(vllm(**names), made, Role.PREFILL)
    after = (made.scheduler_config.scheduler_cls, made.parallel_config.worker_cls)
    assert after == before
    assert not is_resuming(made)


@pytest.mark.usefixtures("_names")
@pytest.mark.parametrize("is_v2", [False, True])
def test_states_that_are_kept_are_speculated_by_runner_v1(*, is_v2: bool) -> None:
    """Their layer goes by the name of a speculative method; V1 draws by that."""
    kept = SimpleNamespace(method="extract_hidden_states")
    made = config(speculative_config=kept, use_v2_model_runner=is_v2)
    why = use_resume(vllm(), made, Role.PREFILL)
    assert ("speculative" in why) is not is_v2


@pytest.mark.usefixtures("_names")
@pytest.mark.parametrize(
    ("names", "missing"),
    [
        ({"stand_in:Named": ("own", "gone")}, "stand_in:Named.gone"),
        ({"stand_in:Gone": ()}, "stand_in:Gone"),
        ({"no_such_module_at_all:Named": ()}, "no_such_module_at_all:Named"),
    ],
)
def test_a_name_that_vllm_lost_is_in_the_way(
    monkeypatch: pytest.MonkeyPatch, names: dict[str, tuple[str, ...]], missing: str
) -> None:
    """It is found before the engine is made."""
    monkeypatch.setattr(resume, "_NAMES", names)
    why = use_resume(vllm(), config(), Role.DECODE)
    assert why == f"vLLM 0.32.0 has no {missing}"
    monkeypatch.setattr(resume, "_NAMES", {})
    monkeypatch.setattr(resume, "_NAMES_V1", names)
    assert use_resume(vllm(), config(), Role.DECODE) == why
    assert use_resume(vllm(), config(use_v2_model_runner=True), Role.DECODE) == ""


# --- requests --------------------------------------------------------------------------


def params_of(leg: Leg, num_prior: int, **fields: Any) -> Any:
    """Return vLLM's sampling parameters of a request of five ids."""
    names = vllm(
        SamplingParams=SimpleNamespace,
        RequestOutputKind=SimpleNamespace(DELTA="delta"),
    )
    request = EngineRequest(
        "r", [1, 2, 3, 4, 5], Sampling(**fields), leg, num_prior=num_prior
    )
    return sampling_params(names, request)


def test_vllm_is_told_where_the_output_begins() -> None:
    """And what the whole request may have; a prefill leg has one token more."""
    full = params_of(Leg.FULL, 2, max_tokens=9, min_tokens=7)
    assert full.extra_args == {NUM_PROMPT_KEY: 3}
    assert (full.max_tokens, full.min_tokens) == (9, 7)
    prefill = params_of(Leg.PREFILL, 2, max_tokens=9, min_tokens=7)
    assert prefill.extra_args[NUM_PROMPT_KEY] == 3
    assert (prefill.max_tokens, prefill.min_tokens) == (3, 3)
    assert params_of(Leg.FULL, 0, max_tokens=9).extra_args is None


def test_the_end_speaks_of_the_prompt_alone() -> None:
    """For vLLM all that came was the prompt."""
    state = OpenRequest(EngineRequest("r", [1, 2, 3], Sampling(9), num_prior=1))
    completion = SimpleNamespace(
        token_ids=[], finish_reason="error", stop_reason=GRAMMAR_REJECTS_PREFIX
    )
    output = SimpleNamespace(
        outputs=[completion],
        prompt_logprobs=None,
        prompt_token_ids=[1, 2, 3],
        finished=True,
        kv_transfer_params=None,
        num_cached_tokens=2,
        metrics=None,
    )
    _, end = state.take(output)
    assert end is not None
    assert (end.prompt_token_ids, end.num_prompt_tokens) == ([1, 2], 2)
    assert (end.reason, end.error_kind) == (FinishReason.ERROR, ErrorKind.INVALID)
    assert end.stop_reason == GRAMMAR_REJECTS_PREFIX
    assert "does not fit the structured output" in end.error
    assert state.stopped().num_prompt_tokens == 2
    assert state.failed(ErrorKind.ENGINE, "x").num_prompt_tokens == 2


def test_runner_v2_has_no_prompt_logprobs_behind_output() -> None:
    """It takes them for told, as of a preempted request."""
    sampling = Sampling(9, prompt_logprobs=1)
    with pytest.raises(ValueError, match="prompt_logprobs"):
        check_runner_v2(EngineRequest("r", [1, 2], sampling, num_prior=1))
    check_runner_v2(EngineRequest("r", [1, 2], sampling))
    check_runner_v2(EngineRequest("r", [1, 2], Sampling(9), num_prior=1))


# --- the trial -------------------------------------------------------------------------


class DeadError(Exception):
    """vLLM's, of an engine that is gone."""


@dataclass
class Llm:
    """An ``AsyncLLM`` whose ids follow from seed, position and what it forgets."""

    wrong_runs: int = 0  # so many of the requests with output go wrong
    jitter: float = 0.0  # of the logprobs behind output
    fails: Exception | None = None
    finish_reason: str = "length"
    runs: list[tuple[list[int], Any]] = field(
        default_factory=list[tuple[list[int], Any]]
    )

    async def generate(
        self, prompt: Any, params: Any, name: str, *, reasoning_ended: bool
    ) -> Any:
        """Bring two ids at a time."""
        assert reasoning_ended
        del name
        if self.fails is not None:
            raise self.fails
        token_ids: list[int] = prompt["ids"]
        self.runs.append((token_ids, params))
        extra: dict[str, int] = params.extra_args or {}
        num_prompt = extra.get(NUM_PROMPT_KEY, len(token_ids))
        done = len(token_ids) - num_prompt
        is_wrong = done > 0 and self.wrong_runs > 0
        if is_wrong:
            self.wrong_runs -= 1
        ids = [1000 * (params.seed or 0) + n for n in range(done, params.max_tokens)]
        if is_wrong:
            ids[-1] += 1
        for at in range(0, len(ids), 2):
            two = ids[at : at + 2]
            rows = len(two)
            logprobs = SimpleNamespace(
                start_indices=list(range(rows)),
                end_indices=list(range(1, rows + 1)),
                token_ids=two,
                logprobs=[-1.0 - (self.jitter if done else 0.0)] * rows,
                ranks=[1] * rows,
            )
            is_last = at + 2 >= len(ids)
            completion = SimpleNamespace(
                token_ids=two,
                logprobs=logprobs,
                finish_reason=self.finish_reason if is_last else None,
                stop_reason=None,
            )
            yield SimpleNamespace(outputs=[completion])


def tokens_input(ids: list[int], cache_salt: str) -> dict[str, Any]:
    """Return a prompt of vLLM's."""
    return {"ids": list(ids), "salt": cache_salt}


def names_of_trial() -> Vllm:
    """Return the names of vLLM that a trial uses."""
    return vllm(
        SamplingParams=SimpleNamespace,
        StructuredOutputsParams=SimpleNamespace,
        RequestOutputKind=SimpleNamespace(DELTA="delta"),
        EngineDeadError=DeadError,
        tokens_input=tokens_input,
    )


async def test_an_engine_that_goes_on_says_so() -> None:
    """By a seed, penalties and a grammar at once, and only half of the output."""
    llm = Llm()
    assert await exactness(names_of_trial(), llm, bitwise=False) == "same_rng"
    (whole, params), (cut, _) = llm.runs
    assert params.temperature > 0
    assert params.seed is not None
    assert params.frequency_penalty
    assert params.presence_penalty
    assert params.structured_outputs is not None
    assert cut[: len(whole)] == whole
    assert len(cut) == len(whole) + CUTS[0] < len(whole) + NUM_TOKENS


@pytest.mark.parametrize(
    ("jitter", "says_so", "level"),
    [(0.0, True, "bitwise"), (1e-3, True, "same_rng"), (0.0, False, "same_rng")],
)
async def test_equal_numbers_are_promised_by_vllm_and_seen(
    jitter: float, level: str, *, says_so: bool
) -> None:
    """Neither is enough alone."""
    llm = Llm(jitter=jitter)
    assert await exactness(names_of_trial(), llm, bitwise=says_so) == level


@pytest.mark.parametrize(
    ("llm", "level"),
    [
        (Llm(wrong_runs=1), "same_rng"),
        (Llm(wrong_runs=len(CUTS) - 1), "same_rng"),
        (Llm(wrong_runs=len(CUTS)), ""),
        (Llm(fails=ValueError("no such grammar")), ""),
        (Llm(finish_reason="error"), ""),
    ],
)
async def test_an_engine_that_never_goes_on_exactly_promises_nothing(
    llm: Llm, level: str
) -> None:
    """A near tie may fall otherwise once, and has the next attempt."""
    assert await exactness(names_of_trial(), llm, bitwise=False) == level


async def test_an_engine_that_dies_of_it_has_not_started() -> None:
    """The operator reads how to start it."""
    with pytest.raises(EngineStartError, match="--no-exact-resume"):
        await exactness(names_of_trial(), Llm(fails=DeadError()), bitwise=False)
    with pytest.raises(EngineStartError, match="gives no token"):
        await give_token(names_of_trial(), Llm(fails=DeadError()))
    await give_token(names_of_trial(), Llm())
