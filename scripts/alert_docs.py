"""Write the table of alerts in docs/troubleshooting.md, from the rules themselves.

`make docs` runs this.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from table import replaced

__all__ = ["PAGE", "RULES", "alerts", "rendered"]

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
RULES = ROOT / "deploy" / "helm" / "tokenwire" / "files" / "alerts" / "tokenwire.yaml"

VALUE = re.compile(r"\{\{.*?\}\}")  # what Prometheus fills in


def alerts() -> list[dict[str, Any]]:
    """Return the alert rules, in the file's order."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def rendered() -> str:
    """Return the page with its table as it should be."""
    lines = ["| alert | means | do |", "| --- | --- | --- |"]
    for rule in alerts():
        notes = rule["annotations"]
        name = f"`{rule['alert']}` ({rule['labels']['severity']})"
        lines.append(f"| {name} | {_cell(notes['description'])} | {_runbook(notes)} |")
    return replaced(PAGE.read_text(), "alerts", "\n".join(lines))


def _runbook(notes: dict[str, str]) -> str:
    """Return what to do, with links to the pages that are named."""
    return re.sub(r"docs/(\w+\.md)", r"[\1](\1)", _cell(notes["runbook"]))


def _cell(text: str) -> str:
    return VALUE.sub("…", " ".join(text.split())).replace("|", "\\|")


def main() -> None:
    """Write the page."""
    PAGE.write_text(rendered())


if __name__ == "__main__":
    main()
