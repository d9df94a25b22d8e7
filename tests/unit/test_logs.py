"""Lines of the log: whose they are, and what nobody can make of them."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest

from tokenwire.deploy.output import Kind, OutputReader
from tokenwire.protocol.log_lines import (
    MAX_EXCEPTION_CHARS,
    MAX_MESSAGE_CHARS,
    escaped,
    pairs,
)
from tokenwire.protocol.log_rate import MAX_KINDS, MAX_LINES, PERIOD_S, RateLimit
from tokenwire.protocol.logs import (
    ABOUT,
    LogSettings,
    about,
    exits_as_lines,
    is_json,
    log_as,
)

FORGED = "x\n2026-11-30 12:00:00 ERROR admin: all is lost\r\x1b[2J\u2028y"
_log = logging.getLogger("tokenwire.test")


@contextmanager
def logged(form: str, level: str = "info") -> Generator[io.StringIO]:
    """Log as a process does, to what is given."""
    root, hooks = logging.root, (sys.excepthook, sys.stderr)
    before = root.handlers[:], root.level
    sys.stderr = written = io.StringIO()
    try:
        root.handlers.clear()
        fields = {"worker": "w"}
        log_as(LogSettings(form, level), "%(levelname)s %(name)s: %(message)s", fields)
        yield written
    finally:
        logging.captureWarnings(capture=False)
        sys.excepthook, sys.stderr = hooks
        root.handlers[:], root.level = before


def fail(text: str) -> None:
    """Raise an error that says *text*."""
    raise ValueError(text)


def objects(written: io.StringIO) -> list[dict[str, Any]]:
    """Return the lines, each an object."""
    return [json.loads(line) for line in written.getvalue().splitlines()]


def test_json_has_the_fields_of_its_process_and_its_request() -> None:
    """A task's own, or what the line says itself; the time is RFC 3339's."""
    token = ABOUT.set({"request_id": "r1", "trace_id": "t1"})
    try:
        with logged("json") as written:
            _log.info("at %s", 5)
            _log.warning("other", extra=about({"request_id": "r2"}))
            _log.debug("nothing")
    finally:
        ABOUT.reset(token)
    first, second = objects(written)
    assert first.pop("time")[10:].endswith("Z")
    assert first == {
        "level": "info",
        "logger": "tokenwire.test",
        "message": "at 5",
        "worker": "w",
        "request_id": "r1",
        "trace_id": "t1",
    }
    assert second["request_id"] == "r2"
    assert "trace_id" not in second


def test_text_has_them_behind_the_message() -> None:
    """So that people can look for one request, too."""
    with logged("text") as written:
        _log.info("moved", extra=about({"request_id": "r1", "workers": ["a", "b"]}))
    expected = "INFO tokenwire.test: moved request_id=r1 workers=a,b\n"
    assert written.getvalue() == expected


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_client_can_forge_a_line(form: str) -> None:
    """By a message, by a field, by an error that quotes it."""
    with logged(form) as written:
        _log.info("id %s", FORGED)
        _log.info("moved", extra=about({"client_request_id": FORGED}))
        try:
            fail(FORGED)
        except ValueError:
            _log.exception("failed")
    lines = written.getvalue().split("\n")
    heads = [one for one in lines if one and not one.startswith("  ")]
    assert len(heads) == 3
    begins = "{" if form == "json" else ("INFO", "ERROR tokenwire")
    assert all(one.startswith(begins) for one in heads)
    assert not {"\r", "\x1b", "\u2028"} & set(written.getvalue())


def test_an_error_is_a_field_of_json() -> None:
    """With its traceback; headers that are no UTF-8 do no harm."""
    with logged("json") as written:
        try:
            fail("why")
        except ValueError:
            _log.exception("bytes \udcff")
    [line] = objects(written)
    assert line["message"] == "bytes \\udcff"
    assert line["exception"].startswith("Traceback (most recent call last):\n")
    assert line["exception"].endswith("ValueError: why")


def test_lines_are_bounded() -> None:
    """However long what they quote is."""
    with logged("json") as written:
        try:
            fail("x" * 100_000)
        except ValueError:
            _log.exception("%s", "y" * 100_000)
    [line] = objects(written)
    assert len(line["message"]) == MAX_MESSAGE_CHARS + 3
    assert len(line["exception"]) == MAX_EXCEPTION_CHARS


def test_what_ends_a_process_is_a_line_of_json() -> None:
    """Its last sentence, and an error that nobody caught; text is as ever."""
    with logged("json") as written:
        assert is_json()
        with pytest.raises(SystemExit) as stopped, exits_as_lines(_log):
            sys.exit("cannot listen")
        sys.excepthook(ValueError, ValueError("a bug"), None)
    assert stopped.value.code == 1
    said, uncaught = objects(written)
    assert (said["level"], said["message"]) == ("critical", "cannot listen")
    assert uncaught["exception"] == "ValueError: a bug"
    with logged("text"):
        with pytest.raises(SystemExit) as stopped, exits_as_lines(_log):
            sys.exit("cannot listen")
        assert stopped.value.code == "cannot listen"


def test_pairs_are_quoted_where_they_must() -> None:
    """A value cannot look like two."""
    fields = {"a": "b c=d", "e": 'q"', "f": "", "g": 1.5}
    assert pairs(fields) == 'a="b c=d" e="q\\"" f="" g=1.5'
    others = {
        "a": "é",
        "b": "é =",
        "c": ["x", "y"],
        "d": ["x y"],
        "e": None,
        "f": "\x7f",
    }
    assert pairs(others) == 'a=é b="é =" c=x,y d="x y" e=None f="\\\\x7f"'
    assert escaped("é 中") == "é 中"


def test_repeated_lines_are_left_out_and_counted() -> None:
    """By their format, whatever the arguments; others go on, and so do lines asked for."""
    now = 0.0
    limit = RateLimit(lambda: now)

    def passes(message: str, name: str = "a") -> bool:
        record = logging.LogRecord(name, logging.INFO, "", 0, message, (), None)
        passed = limit.filter(record)
        left_out.append(getattr(record, "left_out", 0))
        return passed

    left_out: list[int] = []
    assert [passes("lost %s") for _ in range(MAX_LINES + 5)].count(True) == MAX_LINES
    assert passes("other")
    assert all(passes("request", "tokenwire.access") for _ in range(MAX_LINES + 5))
    now = PERIOD_S
    assert passes("lost %s")
    assert left_out[-1] == 5
    assert not any(left_out[:-1])


def test_kinds_of_lines_are_bounded() -> None:
    """Also where a library has put its arguments into its formats."""
    limit = RateLimit(lambda: 0.0)
    for number in range(3 * MAX_KINDS):
        record = logging.LogRecord("a", logging.INFO, "", 0, f"{number}", (), None)
        limit.filter(record)
    assert limit.num_kinds <= MAX_KINDS


def test_a_supervisor_reads_json() -> None:
    """Phases, what is to be shown, and what is only for the file."""
    with logged("json") as written:
        _log.info("loading", extra=about({"phase": "loading"}))
        _log.info("chatter")
        _log.error("it is lost")
        try:
            fail("why")
        except ValueError:
            _log.exception("failed")
    reader = OutputReader()
    seen = [reader.line(line, 0.0) for line in written.getvalue().splitlines()]
    assert [
        (one.kind, one.text) for one in seen if one and one.kind is not Kind.QUIET
    ] == [
        (Kind.PHASE, "loading"),
        (Kind.SHOW, "ERROR tokenwire.test: it is lost"),
        (Kind.SHOW, "ERROR tokenwire.test: failed ValueError: why"),
    ]
    assert reader.line('{"time": no json', 0.0) is not None


def test_a_supervisor_reads_our_tracebacks() -> None:
    """They are indented: what follows them is judged by itself."""
    with logged("text") as written:
        try:
            fail("why")
        except ValueError:
            _log.exception("failed")
        _log.info("chatter")
    reader = OutputReader()
    seen = [reader.line(line, 0.0) for line in written.getvalue().splitlines()]
    kinds = [one.kind for one in seen if one]
    assert kinds[-1] is Kind.QUIET
    assert set(kinds[:-1]) == {Kind.SHOW}
