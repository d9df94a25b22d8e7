"""Write the runbooks of docs/troubleshooting.md, from the alert rules themselves.

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
    """Return the page with its sections as they should be: each alert's link leads to one."""
    lines: list[str] = []
    for rule in alerts():
        notes = rule["annotations"]
        severity = rule["labels"]["severity"].capitalize()
        lines += [f"### {rule['alert']}", ""]
        lines += [f"{severity}. {_text(notes['description'])}", ""]
        lines += [f"**Do:** {_linked(_text(notes['runbook']))}", ""]
    return replaced(PAGE.read_text(), "alerts", "\n".join(lines))


def _linked(text: str) -> str:
    """Return what to do, with links to the pages and alerts that are named."""
    names = "|".join(rule["alert"] for rule in alerts())
    text = re.sub(
        rf"\b({names})\b", lambda name: f"[{name[0]}](#{name[0].lower()})", text
    )
    return re.sub(r"docs/(\w+\.md)", r"[\1](\1)", text)


def _text(text: str) -> str:
    return VALUE.sub("…", " ".join(text.split()))


def main() -> None:
    """Write the page."""
    PAGE.write_text(rendered())


if __name__ == "__main__":
    main()
