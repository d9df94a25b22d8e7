"""In vLLM's own processes: scheduler and model runner V1, with stand-ins for vLLM."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tokenwire.protocol.messages import GRAMMAR_REJECTS_PREFIX
from tokenwire.worker.vllm.resume import NUM_PROMPT_KEY

SCHEDULER = "tokenwire.worker.vllm.resume_scheduler"
RUNNER = "tokenwire.worker.vllm.resume_runner"
GPU_WORKER = "tokenwire.worker.vllm.gpu_worker"
FIRST_REASONED, REFUSED = 90, 99


class StockScheduler:
    """vLLM's, as far as ours uses it: what is added is scheduled at once."""

    def __init__(self, *, use_v2_model_runner: bool = False) -> None:
        self.requests: dict[str, Any] = {}
        self.grammar_compile_error_reqs: set[str] = set()
        self.structured_output_manager = Manager()
        self.use_v2_model_runner = use_v2_model_runner
        self.new: list[str] = []
        self.taken: list[dict[str, Any]] = []

    def add_request(self, request: Any) -> None:
        """Take a request, or more of its input."""
        if request.request_id not in self.requests:
            self.requests[request.request_id] = request
            self.new.append(request.request_id)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """Plan what is new, as vLLM's NewRequestData has it."""
        del throttle_prefills
        new, self.new = [self.requests[name] for name in self.new], []
        planned = [
            SimpleNamespace(
                req_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                prefill_token_ids=request._all_token_ids
                if self.use_v2_model_runner
                else None,
            )
            for request in new
        ]
        return SimpleNamespace(scheduled_new_reqs=planned)

    def update_from_output(self, planned: Any, brought: Any) -> Any:
        """End what was refused; keep what logprobs came."""
        del planned
        self.taken.append(dict(brought.prompt_logprobs_dict))
        ends = [
            SimpleNamespace(request_id=name, stop_reason=None)
            for name in sorted(self.grammar_compile_error_reqs)
        ]
        self.grammar_compile_error_reqs.clear()
        return {0: SimpleNamespace(outputs=ends)}


class Executor:
    """Runs what is submitted when the test says so."""

    def __init__(self) -> None:
        self.work: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Keep *work*."""
        future: Future[Any] = Future()
        self.work.append((future, work))
        return future

    def run(self) -> None:
        """Do all that was submitted."""
        for future, work in self.work:
            try:
                future.set_result(work())
            except Exception as error:  # noqa: BLE001 - as an executor does
                future.set_exception(error)


class Manager:
    """vLLM's StructuredOutputManager: a grammar begins behind ``FIRST_REASONED``."""

    def __init__(self) -> None:
        self.executor = Executor()
        self.seen: list[tuple[list[int], list[int], list[int]]] = []

    def accept_tokens(self, view: Any, token_ids: list[int]) -> bool:
        """Take note of what there is, and accept all but one id."""
        structured = view.structured_output_request
        structured.reasoner = "a parser"
        structured.reasoning_ended = FIRST_REASONED in view.all_token_ids
        structured.grammar.accepted += token_ids
        self.seen.append(
            (view.prompt_token_ids, view.all_token_ids.copy(), list(token_ids))
        )
        return REFUSED not in token_ids


@dataclass
class Structured:
    """vLLM's StructuredOutputRequest."""

    _grammar: Any = field(default_factory=Future[Any])
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: Any = None
    reasoner: Any = None

    @property
    def grammar(self) -> Any:
        """The grammar, or what was raised."""
        return self._grammar.exception() or self._grammar.result()

    @grammar.setter
    def grammar(self, grammar: Any) -> None:
        self._grammar = grammar


def request(
    token_ids: list[int], num_prompt: int | None = None, structured: Any = None
) -> Any:
    """Return vLLM's Request."""
    extra = None if num_prompt is None else {NUM_PROMPT_KEY: num_prompt}
    return SimpleNamespace(
        request_id="r",
        prompt_token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        _all_token_ids=token_ids.copy(),
        _output_token_ids=[],
        sampling_params=SimpleNamespace(extra_args=extra),
        structured_output_request=structured,
    )


