"""Whether a request has one of the operator's API keys.

Laws:
- Every key of the file is compared, in constant time, whatever was given.
- A file that has become unusable changes nothing; an empty one lets nobody in.
"""

from __future__ import annotations

import hmac
import logging
import time

from tokenwire.protocol.api_keys import ApiKey, digest_of, read_api_keys
from tokenwire.protocol.keys import KeyFileError, file_version

__all__ = ["ApiKeys", "bearer"]

_log = logging.getLogger(__name__)

LOOK_S = 1.0
"""How often the file is looked at, while requests come: a revoked key is out so soon."""

_SCHEME = "bearer"


class ApiKeys:
    """The keys in a file, read again when it has changed."""

    def __init__(self, path: str) -> None:
        """Read *path*.

        Raises:
            KeyFileError: It cannot be used.
        """
        self.path = path
        self._complaint = ""
        self._looked_at = time.monotonic()
        self._seen = _version(path)
        self._keys = read_api_keys(path)

    def verified(self, authorization: str | None) -> ApiKey | None:
        """Return whose key the header *authorization* has; None: no key of ours."""
        now = time.monotonic()
        if now - self._looked_at >= LOOK_S:
            self._looked_at = now
            self.refresh()
        given = bearer(authorization)
        digest = digest_of(given)
        found: ApiKey | None = None
        for key in self._keys:  # all of them, so that time tells nothing
            if hmac.compare_digest(digest, key.digest):
                found = key
        return found if given else None

    def refresh(self) -> None:
        """Read the file again if it has changed."""
        try:
            version = _version(self.path)
            if version == self._seen:
                return
            keys = read_api_keys(self.path)
        except KeyFileError as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                _log.error("%s; the API keys read before stay in use", error)
            return
        self._seen, self._complaint = version, ""
        self._keys = keys
        _log.info("%s has changed: %d API keys", self.path, len(keys))


def bearer(authorization: str | None) -> str:
    """Return the key in the header *authorization*, right or wrong; empty: none."""
    scheme, _, given = (authorization or "").partition(" ")
    return given.strip() if scheme.lower() == _SCHEME else ""


def _version(path: str) -> tuple[int, int, int]:
    try:
        return file_version(path)
    except OSError as error:
        msg = f"the API keys {path}: {error.strerror or error}"
        raise KeyFileError(msg) from error
