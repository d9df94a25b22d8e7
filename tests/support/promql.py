"""Which series a PromQL query asks for, and which labels it groups and joins by.

A reader of names alone: whether the query is one, promtool says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["Asked", "Selector", "asked", "matches"]

_TOKEN = re.compile(
    r"""(?P<space>\s+)
    | (?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    | (?P<range>\[[^\]]*\])
    | (?P<number>[0-9][0-9.]*(?:[a-z]+)?)
    | (?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)
    | (?P<sign>=~|!~|!=|==|<=|>=|[-+*/%^<>=(){},@])""",
    re.VERBOSE,
)
_LABEL_LISTS = {"by", "without", "on", "ignoring", "group_left", "group_right"}
_WORDS = {"and", "or", "unless", "offset", "bool", "inf", "nan"}

Matcher = tuple[str, str, str]  # label, operator, value


@dataclass(slots=True)
class Selector:
    """A metric and what its labels must be."""

    name: str
    matchers: list[Matcher] = field(default_factory=list[Matcher])


@dataclass(slots=True)
class Asked:
    """All that a query names."""

    selectors: list[Selector] = field(default_factory=list[Selector])
    labels: set[str] = field(default_factory=set[str])  # of groups and joins


def asked(query: str) -> Asked:
    """Return what *query* names.

    Raises:
        ValueError: It has a character that no query has.
    """
    result = Asked()
    tokens = list(_tokens(query))
    position = 0
    while position < len(tokens):
        kind, text = tokens[position]
        behind = tokens[position + 1][1] if position + 1 < len(tokens) else ""
        position += 1
        if kind != "name" or text in _WORDS:
            continue
        if text in _LABEL_LISTS:
            if behind == "(":
                end = tokens.index(("sign", ")"), position)
                names = tokens[position:end]
                result.labels |= {name for kind, name in names if kind == "name"}
                position = end + 1
        elif behind == "{":
            end = tokens.index(("sign", "}"), position)
            result.selectors.append(
                Selector(text, _matchers(tokens[position + 1 : end]))
            )
            position = end + 1
        elif behind != "(" and behind not in _LABEL_LISTS:  # else it is a function
            result.selectors.append(Selector(text))
    return result


def matches(selector: Selector, name: str, labels: dict[str, str]) -> bool:
    """Return whether a series is one of those that *selector* asks for."""
    return selector.name == name and all(
        _is_met(labels.get(label, ""), operator, value)
        for label, operator, value in selector.matchers
    )


def _is_met(found: str, operator: str, value: str) -> bool:
    if operator in {"=", "!="}:
        return (found == value) == (operator == "=")
    return bool(re.fullmatch(value, found)) == (operator == "=~")


def _tokens(query: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(query):
        match = _TOKEN.match(query, at)
        if match is None:
            msg = f"no query: {query[at:]!r}"
            raise ValueError(msg)
        at = match.end()
        kind = match.lastgroup or ""
        if kind not in {"space", "range"}:
            yield kind, match[0]


def _matchers(tokens: list[tuple[str, str]]) -> list[Matcher]:
    words = [text for _, text in tokens if text != ","]
    return [
        (words[at], words[at + 1], words[at + 2][1:-1])
        for at in range(0, len(words), 3)
    ]
