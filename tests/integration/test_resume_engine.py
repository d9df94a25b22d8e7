"""Going on behind output on the real engine: the ids, and what else an end says.

The reference is the same engine, undisturbed. Each case is cut where the ids with the
prompt end before, at and behind a block's end, behind the first token and before the
last; the parts of ``worker/vllm/resume*.py`` that a case stands on are named beside it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from support.awake import within
from support.switches import ARGUMENTS as SWITCHED, Switches
from support.vllm_engine import MODEL, EngineProcess, Stream, prompt
from tokenwire.protocol.messages import (
    GRAMMAR_REJECTS_PREFIX,
    ErrorKind,
    FinishReason,
    Role,
    Sampling,
    StructuredOutput,
)
from tokenwire.protocol.tokens import unpack_floats
from tokenwire.worker.engine import EngineFinished

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

BLOCK_SIZE = 128  # vLLM's on a CPU
NUM_PROMPT = BLOCK_SIZE - 28
NUM_OUTPUT = 40
CUTS = (1, 27, 28, 29, NUM_OUTPUT - 1)
NUM_BLOCKS = 17  # one is vLLM's own, the others hold the longest request
EOS, THINK_END = 2, 10
PROMPT = list(range(1_000, 1_000 + NUM_PROMPT))

JSON = StructuredOutput(
    "json",
    '{"type": "object", "properties": {"a": {"type": "array", "items": '
    '{"type": "integer"}, "minItems": 40}}, "required": ["a"]}',
)
REGEX = StructuredOutput("regex", "([a-z]{3,7} ){30}")
RANDOM = {"temperature": 0.8, "seed": 1}

CASES: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0, "ignore_eos": True},
    # the generator's draws
    "seeded": {**RANDOM, "ignore_eos": True},
    "truncated": {**RANDOM, "top_p": 0.9, "top_k": 50, "ignore_eos": True},
    # the runner's output
    "penalized": {
        "temperature": 0.0,
        "ignore_eos": True,
        "frequency_penalty": 1.5,
        "presence_penalty": 1.0,
    },
    # the grammar
    "json": {**RANDOM, "structured_output": JSON},
    # all at once
    "regex": {
        **RANDOM,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
        "structured_output": REGEX,
    },
}


def sampling_of(**fields: object) -> Sampling:
    """Return sampling parameters."""
    base = {"max_tokens": NUM_OUTPUT, "logprobs": 2}
    return msgspec.convert({**base, **fields}, Sampling)


@dataclass
class Answer:
    """What came for a request."""

    stream: Stream
    end: EngineFinished

    @property
    def ids(self) -> list[int]:
        """The ids."""
        return self.stream.token_ids

    @property
    def logprobs(self) -> list[float]:
        """Three for each id: its own, and the two best."""
        rows = [batch.logprobs for batch in self.stream.batches]
        return [x for row in rows if row for x in unpack_floats(row.logprobs)]


async def answer(stream: Stream) -> Answer:
    """Return what came, once it has ended."""
    return Answer(stream, await stream.end())


def thinking_model(folder: Path) -> Path:
    """Make the demo model with names for the ends of its thoughts; return its folder.

    It has tokens that it does not use by itself, and a reasoning parser of vLLM's knows
    tokens by their names.
    """
    for file in MODEL.iterdir():
        if file.suffix == ".json":
            text = file.read_text().replace("<issue_closed>", "</think>")
            text = text.replace("<issue_start>", "<think>")
            (folder / file.name).write_text(text)
        else:
            (folder / file.name).symlink_to(file)
    return folder


@pytest.fixture(scope="module")
def switches(tmp_path_factory: pytest.TempPathFactory) -> Switches:
    """What the engine has off."""
    return Switches(tmp_path_factory.mktemp("switches"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(
    tmp_path_factory: pytest.TempPathFactory, switches: Switches
) -> AsyncIterator[EngineProcess]:
    """An engine with few blocks, short chunks and a reasoning parser."""
    engine = await EngineProcess.start(
        Role.AGGREGATED,
        *("--max-num-batched-tokens", "64", "--max-num-seqs", "8"),
        *("--num-gpu-blocks-override", str(NUM_BLOCKS)),
        *("--reasoning-parser", "deepseek_r1"),
        *SWITCHED,
        environment=switches.environment,
        model=thinking_model(tmp_path_factory.mktemp("model")),
    )
    yield engine
    assert await engine.stop() == []


def goes_on(
    engine: EngineProcess,
    whole: Answer,
    cut: int,
    sampling: Sampling,
    salt: str | None = None,
    *,
    token_ids: list[int] | None = None,
    reasons: bool = False,
) -> Stream:
    """Submit the rest of an answer that is cut."""
    return engine.submit(
        (PROMPT if token_ids is None else token_ids) + whole.ids[:cut],
        sampling,
        cache_salt=salt,
        num_prior=cut,
        reasoning_ended=None if reasons else True,
    )


def begins(
    engine: EngineProcess, sampling: Sampling, *, reasons: bool = False
) -> Stream:
    """Submit a request that is not cut."""
    return engine.submit(PROMPT, sampling, reasoning_ended=None if reasons else True)


async def test_the_engine_has_shown_that_it_goes_on(engine: EngineProcess) -> None:
    """At its start; a CPU promises no equal numbers."""
    assert engine.info.exactness == "same_rng"
    assert "trying to go on behind output" in engine.phases


@pytest.mark.parametrize("name", CASES)
async def test_it_goes_on_as_if_it_had_never_been_cut(
    engine: EngineProcess, name: str
) -> None:
    """Ids and logprobs, whether the prefix cache has any of it or not."""
    sampling = sampling_of(**CASES[name])
    whole = await answer(begins(engine, sampling))
    assert len(whole.ids) == NUM_OUTPUT
    salts = (None, "anew", None, "anew", None)
    streams = [
        goes_on(engine, whole, cut, sampling, salt)
        for cut, salt in zip(CUTS, salts, strict=True)
    ]
    for cut, stream in zip(CUTS, streams, strict=True):
        rest = await answer(stream)
        assert (cut, rest.ids) == (cut, whole.ids[cut:])
        assert rest.logprobs == pytest.approx(whole.logprobs[3 * cut :], abs=1e-3)
        assert rest.end.reason is whole.end.reason
        assert rest.end.prompt_token_ids == PROMPT


async def test_min_tokens_are_those_of_the_whole_output(engine: EngineProcess) -> None:
    """An end that they hold back comes where it would have."""
    eager = sampling_of(temperature=0.0, min_tokens=20, logit_bias={EOS: 40.0})
    whole = await answer(begins(engine, eager))
    assert whole.ids.index(EOS) == 20
    for cut in (1, 19, 20):
        rest = await answer(goes_on(engine, whole, cut, eager))
        assert rest.ids == whole.ids[cut:]
        assert rest.end.reason is FinishReason.STOP


async def test_a_bad_word_may_begin_before_the_cut(engine: EngineProcess) -> None:
    """Its last token stays banned behind it."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    free = sampling_of(temperature=0.0, ignore_eos=True)
    ids = (await answer(begins(engine, free))).ids
    for at in range(1, NUM_OUTPUT):
        word = tokenizer.decode(ids[at - 1 : at + 1], skip_special_tokens=False)
        encoded = tokenizer.encode(word.lstrip(" "), add_special_tokens=False)
        spaced = tokenizer.encode(" " + word.lstrip(" "), add_special_tokens=False)
        if ids[at - 1 : at + 1] in (encoded.ids, spaced.ids) and not word.isspace():
            break
    else:
        pytest.fail("no two tokens of the output are a word")
    banned = sampling_of(temperature=0.0, ignore_eos=True, bad_words=[word.strip()])
    whole = await answer(begins(engine, banned))
    assert whole.ids[:at] == ids[:at]
    assert whole.ids[at] != ids[at]
    rest = await answer(goes_on(engine, whole, at, banned))
    assert rest.ids == whole.ids[at:]


