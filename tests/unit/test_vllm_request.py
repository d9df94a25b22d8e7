"""From vLLM's outputs to ours: reasons, hand-overs, logprobs, sampling parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tokenwire.protocol.messages import (
    ErrorKind,
    FinishReason,
    Leg,
    Sampling,
    StructuredOutput,
)
from tokenwire.protocol.tokens import unpack_floats, unpack_ids
from tokenwire.worker.engine import EngineRequest
from tokenwire.worker.vllm.binding import Vllm
from tokenwire.worker.vllm.logprobs import pack
from tokenwire.worker.vllm.request import OpenRequest, Signal
from tokenwire.worker.vllm.sampling import KEEP_KV, sampling_params
from tokenwire.worker.vllm.stats import LoadRecorder

HANDLES = {"remote_host": "h", "remote_port": 1, "do_remote_prefill": True}


@dataclass
class Flat:
    """vLLM's flat logprobs."""

    start_indices: list[int]
    end_indices: list[int]
    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


def flat(*rows: list[tuple[int, float, int]]) -> Flat:
    """Return rows of (id, logprob, rank)."""
    ends: list[int] = []
    for row in rows:
        ends.append(len(row) + (ends[-1] if ends else 0))
    items = [item for row in rows for item in row]
    return Flat(
        [0, *ends[:-1]],
        ends,
        [item[0] for item in items],
        [item[1] for item in items],
        [item[2] for item in items],
    )


def request(leg: Leg = Leg.FULL, **fields: Any) -> EngineRequest:
    """Return an engine request."""
    fields.setdefault("max_tokens", 9)
    sampling = Sampling(**fields)
    handover = dict(HANDLES) if leg is Leg.DECODE else None
    return EngineRequest("r", [1, 2], sampling, leg, handover=handover)


@dataclass
class Output:
    """vLLM's ``RequestOutput``."""

    token_ids: list[int] = field(default_factory=list[int])
    finish_reason: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    stop_reason: int | None = None
    logprobs: Any = None
    prompt_logprobs: Any = None
    num_cached_tokens: int | None = 1
    metrics: Any = None

    @property
    def finished(self) -> bool:
        """Whether this is the last one."""
        return self.finish_reason is not None

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt."""
        return [1, 2]

    @property
    def outputs(self) -> list[Any]:
        """One completion."""
        return [self]


def test_tokens_then_the_end() -> None:
    """Ids come as they are; the end has reason, counts, prompt and times."""
    state = OpenRequest(request())
    times = SimpleNamespace(queued_ts=1.0, scheduled_ts=1.5, first_token_ts=2.0)

    first, none = state.take(Output([7]))
    tokens, end = state.take(Output([8, 2], "stop", stop_reason=2, metrics=times))

    assert first is not None
    assert tokens is not None
    assert end is not None
    assert (first.token_ids, none, tokens.token_ids) == ([7], None, [8, 2])
    assert (end.reason, end.stop_reason) == (FinishReason.STOP, 2)
    assert (end.num_prompt_tokens, end.num_cached_tokens) == (2, 1)
    assert (end.queue_s, end.prefill_s) == (0.5, 0.5)


def test_a_prefill_leg_hands_over_whole_and_shows_only_the_path() -> None:
    """The handles go to the decode leg untouched, and never to a client."""
    params = {**HANDLES, "hidden_states_path": "/x"}
    _, end = OpenRequest(request(Leg.PREFILL)).take(
        Output([7], "length", kv_transfer_params=params)
    )

    assert end is not None
    assert end.handover == params
    assert end.kv_transfer_params == {"hidden_states_path": "/x"}


def test_a_full_leg_shows_what_the_connector_says() -> None:
    """Nothing is handed over, so all of it is the client's, verbatim."""
    params = {"manifest": [[1, "a"], None]}
    _, end = OpenRequest(request()).take(
        Output([7], "length", kv_transfer_params=params)
    )

    assert end is not None
    assert (end.kv_transfer_params, end.handover) == (params, None)


