"""Stop strings over text that arrives in pieces: nothing of a match gets out early."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopStrings"]


class StopStrings:
    """Finds the first stop string, and holds back text that may begin one."""

    __slots__ = ("_held", "_include", "_longest", "_strings", "matched")

    def __init__(self, strings: Sequence[str], *, include: bool) -> None:
        self._strings = tuple(strings)
        self._include = include
        self._longest = max(map(len, strings), default=0)
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def feed(self, text: str) -> str:
        """Return what is safe to show after *text* came; see ``matched`` then."""
        held = self._held + text
        end = None
        for string in self._strings:
            at = held.find(string)
            if at >= 0 and (end is None or at < end[0]):
                end = (at, string)
        if end is not None:
            at, self.matched = end
            self._held = ""
            return held[: at + len(self.matched)] if self._include else held[:at]
        keep = self._possible_start(held)
        self._held = held[keep:]
        return held[:keep]

    def flush(self) -> str:
        """Return what was held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Return where the longest tail of *text* begins that may begin a match."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            tail = text[start:]
            if any(string.startswith(tail) for string in self._strings):
                return start
        return len(text)
