"""Fenced blocks of documents, and the commands in them.

A block that cannot be run or rendered says so in the line above it:
``<!-- not run: needs a cluster -->``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.pages import PAGES, ROOT

__all__ = ["SHELLS", "Block", "all_blocks", "blocks", "commands"]

SHELLS = {"sh", "bash", "console"}

FENCE = re.compile(r"^( *)(```+)([\w-]*) *$")
MARKER = re.compile(r"<!-- not run: (\S.*\S) -->")

BETWEEN = {
    "until",
    "while",
    "do",
    "then",
    "if",
    "else",
    "exec",
    "nice",
    "env",
    "time",
    "!",
}
"""Words before a command; those that end a block stand alone."""

ENDS = {"done", "fi"}
ASSIGNMENT = re.compile(r"\w+=")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block."""

    page: Path
    line: int  # of its first line, from 1 up
    language: str  # empty: none is named
    text: str
    reason: str  # why it is not run; empty: it is

    @property
    def name(self) -> str:
        """Where it stands."""
        return f"{self.page.relative_to(ROOT).as_posix()}:{self.line}"

    @property
    def script(self) -> str:
        """A shell block as a script: of a console, what is typed."""
        if self.language != "console":
            return self.text
        typed = re.findall(r"^\$ ((?:.*\\\n)*.*)$", self.text, flags=re.MULTILINE)
        return "\n".join(typed) + "\n"


def all_blocks() -> list[Block]:
    """Return the blocks of all pages."""
    return [block for page in PAGES for block in blocks(page)]


def blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of *page*."""
    above, fence, start = "", None, 0
    held: list[str] = []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if fence is None:
            fence = FENCE.match(line)
            if fence is None:
                above = line.strip() or above
            start, held = number + 1, []
        elif line.strip() == fence[2]:
            found = MARKER.fullmatch(above)
            text = "\n".join(one.removeprefix(fence[1]) for one in held) + "\n"
            yield Block(page, start, fence[3], text, found[1] if found else "")
            fence, above = None, ""
        else:
            held.append(line)


def commands(script: str) -> Iterator[list[str]]:
    """Yield the words of each simple command in *script*; no here-documents.

    Variables set before a command are left out, and so is where its output goes.
    """
    lexer = shlex.shlex(_uncommented(script), posix=True, punctuation_chars=";&|()<>\n")
    lexer.whitespace = " \t"
    lexer.commenters = ""
    lexer.whitespace_split = True
    words: list[str] = []
    redirects = False
    for token in [*lexer, "\n"]:
        if redirects:
            redirects = False
        elif set(token) <= set(";&|()\n"):
            yield from _command(words)
            words = []
        elif set(token) <= set("<>&"):
            redirects = True
            if words and words[-1] in {"1", "2"}:
                words.pop()
        else:
            words.append(token)


def _command(words: list[str]) -> Iterator[list[str]]:
    rest = list(words)
    while rest and (rest[0] in BETWEEN or ASSIGNMENT.match(rest[0])):
        rest.pop(0)
    if rest and rest[0] not in ENDS | {"$"}:
        yield rest


def _uncommented(script: str) -> str:
    """Return *script* without comments, its continued lines joined."""
    kept: list[str] = []
    quote = ""
    characters = iter(script.replace("\\\n", " "))
    for character in characters:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character == "#" and (not kept or kept[-1] in " \t\n"):
            for passed in characters:
                if passed == "\n":
                    kept.append(passed)
                    break
            continue
        kept.append(character)
    return "".join(kept)
