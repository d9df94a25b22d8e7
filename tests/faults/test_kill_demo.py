"""``kill_demo`` itself, on simulated engines: it serves, kills, compares and cleans up."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import kill_demo
import pytest

from support.awake import within
from support.formats import HERMES, write_format_model


@pytest.mark.untraced
@pytest.mark.timeout(600)
async def test_a_tool_call_survives_frontend_and_worker(tmp_path: Path) -> None:
    """Both are killed in its middle; the table says that nothing differs."""
    model = write_format_model(tmp_path, HERMES)
    logs = tmp_path / "logs"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(kill_demo.__file__), "--kill", "both"),
        *("--model", str(model), "--logs", str(logs)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=dict(os.environ),
    )
    try:
        async with within(400):
            out, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()

    assert process.returncode == 0, said.decode()
    head, _, calm, both = out.decode().splitlines()
    assert head == kill_demo.HEAD.splitlines()[0]
    assert calm.startswith("| nothing |")
    assert both.startswith("| both |")
    assert "| resume |" in both
