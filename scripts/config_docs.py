"""Write the tables of docs/configuration.md: every option of every command.

`make docs` runs this. The parsers are the commands' own, caught when they are about to
read the command line, so that the page cannot say anything else than they do.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from unittest import mock

from table import replaced

from tokenwire.deploy.api_keys import main as make_api_key
from tokenwire.deploy.keys import main as make_keys
from tokenwire.deploy.up import main as up
from tokenwire.frontend.config import parse_config as frontend
from tokenwire.protocol.settings import SettingsParser
from tokenwire.worker.config import parse_config as worker
from tokenwire.worker.sim.options import parse_options as simulated

__all__ = ["COMMANDS", "PAGE", "options", "parser_of", "rendered"]

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"

COMMANDS: dict[str, Callable[[Sequence[str]], object]] = {
    "tokenwire-frontend": frontend,
    "tokenwire-worker": worker,
    "tokenwire-worker --engine sim --": simulated,
    "tokenwire-up": up,
    "tokenwire-keys": make_keys,
    "tokenwire-keys api": make_api_key,
}

SECTIONS = {
    "Model and address": "model|served-model-name|weight-version|host|port|reuse-port|processes"
    "|frontend-id|worker-id|engine|engine-args|role|listen|announce|start-timeout-s",
    "How many of what": "prefill|decode|aggregated|frontends",
    "Where workers are": "worker|workers-file|workers-dns",
    "Keys of the links": "curve.*|insecure-plaintext",
    "Access and TLS": "(api-key|tls|cors|allowed-host|client-ca|max-(header|connection|requests-per)).*",
    "How much at once": "(max-(inflight|queue|body|requests|queued)|queue-at).*",
    "Timeouts": "(?!admin).*-(timeout|interval|wait)-s",
    "Who computes what": "(remote-prefill|routing|kv-index|kv-events).*",
    "What requests may ask": "token-ids-placement|unknown-fields|trust-request.*",
    "Tools and reasoning": ".*(tool|reasoning).*",
    "Admin plane": "(admin|during-update|while-paused).*",
    "Resumable generations": "(resume|checkpoint|journal|exact-resume).*",
    "Hidden states": "capture.*",
    "Logs, metrics and traces": "(.*log|metrics|goodput|otel|otlp|trac|(no-)?ui).*",
}
"""Where options stand on the page, by their names; all others stand last. A section's
place is the first whose pattern fits, so narrow ones go before wide ones."""

OTHERS = "others"

FEW = 30
"""Options that fit into one table, in the parser's own order."""

_DEFAULT = re.compile(r"\s*\(default: (.*?)\)(?=$|[.;,])", re.DOTALL)


class _Caught(Exception):
    """Ends a command at the point where it would read its command line."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__(parser.prog)
        self.parser = parser


def parser_of(command: str) -> argparse.ArgumentParser:
    """Return the parser of *command*, one of ``COMMANDS``.

    Raises:
        AssertionError: It reads no command line.
    """

    def caught(self: argparse.ArgumentParser, *_: object) -> argparse.Namespace:
        raise _Caught(self)

    with (
        mock.patch.object(SettingsParser, "parse_settings", caught),
        mock.patch.object(argparse.ArgumentParser, "parse_args", caught),
    ):
        try:
            COMMANDS[command]([])
        except _Caught as found:
            return found.parser
    msg = f"{command} reads no command line"
    raise AssertionError(msg)


def options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return what *parser* takes, ``--help`` aside."""
    return [action for action in parser._actions if action.dest != "help"]


def rendered() -> str:
    """Return the page with its tables as they should be."""
    page = PAGE.read_text()
    for command in COMMANDS:
        page = replaced(page, command, tables(command))
    return page


def tables(command: str) -> str:
    """Return the options of *command* by section."""
    parser = parser_of(command)
    has_variables = isinstance(parser, SettingsParser)
    actions = options(parser)
    if len(actions) < FEW:
        return _table(actions, has_variables=has_variables)
    by_section: dict[str, list[argparse.Action]] = {}
    for action in actions:
        by_section.setdefault(_section(action), []).append(action)
    return "\n".join(
        f"### {command}: {name[0].lower()}{name[1:]}\n\n"
        + _table(by_section[name], has_variables=has_variables)
        for name in (*SECTIONS, OTHERS)
        if name in by_section
    )


def _section(action: argparse.Action) -> str:
    name = _long(action).removeprefix("--")
    for section, pattern in SECTIONS.items():
        if re.fullmatch(pattern, name):
            return section
    return OTHERS


def _long(action: argparse.Action) -> str:
    return next((o for o in action.option_strings if o.startswith("--")), "")


def _table(actions: Iterable[argparse.Action], *, has_variables: bool) -> str:
    variable = ("variable",) if has_variables else ()
    head: tuple[str, ...] = ("option", *variable, "default", "what it does")
    lines = [head, tuple("---" for _ in head)]
    for action in actions:
        default, text = _default(action)
        row = (_usage(action), *([_variable(action)] if has_variables else []), default)
        lines.append((*row, text))
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def _usage(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"`{action.metavar or action.dest}`"
    strings = ", ".join(f"`{option}`" for option in action.option_strings)
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        return strings
    value = action.metavar or _long(action).rpartition("-")[2].upper()
    if action.choices:
        value = "|".join(map(str, action.choices))
    return _cell(f"{strings[:-1]} {value}`")


def _variable(action: argparse.Action) -> str:
    long = _long(action)
    if not long or action.dest == "version":
        return ""
    return f"`TOKENWIRE_{long[2:].upper().replace('-', '_')}`"


def _default(action: argparse.Action) -> tuple[str, str]:
    """Return the default and what is left of the help."""
    text = (action.help or "") % {
        **vars(action),
        "default": action.default,
        "prog": "",
    }
    told = _DEFAULT.search(text)
    text = _DEFAULT.sub("", text).strip()
    if told:
        default = told[1]
    elif action.required:
        default = "required"
    elif action.nargs == 0:
        default = "off"
    else:
        default = "" if action.default in (None, "", (), []) else str(action.default)
    if default.isdecimal() and len(default) > 4:
        default = f"{int(default):,}"
    if re.match(r"[a-z]+[ ,;:]", text):
        text = f"{text[0].upper()}{text[1:]}"
    return _cell(default.removesuffix(".0")), _cell(f"{text}." if text else "")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> None:
    """Write the page."""
    PAGE.write_text(rendered())


if __name__ == "__main__":
    main()
