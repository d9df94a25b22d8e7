"""What a frontend tells its operator: logs, a line for each request, traces."""

from __future__ import annotations

import argparse

import msgspec

from tokenwire.protocol.logs import LogSettings, add_log_options, log_settings
from tokenwire.protocol.settings import SettingsParser
from tokenwire.protocol.tracing import (
    TraceSettings,
    add_trace_options,
    trace_settings,
)

__all__ = ["Observability", "add_observability_options", "observability"]


class Observability(msgspec.Struct, frozen=True):
    """What is told."""

    logs: LogSettings
    traces: TraceSettings
    access_log: bool
    log_prompts: bool


def add_observability_options(parser: SettingsParser) -> None:
    """Add the options."""
    add_log_options(parser)
    add = parser.add_argument
    add(
        "--access-log",
        action="store_true",
        help="log a line for each request at its end, without what was asked or answered",
    )
    add(
        "--log-prompts",
        action="store_true",
        help="log what clients ask, too, to be read by all who can read the log",
    )
    add_trace_options(parser)


def observability(parser: SettingsParser, given: argparse.Namespace) -> Observability:
    """Return what was given for ``add_observability_options``.

    Raises:
        SystemExit: 2 after one sentence, see ``trace_settings``.
    """
    return Observability(
        logs=log_settings(given),
        traces=trace_settings(parser, given),
        access_log=given.access_log,
        log_prompts=given.log_prompts,
    )
