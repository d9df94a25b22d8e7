"""The ids of the simulated engine: the rule, and vLLM's stop conditions."""

from __future__ import annotations

from dataclasses import replace
from zlib import crc32

import pytest
from hypothesis import given, settings, strategies as st

from support.worker_fakes import engine_request
from tokenwire.protocol.messages import FinishReason, Leg, Sampling
from tokenwire.protocol.tokens import pack_ids, unpack_floats, unpack_ids
from tokenwire.worker.engine import EngineRequest
from tokenwire.worker.sim.model import SimModel
from tokenwire.worker.sim.sampler import Rule, Sampler, prompt_logprobs
from tokenwire.worker.sim.script import DRAWN, Answer

EOS = 2
MODEL = SimModel(
    vocab_size=1000,
    max_model_len=200,
    eos_token_id=EOS,
    extra_stop_ids=frozenset({3}),
    printable=tuple(range(500, 900)),
)
RULE = Rule(MODEL)


def sampler(
    request: EngineRequest, answer: Answer | None = None, rule: Rule = RULE
) -> Sampler:
    """Return a sampler for *request*."""
    crc = crc32(pack_ids(request.prompt_token_ids))
    return Sampler(rule, request, crc, MODEL.max_model_len, answer)


def run(made: Sampler, count: int = 1) -> list[int]:
    """Return all ids up to the end, *count* at a time."""
    ids: list[int] = []
    while made.reason is None:
        ids += made.take(count)
    return ids


def sampled(
    count: int = 1, prompt: list[int] | None = None, **params: object
) -> list[int]:
    """Return the ids of a request with these parameters."""
    sampling = Sampling(**{"max_tokens": 20, **params})  # type: ignore[arg-type]
    return run(sampler(engine_request(prompt=prompt, sampling=sampling)), count)


def scripted(*ids: int, then_eos: bool = True, **params: object) -> Sampler:
    """Return a sampler that follows a script."""
    sampling = Sampling(**{"max_tokens": 20, **params})  # type: ignore[arg-type]
    return sampler(engine_request(sampling=sampling), Answer(ids, 0, then_eos))


@given(st.lists(st.integers(0, 999), min_size=1, max_size=40), st.integers(1, 30))
@settings(deadline=None)
def test_a_prompt_that_ends_with_earlier_output_goes_on_as_before(
    prompt: list[int], cut: int
) -> None:
    """Resuming after any number of ids gives the same whole."""
    whole = sampled(prompt=prompt, max_tokens=31)
    resumed = sampled(prompt=prompt + whole[:cut], max_tokens=31 - cut)
    assert whole[:cut] + resumed == whole


@pytest.mark.parametrize("output_draws", [False, True])
@pytest.mark.parametrize("cut", [1, 7, 19])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1.0, "seed": 5, "ignore_eos": True},
        {"temperature": 0.0, "presence_penalty": 0.5},
        {"logprobs": 2, "min_tokens": 20, "stop_token_ids": list(MODEL.printable[::7])},
    ],
    ids=["plain", "seeded", "penalized", "careful"],
)
def test_output_that_there_was_changes_nothing(
    params: dict[str, object], cut: int, *, output_draws: bool
) -> None:
    """What follows it are the ids of one that was never cut, and no other."""
    rule = Rule(MODEL, output_draws=output_draws)
    sampling = Sampling(**{"max_tokens": 20, **params})  # type: ignore[arg-type]
    prompt = [5, 6, 7]
    whole = run(sampler(engine_request(prompt=prompt, sampling=sampling), rule=rule))
    resumed = sampler(
        engine_request(prompt=prompt + whole[:cut], sampling=sampling, num_prior=cut),
        rule=rule,
    )
    assert run(resumed, 2) == whole[cut:]
    assert resumed.reason is FinishReason.LENGTH


@pytest.mark.parametrize("params", [{"seed": 5}, {"frequency_penalty": 0.5}])
def test_draws_that_count_the_output_drift_without_its_length(
    params: dict[str, object],
) -> None:
    """As on a real engine, which takes earlier output for a prompt."""
    rule = Rule(MODEL, output_draws=True)
    sampling = Sampling(**{"max_tokens": 20, **params})  # type: ignore[arg-type]
    whole = run(sampler(engine_request(prompt=[5], sampling=sampling), rule=rule))
    plain = engine_request(prompt=[5, *whole[:7]], sampling=sampling)
    assert run(sampler(plain, rule=rule))[:13] != whole[7:]


