"""Folders for temporary files: what a killed worker has left goes, all else stays."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tokenwire.worker.vllm.scratch import Scratch

HOLDER = """
import sys
from tokenwire.worker.vllm.scratch import Scratch
print(Scratch("kind-").root, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, of this test alone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_what_a_killed_process_has_left_goes(folder: Path) -> None:
    """Not before it is dead, by no other kind, and with all that is in it."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(folder)},
        text=True,
    ) as holder:
        assert holder.stdout is not None
        held = Path(holder.stdout.readline().strip())
        (held / "events").touch()
        mine = Scratch("kind-")
        assert (held / "events").exists()
        holder.kill()
    other = Scratch("other-")
    assert held.exists()
    again = Scratch("kind-")
    assert not held.exists()
    assert mine.root.exists()
    for one in (mine, other, again):
        one.close()
    assert not list(folder.iterdir())


def test_links_and_files_are_not_touched(folder: Path) -> None:
    """Whoever may write there cannot have something else deleted."""
    (folder / "else").mkdir()
    (folder / "else/file").touch()
    (folder / "kind-link").symlink_to(folder / "else")
    (folder / "kind-file").touch()
    Scratch("kind-").close()
    left = sorted(path.name for path in folder.rglob("*"))
    assert left == ["else", "file", "kind-file", "kind-link"]


def test_folders_of_others_are_not_touched(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nobody holds them, and this process may delete them."""
    (folder / "kind-theirs").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(os, "getuid", lambda: -1)
        Scratch("kind-").close()
    assert (folder / "kind-theirs").exists()
    Scratch("kind-").close()
    assert not (folder / "kind-theirs").exists()
