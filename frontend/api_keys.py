"""Whether a request has one of the operator's API keys.

Laws:
- Every key of the file is compared, in constant time, whatever was given.
- A file that has become unusable changes nothing; an empty one lets nobody in.
"""

from __future__ import annotations

import hmac
import logging
from functools import partial

from tokenwire.protocol.api_keys import (
    API_KEY_FILE,
    ApiKey,
    digest_of,
    read_api_keys,
)
from tokenwire.protocol.watched import LOOK_S, Watched

from .bearer import bearer

__all__ = ["ApiKeys"]

_log = logging.getLogger(__name__)


class ApiKeys:
    """The keys in a file, read again when it has changed."""

    def __init__(self, path: str) -> None:
        """Read *path*.

        Raises:
            UnusableFile: It cannot be used.
        """
        self.path = path
        self._file = Watched(API_KEY_FILE, [path], partial(read_api_keys, path))
        self._keys = self._file.read()

    def verified(self, authorization: str | None) -> ApiKey | None:
        """Return whose key the header *authorization* has; None: no key of ours."""
        self.refresh(LOOK_S)
        given = bearer(authorization)
        digest = digest_of(given)
        found: ApiKey | None = None
        for key in self._keys:  # all of them, so that time tells nothing
            if hmac.compare_digest(digest, key.digest):
                found = key
        return found if given else None

    def refresh(self, every_s: float = 0.0) -> None:
        """Read the file again if it has changed; see ``Watched.changed``."""
        keys = self._file.changed(every_s)
        if keys is not None:
            self._keys = keys
            _log.info("%s has changed: %d API keys", self.path, len(keys))
