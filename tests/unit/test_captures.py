"""The folder of hidden states: bounds, sweeps, and what is never touched."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import threading
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from support.stack import eventually
from tokenwire.worker import capture_files, captures as module
from tokenwire.worker.capture_files import Access, Array, Removal, Sweep, write
from tokenwire.worker.captures import CaptureError, Captures, CaptureSettings

NOW = 1_000_000.0
TTL_S = 100.0


def keeper(folder: Path, max_bytes: int = 1 << 20, ttl_s: float = TTL_S) -> Captures:
    """Return who keeps *folder*."""
    return Captures(CaptureSettings(str(folder), (2,), Access(0o600), ttl_s, max_bytes))


def made(keeping: Captures, age_s: float, num_bytes: int = 100) -> Path:
    """Write a file of that age and size; return its path."""
    path = Path(keeping.new_path())
    write(str(path), {"x": Array("U8", (num_bytes,), bytes(num_bytes))}, Access(0o600))
    for one in (path, Path(f"{path}.lock")):
        os.utime(one, (NOW - age_s, NOW - age_s))
    return path


def test_what_nobody_takes_goes_with_age(tmp_path: Path) -> None:
    """With its lock; the younger stay and are counted."""
    keeping = keeper(tmp_path)
    old = made(keeping, TTL_S)
    young = made(keeping, TTL_S - 1)

    num_files, num_bytes = keeping.sweep(NOW, NOW)

    assert sorted(os.listdir(tmp_path)) == [young.name, f"{young.name}.lock"]
    assert (num_files, num_bytes) == (1, young.stat().st_size)
    assert not old.exists()
    assert keeping.usage.num_swept == {"age": 1, "size": 0, "broken": 0}


def test_locks_that_their_clients_left_go_with_age(tmp_path: Path) -> None:
    """A client may take the file and forget the lock."""
    keeping = keeper(tmp_path)
    for age_s in (TTL_S, 1):
        os.unlink(made(keeping, age_s))
    assert keeping.sweep(NOW, NOW) == (0, 0)
    assert len(os.listdir(tmp_path)) == 1


def test_a_part_of_a_writer_that_died_goes_at_once(tmp_path: Path) -> None:
    """One that lives holds the lock, and is left alone."""
    keeping = keeper(tmp_path)
    dead, alive = Path(keeping.new_path()), Path(keeping.new_path())
    for path in (dead, alive):
        for suffix in (".lock", ".part"):
            one = Path(f"{path}{suffix}")
            one.write_bytes(b"12")
            os.utime(one, (NOW, NOW))
    with open(f"{alive}.lock", "r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert keeping.sweep(NOW, NOW) == (0, 4)
        assert sorted(os.listdir(tmp_path)) == [
            f"{alive.name}.lock",
            f"{alive.name}.part",
        ]
    keeping.sweep(NOW, NOW)
    assert os.listdir(tmp_path) == []


def test_a_part_that_becomes_whole_while_it_sweeps_counts_as_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As nothing broken, and with its bytes."""
    keeping = keeper(tmp_path)
    path = made(keeping, 0)
    size = path.stat().st_size
    part = path.rename(f"{path}.part")
    remove = capture_files.remove

    def just_then(path: str, sweep: Sweep | None = None) -> Removal:
        part.rename(path)
        return remove(path, sweep)

    monkeypatch.setattr(capture_files, "remove", just_then)
    assert keeping.sweep(NOW, NOW)[1] == size
    assert path.exists()
    assert keeping.usage.num_swept[Sweep.BROKEN] == 0


def test_a_time_in_the_future_counts_as_when_it_was_set(tmp_path: Path) -> None:
    """A client that sets one keeps its file no longer for it."""
    keeping = keeper(tmp_path)
    path = made(keeping, 0)
    os.utime(path, (NOW + 1e6, NOW + 1e6))
    keeping.sweep(NOW, 0)
    keeping.sweep(NOW, TTL_S - 1)
    assert path.exists()
    keeping.sweep(NOW, TTL_S)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("leap_s", [86_400, -86_400])
