"""An event loop that stands still says where, while it stands."""

from __future__ import annotations

import asyncio
import subprocess
import sys

CHILD = """
import asyncio, logging, sys
from tokenwire.protocol.watchdog import watch_loop

def stuck_here():
    sys.stdin.readline()

async def live():
    watching = asyncio.create_task(watch_loop({limit_s}))
    await asyncio.sleep(0)
    {does}
    await asyncio.sleep(0.1)
    watching.cancel()

logging.basicConfig(stream=sys.stderr)
asyncio.run(live())
print("ended", file=sys.stderr)
"""


async def output_of(does: str, limit_s: float, until: str) -> str:
    """Return what a process wrote to stderr; its stdin is closed once it wrote *until*."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        CHILD.format(does=does, limit_s=limit_s),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdin is not None
    assert child.stderr is not None
    seen = ""
    while until not in seen:
        line = await child.stderr.readline()
        assert line, seen
        seen += line.decode()
    child.stdin.close()
    seen += (await child.stderr.read()).decode()
    assert await child.wait() == 0, seen
    return seen


async def test_a_stuck_loop_shows_its_stack_while_it_is_stuck() -> None:
    """The stack comes before the loop goes on; the log line comes after."""
    seen = await output_of("stuck_here()", 0.1, until="in stuck_here")
    stacks, _, rest = seen.partition("in stuck_here")
    assert "Timeout" in stacks
    assert "the event loop stood still for" in rest
    assert rest.endswith("ended\n")


async def test_a_loop_that_turns_says_nothing() -> None:
    """Nothing is written in the life of a process whose loop turns, or after it."""
    assert await output_of("pass", 60.0, until="ended") == "ended\n"
