"""The folder of saved hidden states: what may be written there, and what is swept.

Laws:
- It is bounded, in time and in bytes: what nobody takes is deleted after a while, and
  where the rest is above its bound, requests that would add to it fail.
- Disks are slow: nothing here waits for one on the event loop, except the check at the
  start.
- What a client has not been told of yet is renewed before each sweep.
- A file ages by the monotonic clock: neither the date that somebody sets here, nor that of
  a file server, makes one old, or keeps one young. Only what is there before the first
  sweep is as old as the date says.
Several workers may share a folder. Each sweeps all of it, also what workers before
them have left; a file whose lock somebody holds stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tokenwire.worker import capture_files
from tokenwire.worker.capture_files import PART, Access, Removal, Sweep

__all__ = [
    "MAX_BYTES",
    "TTL_S",
    "CaptureError",
    "CaptureSettings",
    "Captures",
    "Usage",
]

logger = logging.getLogger(__name__)

TTL_S = 600.0
"""A client takes its file within seconds of the answer. This is for one that stands
still meanwhile: a training step, a checkpoint, a slow copy of the file before it."""

MAX_BYTES = 64 << 30
"""Four layers of 8,192 in bf16 for 4,096 tokens are 268 MB: some 240 such files."""

SPARED_S = 15.0
"""No file is swept for its size before: clients wait up to 10 s for its lock."""

MAX_DOOMED = 8_192
"""Files to delete that wait for the thread: as many as a worker takes requests. More
are left to the sweep."""

SWEEPS_PER_TTL = 4
"""A file is at most a quarter of the time late."""

MAX_SWEEP_INTERVAL_S = 10.0
"""Below ``SPARED_S``, with room for a slow listing: what is renewed at each sweep is never
too much, in the eyes of no other worker of the folder either."""

MIN_SWEEP_INTERVAL_S = 0.1
"""Listing 10,000 files takes 30 ms."""


class CaptureError(OSError):
    """Nothing can be saved there; the text is one sentence for the operator."""


@dataclass(slots=True, frozen=True)
class CaptureSettings:
    """Where hidden states are saved, which, and for how long."""

    folder: str  # absolute; empty: this worker saves none
    layers: tuple[int, ...]  # ascending
    access: Access
    ttl_s: float = TTL_S
    max_bytes: int = MAX_BYTES


@dataclass(slots=True, frozen=True)
class Usage:
    """What is in the folder, and what has been since the start."""

    num_files: int = 0
    num_bytes: int = 0
    num_written: int = 0  # by this worker
    num_failed: int = 0  # writes by this worker
    num_discarded: int = 0  # of clients that left
    num_swept: dict[Sweep, int] = field(default_factory=dict[Sweep, int])


@dataclass(slots=True)
class _Entry:
    """One file with its companions, as the folder lists them."""

    path: str
    changed_at: float = 0.0  # of the newest of them, wall clock
    num_bytes: int = 0
    suffixes: set[str] = field(default_factory=set[str])
    age_s: float = 0.0


class _Ages:
    """How old files are, by a clock that nobody sets.

    A file is known by when it was changed, whatever clock has said so: until that differs
    it ages. One that comes between two sweeps is no older than the time between them.
    """

    def __init__(self) -> None:
        self._born: dict[str, tuple[float, float]] = {}  # by path: changed, born
        self._looked_at: float | None = None

    def look(self, entries: list[_Entry], wall: float, monotonic: float) -> None:
        """Set the ages of all files that are there; what is gone is forgotten."""
        oldest = math.inf if self._looked_at is None else monotonic - self._looked_at
        self._looked_at = monotonic
        before, self._born = self._born, {}
        for entry in entries:
            changed, born = before.get(entry.path, (math.nan, 0.0))
            if changed != entry.changed_at:
                # Anybody can give a file a date to come, and a clock may be set back.
                age_s = min(max(wall - entry.changed_at, 0.0), oldest)
                born = monotonic - age_s
            self._born[entry.path] = entry.changed_at, born
            entry.age_s = monotonic - born


class Captures:
    """Keeps one folder."""

    def __init__(self, settings: CaptureSettings) -> None:
        self.settings = settings
        self._doomed: deque[str] = deque(maxlen=MAX_DOOMED)
        self._wake = asyncio.Event()
        self._num_files = 0
        self._num_bytes = 0
        self._new_files = 0  # of the two, since the last sweep began
        self._new_bytes = 0
        self._num_written = 0
        self._num_failed = 0
        self._num_discarded = 0
        self._num_swept = dict.fromkeys(Sweep, 0)
        self._last_error = ""
        self._ages = _Ages()
        self.untold: Callable[[float], list[str]] = _none
        """Which files are to be renewed, at a time of the event loop's."""

    def check(self) -> None:
        """Make the folder if need be, and write a file there as it will be.

        Raises:
            CaptureError: That fails.
        """
        settings = self.settings
        path = self.new_path()
        try:
            os.makedirs(settings.folder, exist_ok=True)
            arrays = {"probe": capture_files.Array("U8", (1,), b"0")}
            capture_files.write(path, arrays, settings.access)
            capture_files.remove(path)
        except OSError as error:
            msg = (
                f"hidden states cannot be saved in {settings.folder}: {error.strerror}"
            )
            raise CaptureError(msg) from error

    def new_path(self) -> str:
        """Return where the next file goes."""
        return os.path.join(self.settings.folder, capture_files.new_name())

    def has(self, path: str) -> bool:
        """Return whether *path* may be a file of this folder, there or not."""
        return capture_files.is_ours(path, self.settings.folder)

    @property
    def refusal(self) -> str:
        """Why nothing more may be saved now; empty: it may."""
        limit = self.settings.max_bytes
        if self._num_bytes < limit:
            return ""
        self._wake.set()  # its clients may have taken some since the last sweep
        return (
            f"hidden states cannot be saved in {self.settings.folder}: its "
            f"{self._num_files} files have {self._num_bytes} bytes, the limit is {limit}"
        )

    @property
    def usage(self) -> Usage:
        """What is there, as of the last sweep and what was written since."""
        return Usage(
            self._num_files,
            self._num_bytes,
            self._num_written,
            self._num_failed,
            self._num_discarded,
            dict(self._num_swept),
        )

    def written(self, num_bytes: int) -> None:
        """Count a file that this worker has written."""
        self._num_written += 1
        self._num_files += 1
        self._num_bytes += num_bytes
        self._new_files += 1
        self._new_bytes += num_bytes
        if self._num_bytes >= self.settings.max_bytes:
            self._wake.set()

    def failed(self, error: str) -> str:
        """Count a write that failed; return the sentence for the client."""
        self._num_failed += 1
        return f"hidden states cannot be saved in {self.settings.folder}: {error}"

    def discard(self, path: object) -> None:
        """Have a file deleted, soon; whatever is no file of ours is ignored."""
        if isinstance(path, str) and self.has(path):
            self._num_discarded += 1
            self._doomed.append(path)
            self._wake.set()

    async def run(self) -> None:
        """Delete and sweep, from now until cancelled."""
        interval_s = min(
            max(self.settings.ttl_s / SWEEPS_PER_TTL, MIN_SWEEP_INTERVAL_S),
            MAX_SWEEP_INTERVAL_S,
        )
        loop = asyncio.get_running_loop()
        sweep_at = loop.time()
        while True:
            self._wake.clear()
            doomed = list(self._doomed)
            self._doomed.clear()
            is_full = self._num_bytes >= self.settings.max_bytes
            if doomed:
                await asyncio.to_thread(self._delete, doomed)
            if is_full or loop.time() >= sweep_at:
                sweep_at = loop.time() + interval_s
                self._new_files = self._new_bytes = 0
                untold = self.untold(loop.time())
                counts = await asyncio.to_thread(self.look, untold)
                # What came meanwhile may have been listed or not: rather twice, until
                # the next sweep, than not at all.
                self._num_files = counts[0] + self._new_files
                self._num_bytes = counts[1] + self._new_bytes
                if self._num_bytes >= self.settings.max_bytes:
                    await asyncio.sleep(MIN_SWEEP_INTERVAL_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(sweep_at):
                    await self._wake.wait()

    def _delete(self, doomed: list[str]) -> None:
        for path in doomed:
            self._removed(capture_files.remove(path), path)

    def look(self, untold: list[str]) -> tuple[int, int]:
        """Renew what no client has been told of, then ``sweep``; blocks."""
        for path in untold:
            capture_files.renew(path)
        return self.sweep(time.time(), time.monotonic())

    def sweep(self, wall: float, monotonic: float) -> tuple[int, int]:
        """Delete what is too old, broken, or too much; blocks.

        Args:
            wall: The wall clock, which files bear.
            monotonic: The clock that nobody sets.

        Returns:
            How many files are left, and their bytes.
        """
        folder = self.settings.folder
        try:
            entries = _listed(folder)
        except OSError as error:
            self._complain(f"{folder} cannot be listed: {error.strerror}")
            return (
                self._num_files - self._new_files,
                self._num_bytes - self._new_bytes,
            )
        self._ages.look(entries, wall, monotonic)
        before = dict(self._num_swept)
        kept: list[_Entry] = []
        for entry in entries:
            if entry.age_s >= self.settings.ttl_s:
                is_gone = self._remove(entry, Sweep.AGE)
            elif PART in entry.suffixes:
                # While its writer lives it holds the lock.
                is_gone = self._remove(entry, Sweep.BROKEN)
            else:
                is_gone = False
            if not is_gone:
                kept.append(entry)
        kept.sort(key=lambda entry: (-entry.age_s, entry.changed_at))
        num_bytes = sum(entry.num_bytes for entry in kept)
        left: list[_Entry] = []
        for entry in kept:
            too_much = num_bytes > self.settings.max_bytes
            is_spared = entry.age_s < SPARED_S
            if too_much and not is_spared and self._remove(entry, Sweep.SIZE):
                num_bytes -= entry.num_bytes
            else:
                left.append(entry)
        swept = {
            str(reason): number - before[reason]
            for reason, number in self._num_swept.items()
            if number > before[reason]
        }
        if swept:
            logger.info("swept files of %s that nobody took: %s", folder, swept)
        return sum("" in entry.suffixes for entry in left), num_bytes

    def _remove(self, entry: _Entry, reason: Sweep) -> bool:
        """Delete a file for *reason*; return whether nothing is left of it."""
        removal = capture_files.remove(entry.path, reason)
        if not self._removed(removal, entry.path):
            return False
        self._num_swept[reason] += 1
        return not (reason is Sweep.BROKEN and "" in entry.suffixes)

    def _removed(self, removal: Removal, path: str) -> bool:
        if removal.error:
            self._complain(f"{path} cannot be deleted: {removal.error}")
        return removal.is_gone

    def _complain(self, error: str) -> None:
        """Log what does not work, once in a row."""
        if error != self._last_error:
            logger.error("%s", error)
        self._last_error = error


def _none(now: float) -> list[str]:
    del now
    return []


def _listed(folder: str) -> list[_Entry]:
    entries: dict[str, _Entry] = {}
    with os.scandir(folder) as listing:
        for found in listing:
            name = capture_files.name_of(found.name)
            if name is None:
                continue
            try:
                status = found.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # its client has just taken it
            entry = entries.get(name)
            if entry is None:
                path = str(Path(folder) / name)
                entry = entries[name] = _Entry(path)
            entry.changed_at = max(entry.changed_at, status.st_mtime)
            entry.num_bytes += status.st_size
            entry.suffixes.add(found.name.removeprefix(name))
    return list(entries.values())
