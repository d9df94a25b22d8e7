"""Where the resume report cuts an output: at blocks, inside of what texts are made of."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from report_client import Answer
from report_kinds import Kind, Text

__all__ = ["CUTS", "UNDER_WAY", "Cut", "cuts_of"]

CUTS = (
    "0",
    "1",
    "block-1",
    "block",
    "block+1",
    "inside a character",
    "inside <think>",
    "in a tool name",
    "in tool arguments",
    "before EOS",
    "after EOS",
)

UNDER_WAY = "under way"
"""The cut of outputs that nobody holds: wherever each is when its worker is lost."""

_NAME = re.compile(r'"name": "[^"]+\Z')
_ARGUMENTS = re.compile(r'"arguments": \{\s*"[^}]+\Z')


@dataclass(frozen=True)
class Cut:
    """One cut."""

    name: str
    k: int  # how many ids the client has


def cuts_of(kind: Kind, whole: Answer, text: Text, block_size: int) -> list[Cut]:
    """Return where an output is cut; what it has no place for is left out.

    Args:
        kind: Of the output.
        whole: The output.
        text: The model's.
        block_size: Of the engine's KV blocks: prompt and output fill them together.
    """
    num_ids, num_prompt = len(whole.ids), len(whole.prompt_ids)
    says = [text.says(whole.ids[:k]) for k in range(num_ids + 1)]
    border = (num_prompt + 2 + block_size - 1) // block_size * block_size - num_prompt
    found = {"0": 0, "1": 1}
    found |= {"block-1": border - 1, "block": border, "block+1": border + 1}

    def at(name: str, holds: Callable[[str], bool]) -> None:
        places = [k for k in range(1, num_ids) if holds(says[k])]
        if places:
            # The last third: behind the first call, not at the very end.
            found[name] = places[len(places) * 2 // 3]

    at("inside a character", lambda said: _is_half(said, says[-1]))
    if kind.has_thought:
        at("inside <think>", lambda said: "</think>" not in said)
    if kind.has_calls:
        at("in a tool name", lambda said: _NAME.search(said) is not None)
        at("in tool arguments", lambda said: _ARGUMENTS.search(said) is not None)
    if whole.finish_reason != "length":
        found |= {"before EOS": num_ids - 1, "after EOS": num_ids}
    last = num_ids if whole.finish_reason != "length" else num_ids - 1
    return [
        Cut(name, found[name]) for name in CUTS if found.get(name, last + 1) <= last
    ]


def _is_half(said: str, whole: str) -> bool:
    return said.endswith("\N{REPLACEMENT CHARACTER}") and not whole.startswith(said)
