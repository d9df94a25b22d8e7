"""Continuous batching in the simulated engine, step by step."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings, strategies as st

from support.worker_fakes import RecordingSink, engine_request
from tokenwire.protocol.messages import (
    ErrorKind,
    FinishReason,
    JsonObject,
    Leg,
    Sampling,
)
from tokenwire.worker.engine import EngineFinished, EngineLoad
from tokenwire.worker.sim.model import read_model
from tokenwire.worker.sim.options import SimOptions
from tokenwire.worker.sim.sampler import Rule
from tokenwire.worker.sim.scheduler import Scheduler
from tokenwire.worker.sim.script import Script
from tokenwire.worker.sim.weights import Weights

RULE = Rule(read_model("no-folder"))
SMALL = SimOptions(num_blocks=16, block_size=4, max_num_seqs=4)


class Source:
    """A ``KVSource`` that records; the test says when a read is over."""

    def __init__(self) -> None:
        self.reads: list[str] = []
        self.freed: list[JsonObject] = []

    def read(self, request_id: str, handover: JsonObject, prompt_crc: int) -> None:
        """Record the read."""
        self.reads.append(request_id)

    def free(self, handover: JsonObject) -> None:
        """Record the empty read."""
        self.freed.append(handover)

    def offer(self, request_id: str, num_tokens: int, blocks: list[int]) -> JsonObject:
        """Return a hand-over that says what it was made of."""
        return {"from": request_id, "num_tokens": num_tokens, "blocks": blocks}


class Bench:
    """A scheduler, what it brought, and a clock of one second a step."""

    def __init__(self, options: SimOptions = SMALL, max_model_len: int = 64) -> None:
        self.source = Source()
        self.sink = RecordingSink()
        self.scheduler = Scheduler(
            options, RULE, Script(), max_model_len, self.source, Weights("m")
        )
        self.now = 0.0

    def step(self) -> int | None:
        """Run a step; return its prompt tokens, or None if there was nothing to do."""
        num_prompt_tokens = self.scheduler.plan(self.now)
        self.now += 1.0
        if num_prompt_tokens is not None:
            output = self.scheduler.commit(self.now)
            self.sink.outputs(output.tokens, output.finished)
        return num_prompt_tokens

    def run(self) -> None:
        """Run steps until there is nothing to do."""
        for _ in range(1000):
            if self.step() is None:
                return
        raise AssertionError("it never ends")

    def end(self, end: EngineFinished | None) -> None:
        """Record an end that came outside of a step."""
        assert end is not None
        self.sink.outputs([], [end])


def ids_alone(prompt: list[int], max_tokens: int) -> list[int]:
    """Return what a request gets with the engine to itself."""
    bench = Bench(replace(SMALL, num_blocks=1000), max_model_len=4000)
    bench.scheduler.add(engine_request("r", prompt, max_tokens=max_tokens), 0.0)
    bench.run()
    return bench.sink.ids["r"]


def test_the_step_that_ends_the_prefill_brings_the_first_token() -> None:
    """Then one token a step, and the end with the last."""
    bench = Bench()
    bench.scheduler.add(engine_request("r", max_tokens=3), 0.0)
    assert bench.step() == 20
    assert len(bench.sink.ids["r"]) == 1
    assert bench.step() == 0
    assert not bench.sink.ends
    assert bench.step() == 0
    end = bench.sink.ends["r"]
    assert end.reason is FinishReason.LENGTH
    assert (end.num_prompt_tokens, end.prompt_token_ids) == (20, list(range(100, 120)))
    assert bench.step() is None
    assert bench.scheduler.load() == EngineLoad()


def test_a_long_prompt_is_computed_in_parts_while_others_decode() -> None:
    """``max_num_batched_tokens`` bounds the prompt tokens of a step, not the decodes."""
    bench = Bench(replace(SMALL, max_num_batched_tokens=8))
    bench.scheduler.add(engine_request("short", [1, 2], max_tokens=9), 0.0)
    assert bench.step() == 2
    bench.scheduler.add(engine_request("long", max_tokens=1), bench.now)
    assert [bench.step() for _ in range(3)] == [8, 8, 4]
    assert len(bench.sink.ids["short"]) == 4
    assert bench.sink.ends["long"].prefill_s == 3.0


def test_who_waits_and_who_runs_is_told() -> None:
    """Above ``max_num_seqs`` requests wait, first come first served."""
    bench = Bench(replace(SMALL, max_num_seqs=2))
    for name in "abc":
        bench.scheduler.add(engine_request(name, [1, 2], max_tokens=2), bench.now)
    bench.step()
    assert bench.scheduler.load() == EngineLoad(2, 1, 2 / 16)
    bench.run()
    assert bench.sink.end_order == ["a", "b", "c"]
    assert bench.sink.ends["c"].queue_s == 2.0
    assert bench.sink.ends["a"].queue_s == 0.0


def test_priorities_count_if_the_policy_says_so() -> None:
    """Lower first, as in vLLM; otherwise the order of arrival."""
    for by_priority, order in ((True, ["b", "a"]), (False, ["a", "b"])):
        bench = Bench(replace(SMALL, max_num_seqs=1, by_priority=by_priority))
        bench.scheduler.add(engine_request("a", priority=1, max_tokens=1), 0.0)
        bench.scheduler.add(engine_request("b", priority=0, max_tokens=1), 0.0)
        bench.run()
        assert bench.sink.end_order == order


def test_an_equal_prefix_is_not_computed_again() -> None:
    """Full blocks are reused, the last id never; another salt shares nothing."""
    bench = Bench()
    for name, salt in (("first", None), ("again", None), ("salted", "s")):
        bench.scheduler.add(
            engine_request(name, cache_salt=salt, max_tokens=1), bench.now
        )
        bench.run()
    ends = bench.sink.ends
    cached = [ends[name].num_cached_tokens for name in ("first", "again", "salted")]
    assert cached == [0, 16, 0]


def test_the_output_is_part_of_the_prefix_of_the_next_turn() -> None:
    """Blocks that decoding has filled are found too."""
    bench = Bench()
    bench.scheduler.add(engine_request("one", max_tokens=9), 0.0)
    bench.run()
    prompt = [*range(100, 120), *bench.sink.ids["one"]]
    bench.scheduler.add(engine_request("two", prompt, max_tokens=1), bench.now)
    bench.run()
    assert bench.sink.ends["two"].num_cached_tokens == 28


def test_when_blocks_run_out_the_youngest_starts_over_and_nobody_notices() -> None:
    """Preempted requests get the same ids, later."""
    bench = Bench(replace(SMALL, num_blocks=8), max_model_len=32)
    prompts = {"a": [1] * 8, "b": [2] * 8, "c": [3] * 8}
    for name, prompt in prompts.items():
        bench.scheduler.add(engine_request(name, prompt, max_tokens=16), 0.0)
    bench.run()
    assert bench.scheduler.num_preempted
    for name, prompt in prompts.items():
        assert bench.sink.ids[name] == ids_alone(prompt, 16)
    assert bench.scheduler.load() == EngineLoad()


def test_what_goes_on_can_start_over_and_nobody_notices() -> None:
    """Output that was there before is computed again, and no id is told twice."""
    bench = Bench(replace(SMALL, num_blocks=8), max_model_len=32)
    prompts = {"a": [1] * 8, "b": [2] * 8, "c": [3] * 8}
    for name, prompt in prompts.items():
        so_far = ids_alone(prompt, 16)[:6]
        request = engine_request(name, prompt + so_far, max_tokens=16, num_prior=6)
        bench.scheduler.add(request, 0.0)
    bench.run()
    assert bench.scheduler.num_preempted
    for name, prompt in prompts.items():
        assert bench.sink.ids[name] == ids_alone(prompt, 16)[6:]
        assert bench.sink.ends[name].num_prompt_tokens == 8
    assert bench.scheduler.load() == EngineLoad()


def test_output_that_was_there_is_part_of_the_prefix_of_the_next_turn() -> None:
    """Its blocks are found by who has the same ids, as whatever part of them."""
    bench = Bench()
    prompt = list(range(100, 110))
    so_far = ids_alone(prompt, 16)[:10]
    for name, num_prior in (("one", 10), ("two", 10), ("plain", 0)):
        request = engine_request(
            name, prompt + so_far, max_tokens=11, num_prior=num_prior
        )
        bench.scheduler.add(request, bench.now)
        bench.run()
    cached = [
        bench.sink.ends[name].num_cached_tokens for name in ("one", "two", "plain")
    ]
    assert cached == [0, 16, 16]


def test_an_aborted_request_ends_once_and_frees_its_blocks_wherever_it_is() -> None:
    """Waiting, prefilling, decoding; the second abort finds nothing."""
    options = replace(SMALL, max_num_batched_tokens=8, max_num_seqs=2)
    bench = Bench(options)
    bench.scheduler.add(engine_request("decoding", [1, 2], max_tokens=9), 0.0)
    bench.step()
    bench.scheduler.add(engine_request("prefilling"), bench.now)
    bench.scheduler.add(engine_request("waiting"), bench.now)
    bench.step()
    for name in ("waiting", "prefilling", "decoding"):
        bench.end(bench.scheduler.abort(name, bench.now))
        assert bench.sink.ends[name].reason is FinishReason.ABORT
        assert bench.scheduler.abort(name, bench.now) is None
    assert bench.step() is None
    assert bench.scheduler.load() == EngineLoad()


def test_what_is_aborted_during_a_step_brings_nothing_more() -> None:
    """The step was planned with it, and ends without it."""
    bench = Bench()
    bench.scheduler.add(engine_request("r"), 0.0)
    assert bench.scheduler.plan(0.0) == 20
    bench.end(bench.scheduler.abort("r", 0.0))
    output = bench.scheduler.commit(1.0)
    assert (output.tokens, output.finished) == ([], [])


def test_many_aborts_behind_a_blocked_head_leave_no_trace() -> None:
    """The queue is rebuilt, so its memory is bounded by what waits."""
    bench = Bench(replace(SMALL, max_num_seqs=1))
    bench.scheduler.add(engine_request("running", max_tokens=40), 0.0)
    bench.step()
    for n in range(500):
        bench.scheduler.add(engine_request(f"r{n}"), 0.0)
        bench.end(bench.scheduler.abort(f"r{n}", 0.0))
    assert bench.scheduler.num_queue_entries < 100
    bench.scheduler.add(engine_request("last", max_tokens=1), 0.0)
    bench.run()
    assert bench.sink.end_order[-2:] == ["running", "last"]


def test_requests_that_cannot_run_end_with_their_reason() -> None:
    """Each is the caller's fault."""
    bench = Bench(max_model_len=20)
    bad = [
        engine_request("empty", []),
        engine_request("long", [1] * 20),
        engine_request("none", [1], max_tokens=0),
        engine_request("alone", [1], leg=Leg.DECODE),
        engine_request("over", [1, 2], max_tokens=1, num_prior=1),
    ]
    ends = [bench.scheduler.add(request, 0.0) for request in bad]
    assert [end and end.error_kind for end in ends] == [ErrorKind.INVALID] * 5
    assert ends[1] is not None
    assert "maximum context length is 20 tokens" in ends[1].error
    assert bench.step() is None


