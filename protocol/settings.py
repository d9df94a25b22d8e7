"""Command-line options that can also be environment variables; errors in a sentence."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from .keys import KeyFiles

__all__ = [
    "SettingsParser",
    "add_key_options",
    "host_and_port",
    "key_files",
    "port",
    "port_or_off",
    "seconds",
    "tcp_endpoint",
    "truth",
    "whole_number",
]

PREFIX = "TOKENWIRE_"

MAX_PORT = 65_535
"""Ports have 16 bits."""

MAX_SECONDS = 1e6
"""Eleven days: event loops count in milliseconds and C integers, not in for ever."""


class SettingsParser(argparse.ArgumentParser):
    """An ``ArgumentParser`` whose every long option also reads ``TOKENWIRE_<NAME>``.

    The command line wins over the environment, also over an option that excludes it.
    A repeatable option takes a comma-separated list from its variable. A bad value,
    wherever it came from, ends the process with one sentence on stderr and exit code 2.
    """

    def __init__(self, *positional: Any, **options: Any) -> None:
        # An abbreviation that works today is ambiguous after the next option.
        options.setdefault("allow_abbrev", False)
        options.setdefault("formatter_class", _VariableInHelp)
        super().__init__(*positional, **options)
        self._variables: dict[str, str] = {}  # long option: the variable it came from

    def parse_settings(
        self, arguments: Sequence[str] | None = None
    ) -> argparse.Namespace:
        """Return the settings from *arguments* (default: ``sys.argv``) and environment.

        Raises:
            SystemExit: 2 on a bad value, 0 after ``--help`` or ``--version``.
        """
        given = list(sys.argv[1:] if arguments is None else arguments)
        options = given[: given.index("--")] if "--" in given else given
        decided = {option.split("=", 1)[0] for option in options}
        for group in self._mutually_exclusive_groups:
            names = {
                o for action in group._group_actions for o in action.option_strings
            }
            if names & decided:
                decided |= names
        self._variables.clear()
        from_environment: list[str] = []
        for action in self._actions:
            variable = _variable(action)
            value = os.environ.get(variable, "") if variable else ""
            if not value or decided.intersection(action.option_strings):
                continue
            long = _long(action)
            self._variables[long] = variable
            from_environment += self._as_arguments(action, long, value)
        return self.parse_args(from_environment + given)

    def error(self, message: str) -> NoReturn:
        """End the process with one sentence and exit code 2."""
        for long, variable in self._variables.items():
            if message.startswith(f"argument {long}:"):
                message = f"{variable}{message.removeprefix(f'argument {long}')}"
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def _as_arguments(
        self, action: argparse.Action, long: str, value: str
    ) -> list[str]:
        """Return what *value*, from the environment, would be on the command line."""
        if isinstance(action, argparse.BooleanOptionalAction):
            on, off = long, f"--no-{long[2:]}"
            return [on if self._truth(long, value) else off]
        if action.nargs == 0:
            return [long] if self._truth(long, value) else []
        if isinstance(action, argparse._AppendAction):  # pyright: ignore[reportPrivateUsage] - no public name
            parts = [part.strip() for part in value.split(",")]
            return [f"{long}={part}" for part in parts if part]
        return [f"{long}={value}"]

    def _truth(self, long: str, value: str) -> bool:
        try:
            return truth(value)
        except ValueError as error:
            self.error(f"argument {long}: {error}")


class _VariableInHelp(argparse.HelpFormatter):
    """Names each option's variable behind its help."""

    def _get_help_string(self, action: argparse.Action) -> str:
        variable = _variable(action)
        return f"{action.help or ''} [{variable}]" if variable else action.help or ""


def _long(action: argparse.Action) -> str:
    return next((o for o in action.option_strings if o.startswith("--")), "")


def _variable(action: argparse.Action) -> str:
    """Return the variable that sets *action*, or nothing if none does.

    ``--help`` and ``--version`` have none: images and charts set ``TOKENWIRE_VERSION``
    to a number of their own.
    """
    long = _long(action)
    if not long or action.dest in {"help", "version"}:
        return ""
    return PREFIX + long[2:].upper().replace("-", "_")


