"""The supervisor ends: in order, within bounds, and nothing of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import fake_children
from support.awake import STANDSTILL_S
from support.fake_children import LIMIT_S, gone, starting
from tokenwire.deploy.supervisor import Timing


async def test_stop_leaves_no_process_behind(tmp_path: Path) -> None:
    """After a stop, children and what they started in other sessions are gone."""
    async with starting(tmp_path) as start:
        setup = start("prefill-0", prefill_0=["family"])
        await setup.lines.until("tokenwire serves")
        pids = [setup.pid(n) for n in ("prefill-0", "frontend-0")]
        pids.append(setup.pid("prefill-0", "family"))
        setup.supervisor.stop()
        assert await setup.end() == 0
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_frontends_stop_before_workers(tmp_path: Path) -> None:
    """No worker is stopped while a frontend still runs."""
    async with starting(tmp_path) as start:
        setup = start("prefill-0", "decode-0", frontends=1)
        await setup.lines.until("tokenwire serves")
        setup.supervisor.stop()
        assert await setup.end() == 0
    stopped = [line for line in setup.lines.text.splitlines() if "stopped" in line]
    assert len(stopped) == 3
    assert "frontend-0" in stopped[0]


async def test_a_deaf_worker_is_killed_after_the_bound(tmp_path: Path) -> None:
    """A worker that ignores SIGTERM is killed when its time to stop is over."""
    timing = Timing(poll_s=0.01, stop_timeout_s=0.2)
    async with starting(tmp_path) as start:
        setup = start("prefill-0", timing=timing, prefill_0=["deaf"])
        await setup.lines.until("prefill-0", "up at")
        setup.supervisor.stop()
        assert await setup.end() == 0
    assert "does not stop: killing it" in setup.lines.text


async def test_a_second_stop_kills_at_once(tmp_path: Path) -> None:
    """A second Ctrl-C does not wait for a worker that ignores the first."""
    timing = Timing(poll_s=0.01, stop_timeout_s=3600)
    async with starting(tmp_path) as start:
        setup = start("prefill-0", timing=timing, prefill_0=["deaf", "family"])
        await setup.lines.until("prefill-0", "up at")
        family = setup.pid("prefill-0", "family")
        setup.supervisor.stop()
        await setup.lines.until("frontend-0", "stopped")
        setup.supervisor.stop()
        assert await setup.end() == 0
    with pytest.raises(ProcessLookupError):
        os.kill(family, 0)


@pytest.fixture
def command_up(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Give ``tokenwire-up`` as a process of its own, serving with fake children."""
    command = [sys.executable, "-m", fake_children.__name__, str(tmp_path)]
    paths = os.pathsep.join(path for path in sys.path if path)
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process: subprocess.Popen[str], words: str) -> str:
    """Return what *process* printed up to the line with *words*."""
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if words in line:
            return text
    pytest.fail(f"ended without {words!r}:\n{text}")


def noted_pids(folder: Path) -> list[int]:
    """Return the ids of all fakes, and of what they started."""
    notes = [*folder.glob("*.pid"), *folder.glob("*.family")]
    return [int(note.read_text()) for note in notes]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_ends_everything_with_0(
    command_up: subprocess.Popen[str], tmp_path: Path, number: signal.Signals
) -> None:
    """One Ctrl-C or SIGTERM stops all, exits with 0 and removes its folders."""
    text = read_until(command_up, "Ctrl-C stops everything")
    logs = Path(text.split("logs in ")[1].splitlines()[0])
    assert logs.stat().st_mode & 0o777 == 0o700
    command_up.send_signal(number)
    assert command_up.wait(LIMIT_S + STANDSTILL_S) == 0
    assert not logs.exists()
    pids = noted_pids(tmp_path)
    assert len(pids) == 3
    assert all(gone(pid) for pid in pids)


def test_children_die_with_a_killed_supervisor(
    command_up: subprocess.Popen[str], tmp_path: Path
) -> None:
    """SIGKILL to ``tokenwire-up`` leaves neither children nor their children."""
    read_until(command_up, "Ctrl-C stops everything")
    command_up.kill()
    pids = noted_pids(tmp_path)
    assert len(pids) == 3
    assert all(gone(pid) for pid in pids)
