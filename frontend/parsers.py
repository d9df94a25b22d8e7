"""vLLM's own parsers of tool calls and reasoning: the only door to that library.

It is imported when a parser is configured, and never else: 9 s and 500 MB, with torch.
Its objects stay ``Any``: following its types costs a type checker two minutes.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from tokenwire.protocol.messages import JsonObject, StructuredOutput

from .errors import bad_request
from .plans import Plan, Query

__all__ = ["ParserChoice", "ParserError", "Parsers", "load_parsers"]

_log = logging.getLogger(__name__)

_HARMONY_NAMES = {"openai", "openai_gptoss"}
"""What vLLM 0.32 calls the parsers of gpt-oss. They are stubs: one parser of the whole
format does the work, from the ids alone."""


class ParserError(Exception):
    """These parsers cannot be used; one sentence for the operator."""


@dataclass(slots=True, frozen=True)
class ParserChoice:
    """What the operator configured."""

    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    tool_parser_plugin: str | None = None  # a Python file that registers parsers
    reasoning_parser_plugin: str | None = None
    tool_strict_level: str = "auto"

    def __bool__(self) -> bool:
        return bool(self.tool_call_parser or self.reasoning_parser)


class Parsers:
    """The configured parsers, ready to plan requests."""

    def __init__(
        self,
        parser_class: Any,
        tokenizer: Any,
        request_class: Any,
        constraint_class: Any,
        model_config: Any,
        choice: ParserChoice,
    ) -> None:
        self.choice = choice
        self.has_tools = parser_class.tool_parser_cls is not None
        self.has_reasoning = parser_class.reasoning_parser_cls is not None
        self._class = parser_class
        self._tokenizer = tokenizer
        self._request_class = request_class
        self._constraint_class = constraint_class
        self._model_config = model_config

    def plan(self, query: Query, failed: Callable[[], None]) -> Plan | None:
        """Return how to parse a request; None if its text is its content.

        Args:
            query: What parsers want to know of it.
            failed: Told of each choice whose parser fails.

        Raises:
            ApiError: 400, the parser's library refuses the tools.
        """
        try:
            return self._plan(query, failed)
        except Exception as error:
            # A parser is one model's code; here it meets what a client wrote into
            # schemas and template arguments. Logged, as it may be a fault of ours.
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            msg = f"the parser refuses the request: {' '.join(lines[:3])}"
            _log.warning("%.400s (%s)", msg, type(error).__name__)
            _log.debug("a parser made no plan", exc_info=True)
            raise bad_request(msg, "tools" if query.tools else None) from error

    def _plan(self, query: Query, failed: Callable[[], None]) -> Plan | None:
        given = _constraint(self._constraint_class, query.structured_output)
        request = self._request_class(
            # Only how many calls there were is asked of the history.
            messages=[
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {
                            "id": str(number),
                            "type": "function",
                            "function": {"name": "f", "arguments": "{}"},
                        }
                        for number in range(query.num_past_calls)
                    ],
                }
            ],
            tools=msgspec.to_builtins(query.tools) if query.tools else None,
            tool_choice=msgspec.to_builtins(query.tool_choice),
            parallel_tool_calls=query.parallel_tool_calls,
            include_reasoning=query.include_reasoning,
            reasoning_effort=query.reasoning_effort,
            chat_template_kwargs=query.template_kwargs,
            structured_outputs=given,
            skip_special_tokens=query.skip_special_tokens,
        )
        tools = request.tools

        def make() -> Any:
            return self._class(
                self._tokenizer,
                tools,
                chat_template_kwargs=query.template_kwargs,
                model_config=self._model_config,
            )

        parser = make()
        asks = query.tool_choice != "none"
        if asks or self.has_reasoning or self._class.always_adjust_request:
            request = parser.adjust_request(request)
        elif not parser.tool_parser.engine_based_streaming:
            return None  # a parser of calls alone, and none are asked for
        constraint = request.structured_outputs
        structured_output = query.structured_output
        if constraint is not given:
            structured_output = _structured_output(constraint)
        return Plan(
            request,
            query,
            make,
            structured_output,
            has_reasoning=self.has_reasoning,
            failed=failed,
        )


def load_parsers(choice: ParserChoice, folder: Path) -> Parsers:
    """Import the library and return the configured parsers.

    Args:
        choice: The parsers' names.
        folder: The model's, with its tokenizer.

    Raises:
        ParserError: The library is missing, there is no such parser, or it does not
            fit the model's tokenizer.
    """
    # Its log lines go the way of ours, instead of to handlers of its own.
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    try:
        manager = import_module("vllm.parser.parser_manager").ParserManager
        tool_manager = import_module("vllm.tool_parsers").ToolParserManager
        reasoning_manager = import_module("vllm.reasoning").ReasoningParserManager
        protocol = import_module("vllm.entrypoints.openai.chat_completion.protocol")
        sampling = import_module("vllm.sampling_params")
        tokenizers = import_module("vllm.tokenizers.hf")
        # The generic class takes tokenizer.json as it is, as our own reading does.
        generic = import_module("transformers").PreTrainedTokenizerFast
    except ImportError as error:
        msg = f"parsers need vLLM beside the frontend (pip install tokenwire[cpu]): {error}"
        raise ParserError(msg) from error
    if choice.tool_parser_plugin:
        _plug("--tool-parser-plugin", choice.tool_parser_plugin)
    if choice.reasoning_parser_plugin:
        _plug("--reasoning-parser-plugin", choice.reasoning_parser_plugin)
    _check_name("--tool-call-parser", choice.tool_call_parser, tool_manager)
    _check_name("--reasoning-parser", choice.reasoning_parser, reasoning_manager)
    config = cast("JsonObject", json.loads((folder / "config.json").read_text()))
    is_harmony = config.get("model_type") == "gpt_oss"
    for name in (choice.tool_call_parser, choice.reasoning_parser):
        if name in _HARMONY_NAMES and not is_harmony:
            msg = (
                f"the parser {name} is for gpt-oss models, and this one's model_type "
                f"is {config.get('model_type')!r}"
            )
            raise ParserError(msg)
    # Parsers ask for the vocabulary whenever one is made: 1 s for 200,000 entries.
    tokenizer = generic.from_pretrained(str(folder))
    tokenizer = tokenizers.get_cached_tokenizer(tokenizer)
    try:
        parser_class = manager.get_parser(
            tool_parser_name=choice.tool_call_parser,
            reasoning_parser_name=choice.reasoning_parser,
            enable_auto_tools=True,
            model_name=str(folder),
            is_harmony=is_harmony,
            tool_strict_level=choice.tool_strict_level,
            tokenizer=tokenizer,
        )
        parser_class(tokenizer)
    except Exception as error:
        # Made for other models, a parser fails in its own way.
        raise ParserError(" ".join(str(error).split())) from error
    if is_harmony:
        _check_harmony()
    hf_config = SimpleNamespace(**config)
    text_config = SimpleNamespace(**config.get("text_config", config))
    architectures = config.get("architectures") or [None]
    return Parsers(
        parser_class,
        tokenizer,
        protocol.ChatCompletionRequest,
        sampling.StructuredOutputsParams,
        # What vLLM 0.32's parsers read of a ModelConfig.
        SimpleNamespace(
            model=str(folder),
            hf_config=hf_config,
            hf_text_config=text_config,
            hf_overrides={},
            architecture=architectures[0],
        ),
        choice,
    )


def _plug(option: str, path: str) -> None:
    plug = import_module("vllm.utils.import_utils").import_plugin
    if plug(path) is None:  # it has logged why
        msg = f"{option}: {path} cannot be loaded"
        raise ParserError(msg)


def _check_name(option: str, name: str | None, manager: Any) -> None:
    known = cast("list[str]", manager.list_registered())
    if name is not None and name not in known:
        msg = f"argument {option}: no parser {name!r}; known are {', '.join(known)}"
        raise ParserError(msg)


def _check_harmony() -> None:
    """Load gpt-oss's vocabulary now: it comes from the network, or from a folder."""
    utils = import_module("vllm.entrypoints.openai.parser.harmony_utils")
    try:
        utils.get_encoding()
    except Exception as error:
        # openai_harmony raises a class that it does not export.
        msg = (
            "gpt-oss's vocabulary cannot be loaded; set TIKTOKEN_ENCODINGS_BASE to a "
            f"folder with o200k_base.tiktoken: {error}"
        )
        raise ParserError(msg) from error


_KINDS = ("json", "regex", "choice", "grammar", "structural_tag")


def _constraint(constraint_class: Any, output: StructuredOutput | None) -> Any:
    """Return *output* as vLLM's ``StructuredOutputsParams``."""
    if output is None:
        return None
    if output.kind == "json_object":
        return constraint_class(
            json_object=True, whitespace_pattern=output.whitespace_pattern
        )
    spec: object = output.spec
    if output.kind == "choice":
        spec = json.loads(output.spec)
    return constraint_class(
        **{output.kind: spec}, whitespace_pattern=output.whitespace_pattern
    )


def _structured_output(constraint: Any) -> StructuredOutput | None:
    """Return vLLM's ``StructuredOutputsParams`` in our words."""
    if constraint is None:
        return None
    if constraint.json_object:
        return StructuredOutput(
            "json_object", whitespace_pattern=constraint.whitespace_pattern
        )
    [kind] = [kind for kind in _KINDS if getattr(constraint, kind) is not None]
    spec = getattr(constraint, kind)
    return StructuredOutput(
        kind,
        spec if isinstance(spec, str) else json.dumps(spec),
        whitespace_pattern=constraint.whitespace_pattern,
    )
