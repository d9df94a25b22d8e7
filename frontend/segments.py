"""Ids of the parts of a prompt that have come before: texts between special tokens.

Every turn of a conversation brings all earlier ones again, and many conversations begin
alike. A tokenizer cuts a text at its special tokens first, and reads each part by itself:
so the ids of a part are the same in every prompt, and only new parts need it.

Laws:
- The ids are those of the whole text. It is cut only where the tokenizer cuts, too.
- What is kept is bounded in bytes; what was not used for longest goes first.
"""

from __future__ import annotations

import re
import sys
import threading
from array import array
from collections.abc import Callable, Iterable
from typing import Protocol

__all__ = ["Segments", "cuts"]

MAX_BYTES = 32 * 1024 * 1024
"""Of texts and ids: some 5 million tokens of English, or 250 conversations of 20,000."""

MAX_PART_BYTES = MAX_BYTES // 16
"""Larger parts are documents, which would drive all else out."""

_ENTRY_BYTES = 200
"""Of an entry beside its text and ids: the dictionary's, and the objects' heads."""


class Token(Protocol):
    """A token that was added to a vocabulary."""

    @property
    def content(self) -> str:
        """Its text."""
        ...

    @property
    def normalized(self) -> bool:
        """Whether it is looked for in what the normalizer has made of a text."""
        ...

    @property
    def single_word(self) -> bool:
        """Whether no letter may stand beside it."""
        ...

    @property
    def lstrip(self) -> bool:
        """Whether it takes the white space before it."""
        ...

    @property
    def rstrip(self) -> bool:
        """Whether it takes the white space behind it."""
        ...


def cuts(tokens: Iterable[tuple[int, Token]], source: str) -> dict[str, int]:
    """Return the tokens of a chat template at which a text can be cut, by their content.

    Args:
        tokens: All that were added to the vocabulary, with their ids.
        source: The template's. Others of the tokens are rare in prompts.
    """
    # What is normalized is looked for later, in each part alone.
    early = {one.content: (n, one) for n, one in tokens if not one.normalized}
    if any(one.lstrip or one.rstrip or one.single_word for _, one in early.values()):
        return {}  # they look at, or take, what stands beside them
    return {
        content: token_id
        for content, (token_id, _) in early.items()
        if content in source and not any(_hides(other, content) for other in early)
    }


def _hides(other: str, content: str) -> bool:
    """Return whether a text may have *other* where *content* seems to be."""
    if not content or other == content:
        return not content
    return content in other or any(
        other.endswith(content[:size]) for size in range(1, len(content))
    )


class Segments:
    """Makes ids of texts, and keeps those of their parts. Any thread may use it.

    Args:
        encode: Returns the ids of each of some texts, without special tokens.
        cuts: Where to cut, and the ids of what stands there; not empty.
        max_bytes: How much to keep.
    """

    def __init__(
        self,
        encode: Callable[[list[str]], list[list[int]]],
        cuts: dict[str, int],
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._encode = encode
        self._cuts = cuts
        longest_first = sorted(cuts, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest_first))})").split
        self._max_bytes = max_bytes
        self._max_part_bytes = min(MAX_PART_BYTES, max_bytes)
        self._lock = threading.Lock()
        # With their sizes as they were counted, the least used first.
        self._known: dict[str, tuple[array[int], int]] = {}
        self.num_bytes = 0

    def encode(self, text: str) -> list[int]:
        """Return the ids of *text*."""
        parts = self._split(text)  # every other one is a cut
        found = self._find(parts[::2])
        missing = [part for part in dict.fromkeys(parts[::2]) if part not in found]
        if missing:
            made = {
                part: array("I", ids)
                for part, ids in zip(missing, self._encode(missing), strict=True)
            }
            self._keep(made)
            found |= made
        token_ids: list[int] = []
        for number, part in enumerate(parts):
            if number % 2:
                token_ids.append(self._cuts[part])
            else:
                token_ids += found[part]
        return token_ids

    def _find(self, parts: list[str]) -> dict[str, array[int]]:
        found: dict[str, array[int]] = {}
        known = self._known
        with self._lock:
            for part in parts:
                entry = known.pop(part, None)
                if entry is not None:
                    known[part] = entry
                    found[part] = entry[0]
        return found

    def _keep(self, made: dict[str, array[int]]) -> None:
        known = self._known
        with self._lock:
            for part, ids in made.items():
                size = _size(part, ids)
                if part not in known and size <= self._max_part_bytes:
                    known[part] = ids, size
                    self.num_bytes += size
            while self.num_bytes > self._max_bytes:
                _, size = known.pop(next(iter(known)))
                self.num_bytes -= size


def _size(part: str, ids: array[int]) -> int:
    """Return what an entry takes; a text takes more once it was read as UTF-8."""
    return sys.getsizeof(part) + ids.itemsize * len(ids) + _ENTRY_BYTES