def test_other_weights_leave_the_output_before_as_it_is() -> None:
    """The ids that were given stay those that the next ones follow from."""
    request = engine_request(prompt=[5, 6, 7, 8], max_tokens=9, num_prior=2)
    made = sampler(request)
    made.take(1)
    made.reweigh(3)
    again = sampler(request)
    again.reweigh(3)
    assert made.output(0, 2) == [7, 8]
    assert run(made)[:-1] != run(sampler(request))[1:-1]
    assert again.take(1) != [7]


@pytest.mark.parametrize("count", [2, 3, 7, 50])
def test_the_ids_do_not_depend_on_how_many_are_taken_at_once(count: int) -> None:
    """Several tokens a step are the same tokens, and no more than asked for."""
    assert sampled(count) == sampled(1)
    assert len(sampled(count)) == 20


def test_the_careful_path_gives_the_same_ids_as_the_fast_one() -> None:
    """Asking for logprobs, or for a stop id that never comes, changes nothing."""
    assert sampled(logprobs=3) == sampled() == sampled(stop_token_ids=[7])


def test_ids_are_printable_and_depend_on_the_prompt() -> None:
    """Another prompt gets other ids from the printable ones."""
    ids = sampled(prompt=[1, 2, 3])
    assert set(ids) <= set(MODEL.printable)
    assert ids != sampled(prompt=[1, 2, 4])


def test_a_seed_counts_if_the_temperature_does_and_zero_is_a_seed() -> None:
    """``seed=0`` is not "no seed"; a greedy request has no use for one."""
    plain = sampled(temperature=1.0)
    assert sampled(temperature=1.0, seed=0) != plain
    assert sampled(temperature=1.0, seed=0) == sampled(temperature=0.5, seed=0)
    assert sampled(temperature=1.0, seed=1) != sampled(temperature=1.0, seed=0)
    assert sampled(temperature=0.0, seed=1) == sampled(temperature=0.0) == plain


def test_the_length_ends_it() -> None:
    """``max_tokens`` ids, and the reason ``length``."""
    made = sampler(engine_request(max_tokens=5))
    assert len(run(made)) == 5
    assert made.reason is FinishReason.LENGTH


def test_the_context_ends_it_too() -> None:
    """A sequence is never longer than ``max_model_len``."""
    made = sampler(engine_request(prompt=[5] * 195, max_tokens=100))
    assert len(run(made)) == 5


def test_a_prefill_leg_has_one_token_whatever_is_asked() -> None:
    """``max_tokens`` and ``min_tokens`` are lowered on that leg."""
    sampling = Sampling(max_tokens=50, min_tokens=10)
    made = sampler(engine_request(leg=Leg.PREFILL, sampling=sampling))
    assert len(run(made)) == 1
    assert made.reason is FinishReason.LENGTH


def test_eos_is_among_the_ids_and_has_no_stop_reason() -> None:
    """The script's end is an EOS, and it is counted."""
    made = scripted(10, 11)
    assert run(made) == [10, 11, EOS]
    assert (made.reason, made.stop_reason) == (FinishReason.STOP, None)


def test_a_stop_id_is_among_the_ids_and_is_the_stop_reason() -> None:
    """A request's stop id ends it, and so does a further EOS of the model."""
    made = scripted(10, 11, 12, stop_token_ids=[11])
    assert run(made) == [10, 11]
    assert (made.reason, made.stop_reason) == (FinishReason.STOP, 11)
    assert run(scripted(10, 3, 12)) == [10, 3]


def test_ignore_eos_goes_on_to_the_length_but_a_stop_id_still_counts() -> None:
    """An EOS is then an id like others."""
    made = scripted(10, EOS, 3, 11, ignore_eos=True, max_tokens=6)
    ids = run(made)
    assert ids[:4] == [10, EOS, 3, 11]
    assert len(ids) == 6
    assert run(scripted(10, 11, ignore_eos=True, stop_token_ids=[11])) == [10, 11]