def test_a_prefill_leg_holds_its_blocks_until_they_are_read() -> None:
    """Its end carries the hand-over; the read frees the blocks."""
    bench = Bench()
    bench.scheduler.add(engine_request("p", leg=Leg.PREFILL, max_tokens=9), 0.0)
    bench.run()
    end = bench.sink.ends["p"]
    assert end.handover == {"from": "p", "num_tokens": 20, "blocks": [0, 1, 2, 3, 4]}
    assert bench.scheduler.load().kv_usage == 5 / 16
    bench.scheduler.kv_taken("p")
    bench.scheduler.kv_taken("p")
    assert bench.scheduler.load() == EngineLoad()


def test_kv_that_nobody_reads_is_freed_when_its_lease_is_over() -> None:
    """And counted."""
    bench = Bench(replace(SMALL, kv_lease_s=30.0))
    bench.scheduler.add(engine_request("p", leg=Leg.PREFILL), 0.0)
    bench.run()
    bench.scheduler.expire(30.9)
    assert bench.scheduler.held
    bench.scheduler.expire(31.0)
    assert bench.scheduler.load() == EngineLoad(num_kv_expired=1)


def decode_leg(name: str = "d", max_tokens: int = 4) -> tuple[Bench, JsonObject]:
    """Return a bench with a waiting decode leg, and its hand-over."""
    bench = Bench()
    handover: JsonObject = {"from": "p"}
    request = engine_request(
        name, leg=Leg.DECODE, handover=handover, max_tokens=max_tokens
    )
    bench.scheduler.add(request, 0.0)
    return bench, handover


