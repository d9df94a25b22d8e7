"""The key of the admin plane: where it comes from, and whether a request has it."""

from __future__ import annotations

import hmac
import os

from tokenwire.protocol.files import UnusableFile, read_file

from .bearer import bearer_or_not

__all__ = ["KEY_VARIABLE", "AdminKey"]

KEY_VARIABLE = "TOKENWIRE_ADMIN_KEY"
"""The key itself. There is no option for it: command lines are there for all to read."""

MIN_KEY_CHARS = 16
"""Shorter ones can be guessed; 16 characters of hexadecimal are 64 bits."""

MAX_KEY_BYTES = 4_096
"""Of a key file; what is longer is another file."""


class AdminKey:
    """A key that requests must have; none, and all that arrives on loopback may."""

    def __init__(self, key: str | None) -> None:
        self._key = None if key is None else key.encode()

    @classmethod
    def read(cls, path: str | None) -> AdminKey:
        """Return the key in the file *path*, else the variable's, else none.

        Raises:
            UnusableFile: The file cannot be read, or by everyone; or the key is too short.
        """
        source, key = KEY_VARIABLE, os.environ.get(KEY_VARIABLE) or None
        if path is not None:
            source = path
            data = read_file("admin key file", path, MAX_KEY_BYTES, denied="r")
            try:
                key = data.decode().strip()
            except UnicodeDecodeError as error:
                msg = f"the admin key in {path} is no text"
                raise UnusableFile(msg) from error
        if key is not None and not MIN_KEY_CHARS <= len(key) <= MAX_KEY_BYTES:
            msg = f"the admin key in {source} must have {MIN_KEY_CHARS} characters or more"
            raise UnusableFile(msg)
        return cls(key)

    @property
    def is_set(self) -> bool:
        """Whether there is one."""
        return self._key is not None

    def fits(self, authorization: str | None) -> bool:
        """Return whether the header *authorization* has the key, in constant time."""
        if self._key is None:
            return True
        given, is_bearer = bearer_or_not(authorization)
        # Compared in any case, so that time tells nothing.
        is_same = hmac.compare_digest(given.encode(errors="surrogateescape"), self._key)
        return is_same and is_bearer
