"""vLLM's parsers behind our fold: the same message from every batching."""

from __future__ import annotations

import json
import os
import random
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.formats import (
    FORMATS,
    GPT_OSS,
    HERMES,
    LLAMA3,
    QWEN3_CODER,
    TOOLS,
    Case,
    Format,
    encode,
    harmony_ids,
    write_format_model,
    write_gpt_oss_model,
    write_harmony_vocabulary,
)
from tokenwire.frontend.message import MessagePart, merged
from tokenwire.frontend.model import load_model
from tokenwire.frontend.parsers import (
    ParserChoice,
    ParserError,
    Parsers,
    load_parsers,
)
from tokenwire.frontend.parsing import ParsingFold
from tokenwire.frontend.plans import Query
from tokenwire.frontend.stop import StopStrings
from tokenwire.frontend.tokenizer import TextModel
from tokenwire.frontend.tools import Tool

ALL = [(form, case) for form in (*FORMATS, GPT_OSS) for case in form.cases]
IDS = [f"{form.name}-{case.name}" for form, case in ALL]
QUERY = Query(
    tools=msgspec.convert(TOOLS, list[Tool]),
    tool_choice="auto",
    parallel_tool_calls=True,
    include_reasoning=True,
    reasoning_effort=None,
    template_kwargs={},
    num_past_calls=0,
    structured_output=None,
    skip_special_tokens=True,
)


class Bench:
    """A model of one format with its parsers."""

    def __init__(self, folder: Path, form: Format) -> None:
        self.form = form
        self.model: TextModel = load_model(str(folder))
        choice = ParserChoice(form.tool_call_parser, form.reasoning_parser)
        self.parsers: Parsers = load_parsers(choice, folder)
        self.failures = 0

    def ids(self, case: Case) -> list[int]:
        """Return the case's text as ids, EOS last."""
        if self.form is GPT_OSS:
            return harmony_ids(case.text)
        return encode(self.model.folder, case.text + self.form.eos)

    def fold(
        self, query: Query = QUERY, stop: StopStrings | None = None
    ) -> ParsingFold:
        """Return a fresh fold."""

        def failed() -> None:
            self.failures += 1

        plan = self.parsers.plan(query, failed)
        assert plan is not None
        detokenizer = self.model.detokenizer(
            [], skip_special_tokens=plan.skip_special_tokens
        )
        return ParsingFold(plan.parser([], "response", 0), detokenizer, stop)


def run(
    fold: ParsingFold, batches: list[list[int]], *, stopped: bool = True
) -> MessagePart:
    """Return the message of *batches*; each is one delivery of a worker."""
    parts: list[MessagePart] = []
    for number, batch in enumerate(batches):
        last = number == len(batches) - 1
        fold.feed(batch, stopped=stopped and last)
        if last:
            fold.finish()
        parts.append(fold.take())
    return merged(parts)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Bench]]:
    """Makes the bench of a format, once each."""
    benches: dict[str, Bench] = {}
    vocabulary = tmp_path_factory.mktemp("o200k")

    def make(form: Format) -> Bench:
        if form.name not in benches:
            folder = tmp_path_factory.mktemp("model")
            if form is GPT_OSS:
                write_gpt_oss_model(folder)
                os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(
                    write_harmony_vocabulary(vocabulary)
                )
            else:
                write_format_model(folder, form)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the libraries, at import
                benches[form.name] = Bench(folder, form)
        return benches[form.name]

    yield make
    os.environ.pop("TIKTOKEN_ENCODINGS_BASE", None)


def calls(message: MessagePart) -> list[tuple[str | None, Any]]:
    """Return name and arguments of each call."""
    return [(call.name, json.loads(call.arguments)) for call in message.tool_calls]


@pytest.mark.parametrize(("form", "case"), ALL, ids=IDS)
def test_a_message_is_what_its_format_says(
    bench: Callable[..., Bench], form: Format, case: Case
) -> None:
    """Content, reasoning and calls come out, and nothing of their marks."""
    made = bench(form)
    fold = made.fold()

    message = run(fold, [[token_id] for token_id in made.ids(case)])

    assert message.content.strip() == case.content.strip()
    assert message.reasoning.strip() == case.reasoning.strip()
    assert calls(message) == list(case.calls)
    assert [call.index for call in message.tool_calls] == list(range(len(case.calls)))
    assert fold.called_tools == bool(case.calls)
    assert made.failures == 0


@pytest.mark.parametrize(("form", "case"), ALL, ids=IDS)
def test_a_message_is_what_vllm_makes_of_the_whole_output(
    bench: Callable[..., Bench], form: Format, case: Case
) -> None:
    """The library's other way, over all text at once, agrees but for white space."""
    made = bench(form)
    manager = import_module("vllm.parser.parser_manager").ParserManager
    protocol = import_module("vllm.entrypoints.openai.chat_completion.protocol")
    generic: Any = import_module("transformers").PreTrainedTokenizerFast
    tokenizer = generic.from_pretrained(str(made.model.folder))
    kind = manager.get_parser(
        tool_parser_name=form.tool_call_parser,
        reasoning_parser_name=form.reasoning_parser,
        enable_auto_tools=True,
        is_harmony=form is GPT_OSS,
        tokenizer=tokenizer,
    )
    request = protocol.ChatCompletionRequest(messages=[], tools=TOOLS)
    reasoning, content, called = kind(tokenizer, request.tools).parse(
        case.text,
        request,
        enable_auto_tools=True,
        model_output_token_ids=made.ids(case),
    )

    message = run(made.fold(), [made.ids(case)])

    assert (reasoning or "").strip() == message.reasoning.strip()
    assert (content or "").strip() == message.content.strip()
    expected = [(call.name, json.loads(call.arguments)) for call in called or ()]
    assert calls(message) == expected


