"""Copies of the loaded adapters, which vLLM reads again whenever it wants to.

vLLM keeps few adapters in memory (``max_cpu_loras``) and none through an update of the
weights; what a step needs it loads again, from the path that came with the request. A
folder that is gone by then ends the engine, and one that has other files by then makes
another version. So requests bring a path of ours: a link to a copy of what was loaded.

Laws:
- What stands under an adapter's link is what its last load has read.
- Copies go with their adapter, with the worker, or, if it was killed, when the next one
  loads an adapter.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

from .scratch import Scratch

__all__ = ["Copies", "reads_our_files"]

_PREFIX = "tokenwire-adapters-"

_FILES = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
    "adapter_model.pt",
)
"""What vLLM 0.32 reads of an adapter's folder. A trainer's checkpoint has more in it."""


def reads_our_files(parallel_config: Any) -> bool:  # vLLM's ParallelConfig
    """Return whether all processes of an engine are on this machine."""
    backend: object = parallel_config.distributed_executor_backend
    num_machines: int = parallel_config.nnodes
    return num_machines == 1 and backend != "ray"


class Copies:
    """The copies of one engine's adapters, in a folder of its own that is made first."""

    def __init__(self) -> None:
        self._scratch: Scratch | None = None
        self._num_copies = 0
        self._placed: dict[int, Path] = {}  # by the adapter's id

    async def make(self, folder: Path) -> Path:
        """Copy an adapter; return where, which nothing refers to yet.

        Raises:
            OSError: It cannot be read, or there is no room.
        """
        self._num_copies += 1
        name = f"copy-{self._num_copies}"
        copying = asyncio.ensure_future(asyncio.to_thread(self._copy, folder, name))
        try:
            return await asyncio.shield(copying)
        except asyncio.CancelledError:
            copying.add_done_callback(self._drop_late)
            raise

    def place(self, number: int, copy: Path) -> Path:
        """Have adapter *number* be *copy*; return the path that stays the same."""
        link = copy.parent / f"adapter-{number}"
        new = copy.parent / "new"
        new.symlink_to(copy.name)
        new.replace(link)
        before = self._placed.get(number)
        self._placed[number] = copy
        if before is not None:
            self.drop(before)
        return link

    def forget(self, number: int) -> None:
        """Delete the copy of an adapter that no request refers to."""
        copy = self._placed.pop(number, None)
        if copy is not None:
            (copy.parent / f"adapter-{number}").unlink(missing_ok=True)
            self.drop(copy)

    def drop(self, copy: Path) -> None:
        """Delete a copy: some files, on a local disk."""
        shutil.rmtree(copy, ignore_errors=True)

    def close(self) -> None:
        """Delete all; harmless where there is nothing, and twice."""
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            scratch.close()

    def _drop_late(self, copying: asyncio.Future[Path]) -> None:
        if not copying.cancelled() and copying.exception() is None:
            self.drop(copying.result())

    def _copy(self, folder: Path, name: str) -> Path:
        copy = self._opened() / name
        copy.mkdir()
        try:
            for file in _FILES:
                if (folder / file).is_file():
                    shutil.copyfile(folder / file, copy / file)
        except BaseException:
            self.drop(copy)
            raise
        return copy

    def _opened(self) -> Path:
        """Return the folder; only one load is under way at a time."""
        if self._scratch is None:
            self._scratch = Scratch(_PREFIX)
        return self._scratch.root
