"""docs/operations.md, capture.md, resume.md and admin.md name what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from support.no_workers import no_workers
from tokenwire.frontend.config import parse_config as frontend_config
from tokenwire.frontend.disaggregation import PrefillPlace
from tokenwire.frontend.gauges import watch_workers
from tokenwire.frontend.metrics import Metrics as FrontendMetrics
from tokenwire.worker.config import parse_config as worker_config
from tokenwire.worker.metrics import Metrics as WorkerMetrics

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("operations.md", "capture.md", "resume.md")
TEXT = "".join((DOCS / page).read_text() for page in PAGES)
ADMIN = (DOCS / "admin.md").read_text()


def test_options_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the frontend or the worker."""
    for parse in (frontend_config, worker_config):
        with pytest.raises(SystemExit):
            parse(["--help"])
    known = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))

    engines = {
        "--enable-lora", "--enable-sleep-mode", "--max-cpu-loras", "--max-loras"
    }  # fmt: skip
    assert {*re.findall(r"`(--[a-z][a-z-]+)", TEXT)} <= known
    assert {*re.findall(r"`(--[a-z][a-z-]+)", ADMIN)} <= known | engines


def test_metrics_exist() -> None:
    """Those that we export."""
    registry = CollectorRegistry()
    WorkerMetrics("m", registry)
    frontend = FrontendMetrics()
    watch_workers(frontend, no_workers())
    pages = frontend.exposition() + generate_latest(registry)
    types = re.findall(r"# TYPE (\S+) (\S+)", pages.decode())
    known = {name for name, _ in types}

    named = set(re.findall(r"`(tokenwire_[a-z_]+)", TEXT + ADMIN))
    assert named <= known
    assert {*re.findall(r"`((?:local_|remote|aggregated)[a-z_]*)`", TEXT)} == {
        place.value for place in PrefillPlace
    }