def brought(**changes: Any) -> Any:
    """Return vLLM's ModelRunnerOutput of a step."""
    made: dict[str, Any] = {
        "prompt_logprobs_dict": {},
        "sampled_token_ids": [[]],
        "req_id_to_index": {"r": 0},
    }
    return SimpleNamespace(**made | changes)


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> None:
    """Put a module in the place of one of vLLM's, or of torch."""
    module = ModuleType(name)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)


def loaded(name: str) -> Iterator[Any]:
    """Load one of our modules on the stand-ins, and leave no trace of it."""
    real = sys.modules.pop(name, None)
    yield import_module(name)
    del sys.modules[name]
    if real is not None:
        sys.modules[name] = real


@pytest.fixture
def scheduling(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the schedulers."""
    sched = "vllm.v1.core.sched"
    stand_in(monkeypatch, f"{sched}.scheduler", Scheduler=StockScheduler)
    stand_in(
        monkeypatch,
        f"{sched}.async_scheduler",
        AsyncScheduler=type("AsyncScheduler", (StockScheduler,), {}),
    )
    yield from loaded(SCHEDULER)


@pytest.mark.parametrize("name", ["ResumeScheduler", "AsyncResumeScheduler"])
def test_output_becomes_output_when_its_request_begins(
    scheduling: Any, name: str
) -> None:
    """For the scheduler and for runner V1, and not before."""
    scheduler = getattr(scheduling, name)()
    made = request([1, 2, 3, 4, 5], 3)
    scheduler.add_request(made)
    assert (made.prompt_token_ids, made._output_token_ids) == ([1, 2, 3, 4, 5], [])
    (new,) = scheduler.schedule().scheduled_new_reqs
    assert (made.prompt_token_ids, made.num_prompt_tokens) == ([1, 2, 3], 3)
    assert made._output_token_ids == [4, 5]
    assert made._all_token_ids == [1, 2, 3, 4, 5]
    assert new.prompt_token_ids == [1, 2, 3]
    made._all_token_ids.append(6)  # as it will; the runner appends its own
    assert new.prefill_token_ids == [1, 2, 3, 4, 5]


def test_a_request_that_begins_again_keeps_its_output(scheduling: Any) -> None:
    """Runner V2 hears of preempted requests as of new ones."""
    scheduler = scheduling.ResumeScheduler(use_v2_model_runner=True)
    made = request([1, 2, 3, 4], 2)
    scheduler.add_request(made)
    scheduler.schedule()
    made._output_token_ids.append(5)
    made._all_token_ids.append(5)
    scheduler.new = ["r"]
    (new,) = scheduler.schedule().scheduled_new_reqs
    assert made._output_token_ids == [3, 4, 5]
    assert new.prompt_token_ids == [1, 2]
    assert new.prefill_token_ids is made._all_token_ids  # as vLLM gave it


def test_a_request_without_output_is_left_alone(scheduling: Any) -> None:
    """It is as vLLM made it."""
    scheduler = scheduling.ResumeScheduler()
    made = request([1, 2, 3])
    scheduler.add_request(made)
    (new,) = scheduler.schedule().scheduled_new_reqs
    assert (new.prompt_token_ids, new.prefill_token_ids) == ([1, 2, 3], None)
    assert (made.num_prompt_tokens, made._output_token_ids) == (3, [])


def test_a_grammar_hears_the_output_as_it_would_have(scheduling: Any) -> None:
    """One id after the other, each behind those before it, beside the steps."""
    scheduler = scheduling.ResumeScheduler()
    structured: Any = Structured()
    compiled, grammar = structured._grammar, SimpleNamespace(accepted=[])
    made = request([1, 2, FIRST_REASONED, 4], 2, structured)
    scheduler.add_request(made)
    assert structured._grammar is not compiled
    manager = scheduler.structured_output_manager
    assert not manager.seen
    compiled.set_result(grammar)
    manager.executor.run()
    assert manager.seen == [
        ([1, 2], [1, 2, FIRST_REASONED], [FIRST_REASONED]),
        ([1, 2], [1, 2, FIRST_REASONED, 4], [4]),
    ]
    assert structured.grammar is grammar
    assert (structured.reasoning_ended, structured.reasoner) == (True, "a parser")


def test_more_of_a_request_is_no_output_to_hear_again(scheduling: Any) -> None:
    """A request that is there gets input by the same call."""
    scheduler = scheduling.ResumeScheduler()
    structured: Any = Structured()
    made = request([1, 2, 3], 2, structured)
    scheduler.add_request(made)
    scheduler.add_request(made)
    assert len(scheduler.structured_output_manager.executor.work) == 1


def test_output_that_a_grammar_refuses_ends_its_request(scheduling: Any) -> None:
    """Its end says why; so does that of one whose grammar does not compile."""
    scheduler = scheduling.ResumeScheduler()
    structured: Any = Structured()
    compiled = structured._grammar
    scheduler.add_request(request([1, REFUSED], 1, structured))
    other: Any = Structured()
    bad = request([1])
    bad.request_id, bad.structured_output_request = "s", other
    scheduler.add_request(bad)
    compiled.set_result(SimpleNamespace(accepted=[]))
    other._grammar.set_exception(ValueError("no such grammar"))
    manager = scheduler.structured_output_manager
    manager.executor.run()
    scheduler.grammar_compile_error_reqs |= {"r", "s", "left meanwhile"}
    outputs = scheduler.update_from_output(None, brought())[0].outputs
    reasons = {output.request_id: output.stop_reason for output in outputs}
    assert reasons == {
        "r": GRAMMAR_REJECTS_PREFIX,
        "s": "grammar failed: no such grammar",
        "left meanwhile": None,
    }


def test_prompt_logprobs_wait_for_the_first_token(scheduling: Any) -> None:
    """VLLM dies of those that come without one; those of a lost request go."""
    scheduler = scheduling.ResumeScheduler()
    scheduler.add_request(request([1, 2, 3], 1))
    scheduler.update_from_output(None, brought(prompt_logprobs_dict={"r": "rows"}))
    scheduler.update_from_output(None, brought())
    scheduler.update_from_output(None, brought(sampled_token_ids=[[7]]))
    scheduler.update_from_output(None, brought(sampled_token_ids=[[8]]))
    assert scheduler.taken == [{}, {}, {"r": "rows"}, {}]
    at_once = brought(prompt_logprobs_dict={"r": "rows"}, sampled_token_ids=[[7]])
    scheduler.update_from_output(None, at_once)
    assert scheduler.taken[-1] == {"r": "rows"}
    scheduler.update_from_output(None, brought(prompt_logprobs_dict={"r": "rows"}))
    del scheduler.requests["r"]
    scheduler.update_from_output(None, brought(req_id_to_index={}))
    assert not scheduler._prompt_rows


# --- model runner V1 -------------------------------------------------------------------


@dataclass
class State:
    """vLLM's CachedRequestState."""

    req_id: str
    prompt_token_ids: list[int]
    generator: Any = None
    output_token_ids: list[int] = field(default_factory=list[int])
    num_tokens: int = 0

    def __post_init__(self) -> None:
        """Count, as vLLM does."""
        self.num_tokens = len(self.prompt_token_ids) + len(self.output_token_ids)


class Generator:
    """torch's, of some device: counts what is drawn."""

    def __init__(self, device: str, per_draw: int = 4) -> None:
        self.device = SimpleNamespace(type=device)
        self.offset = 0
        self.per_draw = per_draw
        self.drawn: list[Any] = []

    def get_offset(self) -> int:
        """Return where it is."""
        return self.offset

    def set_offset(self, offset: int) -> None:
        """Go there."""
        self.offset = offset


class Tensor:
    """torch's, of noise."""

    def __init__(self, size: int, dtype: str, device: Any) -> None:
        self.drawn = (size, dtype, device.type)

    def exponential_(self, *, generator: Generator) -> None:
        """Draw."""
        generator.drawn.append(self.drawn)
        generator.offset += generator.per_draw


def randint(low: int, high: int, size: tuple[int], *, generator: Generator) -> None:
    """Draw."""
    generator.drawn.append((low, high, *size))


class Sampler:
    """vLLM's TopKTopPSampler."""

    def __init__(self, *, is_fused: bool = True, use_fp64_gumbel: bool = False) -> None:
        self.use_fp64_gumbel = use_fp64_gumbel
        self.forward = self.forward_cpu if is_fused else self.forward_native

    def forward_cpu(self) -> None:
        """Sample with a seed a token."""

    def forward_native(self) -> None:
        """Sample with noise for the vocabulary."""


class Runner:
    """vLLM's GPUModelRunner, as far as ours uses it."""

    def __init__(self, module: Any, generator: Any, sampler: Sampler) -> None:
        self._module = module
        self._generator = generator
        self.sampler = SimpleNamespace(topk_topp_sampler=sampler)
        self.input_batch = SimpleNamespace(vocab_size=50)
        self.states: list[State] = []

    def _update_states(self, planned: Any) -> str:
        for new in planned.scheduled_new_reqs:
            self.states.append(
                self._module.CachedRequestState(
                    new.req_id, new.prompt_token_ids, self._generator
                )
            )
        return "its answer"


def new(name: str, prompt: list[int], everything: list[int] | None) -> Any:
    """Return vLLM's NewRequestData."""
    return SimpleNamespace(
        req_id=name, prompt_token_ids=prompt, prefill_token_ids=everything
    )


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the runner."""
    stand_in(
        monkeypatch,
        "torch",
        float32="f32",
        float64="f64",
        randint=randint,
        empty=Tensor,
    )
    stand_in(monkeypatch, "vllm.v1.worker.gpu_model_runner", CachedRequestState=State)
    yield from loaded(RUNNER)


def test_a_state_begins_with_the_output_of_its_request(running: Any) -> None:
    """And its generator behind the draws of that; others begin with nothing."""
    module = sys.modules["vllm.v1.worker.gpu_model_runner"]
    generator = Generator("cpu")
    runner: Any = Runner(module, generator, Sampler())
    running.begin_with_output(runner)
    planned = SimpleNamespace(
        scheduled_new_reqs=[new("r", [1, 2], [1, 2, 3, 4, 5]), new("s", [1], None)]
    )
    assert runner._update_states(planned) == "its answer"
    first, second = runner.states
    assert isinstance(first, State)
    assert (first.output_token_ids, first.num_tokens) == ([3, 4, 5], 5)
    assert (second.output_token_ids, second.num_tokens) == ([], 1)
    assert generator.drawn == [(0, 2**31, 3)]
    again = SimpleNamespace(scheduled_new_reqs=[new("r", [1, 2], None)])
    runner._update_states(again)  # the id anew: of what it had nothing is left
    assert runner.states[-1].output_token_ids == []


def test_an_unseeded_request_has_no_draws_to_take(running: Any) -> None:
    """There is no generator."""
    module = sys.modules["vllm.v1.worker.gpu_model_runner"]
    runner: Any = Runner(module, None, Sampler())
    running.begin_with_output(runner)
    runner._update_states(SimpleNamespace(scheduled_new_reqs=[new("r", [1], [1, 2])]))
    assert runner.states[0].output_token_ids == [2]


@pytest.mark.parametrize(
    ("sampler", "drawn"),
    [
        (Sampler(is_fused=False), (50, "f32", "cpu")),
        (Sampler(use_fp64_gumbel=True), (50, "f64", "cpu")),
    ],
)
def test_a_sampler_that_draws_the_vocabulary_s_noise(
    running: Any, sampler: Sampler, drawn: tuple[int, str, str]
) -> None:
    """On a CPU it is drawn for each token."""
    generator = Generator("cpu")
    running.advance(generator, 3, Runner(None, None, sampler))
    assert generator.drawn == [drawn] * 3


def test_a_gpu_s_generator_goes_as_far_as_its_draws(running: Any) -> None:
    """One draw tells how far that is."""
    generator = Generator("cuda", per_draw=8)
    running.advance(generator, 5, Runner(None, None, Sampler()))
    assert generator.offset == 40
    assert len(generator.drawn) == 1


def test_a_gpu_s_worker_gives_its_runner_the_output(
    running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as there is one; stand-ins for vLLM are all that has run it."""

    class Worker:
        """vLLM's."""

        def init_device(self) -> None:
            """Make the runner."""
            module = sys.modules["vllm.v1.worker.gpu_model_runner"]
            self.model_runner: Any = Runner(module, None, Sampler())

    stand_in(monkeypatch, "vllm.v1.worker.gpu_worker", Worker=Worker)
    assert running
    [gpu_worker] = loaded(GPU_WORKER)
    made = gpu_worker.GpuWorker()
    made.init_device()
    runner = made.model_runner
    runner._update_states(SimpleNamespace(scheduled_new_reqs=[new("r", [1], [1, 2])]))
    assert runner.states[0].output_token_ids == [2]
