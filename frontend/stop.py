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

    def feed(self, text: str, *, can_match: bool = True) -> str:
        """Return what is safe to show after *text* came; see ``matched`` then.

        Several may match in it: the one that is complete first counts, then the order
        of the strings, as in vLLM. Without *can_match* no string may end in *text*,
        but one that begins in it may end later.
        """
        held = self._held + text
        first: tuple[int, str] | None = None
        for string in self._strings if can_match else ():
            # What was held was looked at before; a match ends in *text*.
            at = held.find(string, max(0, len(self._held) + 1 - len(string)))
            if at >= 0 and (first is None or at + len(string) < first[0]):
                first = (at + len(string), string)
        if first is not None:
            end, self.matched = first
            self._held = ""
            return held[: end if self._include else end - len(self.matched)]
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
            if any(
                len(tail) < len(string) and string.startswith(tail)
                for string in self._strings
            ):
                return start
        return len(text)