@pytest.mark.parametrize(("form", "case"), ALL, ids=IDS)
def test_no_cut_of_the_tokens_changes_a_message(
    bench: Callable[..., Bench], form: Format, case: Case
) -> None:
    """Cut in two at every place, at random places, or not at all: one message.

    Every chunk on the way is what its ids add, one by one.
    """
    made = bench(form)
    ids = made.ids(case)
    single = made.fold()
    steps: list[MessagePart] = []
    for number, token_id in enumerate(ids):
        single.feed([token_id], stopped=number == len(ids) - 1)
        steps.append(single.take())
    single.finish()
    steps[-1] = merged([steps[-1], single.take()])

    chance = random.Random(form.name + case.name)  # noqa: S311 - a seed, no secret
    cuts = [[at] for at in range(len(ids))]
    cuts += [
        sorted(chance.sample(range(1, len(ids)), chance.randint(1, len(ids) - 1)))
        for _ in range(20)
    ]
    for places in cuts:
        fold = made.fold()
        borders = [0, *[place for place in places if place], len(ids)]
        for start, end in pairwise(borders):
            fold.feed(ids[start:end], stopped=end == len(ids))
            if end == len(ids):
                fold.finish()
            expected = merged(steps[start:end])
            assert fold.take() == expected, f"cut at {places}"


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (ParserChoice(reasoning_parser="r1"), ("'r1'", "deepseek_r1", "qwen3")),
        (ParserChoice("llama3_json"), ("llama3_json", "<|python_tag|>")),
        (ParserChoice("openai"), ("openai", "gpt-oss", "llama")),
        (
            ParserChoice("hermes", tool_parser_plugin="/no/file.py"),
            ("--tool-parser-plugin", "/no/file.py"),
        ),
        (
            ParserChoice("hermes", reasoning_parser_plugin="/no/file.py"),
            ("--reasoning-parser-plugin", "/no/file.py"),
        ),
    ],
)
def test_parsers_that_cannot_be_are_refused(
    bench: Callable[..., Bench], choice: ParserChoice, words: tuple[str, ...]
) -> None:
    """An unknown name lists the known ones; one for other models says so."""
    folder = bench(HERMES).model.folder
    with pytest.raises(ParserError) as caught:
        load_parsers(choice, folder)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_plugin_adds_a_parser(bench: Callable[..., Bench], tmp_path: Path) -> None:
    """A file of the operator's registers a name, which is then known."""
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from vllm.tool_parsers import ToolParserManager\n"
        "from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser\n"
        "ToolParserManager.register_module('mine', module=Hermes2ProToolParser)\n"
    )
    choice = ParserChoice("mine", tool_parser_plugin=str(plugin))
    assert load_parsers(choice, bench(LLAMA3).model.folder).has_tools


def test_no_request_reads_the_vocabulary(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take a second of every request with a vocabulary of today's size."""
    made = bench(QWEN3_CODER)

    def read(_self: object) -> None:
        pytest.fail("the vocabulary was read")

    transformers: Any = import_module("transformers")
    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "get_vocab", read)
    assert calls(run(made.fold(), [made.ids(made.form.cases[1])]))


def test_arguments_come_as_they_are_made(bench: Callable[..., Bench]) -> None:
    """Id by id a call's arguments arrive in parts, and never again what was told."""
    made = bench(HERMES)
    [case] = [case for case in HERMES.cases if case.name == "two"]
    fold = made.fold()
    parts: list[str] = []
    for token_id in made.ids(case):
        fold.feed([token_id])
        parts += [call.arguments for call in fold.take().tool_calls if call.arguments]

    assert len(parts) > 8
    whole = run(made.fold(), [made.ids(case)])
    assert "".join(parts) == "".join(call.arguments for call in whole.tool_calls)


@pytest.mark.parametrize(("form", "case"), ALL, ids=IDS)
def test_an_output_cut_short_is_no_failure(
    bench: Callable[..., Bench], form: Format, case: Case
) -> None:
    """``max_tokens`` may fall anywhere: one message still, whatever the batches.

    What vLLM's parsers make of half a call is theirs: the finish reason is ``length``.
    """
    made = bench(form)
    ids = made.ids(case)
    whole = run(made.fold(), [ids])
    for size in range(1, len(ids)):
        message = run(made.fold(), [[one] for one in ids[:size]], stopped=False)
        again = run(made.fold(), [ids[:size]], stopped=False)
        assert message == again
        assert len(message.tool_calls) <= len(whole.tool_calls)
    assert made.failures == 0