def test_a_decode_leg_waits_for_its_kv_and_then_computes_one_id() -> None:
    """It counts as waiting, has its blocks, and gets the ids of a whole run."""
    bench, _ = decode_leg()
    assert bench.step() is None
    assert bench.source.reads == ["d"]
    assert bench.scheduler.load() == EngineLoad(0, 1, 5 / 16)
    assert bench.scheduler.kv_arrived("d", None, bench.now) is None
    assert bench.step() == 1
    bench.run()
    assert bench.sink.ids["d"] == ids_alone(list(range(100, 120)), 4)
    assert bench.sink.ends["d"].num_cached_tokens == 20  # as vLLM counts


def test_a_failed_read_ends_the_decode_leg() -> None:
    """With an error that says to prefill again."""
    bench, _ = decode_leg()
    bench.step()
    bench.end(bench.scheduler.kv_arrived("d", "gone", bench.now))
    end = bench.sink.ends["d"]
    assert (end.error_kind, end.error) == (ErrorKind.HANDOVER, "gone")
    assert bench.scheduler.load() == EngineLoad()


def test_aborting_during_a_read_keeps_the_blocks_until_it_is_over() -> None:
    """KV must not be written into blocks that are somebody else's by then."""
    bench, _ = decode_leg()
    bench.step()
    bench.end(bench.scheduler.abort("d", bench.now))
    assert bench.scheduler.load().kv_usage == 5 / 16
    assert bench.scheduler.kv_arrived("d", None, bench.now) is None
    assert bench.scheduler.load() == EngineLoad()


