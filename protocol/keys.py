"""CURVE keys in files, and where messages may go without them.

A line of a key file is a key in Z85 (RFC 32 of ZeroMQ, 40 characters) and, behind a
space, whatever the operator wants to note. A line that begins with ``#`` is a comment:
no key does, since that letter would make its first number larger than 32 bits.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from .files import UnusableFile, read_file
from .watched import Watched

__all__ = [
    "INSECURE",
    "Key",
    "KeyFiles",
    "KeyList",
    "abbreviated",
    "key_lines",
    "read_secret_key",
    "stays_here",
]

_log = logging.getLogger(__name__)

INSECURE = (
    "--insecure-plaintext: the links between frontends and workers are neither encrypted "
    "nor authenticated. Whoever reaches them can use the engines and read every prompt"
)
"""What both sides say loudly when they start so."""

KEY_CHARS = 40
"""32 bytes in Z85."""

_KIND = "key file"

MAX_KEY_FILE_BYTES = 1024 * 1024
"""Some 10,000 keys with a note each: ten times the frontends that a worker takes."""

_DIGITS = {
    digit: value
    for value, digit in enumerate(
        "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
        ".-:+=^!/*?&<>()[]{}@%$#"
    )
}
_GROUP_CHARS = 5  # of Z85, for four bytes
_GROUP_LIMIT = 2**32


@dataclass(slots=True, frozen=True)
class Key:
    """One line of a key file."""

    z85: str
    note: str = ""


@dataclass(slots=True, frozen=True)
class KeyFiles:
    """What the operator has set: both files or neither."""

    secret_key: str = ""  # path of this process's
    peer_keys: str = ""  # path of the public keys of those it speaks to
    insecure_plaintext: bool = False

    @property
    def is_plaintext(self) -> bool:
        """Whether the links are not encrypted."""
        return not self.secret_key


class KeyList:
    """The keys in a file, read again when it has changed."""

    def __init__(self, path: str) -> None:
        """Read *path*.

        Raises:
            UnusableFile: It cannot be read, or holds something else.
        """
        self.path = path
        self._file = Watched(_KIND, [path], partial(_read_keys, path))
        self.keys = self._file.read()

    def refresh(self) -> bool:
        """Look at the file; return whether other keys count now.

        To allow nobody, empty the file: one that cannot be used changes nothing.
        """
        keys = self._file.changed()
        if keys is None or keys == self.keys:
            return False
        self.keys = keys
        _log.info("%s has changed: %d keys", self.path, len(keys))
        return True


def read_secret_key(path: str) -> str:
    """Return the one key in *path*.

    Raises:
        UnusableFile: It cannot be read, or does not hold exactly one key.
    """
    keys = _read_keys(path)
    if len(keys) != 1:
        msg = f"{path} holds {len(keys)} keys, a secret key file holds one"
        raise UnusableFile(msg)
    if os.stat(path).st_mode & stat.S_IROTH:
        _log.warning("%s can be read by every user: chmod 600 %s", path, path)
    return keys[0].z85


def abbreviated(z85: str) -> str:
    """Return as much of a public key as a person needs to find it in a file."""
    return f"{z85[:8]}..."


def stays_here(endpoint: str) -> bool:
    """Return whether what is sent to *endpoint* never leaves this machine."""
    scheme, _, address = endpoint.partition("://")
    if scheme != "tcp":
        return scheme in {"ipc", "inproc"}
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name: it may be anybody's


def key_lines(data: bytes) -> Iterator[tuple[int, str]]:
    """Yield the lines of a key file with their numbers; no empty ones, no comments."""
    for number, line in enumerate(data.decode(errors="replace").splitlines(), 1):
        text = line.strip()
        if text and not text.startswith("#"):
            yield number, text


def _read_keys(path: str) -> tuple[Key, ...]:
    keys: list[Key] = []
    for number, text in key_lines(read_file(_KIND, path, MAX_KEY_FILE_BYTES)):
        z85, _, note = text.partition(" ")
        if not _is_key(z85):
            # Without the line itself: it may be a secret key with a typing error.
            msg = f"line {number} of {path} is neither a key nor a comment"
            raise UnusableFile(msg)
        keys.append(Key(z85, note.strip()))
    return tuple(keys)


def _is_key(text: str) -> bool:
    if len(text) != KEY_CHARS:
        return False
    for start in range(0, KEY_CHARS, _GROUP_CHARS):
        value = 0
        for char in text[start : start + _GROUP_CHARS]:
            digit = _DIGITS.get(char)
            if digit is None:
                return False
            value = value * len(_DIGITS) + digit
        if value >= _GROUP_LIMIT:
            return False
    return True
