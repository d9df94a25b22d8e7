"""The supervisor over real processes: start, restart and giving up."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from support.fake_children import gone, starting
from tokenwire.deploy.supervisor import Timing
from tokenwire.protocol.restart import RestartPolicy


async def test_starts_announces_and_says_how_to_try(tmp_path: Path) -> None:
    """Workers that are up are in the workers file, and readiness is said with a URL."""
    async with starting(tmp_path) as start:
        setup = start("prefill-0", "decode-0")
        await setup.lines.until("tokenwire serves m at http://127.0.0.1:")
        await setup.lines.until("return_token_ids")
        await setup.lines.until("frontend-0", "up")
        assert setup.workers() == {
            name: f"tcp://127.0.0.1:{setup.pid(name)}"
            for name in ("decode-0", "prefill-0")
        }
        setup.supervisor.stop()
        assert await setup.end() == 0


async def test_serving_is_said_when_the_last_worker_is_up(tmp_path: Path) -> None:
    """One worker and a ready frontend are not what was asked for."""
    async with starting(tmp_path) as start:
        setup = start(
            "prefill-0",
            "decode-0",
            timing=Timing(poll_s=0.01, silence_s=0.2),
            prefill_0=["mute"],
            frontend_0=["eager"],
        )
        await setup.lines.until("decode-0", "up at")
        await setup.lines.until("frontend-0", "up")
        await setup.lines.until("waiting for prefill-0 (loading", times=2)
        assert "tokenwire serves" not in setup.lines.text


async def test_shows_phases_and_warnings_but_not_chatter(tmp_path: Path) -> None:
    """Phases and warnings are shown under the process's name; INFO is only logged."""
    async with starting(tmp_path) as start:
        setup = start("prefill-0")
        await setup.lines.until("prefill-0", "loading")
        await setup.lines.until("prefill-0", "WARNING 01-01 take care")
        await setup.lines.until("prefill-0", "up at tcp://")
    assert "chatter" not in setup.lines.text
    assert "INFO 01-01 chatter" in (tmp_path / "prefill-0.log").read_text()


async def test_restarts_a_killed_worker_under_its_new_endpoint(tmp_path: Path) -> None:
    """A worker killed by a signal is named with it, restarted and listed anew."""
    async with starting(tmp_path) as start:
        setup = start("prefill-0", "decode-0")
        await setup.lines.until("tokenwire serves")
        old = setup.pid("decode-0")
        os.kill(old, signal.SIGKILL)
        await setup.lines.until("decode-0", "SIGKILL", "starts again")
        await setup.lines.until("decode-0", "up at", times=2)
        new = setup.pid("decode-0")
        assert new != old
        assert setup.workers()["decode-0"] == f"tcp://127.0.0.1:{new}"


async def test_restarts_a_worker_whose_guard_is_killed(tmp_path: Path) -> None:
    """``pkill -9 -f`` with a worker's name kills its guard, too, and the worker is restarted.

    The resource tracker outlives both and holds their output: nobody waits for its end.
    """
    async with starting(tmp_path) as start:
        setup = start("prefill-0", "decode-0", decode_0=["tracker"])
        await setup.lines.until("tokenwire serves")
        old, tracker = setup.pid("decode-0"), setup.pid("decode-0", "family")
        os.kill(os.getpgid(old), signal.SIGKILL)  # the guard leads the group
        await setup.lines.until("decode-0", "SIGKILL", "starts again")
        await setup.lines.until("decode-0", "up at", times=2)
        assert setup.pid("decode-0") != old
        assert gone(old)
        assert gone(tracker)


async def test_a_dead_worker_leaves_the_workers_file(tmp_path: Path) -> None:
    """While a worker is down, the workers file does not send frontends to it."""
    policy = RestartPolicy(first_delay_s=3600, max_delay_s=3600)
    async with starting(tmp_path) as start:
        setup = start("prefill-0", "decode-0", policy=policy)
        await setup.lines.until("tokenwire serves")
        os.kill(setup.pid("decode-0"), signal.SIGKILL)
        await setup.lines.until("decode-0", "starts again in 3600 s")
        assert list(setup.workers()) == ["prefill-0"]
        setup.supervisor.stop()
        assert await setup.end() == 0


