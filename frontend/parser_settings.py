"""vLLM's options for tool calls and reasoning, under vLLM's names."""

from __future__ import annotations

import argparse

from tokenwire.protocol.settings import SettingsParser

from .parsers import ParserChoice

__all__ = ["add_parser_options", "parser_settings"]


def add_parser_options(parser: SettingsParser) -> None:
    """Add them."""
    add = parser.add_argument
    add(
        "--tool-call-parser",
        metavar="NAME",
        help="vLLM's parser of tool calls (hermes, llama3_json, ...); needs vLLM here",
    )
    add(
        "--reasoning-parser",
        metavar="NAME",
        help="vLLM's parser of reasoning (deepseek_r1, qwen3, ...); needs vLLM here, "
        "and the same option of the engine for structured output",
    )
    add(
        "--enable-auto-tool-choice",
        action="store_true",
        help="implied by --tool-call-parser; taken so that vLLM's options fit",
    )
    add(
        "--exclude-tools-when-tool-choice-none",
        action="store_true",
        help="leave tools out of the prompt when tool_choice is none",
    )
    add(
        "--tool-strict-level",
        choices=["auto", "function", "parameter"],
        default="auto",
        help="how much of every tool call a grammar binds (default: %(default)s)",
    )
    add(
        "--tool-parser-plugin",
        metavar="FILE",
        help="Python file that registers more parsers of tool calls",
    )
    add(
        "--reasoning-parser-plugin",
        metavar="FILE",
        help="Python file that registers more parsers of reasoning",
    )


def parser_settings(parser: SettingsParser, given: argparse.Namespace) -> ParserChoice:
    """Return which parsers *given* asks for.

    Raises:
        SystemExit: 2 after one sentence, if an option lacks another.
    """
    if given.enable_auto_tool_choice and not given.tool_call_parser:
        parser.error("--enable-auto-tool-choice needs --tool-call-parser")
    return ParserChoice(
        tool_call_parser=given.tool_call_parser or None,
        reasoning_parser=given.reasoning_parser or None,
        tool_parser_plugin=given.tool_parser_plugin,
        reasoning_parser_plugin=given.reasoning_parser_plugin,
        tool_strict_level=given.tool_strict_level,
    )