def test_a_prefill_leg_without_handles_has_failed() -> None:
    """An answer without transfer parameters is a failure (aibrix#2289)."""
    _, end = OpenRequest(request(Leg.PREFILL)).take(Output([7], "length"))

    assert end is not None
    assert (end.reason, end.error_kind) == (FinishReason.ERROR, ErrorKind.HANDOVER)


def test_an_aborted_prefill_leg_still_names_what_it_holds() -> None:
    """It finished in the step of the abort: the frontend has to release it."""
    state = OpenRequest(request(Leg.PREFILL))
    state.aborted = True
    _, end = state.take(Output([7], "length", kv_transfer_params=dict(HANDLES)))

    assert end is not None
    assert (end.reason, end.handover) == (FinishReason.ABORT, HANDLES)


@pytest.mark.parametrize(
    ("leg", "has_token", "kind"),
    [
        (Leg.DECODE, False, ErrorKind.HANDOVER),
        (Leg.DECODE, True, ErrorKind.ENGINE),
        (Leg.FULL, False, ErrorKind.ENGINE),
    ],
)
def test_an_error_before_the_first_decoded_token_is_the_hand_over(
    leg: Leg, has_token: bool, kind: ErrorKind
) -> None:
    """VLLM says "error" when KV does not arrive; later it is the engine's own."""
    state = OpenRequest(request(leg))
    if has_token:
        state.take(Output([7]))
    _, end = state.take(Output([], "error"))

    assert end is not None
    assert end.error_kind is kind


def test_an_abort_nobody_asked_for_is_the_engines_failure() -> None:
    """An engine on its way out aborts what it has; that must not look wanted."""
    _, end = OpenRequest(request()).take(Output([], "abort"))

    assert end is not None
    assert (end.reason, end.error_kind) == (FinishReason.ERROR, ErrorKind.ENGINE)


def test_signal_calls_back_for_each_output() -> None:
    """Setting the event notifies, also while it is set."""
    calls: list[int] = []
    signal = Signal(lambda: calls.append(1))
    signal.set()
    signal.set()

    assert signal.is_set()
    assert len(calls) == 2


def test_logprob_rows_have_one_width() -> None:
    """The sampled token first; a row that vLLM merged is filled up."""
    packed = pack(
        flat([(5, -1.0, 3), (6, -0.1, 1), (7, -0.2, 2)], [(6, -0.1, 1), (7, -0.2, 2)]),
        2,
    )

    assert packed is not None
    assert packed.width == 3
    assert unpack_ids(packed.token_ids) == [5, 6, 7, 6, 6, 7]
    assert unpack_floats(packed.logprobs)[0] == -1.0


def test_a_row_that_stays_short_is_filled_with_nothing_likely() -> None:
    """The filling can never be taken for a candidate."""
    packed = pack(flat([(5, -1.0, 1)]), 2)

    assert packed is not None
    assert unpack_ids(packed.token_ids)[0] == 5
    assert unpack_floats(packed.logprobs)[2] == -math.inf


def test_empty_rows_are_left_out() -> None:
    """The first prompt token has no logprob; nothing at all is None."""
    packed = pack(flat([], [(5, -1.0, 1)]), 0)

    assert packed is not None
    assert unpack_ids(packed.token_ids) == [5]
    assert pack(flat([]), 0) is None


def keep(**given: object) -> dict[str, object]:
    """Return the arguments."""
    return given


def fake_vllm() -> Vllm:
    """Return a stand-in whose parameter classes keep what they get."""
    return cast(
        "Vllm",
        SimpleNamespace(
            SamplingParams=keep,
            StructuredOutputsParams=keep,
            RequestOutputKind=SimpleNamespace(DELTA="delta"),
        ),
    )


def params(leg: Leg = Leg.FULL, **fields: Any) -> dict[str, Any]:
    """Return what vLLM's SamplingParams would get."""
    return cast("dict[str, Any]", sampling_params(fake_vllm(), request(leg, **fields)))