def test_a_clock_that_is_set_makes_no_file_old_or_young(
    tmp_path: Path, leap_s: float
) -> None:
    """Nor does a file server whose clock is another: what is new is as old as it can be."""
    keeping = keeper(tmp_path)
    before = made(keeping, 0)
    keeping.sweep(NOW, 0)
    leapt = NOW + leap_s
    keeping.sweep(leapt, 10)
    assert before.exists()
    since = made(keeping, 0)  # of a clock that has not leapt
    keeping.sweep(leapt, 20)
    keeping.sweep(leapt, TTL_S - 1)
    assert before.exists()
    keeping.sweep(leapt, TTL_S)
    assert not before.exists()
    keeping.sweep(leapt, TTL_S + 9)
    assert since.exists()
    keeping.sweep(leapt, TTL_S + 20)
    assert os.listdir(tmp_path) == []


def test_the_oldest_go_first_whatever_the_clock_says(tmp_path: Path) -> None:
    """By how long they have been there, above the bound."""
    keeping = keeper(tmp_path, max_bytes=500)
    first = made(keeping, -3_600, 400)  # written under a clock that was ahead
    keeping.sweep(NOW, 0)
    second = made(keeping, 0, 400)
    keeping.sweep(NOW, 1)
    keeping.sweep(NOW, 2 * module.SPARED_S)
    assert not first.exists()
    assert second.exists()


def test_above_the_bound_the_oldest_go(tmp_path: Path) -> None:
    """No more of them than needed, and none that its client may be about to take."""
    keeping = keeper(tmp_path, max_bytes=1_000)
    made(keeping, 50, 400)
    second = made(keeping, 40, 400)
    fresh = made(keeping, module.SPARED_S - 1, 400)

    num_files, num_bytes = keeping.sweep(NOW, NOW)

    assert second.exists()
    assert fresh.exists()
    assert num_files == 2
    assert 800 < num_bytes < 1_000
    assert keeping.usage.num_swept[Sweep.SIZE] == 1


def test_above_the_bound_claimed_files_stay(tmp_path: Path) -> None:
    """The next oldest goes; its client has told nobody that it wants it."""
    keeping = keeper(tmp_path, max_bytes=1_000)
    claimed = made(keeping, 50, 400)
    os.unlink(f"{claimed}.lock")
    second = made(keeping, 40, 400)
    made(keeping, 30, 400)
    assert keeping.sweep(NOW, NOW)[0] == 2
    assert claimed.exists()
    assert not second.exists()


def test_fresh_files_above_the_bound_stay_and_refuse_more(tmp_path: Path) -> None:
    """The bound then holds by refusing what would be added."""
    keeping = keeper(tmp_path, max_bytes=500)
    path = made(keeping, 0, 600)
    assert keeping.refusal == ""
    keeping.written(keeping.sweep(NOW, NOW)[1])
    assert path.exists()
    assert "the limit is 500" in keeping.refusal
    assert str(tmp_path) in keeping.refusal


def test_what_no_client_was_told_of_is_neither_old_nor_too_much(tmp_path: Path) -> None:
    """Not for this worker, and not for another that has the same folder."""
    keeping = keeper(tmp_path, max_bytes=500)
    another = keeper(tmp_path, max_bytes=500)
    untold, told = made(keeping, 10 * TTL_S, 400), made(keeping, 10 * TTL_S, 400)
    gone = keeping.new_path()

    assert keeping.look([str(untold), gone])[0] == 1

    now = time.time() + module.MAX_SWEEP_INTERVAL_S
    another.sweep(now, 0)
    assert sorted(os.listdir(tmp_path)) == [untold.name, f"{untold.name}.lock"]
    assert not told.exists()
    another.sweep(now, TTL_S)
    assert os.listdir(tmp_path) == []


def test_the_renewed_are_spared_until_they_are_renewed_again() -> None:
    """With seconds to list the folder in: a sweep for size spares what is so young."""
    assert module.SPARED_S - module.MAX_SWEEP_INTERVAL_S >= 5.0


