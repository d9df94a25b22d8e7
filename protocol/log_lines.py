"""Records as lines of text or JSON; no client's text makes a line of its own."""

from __future__ import annotations

import datetime
import json
import logging
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, cast

import msgspec

__all__ = ["JsonLines", "TextLines", "escaped", "pairs"]

MAX_MESSAGE_CHARS = 8_192
"""Of one line: a message may quote what has any length, and readers cut long lines."""

MAX_EXCEPTION_CHARS = 32_768
"""The end of a traceback, which names the error; some 300 frames."""

_PLAIN = re.compile(r'[^ "=]+')
"""What needs no quotes as a value, if it is printable."""

_ASCII_PLAIN = re.compile(r"[!#-<>-~]+")
"""The same of ASCII, which nearly all values are: one look in place of two."""

INDENT = "  "
"""Before each line behind a message: only a record begins a line without it."""


class TextLines(logging.Formatter):
    """Lines for people: the message, then ``name=value`` of what it is about."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of *record*, with indented ones behind it if it has an error."""
        record.message = escaped(_message(record))
        if self.usesTime():
            record.asctime = self.formatTime(record, self.datefmt)
        line = self.formatMessage(record)
        fields = getattr(record, "fields", None)
        if fields:
            line = f"{line} {pairs(fields)}"
        left_out = getattr(record, "left_out", 0)
        if left_out:
            line = f"{line} ({left_out} more like it were left out)"
        for text in (_exception(self, record), record.stack_info):
            if text:
                behind = [INDENT + escaped(one) for one in text.splitlines()]
                line = "\n".join([line, *behind])
        return line


class JsonLines(logging.Formatter):
    """One JSON object a record.

    Args:
        fields: In each: who writes it.
    """

    def __init__(self, fields: Mapping[str, str]) -> None:
        super().__init__()
        self._fields = dict(fields)

    def format(self, record: logging.LogRecord) -> str:
        """Return the object of *record*, on one line."""
        line: dict[str, Any] = {
            "time": _rfc3339(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
            **self._fields,
        }
        fields = getattr(record, "fields", None)
        if fields:
            line.update(fields)
        left_out = getattr(record, "left_out", 0)
        if left_out:
            line["left_out"] = left_out
        exception = _exception(self, record)
        if exception:
            line["exception"] = exception
        if record.stack_info:
            line["stack"] = record.stack_info
        try:
            text = msgspec.json.encode(line).decode()
        except UnicodeEncodeError:  # lone surrogates, as in headers that are no UTF-8
            valid = {
                name: _valid(value) if isinstance(value, str) else value
                for name, value in line.items()
            }
            text = msgspec.json.encode(valid).decode()
        if text.isprintable():
            return text
        # JSON may hold other ends of lines than \n, which some readers take for such.
        return "".join(
            one if one.isprintable() else json.dumps(one)[1:-1] for one in text
        )


def escaped(text: str) -> str:
    """Return *text* with all that is not printable as escapes: on one line, no colours."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else _escape(one) for one in text)


def pairs(fields: Mapping[str, Any]) -> str:
    """Return *fields* as ``name=value``, a value with spaces in quotes."""
    return " ".join(f"{name}={_value(value)}" for name, value in fields.items())


def _value(value: object) -> str:
    kind = type(value)
    if kind is int or kind is float:
        return str(value)
    if kind is list:
        value = ",".join(map(str, cast("list[object]", value)))
    text = str(value)
    if _ASCII_PLAIN.fullmatch(text):
        return text
    if _PLAIN.fullmatch(text) and text.isprintable():
        return text
    text = escaped(text)
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode()


def _valid(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def _message(record: logging.LogRecord) -> str:
    message = record.getMessage()
    if len(message) > MAX_MESSAGE_CHARS:
        message = f"{message[:MAX_MESSAGE_CHARS]}..."
    return message


def _exception(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    if not record.exc_info:
        return ""
    text = formatter.formatException(record.exc_info)
    return text[-MAX_EXCEPTION_CHARS:]


def _rfc3339(seconds: float) -> str:
    whole = int(seconds)
    return f"{_second(whole)}.{int(1e3 * (seconds - whole)):03d}Z"


@lru_cache(maxsize=2)  # lines come in the order of their time
def _second(seconds: int) -> str:
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}"
