"""``make run``: what it gives to ``tokenwire-up``, and where it may listen."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder with a ``tokenwire-up`` that says what it was given."""
    command = tmp_path / "tokenwire-up"
    command.write_text('#!/bin/sh\necho "$@"\n')
    command.chmod(0o755)
    return tmp_path


def run(tools: Path, *given: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the recipe, without setting anything up."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.run(
        ["make", "run", "SETUP=true", f"BIN={tools}", "MODEL=/m", *given],  # noqa: S607
        cwd=ROOT,
        env=kept | variables,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("host", ["127.0.0.2", "localhost", "::1"])
def test_a_host_is_passed_on(tools: Path, host: str) -> None:
    """Any on this machine needs no keys."""
    done = run(tools, f"HOST={host}")
    assert f"--port 8000 --host {host}" in done.stdout, done.stderr


def test_a_shells_own_host_is_none(tools: Path) -> None:
    """Some shells export the machine's name: it must not open the port to others."""
    done = run(tools, HOST="0.0.0.0")  # noqa: S104 -- nothing listens
    assert done.returncode == 0
    assert "--host" not in done.stdout


def test_beyond_this_machine_keys_are_wanted(tools: Path) -> None:
    """Whoever reaches the port could use the engine."""
    refused = run(tools, "HOST=0.0.0.0")
    assert refused.returncode != 0
    assert not refused.stdout
    assert "HOST=0.0.0.0 lets other machines in" in refused.stderr
    done = run(tools, "HOST=0.0.0.0", TOKENWIRE_API_KEYS="/keys")
    assert "--host 0.0.0.0" in done.stdout