def test_no_stop_comes_before_min_tokens() -> None:
    """Until then another id stands in the place of a stop."""
    ids = run(scripted(EOS, 11, EOS, EOS, min_tokens=3, stop_token_ids=[11]))
    assert len(ids) == 4
    assert not {EOS, 11} & set(ids[:3])
    assert ids[3] == EOS


def test_a_script_can_go_on_by_the_rule() -> None:
    """``then: generate`` fills up to the length."""
    ids = run(scripted(10, 11, then_eos=False, max_tokens=6))
    assert ids[:2] == [10, 11]
    assert set(ids[2:]) <= set(MODEL.printable)
    assert len(ids) == 6


def test_a_script_may_leave_ids_to_the_draws() -> None:
    """Seeds decide on them, and how much output there is where draws count it."""
    drawing = Rule(MODEL, output_draws=True)
    holes = Answer([7, DRAWN, 8, DRAWN, DRAWN], 0, True, drawn=range(500, 537))

    def drawn(seed: int, prior: list[int], *, told: bool = True) -> list[int]:
        request = engine_request(
            prompt=[1, 2, *prior],
            sampling=Sampling(max_tokens=9, seed=seed),
            num_prior=len(prior) if told else 0,
        )
        answer = holes if told else replace(holes, start=len(prior))
        return run(sampler(request, answer, drawing))

    outputs = [drawn(seed, []) for seed in range(12)]
    for seed, ids in enumerate(outputs):
        assert (ids[0], ids[2], ids[5:]) == (7, 8, [EOS])
        assert set(ids[1:5]) <= {8, *holes.drawn}
        assert drawn(seed, ids[:2]) == ids[2:]
    assert len({tuple(ids) for ids in outputs}) > 6
    untold = [drawn(n, ids[:2], told=False) for n, ids in enumerate(outputs)]
    assert untold != [ids[2:] for ids in outputs]


@pytest.mark.parametrize("hold_at", [0, 1, 3, 4])
def test_a_script_may_hold_an_output(hold_at: int) -> None:
    """At its token, before an end that would come with it; elsewhere it goes on."""
    held = Answer([10, 11, 12], 0, True, hold_at=hold_at)
    made = sampler(engine_request(sampling=Sampling(max_tokens=20)), held)
    ids = [token_id for _ in range(9) for token_id in made.take(2)]
    assert (ids, made.reason) == ([10, 11, 12, EOS][:hold_at], None)
    assert run(scripted(10, 11, 12)) == [10, 11, 12, EOS]


def test_the_mean_decides_where_eos_falls() -> None:
    """With a mean of 1 it is the first token, with none it never comes."""
    rule = Rule(MODEL, mean_output_tokens=1)
    assert run(sampler(engine_request(), rule=rule)) == [EOS]


def test_allowed_ids_and_the_ends_of_logit_bias_are_kept() -> None:
    """Only allowed ids, none that is banned, and those that must be."""
    assert set(sampled(allowed_token_ids=[600, 601])) == {600, 601}
    assert set(sampled(allowed_token_ids=[600, 601], logit_bias={601: -100})) == {600}
    assert set(sampled(logit_bias={77: 100})) == {77}
    assert sampled(logit_bias={77: 5.0}) == sampled()


@pytest.mark.parametrize("width", [0, 1, 5])
def test_logprobs_have_a_row_per_id_with_the_sampled_one_first(width: int) -> None:
    """A row is the sampled id, then the best ones in order, itself among them."""
    made = sampler(engine_request(sampling=Sampling(max_tokens=3, logprobs=width)))
    ids = made.take(3)
    rows = made.logprobs
    assert rows is not None
    assert rows.width == width + 1
    columns = unpack_ids(rows.token_ids)
    values, ranks = unpack_floats(rows.logprobs), unpack_ids(rows.ranks)
    for at, token_id in enumerate(ids):
        row = slice(at * (width + 1), (at + 1) * (width + 1))
        assert columns[row][0] == token_id
        assert ranks[row] == [1, *range(1, width + 1)]
        assert values[row][1:] == sorted(values[row][1:], reverse=True)
        assert len(set(columns[row][1:])) == width
        assert all(value <= 0 for value in values[row])


def test_prompt_logprobs_have_a_row_for_every_id_but_the_first() -> None:
    """The first has nothing before it."""
    rows = prompt_logprobs([5, 6, 7], 2, RULE)
    assert unpack_ids(rows.token_ids)[::3] == [6, 7]