def test_what_is_not_ours_is_never_touched(tmp_path: Path) -> None:
    """However old: names of others, folders, and what a client has renamed."""
    keeping = keeper(tmp_path)
    names = ["hs_1.safetensors", "capture-1.safetensors", "x.lock", "capture-"]
    for name in names:
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0))
    (tmp_path / "folder").mkdir()
    keeping.sweep(NOW, NOW)
    assert sorted(os.listdir(tmp_path)) == sorted([*names, "folder"])


def test_a_client_s_lock_protects_its_file(tmp_path: Path) -> None:
    """Also when it is old: it is being moved, and is swept later."""
    keeping = keeper(tmp_path)
    path = made(keeping, 10 * TTL_S)
    with open(f"{path}.lock", "r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        keeping.sweep(NOW, NOW)
        assert path.exists()
    keeping.sweep(NOW, NOW)
    assert not path.exists()


def test_a_folder_is_made_and_tried(tmp_path: Path) -> None:
    """Nothing is left of the trial."""
    folder = tmp_path / "a" / "b"
    keeper(folder).check()
    assert os.listdir(folder) == []


def test_an_unwritable_folder_is_one_sentence(tmp_path: Path) -> None:
    """That names it and says why."""
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "x"
    with pytest.raises(CaptureError) as caught:
        keeper(folder).check()
    assert str(caught.value) == (
        f"hidden states cannot be saved in {folder}: Not a directory"
    )


@contextlib.asynccontextmanager
async def running(keeping: Captures) -> AsyncGenerator[None]:
    """Keep the folder meanwhile."""
    task = asyncio.create_task(keeping.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_it_sweeps_what_others_have_left(tmp_path: Path) -> None:
    """From the start: a worker before this one, which has died, is no other case."""
    keeping = keeper(tmp_path)
    made(keeping, 0)
    async with running(keeping):
        await eventually(lambda: not os.listdir(tmp_path))


async def test_what_is_written_while_it_sweeps_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the sweep has listed does not know of it: the bound must hold all the same."""
    keeping = keeper(tmp_path, ttl_s=1e12)
    path = made(keeping, 0)
    sweep = keeping.sweep
    listed, may_end = threading.Event(), threading.Semaphore(0)

    def slow(wall: float, monotonic: float) -> tuple[int, int]:
        counts = sweep(wall, monotonic)
        listed.set()
        may_end.acquire()
        return counts

    monkeypatch.setattr(keeping, "sweep", slow)
    async with running(keeping):
        try:
            await eventually(listed.is_set)
            keeping.written(400)
            keeping.discard(str(path))
            may_end.release()
            await eventually(lambda: not path.exists())  # the counts are in by then
            assert keeping.usage.num_files == 2
            assert keeping.usage.num_bytes > 400
        finally:
            may_end.release(9)


async def test_discarded_files_go_soon(tmp_path: Path) -> None:
    """Those of ours in this folder, that is; all else a peer may name stays."""
    keeping = keeper(tmp_path, ttl_s=1e12)
    path = made(keeping, 0)
    other = tmp_path / "other"
    other.touch()
    async with running(keeping):
        await eventually(lambda: keeping.usage.num_files == 1)
        for bad in (str(other), f"{tmp_path}/../x", 5, None, [str(path)]):
            keeping.discard(bad)
        keeping.discard(str(path))
        await eventually(lambda: os.listdir(tmp_path) == ["other"])
    assert keeping.usage.num_discarded == 1


async def test_a_full_folder_recovers_when_clients_take_theirs(tmp_path: Path) -> None:
    """The next refusal has it looked at again, long before the next sweep is due."""
    keeping = keeper(tmp_path, max_bytes=150, ttl_s=1e12)
    path = made(keeping, 0, 200)
    os.utime(path)  # fresh: it is spared
    async with running(keeping):
        await eventually(lambda: bool(keeping.refusal))
        path.unlink()
        await eventually(lambda: not keeping.refusal)


async def test_what_cannot_be_listed_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder that is gone is an error in the log, and no end of the worker."""
    keeping = keeper(tmp_path / "gone")
    for _ in range(3):
        keeping.sweep(NOW, NOW)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