async def test_a_dead_worker_leaves_the_workers_file_before_its_family(
    tmp_path: Path,
) -> None:
    """Clearing up after a worker takes seconds in which nobody is sent to it."""
    async with starting(tmp_path) as start:
        policy = RestartPolicy(first_delay_s=3600, max_delay_s=3600)
        setup = start("prefill-0", policy=policy, prefill_0=["family"])
        await setup.lines.until("prefill-0", "up at")
        os.kill(setup.pid("prefill-0"), signal.SIGKILL)
        await setup.lines.until("prefill-0", "ended, clearing up")
        assert setup.workers() == {}


async def test_restarts_a_killed_frontend(tmp_path: Path) -> None:
    """A frontend that dies is started again and answers again."""
    async with starting(tmp_path) as start:
        setup = start("prefill-0")
        await setup.lines.until("tokenwire serves")
        await setup.lines.until("frontend-0", "up")
        os.kill(setup.pid("frontend-0"), signal.SIGKILL)
        await setup.lines.until("frontend-0", "SIGKILL", "starts again")
        await setup.lines.until("frontend-0  up", times=2)


async def test_gives_up_a_worker_that_never_came_up(tmp_path: Path) -> None:
    """Three failed starts end everything with exit code 1 and the last lines shown."""
    async with starting(tmp_path) as start:
        setup = start("prefill-0", "decode-0", decode_0=["fail"])
        assert await setup.end() == 1
    assert "> no such model" in setup.lines.text
    assert "did not come up, 3 times in a row (exit code 1)" in setup.lines.text
    assert setup.lines.count("decode-0", "starting") == 3


async def test_gives_up_a_bad_setting_at_once(tmp_path: Path) -> None:
    """A child that exits with 2 at its start is not tried again."""
    async with starting(tmp_path) as start:
        setup = start("prefill-0", prefill_0=["misuse"])
        assert await setup.end() == 1
    assert "was started with a bad setting (exit code 2)" in setup.lines.text
    assert setup.lines.count("prefill-0", "starting") == 1


async def test_keeps_trying_a_worker_that_was_up_once(tmp_path: Path) -> None:
    """A worker that has served is restarted more often than one that never did."""
    async with starting(tmp_path) as start:
        policy = RestartPolicy(first_delay_s=0.01, max_failed_starts=1)
        setup = start("prefill-0", policy=policy, prefill_0=["once"])
        await setup.lines.until("prefill-0", "up at")
        os.kill(setup.pid("prefill-0"), signal.SIGKILL)
        await setup.lines.until("prefill-0", "exit code 7", "starts again", times=2)
        setup.supervisor.stop()
        assert await setup.end() == 0


async def test_a_malformed_announce_is_a_failed_start(tmp_path: Path) -> None:
    """A worker that announces something else is killed, in a sentence, and given up."""
    policy = RestartPolicy(max_failed_starts=1)
    async with starting(tmp_path) as start:
        setup = start("prefill-0", policy=policy, prefill_0=["garbage"])
        assert await setup.end() == 1
    assert "its announce file is malformed" in setup.lines.text


async def test_a_worker_that_loads_for_ever_is_a_failed_start(tmp_path: Path) -> None:
    """A worker that does not announce itself within the limit is killed."""
    policy = RestartPolicy(max_failed_starts=1)
    timing = Timing(poll_s=0.01, start_timeout_s=0.3)
    async with starting(tmp_path) as start:
        setup = start("prefill-0", policy=policy, timing=timing, prefill_0=["mute"])
        assert await setup.end() == 1
    assert "killing it" in setup.lines.text


async def test_says_whom_it_waits_for(tmp_path: Path) -> None:
    """While nothing changes, a line names who is awaited, in which phase."""
    async with starting(tmp_path) as start:
        timing = Timing(poll_s=0.01, silence_s=0.1)
        setup = start("prefill-0", timing=timing, prefill_0=["mute"])
        await setup.lines.until("waiting for prefill-0 (loading,")


def parent(pid: int) -> int:
    """Return the process that started *pid*."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


async def test_a_killed_guard_takes_its_worker_along(tmp_path: Path) -> None:
    """SIGKILL to the process between supervisor and worker ends the worker too."""
    async with starting(tmp_path) as start:
        setup = start("prefill-0")
        await setup.lines.until("prefill-0", "up at")
        worker = setup.pid("prefill-0")
        os.kill(parent(worker), signal.SIGKILL)
        assert gone(worker)
        await setup.lines.until("prefill-0", "up at", times=2)