async def test_the_cache_counts_with_the_output(engine: EngineProcess) -> None:
    """A block is found that the prompt alone does not fill."""
    sampling = sampling_of(temperature=0.0, ignore_eos=True)
    salt = "counted"
    whole = await answer(engine.submit(PROMPT, sampling, cache_salt=salt))
    rest = await answer(goes_on(engine, whole, 35, sampling, salt))
    assert rest.end.num_cached_tokens == BLOCK_SIZE
    assert rest.stream.batches[0].num_cached_tokens == BLOCK_SIZE
    assert rest.end.num_prompt_tokens == NUM_PROMPT < BLOCK_SIZE


async def test_a_long_output_is_computed_in_chunks(engine: EngineProcess) -> None:
    """With a seed, and with the prompt's logprobs, which are there a chunk too early."""
    tokens = prompt(20)
    sampling = sampling_of(
        **RANDOM, max_tokens=110, logprobs=None, prompt_logprobs=1, ignore_eos=True
    )
    whole = await answer(engine.submit(tokens, sampling))
    cut = 105  # the first chunk ends behind the prompt
    rest = await answer(goes_on(engine, whole, cut, sampling, "x", token_ids=tokens))
    assert rest.ids == whole.ids[cut:]
    rows = (whole.end.prompt_logprobs, rest.end.prompt_logprobs)
    assert rows[0] is not None
    assert rows[1] is not None
    assert rows[0].token_ids == rows[1].token_ids
    assert len(rows[1].ranks) == len(rows[0].ranks)


