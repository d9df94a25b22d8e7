"""``tokenwire-keys api``: makes the API key of a client."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from tokenwire.protocol.api_keys import (
    LIMITS,
    MAX_LIMIT,
    NAME_FORM,
    ApiKey,
    KeyLimits,
    digest_of,
    line_of,
    make_key,
    read_api_keys,
)
from tokenwire.protocol.files import UnusableFile
from tokenwire.protocol.settings import SettingsParser

__all__ = ["add_key", "main"]

MODE = 0o600
"""Of a new file. Hashes tell nothing, but names do."""


_TEXTS = {
    "requests-per-minute": "requests that it may send",
    "tokens-per-minute": "tokens that it may use, prompts and outputs together",
    "concurrency": "requests that it may have under way",
    "urgency": "how far below 0 the priority of its requests may be",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the key that the command line asks for, and print it, once.

    Raises:
        SystemExit: 1 if the file cannot be read or written, 2 on a bad setting.
    """
    parser = SettingsParser(
        prog="tokenwire-keys api",
        description="Make an API key for a client. It is printed here and nowhere else; "
        "its hash is added to a file, for --api-keys of the frontends.",
    )
    add = parser.add_argument
    add("name", type=_name, metavar="NAME", help="whose: in limits, metrics and logs")
    add(
        "--file",
        default="api-keys",
        metavar="FILE",
        help="where its hash is added (default: %(default)s)",
    )
    for word, text in _TEXTS.items():
        default = "0" if word == "urgency" else "no limit"
        help_text = f"{text} (default: {default})"
        add(f"--{word}", type=_limit, default=0, metavar="N", help=help_text)
    given = parser.parse_settings(arguments)
    limits = KeyLimits(**{name: getattr(given, name) for name in LIMITS.values()})
    try:
        print(add_key(Path(given.file), given.name, limits))
    except UnusableFile as error:
        sys.exit(f"tokenwire-keys: {error}")
    except OSError as error:
        sys.exit(f"tokenwire-keys: {given.file}: {error.strerror or error}")


def add_key(path: Path, name: str, limits: KeyLimits) -> str:
    """Add the line of a new key to the file *path*; return the key.

    A name that is there already keeps its limits if none are given.

    Raises:
        UnusableFile: The file holds something else, or the name with other limits.
        OSError: It cannot be written.
    """
    there = read_api_keys(str(path)) if path.exists() else ()
    had = next((one.limits for one in there if one.name == name), None)
    if had is not None and limits == KeyLimits():
        limits = had
    if had is not None and limits != had:
        msg = (
            f"{path} has {name} with other limits: change them there, then add the key"
        )
        raise UnusableFile(msg)
    key = make_key()
    line = f"{line_of(ApiKey(name, digest_of(key), limits))}\n"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, MODE)
    with os.fdopen(descriptor, "r+b", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        if end and os.pread(descriptor, 1, end - 1) != b"\n":
            line = f"\n{line}"
        file.write(line.encode())  # at once: a frontend may be reading
    return key


def _name(text: str) -> str:
    if re.fullmatch(NAME_FORM, text) is None:
        msg = f"{text!r} is not a name of letters, digits, '.', '_' and '-', 64 at most"
        raise argparse.ArgumentTypeError(msg)
    return text


def _limit(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= MAX_LIMIT:
        msg = f"{text!r} is not a whole number from 1 up"
        raise argparse.ArgumentTypeError(msg)
    return int(text)