def add_key_options(parser: SettingsParser, peer_keys: str, peers: str) -> None:
    """Add the options of secure links; *peer_keys* is the one for the *peers*' keys."""
    add = parser.add_argument
    add(
        "--curve-secret-key",
        default="",
        metavar="FILE",
        help="this process's secret key, as tokenwire-keys makes it: links are encrypted",
    )
    add(peer_keys, default="", metavar="FILE", dest="peer_keys", help=peers)
    add(
        "--insecure-plaintext",
        action="store_true",
        help="allow links in plain text beyond this machine",
    )


def key_files(parser: SettingsParser, settings: argparse.Namespace) -> KeyFiles:
    """Return what was given for ``add_key_options``.

    Raises:
        SystemExit: 2 after one sentence, if the options contradict each other.
    """
    files = KeyFiles(
        settings.curve_secret_key, settings.peer_keys, settings.insecure_plaintext
    )
    if bool(files.secret_key) != bool(files.peer_keys):
        option = next(
            action.option_strings[0]
            for action in parser._actions
            if action.dest == "peer_keys"
        )
        parser.error(f"give both --curve-secret-key and {option}, or neither")
    if files.secret_key and files.insecure_plaintext:
        parser.error("--insecure-plaintext contradicts --curve-secret-key")
    return files


def truth(value: str) -> bool:
    """Return a boolean from its usual spellings.

    Raises:
        ValueError: It is none of them.
    """
    lowered = value.strip().lower()
    if lowered in {"1", "true", "yes", "on"}:
        return True
    if lowered in {"0", "false", "no", "off"}:
        return False
    msg = f"invalid boolean value: {value!r}"
    raise ValueError(msg)


def whole_number(minimum: int) -> Callable[[str], int]:
    """Return the reader of an option that is a whole number from *minimum* up."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            msg = f"{text!r} is not a whole number from {minimum} up"
            raise argparse.ArgumentTypeError(msg)
        return int(text)

    return read


def port(text: str) -> int:
    """Return the TCP port in *text*; 0 stands for any free one.

    Raises:
        ArgumentTypeError: It is none.
    """
    if not text.isdecimal() or int(text) > MAX_PORT:
        msg = f"{text!r} is not a port (0..{MAX_PORT})"
        raise argparse.ArgumentTypeError(msg)
    return int(text)


def port_or_off(text: str) -> int | None:
    """Return the TCP port in *text*, None for ``off``.

    Raises:
        ArgumentTypeError: It is neither.
    """
    if text == "off":
        return None
    try:
        return port(text)
    except argparse.ArgumentTypeError as error:
        msg = f"{error} or off"
        raise argparse.ArgumentTypeError(msg) from None


def tcp_endpoint(text: str) -> str:
    """Return *text*, which says where a worker listens.

    Raises:
        ArgumentTypeError: It is no ``tcp://HOST:PORT``.
    """
    host, _, number = text.removeprefix("tcp://").rpartition(":")
    is_port = number.isdecimal() and 0 < int(number) <= MAX_PORT
    if not text.startswith("tcp://") or not host or not is_port:
        msg = f"{text!r} is not an endpoint like tcp://127.0.0.1:5555"
        raise argparse.ArgumentTypeError(msg)
    return text


def host_and_port(text: str) -> tuple[str, int]:
    """Return the host and the TCP port in *text*; 0 stands for any free one.

    Raises:
        ArgumentTypeError: It is no ``HOST:PORT``.
    """
    host, _, number = text.rpartition(":")
    if not host:
        msg = f"{text!r} is not HOST:PORT"
        raise argparse.ArgumentTypeError(msg)
    return host.strip("[]"), port(number)


def seconds(*, zero: bool = False) -> Callable[[str], float]:
    """Return the reader of an option that is a duration; *zero*: it may be 0."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not (0 < value < MAX_SECONDS or (zero and value == 0)):
            bound = "from 0 up" if zero else "above 0"
            msg = f"{text!r} is not a number of seconds {bound}"
            raise argparse.ArgumentTypeError(msg)
        return value

    return read
