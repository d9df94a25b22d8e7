"""The simulated engine's clock and faults, with time that the test turns."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.worker_fakes import FakeTimers, engine_request, start_sim
from tokenwire.protocol.messages import (
    GRAMMAR_REJECTS_PREFIX,
    ErrorKind,
    FinishReason,
    Sampling,
    StructuredOutput,
)
from tokenwire.worker.engine import EngineStartError


async def test_a_step_takes_its_time_and_prefill_adds_to_it() -> None:
    """10 ms a step, and 20 tokens at 1000 tokens/s make 20 ms more."""
    timers = FakeTimers()
    engine, sink, _ = await start_sim(
        "--step-ms", "10", "--prefill-tokens-per-s", "1000", timers=timers
    )
    engine.submit(engine_request(max_tokens=3))
    timers.advance(0.0299)
    assert not sink.ids
    timers.advance(0.0002)
    assert len(sink.ids["r"]) == 1
    timers.advance(0.02)
    end = sink.ends["r"]
    assert end.prefill_s == pytest.approx(0.030)
    await engine.stop()


async def test_steps_do_not_get_longer_because_a_timer_is_late() -> None:
    """The next one is due from when the last was due."""
    timers = FakeTimers()
    engine, sink, _ = await start_sim(
        "--step-ms", "10", "--prefill-tokens-per-s", "0", timers=timers
    )
    engine.submit(engine_request(max_tokens=100))
    late = timers.call_at

    def call_late(when: float, callback: object, /) -> object:
        return late(when + 0.004, callback)  # type: ignore[arg-type]

    timers.call_at = call_late  # type: ignore[method-assign]
    timers.run(lambda: len(sink.ids.get("r", [])) == 50)
    assert timers.now == pytest.approx(1000.0 + 0.5 + 0.004)
    await engine.stop()


async def test_without_a_step_time_no_time_passes() -> None:
    """As fast as it goes, one step per iteration of the loop."""
    timers = FakeTimers()
    engine, sink, _ = await start_sim(
        "--step-ms", "0", "--prefill-tokens-per-s", "0", timers=timers
    )
    engine.submit(engine_request(max_tokens=50))
    timers.run(lambda: "r" in sink.ends)
    assert timers.now == 1000.0
    assert sink.num_outputs == 50
    await engine.stop()


async def test_an_idle_engine_takes_no_step() -> None:
    """Nothing is due after the last request has ended."""
    timers = FakeTimers()
    engine, sink, _ = await start_sim(timers=timers)
    engine.submit(engine_request())
    timers.run(lambda: "r" in sink.ends)
    num_outputs = sink.num_outputs
    timers.advance(60.0)
    assert sink.num_outputs == num_outputs
    await engine.stop()


async def test_an_abort_is_answered_in_the_next_iteration() -> None:
    """Not inside the call, and not only at the end of the step."""
    timers = FakeTimers()
    engine, sink, _ = await start_sim("--step-ms", "1000", timers=timers)
    engine.submit(engine_request())
    timers.settle()
    engine.abort("r")
    engine.abort("r")
    engine.abort("unknown")
    assert not sink.ends
    timers.settle()
    assert sink.ends["r"].reason is FinishReason.ABORT
    await engine.stop()


async def test_what_it_cannot_do_is_refused() -> None:
    """Ids outside the vocabulary and grammars are the caller's mistake."""
    timers = FakeTimers()
    engine, sink, info = await start_sim(timers=timers)
    engine.submit(engine_request("id", [info.vocab_size]))
    grammar = StructuredOutput(kind="regex", spec="a+")
    sampling = Sampling(max_tokens=1, structured_output=grammar)
    engine.submit(engine_request("grammar", sampling=sampling))
    engine.submit(engine_request("empty", []))
    timers.settle()
    assert {end.error_kind for end in sink.ends.values()} == {ErrorKind.INVALID}
    assert "out of vocabulary" in sink.ends["id"].error
    assert len(sink.ends) == 3
    await engine.stop()


async def test_a_scripted_prompt_may_have_a_grammar(tmp_path: Path) -> None:
    """The script says what any grammar would have led to."""
    timers = FakeTimers()
    script = tmp_path / "script.json"
    script.write_text('[{"contains": [7], "output_token_ids": [5, 6]}]')
    engine, sink, _ = await start_sim("--script", str(script), timers=timers)
    grammar = StructuredOutput(kind="regex", spec="a+")
    sampling = Sampling(max_tokens=2, structured_output=grammar)
    engine.submit(engine_request("scripted", [7], sampling=sampling))
    engine.submit(engine_request("other", [8], sampling=sampling))
    timers.advance(1.0)
    assert sink.ends["scripted"].reason is FinishReason.LENGTH
    assert sink.ends["other"].error_kind is ErrorKind.INVALID
    await engine.stop()


