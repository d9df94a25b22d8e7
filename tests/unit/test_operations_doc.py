"""The pages for operators name options and metrics that exist."""

from __future__ import annotations

import re

from config_docs import COMMANDS, options, parser_of
from prometheus_client import CollectorRegistry, generate_latest

from support.no_workers import no_workers
from support.pages import ROOT
from tokenwire.frontend.disaggregation import PrefillPlace
from tokenwire.frontend.gauges import watch_workers
from tokenwire.frontend.metrics import Metrics as FrontendMetrics
from tokenwire.worker.metrics import Metrics as WorkerMetrics

# Of other programs, and of scripts for developers.
OTHERS = {"benchmarks.md", "faults.md", "faults-peers.md", "migrate.md", "routing.md"}
TEXT = "".join(
    page.read_text()
    for page in sorted((ROOT / "docs").glob("*.md"))
    if page.name not in OTHERS
)
VLLM = {
    *("--disable-log-stats", "--enable-lora", "--enable-sleep-mode", "--enforce-eager"),
    *("--gpu-memory-utilization", "--kv-cache-memory-bytes", "--kv-events-config"),
    *("--kv-transfer-config", "--max-cpu-loras", "--max-loras", "--scheduler-cls"),
    *("--speculative-config", "--structured-outputs-config", "--worker-extension-cls"),
}
"""Engine arguments of vLLM's that pages name."""


def known_options() -> set[str]:
    """Return those of all our commands."""
    actions = (one for name in COMMANDS for one in options(parser_of(name)))
    return {flag for action in actions for flag in action.option_strings}


def test_options_exist() -> None:
    """Ours, or vLLM's."""
    named = set(re.findall(r"`(--[a-z][a-z-]+[a-z])\b", TEXT))

    assert len(named) > 100
    assert named - known_options() - VLLM - {"--help"} == set()


def test_migration_leads_to_options_that_exist() -> None:
    """Those of the column `here`, on the page about others' options."""
    page = (ROOT / "docs" / "migrate.md").read_text()
    here = [line.split("|")[2] for line in page.splitlines() if line.startswith("| ")]
    named = {flag for cell in here for flag in re.findall(r"(--[a-z][a-z-]+)", cell)}

    assert "--routing-session-tokens" in named
    assert named - known_options() - VLLM == set()


def test_metrics_exist() -> None:
    """Those that we export."""
    registry = CollectorRegistry()
    WorkerMetrics("m", registry)
    frontend = FrontendMetrics()
    watch_workers(frontend, no_workers())
    pages = frontend.exposition() + generate_latest(registry)
    types = re.findall(r"# TYPE (\S+) (\S+)", pages.decode())
    known = {name for name, _ in types}

    named = set(re.findall(r"`(tokenwire_[a-z_]+)", TEXT))
    assert named <= known
    assert {*re.findall(r"`((?:local_|remote|aggregated)[a-z_]*)`", TEXT)} >= {
        place.value for place in PrefillPlace
    }
