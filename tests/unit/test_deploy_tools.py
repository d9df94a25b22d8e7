"""The programs that prove the chart: run only if they are the ones that were looked at."""

from __future__ import annotations

import hashlib
from pathlib import Path

import deploy_tools
import pytest
from deploy_tools import flaw


def test_a_program_with_other_bytes_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor one that is not there."""
    program = tmp_path / "helm"
    digest = hashlib.sha256(b"helm").hexdigest()
    monkeypatch.setattr(deploy_tools, "SHA256", {"helm": digest})
    assert flaw(tmp_path) == f"{program} is missing"
    program.write_bytes(b"helm")
    assert flaw(tmp_path) is None
    program.write_bytes(b"another")
    assert "SHA-256" in str(flaw(tmp_path))