def test_aborting_before_the_read_frees_the_other_side() -> None:
    """The empty read, as vLLM makes it."""
    bench, handover = decode_leg()
    bench.end(bench.scheduler.abort("d", 0.0))
    assert bench.source.freed == [handover]
    assert not bench.source.reads


def test_all_ends_at_once_when_the_engine_dies() -> None:
    """Each request once, with the reason."""
    bench, _ = decode_leg()
    bench.step()
    bench.scheduler.add(engine_request("r"), 0.0)
    ends = bench.scheduler.end_all(FinishReason.ERROR, 1.0, "dead")
    bench.sink.outputs([], ends)
    assert set(bench.sink.ends) == {"d", "r"}
    assert {end.error_kind for end in ends} == {ErrorKind.ENGINE}


@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(0, 60)),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 5),
)
@settings(max_examples=25, deadline=None)
def test_whatever_comes_every_request_ends_once_with_its_own_ids(
    jobs: list[tuple[int, int, int]], per_step: int
) -> None:
    """Prompts, lengths and arrivals as drawn, in a pool that is too small for all."""
    options = replace(SMALL, tokens_per_step=per_step, max_num_batched_tokens=16)
    bench = Bench(options)
    arrivals = sorted((arrival, n) for n, (_, _, arrival) in enumerate(jobs))
    prompts = {n: [n + 1] * size for n, (size, _, _) in enumerate(jobs)}
    while arrivals or bench.scheduler.has_work:
        while arrivals and arrivals[0][0] <= bench.now:
            n = arrivals.pop(0)[1]
            sampling = Sampling(max_tokens=jobs[n][1])
            bench.scheduler.add(
                engine_request(str(n), prompts[n], sampling=sampling), bench.now
            )
        bench.step()
    for n, (_, max_tokens, _) in enumerate(jobs):
        assert bench.sink.ends[str(n)].reason is FinishReason.LENGTH
        assert bench.sink.ids[str(n)] == ids_alone(prompts[n], max_tokens)
    assert bench.scheduler.load() == EngineLoad()
