"""Pickle runs code of whoever wrote it: nothing here reads or writes any."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Modules of the standard library and of the usual packages that unpickle.
IMPORT = re.compile(
    r"^\s*(?:import|from)\s+(?:\w+\s*,\s*)*"
    r"(?:_?pickle|cPickle|cloudpickle|dill|joblib|marshal|shelve)\b",
    re.MULTILINE,
)


def tracked_sources() -> list[Path]:
    """Return the Python files of the repository, or of the folders without git."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", "*.py"],  # noqa: S607 - git as the user has it
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    names = [name for name in listed.stdout.split("\0") if name]
    paths = [ROOT / name for name in names]
    return [path for path in paths if path.exists()] or sorted(
        path
        for top in ("frontend", "worker", "protocol", "deploy", "scripts", "tests")
        for path in (ROOT / top).rglob("*.py")
    )


def test_an_import_of_pickle_would_be_found() -> None:
    """The search sees every way to write it."""
    assert IMPORT.search("import pickle\n")
    assert IMPORT.search("    import json, pickle\n")
    assert IMPORT.search("from pickle import loads\n")
    assert not IMPORT.search("# no pickle\nimport msgspec\n")


@pytest.mark.pitfall(36)
def test_no_file_imports_pickle() -> None:
    """Neither the product nor its tests and scripts."""
    sources = tracked_sources()

    assert len(sources) > 100
    assert [path for path in sources if IMPORT.search(path.read_text())] == []
