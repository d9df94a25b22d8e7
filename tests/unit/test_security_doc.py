"""docs/security.md names what exists: tests, options and metrics."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tokenwire.deploy.keys import main as keys_command
from tokenwire.frontend.config import parse_config as frontend_config
from tokenwire.frontend.metrics import Metrics as FrontendMetrics
from tokenwire.worker.config import parse_config as worker_config
from tokenwire.worker.metrics import Metrics as WorkerMetrics

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "security.md").read_text()
ROW = re.compile(r"^\| (\d+) \| (\w) \| (.+) \| (.+) \| `(\S+)::(\w+)` \|$")


def threats() -> list[tuple[str, ...]]:
    """Return the rows of the threat model."""
    table = TEXT.split("<!-- table: threats -->\n", 1)[1].split("<!-- end -->", 1)[0]
    rows = table.splitlines()[2:]
    found = [ROW.fullmatch(row) for row in rows]
    assert all(found), [
        row for row, match in zip(rows, found, strict=True) if not match
    ]
    return [match.groups() for match in found if match is not None]


def defined(path: str) -> set[str]:
    """Return the tests of a module."""
    tree = ast.parse((ROOT / path).read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in tree.body if isinstance(node, kinds)}


def test_every_threat_has_a_test() -> None:
    """Rows are numbered, say who attacks, and name a test that there is."""
    rows = threats()
    assert [int(number) for number, *_ in rows] == list(range(1, len(rows) + 1))
    assert {who for _, who, *_ in rows} == set(re.findall(r"\*\*(\w)\*\* ", TEXT))
    for number, *_, path, name in rows:
        assert name.startswith("test_"), number
        assert name in defined(path), number


def test_options_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the frontend, the worker, or the command that makes keys."""
    for show in (
        lambda: frontend_config(["--help"]),
        lambda: worker_config(["--help"]),
        lambda: keys_command(["--help"]),
        lambda: keys_command(["api", "--help"]),
    ):
        with pytest.raises(SystemExit):
            show()
    known = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    named = set(re.findall(r"`(--[a-z][a-z-]+)", TEXT))
    assert named - known <= {"--curve"}  # of tokenwire-up
    for action in ("api-keys", "tls-cert", "max-connections"):
        assert f"--{action}" in named


def test_metrics_exist() -> None:
    """Those that we export."""
    registry = CollectorRegistry()
    WorkerMetrics("m", registry)
    page = FrontendMetrics().exposition() + generate_latest(registry)
    known = set(re.findall(r"# TYPE (\S+)", page.decode()))
    assert set(re.findall(r"`(tokenwire_[a-z_]+)", TEXT)) <= known
