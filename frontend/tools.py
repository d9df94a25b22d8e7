"""Tools in a chat request: which there are, which must be called, which were called."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal, cast

import msgspec

from .bounds import check_depth, check_size
from .errors import bad_request

__all__ = [
    "NamedTool",
    "ReasoningEffort",
    "Tool",
    "ToolChoice",
    "checked_choice",
    "num_past_calls",
    "past_turn",
    "template_tools",
]

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""vLLM's levels: OpenAI's, and DeepSeek V4's ``max``."""


class Function(msgspec.Struct, forbid_unknown_fields=True):
    """``function`` of a tool."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None
    defer_loading: bool | None = None  # vLLM's


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    """One of ``tools``."""

    function: Function
    type: Literal["function"] = "function"
    defer_loading: bool | None = None  # vLLM's


class NamedFunction(msgspec.Struct, forbid_unknown_fields=True):
    """``function`` of a tool choice."""

    name: str


class NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    """``tool_choice`` that names the one tool to call."""

    function: NamedFunction
    type: Literal["function"] = "function"


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def checked_choice(
    tools: Sequence[Tool] | None, choice: str | NamedTool | None, *, has_parser: bool
) -> ToolChoice:
    """Return the tool choice, its default filled in.

    Args:
        tools: Of the request.
        choice: Of the request.
        has_parser: Whether calls can be parsed; without, none can be asked for.

    Raises:
        ApiError: 400: no such choice, no such tool, or nothing to parse calls with.
    """
    if tools is not None and not tools:
        msg = "tools must not be an empty array: leave it out, or give one"
        raise bad_request(msg, "tools")
    for tool in tools or ():
        check_depth("tools", tool.function.parameters)
    # Of all: a required call may be of any.
    parameters = [tool.function.parameters for tool in tools or ()]
    check_size("tools", len(msgspec.json.encode(parameters)))
    if choice is None:
        choice = "auto" if tools else "none"
    if isinstance(choice, str) and choice not in {"none", "auto", "required"}:
        msg = (
            f"tool_choice must be none, auto, required or a named tool, not "
            f"{choice!r:.40}"
        )
        raise bad_request(msg, "tool_choice")
    if choice == "none":
        return "none"
    if not tools:
        msg = "tool_choice needs tools"
        raise bad_request(msg, "tool_choice")
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in {tool.function.name for tool in tools}:
            msg = f"tool_choice names {name!r:.80}, which is not one of tools"
            raise bad_request(msg, "tool_choice")
    if not has_parser:
        wanted = choice if isinstance(choice, str) else choice.function.name
        msg = (
            f"tool_choice {wanted!r:.80} needs a frontend with --tool-call-parser; "
            "without one only tool_choice none is served"
        )
        raise bad_request(msg, "tool_choice")
    return cast("ToolChoice", choice)


def template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return *tools* as templates see them: vLLM's keys in vLLM's order.

    A template prints them as JSON, so another order would be other tokens.
    """
    return [_template_tool(tool) for tool in tools]


def _template_tool(tool: Tool) -> dict[str, Any]:
    function = tool.function
    shown: dict[str, Any] = {
        "name": function.name,
        "description": function.description,
        "parameters": function.parameters,
    }
    if function.strict is not None:
        shown["strict"] = function.strict
    defer_loading = function.defer_loading
    if defer_loading is None:
        defer_loading = tool.defer_loading
    if defer_loading is not None:
        shown["defer_loading"] = defer_loading
    result: dict[str, Any] = {"type": tool.type, "function": shown}
    if tool.defer_loading is not None:
        result["defer_loading"] = tool.defer_loading
    return result


def num_past_calls(messages: Sequence[dict[str, Any]]) -> int:
    """Return how many tools were called in a history."""
    past = [
        message.get("tool_calls")
        for message in messages
        if message.get("role") == "assistant"
    ]
    return sum(len(cast("list[object]", one)) for one in past if isinstance(one, list))


def past_turn(message: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a message of the history as templates expect it.

    An assistant's calls have their arguments as objects, not as JSON in a string, and
    its reasoning stands under both of the names in use, as in vLLM.

    Args:
        message: As the client sent it; stays as it is.
        where: Its place, for an error's ``param``.

    Raises:
        ApiError: 400: a field of it has another form.
    """
    if message["role"] == "tool":
        _optional_text(message, "tool_call_id", where)
        return message
    if message["role"] != "assistant":
        return message
    result = dict(message)
    reasoning = _optional_text(message, "reasoning", where)
    if reasoning is None:
        reasoning = _optional_text(message, "reasoning_content", where)
    for key in ("reasoning", "reasoning_content"):
        result.pop(key, None)
        if reasoning is not None:
            result[key] = reasoning
    calls = result.pop("tool_calls", None)
    if calls is None:
        return result
    if not isinstance(calls, list):
        msg = f"{where}.tool_calls must be a list"
        raise bad_request(msg, f"{where}.tool_calls")
    if calls:  # an empty list would send templates down the path of a call
        result["tool_calls"] = [
            _past_call(call, f"{where}.tool_calls[{number}]")
            for number, call in enumerate(cast("list[object]", calls))
        ]
    return result


def _past_call(call: object, where: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        msg = f"{where} must be an object"
        raise bad_request(msg, where)
    fields = cast("dict[str, Any]", call)
    _optional_text(fields, "id", where)
    if fields.get("type", "function") != "function":
        msg = f"{where}.type must be function"
        raise bad_request(msg, f"{where}.type")
    function = fields.get("function")
    if not isinstance(function, dict):
        msg = f"{where}.function must be an object"
        raise bad_request(msg, f"{where}.function")
    inner = cast("dict[str, Any]", function)
    if not isinstance(inner.get("name"), str):
        msg = f"{where}.function.name must be a string"
        raise bad_request(msg, f"{where}.function.name")
    arguments = _arguments(inner.get("arguments"), f"{where}.function.arguments")
    return {**fields, "function": {**inner, "arguments": arguments}}


def _arguments(given: object, where: str) -> dict[str, Any]:
    """Return a call's arguments as an object.

    A text that is none is what a model wrote, cut off perhaps: an agent that sends its
    history back can do nothing about it, so that templates see no arguments, as in
    vLLM 0.32. Any other type is the client's mistake.
    """
    if given is None:
        return {}
    parsed = given
    if isinstance(given, str):
        try:
            parsed = json.loads(given)
        except (ValueError, RecursionError):
            return {}
        if not isinstance(parsed, dict):
            return {}
    if not isinstance(parsed, dict):
        msg = f"{where} must be a string with a JSON object"
        raise bad_request(msg, where)
    return cast("dict[str, Any]", parsed)


def _optional_text(fields: dict[str, Any], key: str, where: str) -> str | None:
    value = fields.get(key)
    if value is not None and not isinstance(value, str):
        msg = f"{where}.{key} must be a string"
        raise bad_request(msg, f"{where}.{key}")
    return value
