"""What stands for weights in the simulated engine: a number that every id depends on.

It is made of the files that the real engine would load, so other files make other ids,
and the same files the same ids. The weights of the start count as 0, and so do those in
the model's own folder.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from zlib import crc32

from tokenwire.worker.engine import AdminOutcome

__all__ = ["Weights"]

MAX_FILE_BYTES = 1 << 20
"""Read of each file: headers and the first tensors are enough to tell two apart."""

MAX_FILES = 1_024
"""In a folder; the largest models have some hundred."""


class Weights:
    """The weights of one engine, and those of its adapters.

    Args:
        model: The model's folder, or a name.
    """

    def __init__(self, model: str) -> None:
        self._model = Path(model)
        self._base = 0
        self._adapters: dict[str, int] = {}

    def of(self, lora: str) -> int | None:
        """Return the number for a request; None: there is no such adapter."""
        if not lora:
            return self._base
        adapter = self._adapters.get(lora)
        return None if adapter is None else self._base ^ adapter

    def load(self, folder: str | None) -> AdminOutcome:
        """Take the weights in *folder*."""
        if folder is None:
            return AdminOutcome("the simulated engine loads from a folder", "invalid")
        path = Path(folder)
        if not path.is_dir():
            return AdminOutcome(f"there is no folder {folder}", "not_found")
        files = path.glob("*.safetensors")
        number = _number(files)
        if number is None and path.resolve() != self._model.resolve():
            return AdminOutcome(f"{folder} has no *.safetensors", "invalid")
        is_own = path.resolve() == self._model.resolve()
        self._base = 0 if is_own or number is None else number
        return AdminOutcome()

    def load_adapter(self, name: str, folder: str) -> AdminOutcome:
        """Take the adapter in *folder* under *name*."""
        path = Path(folder)
        if not (path / "adapter_config.json").is_file():
            return AdminOutcome(
                f"Loading lora {name} failed: No adapter found for {folder}",
                "not_found",
            )
        self._adapters[name] = _number(path.glob("adapter_*")) or 0
        return AdminOutcome()

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter."""
        self._adapters.pop(name, None)


def _number(files: Iterable[Path]) -> int | None:
    """Return a number that the *files* decide; None: there are none."""
    number: int | None = None
    for path in sorted(files)[:MAX_FILES]:
        with path.open("rb") as file:
            number = crc32(file.read(MAX_FILE_BYTES), number or 0)
    return number