async def test_what_goes_on_is_preempted_and_goes_on(engine: EngineProcess) -> None:
    """Five of 410 ids have no room together: 20 blocks, of which there are fewer."""
    tokens = [prompt(330) for _ in range(5)]
    sampling = sampling_of(
        **RANDOM, max_tokens=80, logprobs=None, frequency_penalty=0.3, ignore_eos=True
    )
    streams = [engine.submit(one, sampling) for one in tokens[:2]]
    wholes = [await answer(stream) for stream in streams]
    cut = 40
    streams = [
        # The others' output is another request's: it takes the same room.
        engine.submit(one + wholes[n % 2].ids[:cut], sampling, num_prior=cut)
        for n, one in enumerate(tokens)
    ]
    rests = [await answer(stream) for stream in streams]
    assert 5 * -(-410 // BLOCK_SIZE) > NUM_BLOCKS
    for whole, rest in zip(wholes, rests, strict=False):
        assert rest.ids == whole.ids[cut:]
    assert all(len(rest.ids) == 40 for rest in rests)


async def test_output_that_is_none_of_a_grammar_is_refused(
    engine: EngineProcess,
) -> None:
    """By a sentence and a reason of its own; the engine serves on."""
    sampling = sampling_of(**CASES["json"])
    other = Answer(
        Stream("other", token_ids=[5, 6, 7]), EngineFinished("other", FinishReason.STOP)
    )
    end = await goes_on(engine, other, 3, sampling).end()
    assert (end.reason, end.error_kind) == (FinishReason.ERROR, ErrorKind.INVALID)
    assert end.stop_reason == GRAMMAR_REJECTS_PREFIX
    assert "structured output" in end.error
    again = await answer(begins(engine, sampling))
    assert len(again.ids) == NUM_OUTPUT


async def thought(engine: EngineProcess) -> tuple[Sampling, Answer, int]:
    """Return parameters, an answer, and where in it the reasoning ends."""
    samplings = [
        sampling_of(
            temperature=1.0,
            seed=seed,
            logit_bias={THINK_END: 19.0},
            structured_output=StructuredOutput("regex", "[0-9 ]{90}"),
        )
        for seed in range(8)
    ]
    streams = [begins(engine, one, reasons=True) for one in samplings]
    for sampling, stream in zip(samplings, streams, strict=True):
        whole = await answer(stream)
        if THINK_END in whole.ids[2 : NUM_OUTPUT - 3]:
            return sampling, whole, whole.ids.index(THINK_END)
    pytest.fail("no seed leads to an end of the reasoning")


async def test_a_grammar_waits_for_reasoning_to_end(engine: EngineProcess) -> None:
    """Where it ends, before the cut or behind it, it binds as it would have."""
    sampling, whole, at = await thought(engine)
    for cut in (1, at, at + 1, at + 2, NUM_OUTPUT - 1):
        rest = await answer(goes_on(engine, whole, cut, sampling, reasons=True))
        assert (cut, rest.ids) == (cut, whole.ids[cut:])


async def test_an_abort_at_each_stage_leaves_nothing(engine: EngineProcess) -> None:
    """Before its grammar is there, while it is computed, while it decodes."""
    sampling = sampling_of(**CASES["json"])
    whole = await answer(begins(engine, sampling))
    sampling = msgspec.structs.replace(sampling, max_tokens=400)
    for num_tokens in (0, 1):
        stream = goes_on(engine, whole, NUM_OUTPUT, sampling, f"abort {num_tokens}")
        await stream.have(num_tokens)
        engine.abort(stream)
        assert (await stream.end()).reason is FinishReason.ABORT
    await engine.until_load(
        lambda load: not (load.num_running or load.num_waiting or load.kv_usage),
        within_s=15.0,
    )


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("relabel", "penalized"),
        ("told", "penalized"),
        ("draws", "seeded"),
        ("grammar", "json"),
        ("grammar", "regex"),
    ],
)
async def test_without_a_part_it_goes_on_otherwise(
    engine: EngineProcess, switches: Switches, part: str, name: str
) -> None:
    """So a case above that stands on the part fails; with it again, the same comes."""
    cut = CUTS[2]
    sampling = sampling_of(**CASES[name])
    whole = await answer(begins(engine, sampling))
    with switches.off(part):
        without = await answer(goes_on(engine, whole, cut, sampling))
    again = await answer(goes_on(engine, whole, cut, sampling))

    expected = whole.ids[cut:]
    assert without.ids[: len(expected)] != expected
    assert again.ids == expected


