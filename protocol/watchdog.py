"""Where a process of ours was stuck: an event loop that stands still is a lost peer.

Whoever holds the loop (or the GIL) for longer than the heartbeat's timeout makes every
peer take this process for lost, and nothing in its log would say why.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import time

__all__ = ["watch_loop"]

_log = logging.getLogger(__name__)

LOOKS = 4
"""Per limit: a loop that stands still is found at most a quarter late."""


async def watch_loop(limit_s: float) -> None:
    """Write the stacks of all threads to stderr when the loop stands still; never ends.

    They are written by a thread that needs neither the loop nor the GIL, while the loop
    stands; a log line follows when it goes on. One per process: faulthandler has one timer.

    Args:
        limit_s: For how long the loop may stand: the heartbeat's timeout, at which its peers
            give it up.
    """
    try:
        while True:
            faulthandler.dump_traceback_later(limit_s)
            before = time.monotonic()
            await asyncio.sleep(limit_s / LOOKS)
            late_s = time.monotonic() - before - limit_s / LOOKS
            if late_s > limit_s * (LOOKS - 1) / LOOKS:
                _log.warning(
                    "the event loop stood still for %.1f s: peers have taken this process "
                    "for lost. The stacks above show what held it; if they show "
                    "nothing but a wait, the whole process was stopped or starved of CPU",
                    late_s,
                )
    finally:
        faulthandler.cancel_dump_traceback_later()
