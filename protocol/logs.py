"""The log of a process: which options it has, what its lines say, how they are written.

Laws:
- A line is about one record: what a client has chosen cannot begin another one. Text has
  whatever is not printable escaped, and indents what follows a message; JSON escapes.
- No prompt, no output and no key is in a line, unless ``--log-prompts`` asks for it.
- A line that is said too often is left out and counted.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from argparse import Namespace
from collections.abc import Generator, Mapping
from contextvars import ContextVar
from types import TracebackType
from typing import Any, NoReturn

import msgspec

from .log_lines import JsonLines, TextLines
from .log_rate import RateLimit
from .restart import BAD_SETTINGS
from .settings import SettingsParser

__all__ = [
    "ABOUT",
    "LogSettings",
    "about",
    "add_log_options",
    "end_for_setting",
    "exits_as_lines",
    "is_json",
    "log_as",
    "log_settings",
]

ABOUT: ContextVar[Mapping[str, str] | None] = ContextVar("about", default=None)
"""What lines are about that a request's own task writes: ``request_id``, ``trace_id``."""

LEVELS = ("debug", "info", "warning", "error")


class LogSettings(msgspec.Struct, frozen=True):
    """How a process logs."""

    format: str = "text"  # or "json"
    level: str = "info"


def add_log_options(parser: SettingsParser) -> None:
    """Add the options that all processes have."""
    add = parser.add_argument
    add(
        "--log-format",
        default="text",
        choices=["text", "json"],
        help="lines for people, or one JSON object a line (default: %(default)s)",
    )
    add(
        "--log-level",
        default="info",
        choices=LEVELS,
        help="the least severe lines that are logged (default: %(default)s)",
    )


def log_settings(given: Namespace) -> LogSettings:
    """Return what was given for ``add_log_options``."""
    return LogSettings(given.log_format, given.log_level)


def about(fields: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the ``extra`` of a line about something else than the task that writes it.

    Args:
        fields: What it is about; None: what the task is about.
    """
    return {"fields": fields}


def log_as(
    settings: LogSettings, text_format: str, fields: Mapping[str, str] | None = None
) -> None:
    """Log to standard error, in place of whatever was set before.

    Args:
        settings: How.
        text_format: Of a line of text.
        fields: In each line of JSON: who writes it.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_about_its_task)
    handler.addFilter(RateLimit())
    if settings.format == "json":
        handler.setFormatter(JsonLines(fields or {}))
        logging.captureWarnings(capture=True)
        sys.excepthook = _log_uncaught
        threading.excepthook = _log_uncaught_of_thread
    else:
        handler.setFormatter(TextLines(text_format))
    logging.basicConfig(handlers=[handler], level=settings.level.upper(), force=True)


def is_json() -> bool:
    """Return whether this process writes JSON."""
    return any(isinstance(one.formatter, JsonLines) for one in logging.root.handlers)


@contextlib.contextmanager
def exits_as_lines(logger: logging.Logger) -> Generator[None]:
    """Have a sentence that ends the process be a line of its log, where that is JSON."""
    try:
        yield
    except SystemExit as error:
        if not isinstance(error.code, str) or not is_json():
            raise
        logger.critical("%s", error.code)
        raise SystemExit(1) from None


def end_for_setting(logger: logging.Logger, sentence: str) -> NoReturn:
    """End the process for what is wrong with its settings, or with a file that they name.

    By the exit code of the option parser, so that nobody starts it again for nothing.

    Raises:
        SystemExit: ``BAD_SETTINGS``, behind the sentence.
    """
    if is_json():
        logger.critical("%s", sentence)
    else:
        sys.stderr.write(f"{sentence}\n")
    sys.exit(BAD_SETTINGS)


def _about_its_task(record: logging.LogRecord) -> bool:
    """Note what a record is about, unless it says so itself; for a handler."""
    if getattr(record, "fields", None) is None:
        record.fields = ABOUT.get()
    return True


def _log_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    logging.getLogger("tokenwire").critical(
        "an error ends the process", exc_info=(kind, error, trace)
    )


def _log_uncaught_of_thread(arguments: threading.ExceptHookArgs) -> None:
    error = arguments.exc_value
    if error is not None:
        logging.getLogger("tokenwire").error("a thread has failed", exc_info=error)
