"""What a parser makes of an output's text: reasoning, content and tool calls."""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = [
    "MessagePart",
    "ToolCallPart",
    "call_id",
    "delta_object",
    "merged",
    "message_object",
]

# What vLLM 0.32's parsers make up (``make_tool_call_id``, and a few with prefixes of
# their own). Any other id is the format's, like Kimi's ``functions.NAME:INDEX``.
_MADE_UP = re.compile(r"(chatcmpl-tool-|call_([0-9]+_)?)[0-9a-f]{8,}(-[0-9a-f]+)*")
_MISTRAL = re.compile(r"[A-Za-z0-9]{9}")  # its templates refuse any other length
_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(slots=True)
class ToolCallPart:
    """A part of one tool call, or all of it; id and name come with its first part."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class MessagePart:
    """What some tokens add to a message; of all its tokens, the message itself."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallPart] = field(default_factory=list[ToolCallPart])

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


def merged(parts: Iterable[MessagePart]) -> MessagePart:
    """Return what all *parts* add, in order; one entry stays for each call.

    At once, not part by part: strings that grow by a token each are copied each time.
    """
    content: list[str] = []
    reasoning: list[str] = []
    first: dict[int, ToolCallPart] = {}
    arguments: dict[int, list[str]] = {}
    for part in parts:
        content.append(part.content)
        reasoning.append(part.reasoning)
        for call in part.tool_calls:
            first.setdefault(call.index, call)
            arguments.setdefault(call.index, []).append(call.arguments)
    calls = [
        ToolCallPart(index, call.id, call.name, "".join(arguments[index]))
        for index, call in first.items()
    ]
    return MessagePart("".join(content), "".join(reasoning), calls)


def call_id(made_up: str, response_id: str, choice: int, index: int) -> str:
    """Return the id of a tool call: the format's own, or one that can be made again.

    Args:
        made_up: The parser's id.
        response_id: Of the response the call is in.
        choice: The choice's index.
        index: The call's index in its message.
    """
    digest = hashlib.sha256(f"{response_id}/{choice}/{index}".encode()).digest()
    if _MADE_UP.fullmatch(made_up):
        return f"chatcmpl-tool-{digest[:16].hex()}"
    if _MISTRAL.fullmatch(made_up):
        return "".join(_ALPHANUMERIC[byte % 62] for byte in digest[:9])
    return made_up


def delta_object(parsed: MessagePart) -> dict[str, object]:
    """Return ``delta`` of a chat chunk; what it does not add has no key."""
    delta: dict[str, object] = {}
    if parsed.reasoning:
        delta["reasoning"] = parsed.reasoning
    if parsed.content:
        delta["content"] = parsed.content
    if parsed.tool_calls:
        delta["tool_calls"] = [_call_delta(call) for call in parsed.tool_calls]
    return delta


def _call_delta(call: ToolCallPart) -> dict[str, object]:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    # OpenAI's first part of a call always has arguments, if only "".
    return {
        "index": call.index,
        "id": call.id,
        "type": "function",
        "function": {"name": call.name or "", "arguments": call.arguments},
    }


def message_object(
    parsed: MessagePart, *, with_reasoning: bool, call_forced: bool
) -> dict[str, object]:
    """Return ``message`` of a chat response.

    Args:
        parsed: All that its tokens add.
        with_reasoning: Whether it has the key ``reasoning``, null if there is none.
        call_forced: ``tool_choice`` asked for a call: no content is then "", as in
            vLLM. Else it is null beside reasoning and calls, as in OpenAI's API.
    """
    content: str | None = parsed.content
    if not call_forced and not content and (parsed.tool_calls or parsed.reasoning):
        content = None
    message: dict[str, object] = {
        "role": "assistant",
        "content": content,
        "refusal": None,
    }
    if with_reasoning:
        message["reasoning"] = parsed.reasoning or None
    if parsed.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id or "",
                "type": "function",
                "function": {"name": call.name or "", "arguments": call.arguments},
            }
            for call in parsed.tool_calls
        ]
    return message
