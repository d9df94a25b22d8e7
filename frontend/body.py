"""A body's bytes to a JSON object; a long one in steps, so that other threads run.

msgspec decodes without letting the GIL go: 50 ms for 8 MiB of token ids, in which no
other stream would move. In steps the longest is the scan for the parts: 10 ms.

Of equal keys the last counts, as in Python's and JavaScript's parsers.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any, cast

import msgspec

from .errors import ApiError, bad_request

__all__ = ["decode_object"]

STEP_BYTES = 64 * 1024
"""Decoded at once: half a millisecond."""

MAX_STEP_DEPTH = 4
"""Levels taken apart: body, ``messages``, message, ``content``. Each level scans what is
below it again, so an endless nest of objects must not be followed."""

MAX_BLAME_BYTES = 1024 * 1024
"""Bodies up to this size are read again to name the field that is broken: 10 ms."""

MAX_CONTAINERS = 512 * 1024
"""Arrays and objects in a body: a conversation of 256,000 messages. An empty object in it
has two bytes, and 64 and more as Python's: 60 MiB of them took 2.7 GB."""

MAX_QUOTES = 4 * 1024 * 1024
"""Two for each text and each name: short ones take twenty times their bytes."""

_BROKEN = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_NO_OBJECT = "the body must be a JSON object"
_ENTRIES = dict[str, msgspec.Raw]
_ELEMENTS = list[msgspec.Raw]


def decode_object(data: bytes) -> dict[str, object]:
    """Return the object in *data*.

    Raises:
        ApiError: 400: not JSON, or no object; names the field where one is wrong.
    """
    _check_marks(data)
    try:
        if len(data) <= STEP_BYTES:
            body = msgspec.json.decode(data)
        else:
            body = _parts(_entries(data), MAX_STEP_DEPTH - 1)
    except _BROKEN as error:
        msg = f"the body is not valid JSON: {error}"
        raise bad_request(msg, _broken_field(data)) from error
    if not isinstance(body, dict):
        raise bad_request(_NO_OBJECT)
    return cast("dict[str, object]", body)


def _check_marks(data: bytes) -> None:
    """Refuse what would be far too many objects; marks inside texts count, too.

    Raises:
        ApiError: 400.
    """
    if len(data) <= 2 * MAX_CONTAINERS:
        return
    num_open = num_quotes = 0
    for start in range(0, len(data), STEP_BYTES):
        end = start + STEP_BYTES
        num_open += data.count(b"{", start, end) + data.count(b"[", start, end)
        num_quotes += data.count(b'"', start, end)
    if num_open > MAX_CONTAINERS:
        msg = f"the body opens more than {MAX_CONTAINERS} arrays and objects"
        raise bad_request(msg)
    if num_quotes > MAX_QUOTES:
        msg = f"the body has more than {MAX_QUOTES} quotation marks"
        raise bad_request(msg)


def _entries(data: bytes) -> dict[str, msgspec.Raw]:
    """Return the fields of a body, their syntax checked, but for what is in strings.

    Raises:
        ApiError: 400, the body is no object.
    """
    try:
        return msgspec.json.decode(data, type=_ENTRIES)
    except msgspec.ValidationError as error:
        raise bad_request(_NO_OBJECT) from error


def _broken_field(data: bytes) -> str | None:
    """Return the field whose value is no JSON; None: the whole is not.

    That is a text that is no Unicode, a number out of range, or NaN.
    """
    with contextlib.suppress(*_BROKEN, ApiError):
        for name, raw in _entries(data).items():
            try:
                msgspec.json.decode(raw)
            except _BROKEN:
                return name
    if len(data) > MAX_BLAME_BYTES:
        return None
    # Python's parser goes on behind lone surrogates and NaN; both cannot be written.
    with contextlib.suppress(ValueError, RecursionError):
        body = json.loads(data, parse_constant=lambda _: object())
        fields = cast("dict[str, object]", body if isinstance(body, dict) else {})
        for name, value in fields.items():
            try:
                msgspec.json.encode(value)
            except (UnicodeEncodeError, TypeError):
                return name
    return None


def _parts(entries: dict[str, msgspec.Raw], depth: int) -> dict[str, Any]:
    return {name: _value(memoryview(raw), depth) for name, raw in entries.items()}


def _value(data: memoryview, depth: int) -> Any:
    """Return the value in *data*, taken apart *depth* levels deep where it is long."""
    if len(data) <= STEP_BYTES or not depth:
        return msgspec.json.decode(data)
    first = chr(data[0])
    if first == "{":
        return _parts(msgspec.json.decode(data, type=_ENTRIES), depth - 1)
    if first != "[":
        return msgspec.json.decode(data)  # a string: fast, however long
    inside = bytes(data[1:STEP_BYTES]).lstrip()
    if inside.startswith((b"{", b"[")):
        elements = msgspec.json.decode(data, type=_ELEMENTS)
        return [_value(memoryview(raw), depth - 1) for raw in elements]
    return _numbers(bytes(data))


def _numbers(data: bytes) -> Any:
    """Return the list in *data*, by pieces if it is one of numbers."""
    values: list[Any] = []
    start, last = 1, len(data) - 1
    while start < last:
        end = data.find(b",", start + STEP_BYTES, last)
        if end < 0:
            end = last
        piece = data[start:end]
        if any(mark in piece for mark in (b'"', b"[", b"{")):
            return msgspec.json.decode(data)  # a comma may be inside one of these
        values += msgspec.json.decode(b"[" + piece + b"]")
        start = end + 1
    return values
