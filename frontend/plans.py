"""One request's parser: how its output is constrained, and becomes a message.

vLLM's objects stay ``Any`` here; `parsers.py` is the door to their library.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from tokenwire.protocol.messages import JsonObject, StructuredOutput

from .job import Reasoning
from .message import MessagePart, ToolCallPart, call_id
from .tools import NamedTool, Tool, ToolChoice

__all__ = ["Plan", "Query", "VllmParser"]

_log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Query:
    """What parsers want to know of a chat request."""

    tools: Sequence[Tool] | None
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    include_reasoning: bool
    reasoning_effort: str | None
    template_kwargs: dict[str, Any]  # as the template got them
    num_past_calls: int  # tool calls in the history; Kimi counts on from there
    structured_output: StructuredOutput | None
    skip_special_tokens: bool


class Plan:
    """How the output of one request is constrained and parsed."""

    def __init__(
        self,
        request: Any,
        query: Query,
        make: Callable[[], Any],
        structured_output: StructuredOutput | None,
        *,
        has_reasoning: bool,
        failed: Callable[[], None],
    ) -> None:
        self.structured_output = structured_output
        self.skip_special_tokens = bool(request.skip_special_tokens)
        self.has_reasoning = has_reasoning
        self.call_forced = query.tool_choice not in ("none", "auto")
        self._request = request
        self._query = query
        self._make = make
        self._failed = failed

    def reasoning(self, prompt_token_ids: list[int]) -> Reasoning:
        """Return what the engine must know to apply a grammar behind reasoning."""
        if self.structured_output is None:
            return Reasoning()
        ended = self._request.resolve_reasoning_ended(self._make(), prompt_token_ids)
        kwargs: JsonObject | None = None
        if self.has_reasoning:
            kwargs = {"chat_template_kwargs": self._query.template_kwargs}
        return Reasoning(cast("bool | None", ended), kwargs)

    def parser(
        self, prompt_token_ids: list[int], response_id: str, choice: int
    ) -> VllmParser:
        """Return a fresh parser for one choice."""
        return VllmParser(
            self._make(),
            self._request,
            prompt_token_ids,
            lambda made_up, index: call_id(made_up, response_id, choice, index),
            self._failed,
            is_named=isinstance(self._query.tool_choice, NamedTool),
            first_call_only=not self._query.parallel_tool_calls,
        )


class VllmParser:
    """One choice's parser: vLLM's, its calls numbered and named again."""

    def __init__(
        self,
        parser: Any,
        request: Any,
        prompt_token_ids: list[int],
        name_call: Callable[[str, int], str],
        failed: Callable[[], None],
        *,
        is_named: bool,
        first_call_only: bool,
    ) -> None:
        self._parser = parser
        self._request = request
        self._prompt_token_ids = prompt_token_ids
        self._name_call = name_call
        self._failed = failed
        self._is_named = is_named
        self._first_call_only = first_call_only
        self._has_failed = False
        self._untold: list[str] = []  # text since the parser last told something
        self._opened: dict[int, list[str]] = {}
        """The arguments so far of each call whose first part is out, by its index."""

    @property
    def called_tools(self) -> bool:
        """Whether the finish reason is ``tool_calls`` if the output stops here.

        A call of a named tool is no decision of the model: ``stop``, as in vLLM. A
        call that is cut off can be run by nobody: ``stop`` too, unlike in vLLM.
        """
        if not self._opened or self._is_named or self._has_failed:
            return False
        last = next(reversed(self._opened.values()))
        return _is_whole("".join(last))

    def feed(self, text: str, token_ids: list[int], *, finished: bool) -> MessagePart:
        """Return what *text*, of *token_ids*, adds; *finished*: nothing follows."""
        if self._has_failed:
            return MessagePart(text)
        self._untold.append(text)
        try:
            message = self._parser.parse_delta(
                text,
                token_ids,
                self._request,
                self._prompt_token_ids,
                finished=finished,
            )
        except Exception:  # noqa: BLE001 - one model's code, on whatever it says
            if not text and not token_ids:
                # An end without a token, which some parsers do not know: nothing was
                # said, and what they hold back is lost, as it is in vLLM.
                _log.debug("a parser takes no end alone", exc_info=True)
                return MessagePart()
            # The ids are right, and the text is worth having.
            _log.exception("a parser failed; what follows it becomes content")
            self._has_failed = True
            self._failed()
            return MessagePart("".join(self._untold))
        if message is None:
            return MessagePart()
        parsed = MessagePart(message.content or "", message.reasoning or "")
        for call in message.tool_calls or ():
            part = self._part(call)
            if part is not None:
                parsed.tool_calls.append(part)
        if parsed:
            self._untold.clear()
        return parsed

    def count_reasoning(self, token_ids: Sequence[int]) -> int:
        """Return how many of the output's ids are reasoning."""
        try:
            return int(self._parser.count_reasoning_tokens(tuple(token_ids)))
        except Exception:  # noqa: BLE001 - as above; a count is worth no response
            _log.exception("a parser cannot count its reasoning tokens")
            return 0

    def _part(self, call: Any) -> ToolCallPart | None:
        index = int(call.index)
        if self._first_call_only and index > 0:
            return None
        function = call.function
        arguments = (function.arguments if function is not None else None) or ""
        name = function.name if function is not None else None
        if index in self._opened or not name:
            self._opened.get(index, []).append(arguments)
            return ToolCallPart(index, None, None, arguments) if arguments else None
        self._opened[index] = [arguments]
        made_up = call.id or "chatcmpl-tool-00000000"
        return ToolCallPart(index, self._name_call(made_up, index), name, arguments)


def _is_whole(arguments: str) -> bool:
    """Return whether arguments are a JSON object to its end."""
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False
