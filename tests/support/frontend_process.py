"""A frontend of two processes, as a process of the test's own."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from support.worker_process import PATHS, Process

__all__ = ["started"]


async def started(*options: str) -> Process:
    """Start a frontend."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tokenwire.frontend", "--processes", "2", *options),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": PATHS},
    )
    return Process(process, Path())
