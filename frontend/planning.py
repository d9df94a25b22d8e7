"""How a chat request's output becomes a message: what to ask of the parsers."""

from __future__ import annotations

from typing import Any

from .errors import bad_request
from .plans import Plan, Query
from .policy import Policy
from .sampling import structured_output
from .schema import ChatRequest
from .tools import NamedTool, checked_choice, num_past_calls, template_tools

__all__ = ["plan_output", "template_kwargs", "tools_shown"]


def plan_output(request: ChatRequest, policy: Policy) -> Plan | None:
    """Return how the output becomes a message; None if its text is its content.

    Raises:
        ApiError: 400: tools or their choice are wrong, or cannot be served.
    """
    parsers = policy.parsers
    tool_choice = checked_choice(
        request.tools,
        request.tool_choice,
        has_parser=parsers is not None and parsers.has_tools,
    )
    if parsers is None:
        return None
    if request.structured_outputs is not None and isinstance(tool_choice, NamedTool):
        msg = "structured_outputs and a named tool_choice exclude each other"
        raise bad_request(msg, "structured_outputs")
    continued = bool(request.continue_final_message)
    query = Query(
        tools=request.tools,
        tool_choice=tool_choice,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        include_reasoning=request.include_reasoning is not False,
        reasoning_effort=request.reasoning_effort,
        template_kwargs={
            **template_kwargs(request),
            "add_generation_prompt": not continued,
            "continue_final_message": continued,
        },
        num_past_calls=num_past_calls(request.messages),
        structured_output=structured_output(request),
        skip_special_tokens=request.skip_special_tokens is not False,
    )
    return parsers.plan(query, policy.parser_failed)


def template_kwargs(request: ChatRequest) -> dict[str, Any]:
    """Return what the template may name beside the messages, as in vLLM."""
    kwargs = dict(request.chat_template_kwargs or {})
    effort = request.reasoning_effort
    if effort is not None:
        # Templates of models that think on demand look at the one or the other.
        kwargs.setdefault("enable_thinking", effort != "none")
        kwargs["reasoning_effort"] = effort
    return kwargs


def tools_shown(request: ChatRequest, policy: Policy) -> list[dict[str, Any]] | None:
    """Return the tools that the template sees; None: none."""
    if not request.tools or (policy.exclude_tools and request.tool_choice == "none"):
        return None
    return template_tools(request.tools)
