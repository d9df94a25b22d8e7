"""The file of API keys: names, hashes and limits, as frontends read and a command writes it.

A line is ``NAME SHA256 [requests-per-minute=N] [tokens-per-minute=N] [concurrency=N]
[urgency=N]``; one that begins with ``#`` is a comment. A name may have several lines, so that its key can be
changed: they have the same limits, and share them.

Law: no key is kept in it. A key has 256 bits of chance, so that a plain hash of it cannot
be guessed backwards.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass, field

from .files import UnusableFile, read_file
from .keys import key_lines

__all__ = [
    "API_KEY_FILE",
    "LIMITS",
    "MAX_LIMIT",
    "NAME_FORM",
    "ApiKey",
    "KeyLimits",
    "digest_of",
    "line_of",
    "make_key",
    "read_api_keys",
]

API_KEY_FILE = "API key file"

PREFIX = "tw-"
"""Of every key: who finds one in a log or a repository sees what it is."""

KEY_BYTES = 32
"""Of chance."""

NAME_FORM = r"[A-Za-z0-9._-]{1,64}"
"""It is a label of metrics, and stands in logs."""

MAX_KEYS = 1_024
"""Each is compared for every request, some 0.06 us: more tenants want a gateway."""

MAX_FILE_BYTES = 1024 * 1024
"""1,024 bytes a key, of which a line takes 70 to 150; what is longer is another file."""

MAX_LIMIT = 10**12
"""Of a limit: far above what any machine does."""

_LINE = re.compile(rf"({NAME_FORM}) ([0-9a-fA-F]{{64}})")


@dataclass(slots=True, frozen=True)
class KeyLimits:
    """What a key may use; 0: as much as there is."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0  # of prompts and outputs
    concurrency: int = 0  # requests being served at once
    urgency: int = 0  # how far below 0 its ``priority`` may be; here 0 is none


LIMITS = {
    "requests-per-minute": "requests_per_minute",
    "tokens-per-minute": "tokens_per_minute",
    "concurrency": "concurrency",
    "urgency": "urgency",
}
"""The words of a line, and the fields of ``KeyLimits``."""


@dataclass(slots=True, frozen=True)
class ApiKey:
    """One line."""

    name: str
    digest: bytes = field(repr=False)  # SHA-256 of the key
    limits: KeyLimits = KeyLimits()


def make_key() -> str:
    """Return a new key."""
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def digest_of(key: str) -> bytes:
    """Return what is kept of a key, or of what a client gives for one."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def line_of(key: ApiKey) -> str:
    """Return the line of a key, without its end."""
    values = ((word, getattr(key.limits, name)) for word, name in LIMITS.items())
    words = [key.name, key.digest.hex()]
    return " ".join([*words, *(f"{word}={value}" for word, value in values if value)])


def read_api_keys(path: str) -> tuple[ApiKey, ...]:
    """Return the keys in the file *path*.

    Raises:
        UnusableFile: It cannot be read, or may be written by everyone, or holds
            something else.
    """
    data = read_file(API_KEY_FILE, path, MAX_FILE_BYTES, denied="w")
    keys: list[ApiKey] = []
    limits: dict[str, KeyLimits] = {}
    for number, text in key_lines(data):
        where = f"line {number} of {path}"
        key = _key(where, text)
        if limits.setdefault(key.name, key.limits) != key.limits:
            msg = f"{where} has other limits than {key.name} has above"
            raise UnusableFile(msg)
        keys.append(key)
    if len(keys) > MAX_KEYS:
        msg = f"{path} holds {len(keys)} API keys, and may hold {MAX_KEYS}"
        raise UnusableFile(msg)
    return tuple(keys)


def _key(where: str, text: str) -> ApiKey:
    words = text.split()
    line = _LINE.fullmatch(" ".join(words[:2]))
    if line is None:
        # Without the line itself: it may be a key that somebody forgot to hash.
        msg = f"{where} is not NAME SHA256, as `tokenwire-keys api NAME` writes it"
        raise UnusableFile(msg)
    limits: dict[str, int] = {}
    for word in words[2:]:
        name, _, value = word.partition("=")
        if name not in LIMITS or not _is_limit(value):
            known = ", ".join(f"{one}=N" for one in LIMITS)
            msg = f"{where}: behind the hash may stand {known}, with N from 1 up"
            raise UnusableFile(msg)
        limits[LIMITS[name]] = int(value)
    return ApiKey(line[1], bytes.fromhex(line[2]), KeyLimits(**limits))


def _is_limit(text: str) -> bool:
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(MAX_LIMIT))
    return is_number and 0 < int(text) <= MAX_LIMIT