async def test_a_script_goes_on_behind_what_there_was_of_it(tmp_path: Path) -> None:
    """Where that is not how it began, the grammar that it stands for refuses it."""
    timers = FakeTimers()
    script = tmp_path / "script.json"
    script.write_text('[{"num_prompt_tokens": 1, "output_token_ids": [5, 6, 7]}]')
    engine, sink, _ = await start_sim("--script", str(script), timers=timers)
    grammar = StructuredOutput(kind="regex", spec="a+")
    sampling = Sampling(max_tokens=3, structured_output=grammar)
    for name, prior in (("rest", [5, 6]), ("other", [6])):
        engine.submit(
            engine_request(name, [8, *prior], sampling=sampling, num_prior=len(prior))
        )
    timers.advance(1.0)
    assert sink.ids["rest"] == [7]
    assert sink.ends["rest"].reason is FinishReason.LENGTH
    refused = sink.ends["other"]
    assert (refused.error_kind, refused.stop_reason) == (
        ErrorKind.INVALID,
        GRAMMAR_REJECTS_PREFIX,
    )
    await engine.stop()


async def test_an_output_on_hold_has_steps_and_no_tokens(tmp_path: Path) -> None:
    """So that its worker is not taken for stalled; an abort ends it as any other."""
    timers = FakeTimers()
    script = tmp_path / "script.json"
    script.write_text('[{"output_token_ids": [5, 6, 7], "hold_at": 2}]')
    engine, sink, _ = await start_sim("--script", str(script), timers=timers)
    engine.submit(engine_request("held", [8], max_tokens=9))
    timers.advance(1.0)
    num_outputs, num_steps = sink.num_outputs, engine.load().num_steps or 0
    timers.advance(1.0)
    assert sink.ids["held"] == [5, 6]
    assert (engine.load().num_steps or 0) > num_steps
    assert sink.num_outputs == num_outputs
    engine.abort("held")
    timers.settle()
    assert sink.ends["held"].reason is FinishReason.ABORT
    await engine.stop()


async def test_a_dying_engine_ends_everything_first() -> None:
    """Then it says so, and refuses what still comes."""
    timers = FakeTimers()
    engine, sink, _ = await start_sim(
        "--fault", "die@3", "--max-num-seqs", "1", timers=timers
    )
    engine.submit(engine_request("running", max_tokens=50))
    engine.submit(engine_request("waiting"))
    timers.run(lambda: sink.dead is not None)
    assert len(sink.ids["running"]) == 2
    assert {end.error_kind for end in sink.ends.values()} == {ErrorKind.ENGINE}
    assert "injected fault at step 3" in (sink.dead or "")
    engine.submit(engine_request("late"))
    timers.settle()
    assert sink.ends["late"].error_kind is ErrorKind.ENGINE
    await engine.stop()


async def test_a_frozen_engine_is_silent_but_still_aborts() -> None:
    """It neither steps nor dies."""
    timers = FakeTimers()
    engine, sink, _ = await start_sim("--fault", "freeze@2", timers=timers)
    engine.submit(engine_request(max_tokens=50))
    timers.advance(600.0)
    assert len(sink.ids["r"]) == 1
    engine.submit(engine_request("more"))
    timers.advance(600.0)
    assert "more" not in sink.ids
    engine.abort("r")
    timers.settle()
    assert sink.ends["r"].reason is FinishReason.ABORT
    await engine.stop()


async def test_a_slow_step_is_that_much_slower() -> None:
    """The others are as ever."""
    timers = FakeTimers()
    options = ("--step-ms", "10", "--prefill-tokens-per-s", "0")
    engine, sink, _ = await start_sim(*options, "--fault", "slow=500@2", timers=timers)
    engine.submit(engine_request(max_tokens=3))
    timers.run(lambda: "r" in sink.ends)
    assert timers.now == pytest.approx(1000.0 + 0.53)
    await engine.stop()


async def test_a_dropped_end_never_comes() -> None:
    """The one counted, and no other: for tests of those who wait for it."""
    timers = FakeTimers()
    engine, sink, _ = await start_sim("--fault", "drop-finish@1", timers=timers)
    engine.submit(engine_request("one"))
    engine.submit(engine_request("two"))
    timers.advance(60.0)
    assert len(sink.ids["one"]) == 4
    assert set(sink.ends) == {"two"}
    await engine.stop()


async def test_stopping_aborts_what_runs() -> None:
    """With an end for each, before it returns; also before a start."""
    timers = FakeTimers()
    engine, sink, _ = await start_sim(timers=timers)
    engine.submit(engine_request())
    timers.settle()
    await engine.stop()
    assert sink.ends["r"].reason is FinishReason.ABORT
    timers.advance(60.0)
    assert not sink.ids
    await engine.stop()


async def test_a_context_that_fits_no_pool_stops_the_start() -> None:
    """As vLLM refuses it, with what to change."""
    with pytest.raises(EngineStartError, match="raise --num-blocks"):
        await start_sim("--num-blocks", "2", "--block-size", "16")