async def test_reasoning_that_ends_in_the_output_is_looked_for_there(
    engine: EngineProcess, switches: Switches
) -> None:
    """Taken for the prompt's, the grammar hears the ids of the reasoning."""
    sampling, whole, at = await thought(engine)
    with switches.off("prompt"):
        end = await goes_on(engine, whole, at + 2, sampling, reasons=True).end()

    assert end.stop_reason == GRAMMAR_REJECTS_PREFIX


async def test_a_refusal_is_the_grammar_s(
    engine: EngineProcess, switches: Switches
) -> None:
    """What it says of the output is heard; otherwise nonsense would go on."""
    other = Answer(
        Stream("other", token_ids=[5, 6, 7]), EngineFinished("other", FinishReason.STOP)
    )
    with switches.off("refusal"):
        end = await goes_on(engine, other, 3, sampling_of(**CASES["json"])).end()

    assert end.reason is not FinishReason.ERROR


async def test_a_killed_engine_core_ends_every_request(engine: EngineProcess) -> None:
    """As the engine's fault, then ``died`` comes; the last of these tests."""
    long = sampling_of(max_tokens=400, logprobs=None, temperature=0.0, ignore_eos=True)
    streams = [engine.submit(prompt(10), long) for _ in range(3)]
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
    late = await engine.submit(prompt(3), long).end()
    assert (late.reason, late.error_kind) == (FinishReason.ERROR, ErrorKind.ENGINE)
    assert await engine.stop() == []
