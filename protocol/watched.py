"""Files of the operator's, read again when they have changed.

Laws:
- One that has become unusable changes nothing: what was read before stays in use, so that
  a slip of the pen does not stop a cluster.
- What is wrong with it is said once; that it is over, too.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from .files import UnusableFile, Version, version_of

__all__ = ["LOOK_S", "Watched"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_S = 1.0
"""How often a file is looked at for requests or connections, however many come: what is
struck off it is out so soon."""


class Watched(Generic[T]):
    """Files that are read again when one of them has changed.

    Args:
        kind: What they are, as in ``key file``.
        paths: All that *load* reads.
        load: Returns what they hold; raises ``UnusableFile``.
    """

    def __init__(self, kind: str, paths: Sequence[str], load: Callable[[], T]) -> None:
        self._kind = kind
        self._paths = paths
        self._load = load
        self._seen: list[Version] | None = None
        self._looked_at = -math.inf
        self._complaint = ""

    def read(self) -> T:
        """Return what the files hold.

        Raises:
            UnusableFile: One of them cannot be used.
        """
        self._looked_at = time.monotonic()
        # Looked at first: what changes while it is read is read again.
        seen = self._versions()
        held = self._load()
        self._seen = seen
        return held

    def changed(self, every_s: float = 0.0) -> T | None:
        """Return what the files hold, if that has changed and can be used; else None.

        Args:
            every_s: They are left alone if they were looked at within so long.
        """
        now = time.monotonic()
        if now - self._looked_at < every_s:
            return None
        self._looked_at = now
        try:
            held = self.read() if self._versions() != self._seen else None
        except UnusableFile as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                _log.error("%s; what was read before stays in use", error)
            return None
        if self._complaint:
            self._complaint = ""
            _log.info("the %s %s can be used again", self._kind, self._paths[0])
        return held

    def _versions(self) -> list[Version]:
        return [version_of(self._kind, path) for path in self._paths]
