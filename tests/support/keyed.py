"""API keys for tests: a file of them, and the headers that have one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenwire.protocol.api_keys import ApiKey, KeyLimits, digest_of, line_of

__all__ = ["Keyed", "with_key"]


def with_key(key: str) -> dict[str, str]:
    """Return the header that has *key*."""
    return {"Authorization": f"Bearer {key}"}


class Keyed:
    """A file of API keys; a key is ``key-of-NAME`` unless another is given."""

    def __init__(self, path: Path, names: Iterable[str] = ()) -> None:
        self.path = path
        self._lines: list[str] = []
        for name in names:
            self.add(name)

    def add(self, name: str, key: str = "", **limits: int) -> dict[str, str]:
        """Add a key, and return the header that has it."""
        key = key or f"key-of-{name}"
        line = line_of(ApiKey(name, digest_of(key), KeyLimits(**limits)))
        self.write([*self._lines, line])
        return with_key(key)

    def write(self, lines: list[str]) -> None:
        """Write these lines, in place of all others."""
        self._lines = lines
        self.path.write_text("".join(f"{line}\n" for line in lines))

    @property
    def arguments(self) -> tuple[str, ...]:
        """What a frontend is told."""
        return "--api-keys", str(self.path)
