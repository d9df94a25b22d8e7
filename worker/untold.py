"""Files of hidden states whose clients have not been told of them: no sweep takes them.

A prompt's states are written when it is computed, and its client is told at the end of
the output, or at that of the last of several choices, which may be long after. Until then
the file is renewed at every sweep, so that it is too young for this worker's sweeps and
for those of others that share the folder.

Laws:
- A file is kept until its frontend says that the client was told, or has it deleted; or
  until that frontend is lost. From then on it ages as any other.
- What is kept is bounded, in number and in time.
No I/O and no clock in here; *now* is the worker's clock, in s.
"""

from __future__ import annotations

from tokenwire.protocol.captures import saved_path
from tokenwire.protocol.messages import CAPTURE_TOLD, Finished
from tokenwire.worker.captures import Captures
from tokenwire.worker.engine import EngineFinished

from .frontends import Frontend

__all__ = ["MAX_UNTOLD", "MAX_UNTOLD_S", "Untold"]

MAX_UNTOLD = 8_192
"""As many as a worker takes requests. Of more, the oldest are left to the sweep."""

MAX_UNTOLD_S = 86_400.0
"""No output takes a day: a frontend that has said nothing by then never will."""


class Untold:
    """Which frontend has yet to tell its client of which file.

    Args:
        captures: Who keeps the files; None: there are none.
    """

    def __init__(self, captures: Captures | None) -> None:
        self._captures = captures
        self._since: dict[tuple[bytes, str], float] = {}  # oldest first
        if captures is not None:
            captures.untold = self.paths

    def __len__(self) -> int:
        return len(self._since)

    def given(self, frontend: Frontend, end: Finished, now: float) -> None:
        """Keep the file that *end* tells *frontend* of, if any."""
        path = saved_path(end.kv_transfer_params)
        if (
            self._captures is not None
            and CAPTURE_TOLD in frontend.hello.capabilities
            and path is not None
            and self._captures.has(path)
        ):
            self._since[frontend.identity, path] = now
            if len(self._since) > MAX_UNTOLD:
                del self._since[next(iter(self._since))]

    def told(self, frontend: Frontend, path: str) -> None:
        """Keep a file no longer: its client has been told."""
        self._since.pop((frontend.identity, path), None)

    def discard(self, frontend: Frontend, path: str) -> None:
        """Have a file deleted: its client will not be told."""
        self._since.pop((frontend.identity, path), None)
        if self._captures is not None:
            self._captures.discard(path)

    def undelivered(self, end: EngineFinished) -> None:
        """Have the file of *end* deleted: its frontend will not hear of it."""
        if self._captures is not None:
            self._captures.discard(saved_path(end.kv_transfer_params))

    def lost(self, frontend: Frontend) -> None:
        """Keep nothing for *frontend* any more."""
        for key in [key for key in self._since if key[0] == frontend.identity]:
            del self._since[key]

    def paths(self, now: float) -> list[str]:
        """Return what is to be renewed now."""
        while self._since:
            key, since = next(iter(self._since.items()))
            if now - since < MAX_UNTOLD_S:
                break
            del self._since[key]
        return [path for _, path in self._since]