def test_zero_reaches_the_engine() -> None:
    """temperature=0, seed=0 and logprobs=0 are values."""
    made = params(temperature=0.0, seed=0, logprobs=0)

    assert (made["temperature"], made["seed"], made["logprobs"]) == (0.0, 0, 0)
    assert made["extra_args"] is None
    assert not made["detokenize"]


@pytest.mark.pitfall(14)
def test_a_prefill_leg_makes_one_token_and_keeps_its_kv() -> None:
    """max_tokens and min_tokens are lowered on that leg only."""
    made = params(Leg.PREFILL, min_tokens=5)

    assert (made["max_tokens"], made["min_tokens"]) == (1, 1)
    assert made["extra_args"] == {"kv_transfer_params": KEEP_KV}


def test_a_decode_leg_passes_the_hand_over_on_whole() -> None:
    """No field of it is picked or dropped."""
    made = params(Leg.DECODE, min_tokens=5, prompt_logprobs=1)

    assert (made["max_tokens"], made["min_tokens"]) == (9, 5)
    assert made["extra_args"] == {"kv_transfer_params": HANDLES}
    assert made["prompt_logprobs"] is None


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (StructuredOutput("json", "{}"), {"json": "{}"}),
        (StructuredOutput("regex", "a+"), {"regex": "a+"}),
        (StructuredOutput("json_object"), {"json_object": True}),
        (StructuredOutput("choice", '["a"]'), {"choice": ["a"]}),
        (StructuredOutput("structural_tag", "{}"), {"structural_tag": "{}"}),
    ],
)
def test_grammars_in_vllms_words(
    output: StructuredOutput, expected: dict[str, object]
) -> None:
    """Each kind becomes vLLM's parameter of that name."""
    made = params(structured_output=output)["structured_outputs"]

    assert made == {**expected, "whitespace_pattern": None}


def test_an_unknown_grammar_is_the_callers_fault() -> None:
    """A kind from a newer frontend is refused, not ignored."""
    with pytest.raises(ValueError, match="unknown kind"):
        params(structured_output=StructuredOutput("yaml"))


def test_load_is_summed_over_cores_and_idle_is_zero() -> None:
    """Counts add up, the usage is the fullest core's, and the last step counts."""

    def stats(running: int, waiting: int, usage: float) -> SimpleNamespace:
        return SimpleNamespace(
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            num_skipped_waiting_reqs=1,
            kv_cache_usage=usage,
        )

    recorder = LoadRecorder()
    recorder.factory(None, 0).record(stats(1, 2, 0.5), None)
    recorder.factory(None, 1).record(stats(3, 0, 0.25), None, None, 1)
    recorder.record(None, None)

    load = recorder.load()
    assert (load.num_running, load.num_waiting, load.kv_usage) == (4, 4, 0.5)
    assert load.num_steps == 2


@pytest.mark.parametrize("leg", [Leg.FULL, Leg.PREFILL, Leg.DECODE])
def test_a_grammar_that_does_not_compile_is_the_client_s_fault(leg: Leg) -> None:
    """No other worker is asked, and none is thought ill of, but where output is there."""
    completion = SimpleNamespace(
        token_ids=[], finish_reason="error", stop_reason="grammar failed: no such class"
    )
    output = SimpleNamespace(
        outputs=[completion],
        prompt_logprobs=None,
        prompt_token_ids=[1, 2],
        finished=True,
        kv_transfer_params=None,
        num_cached_tokens=0,
        metrics=None,
    )
    for num_prior, kind in ((0, ErrorKind.INVALID), (1, ErrorKind.ENGINE)):
        request = EngineRequest("r", [1, 2], Sampling(9), leg, num_prior=num_prior)
        _, end = OpenRequest(request).take(output)
        assert end is not None
        assert (end.reason, end.error_kind) == (FinishReason.ERROR, kind)
        assert end.stop_reason is None
        assert end.error == (
            "the engine cannot hold an output to this grammar: no such class"
        )
