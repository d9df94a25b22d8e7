"""What the fork server forks, and that nothing of it stays."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

from support.awake import within
from support.up import alive, until
from support.worker_process import PATHS

GONE_S = 30.0


async def test_a_forked_process_has_what_was_imported_and_what_was_set_later() -> None:
    """And its exit code arrives; the server ends with a parent that is killed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "support.fork_probe"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": PATHS},
    )
    assert process.stdout is not None
    async with within(GONE_S):
        said = json.loads(await process.stdout.readline())
    server = said["server"]
    assert said["forked"] == [[True, "yes", server, 3]] * 2
    assert said["new"] == [False, "yes", process.pid, 3]
    assert alive(server)
    process.send_signal(signal.SIGKILL)
    await process.wait()
    await until(lambda: not alive(server), GONE_S, "the server has ended")
