"""Write the Grafana dashboard from its panels (``dashboard_rows``)."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from dashboard_forms import Panel
from dashboard_rows import ROWS

TARGET = "deploy/helm/tokenwire/files/dashboards/tokenwire.json"

UID = "tokenwire"  # links to it stay right when it is loaded again

WIDTH = 24  # Grafana's grid


def written(query: str) -> str:
    """Return *query* as Grafana wants it."""
    return query.replace("@", 'job=~"$job"').replace("[w]", "[$__rate_interval]")


def dashboard() -> dict[str, object]:
    """Return the dashboard as Grafana's JSON model."""
    return {
        "uid": UID,
        "title": "tokenwire",
        "description": "Written by `make docs` from scripts/dashboard.py.",
        "tags": ["tokenwire", "vllm"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _variables()},
        "panels": list(_panels()),
    }


def _variables() -> list[dict[str, object]]:
    name = 'label_values({__name__=~"tokenwire_(frontend|worker)_info"}, job)'
    return [
        {"name": "datasource", "type": "datasource", "query": "prometheus"},
        {
            "name": "job",
            "label": "scrape job",
            "type": "query",
            "datasource": _DATASOURCE,
            "definition": name,
            "query": {"query": name, "refId": "job"},
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": ["All"], "value": ["$__all"]},
        },
    ]


_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def _panels() -> Iterator[dict[str, object]]:
    number, top = 1, 0
    for title, panels in ROWS.items():
        at = {"h": 1, "w": WIDTH, "x": 0, "y": top}
        yield {"id": number, "type": "row", "title": title, "gridPos": at}
        number, top, left = number + 1, top + 1, 0
        height = 4 if panels[0].kind == "stat" else 8
        for panel in panels:
            if left + panel.width > WIDTH:
                top, left = top + height, 0
            at = {"h": height, "w": panel.width, "x": left, "y": top}
            yield {"id": number, **_panel(panel), "gridPos": at}
            number, left = number + 1, left + panel.width
        top += height


def _panel(panel: Panel) -> dict[str, object]:
    defaults: dict[str, object] = {"unit": panel.unit, "thresholds": _thresholds(panel)}
    if panel.unit == "percentunit":
        defaults |= {"min": 0, "max": 1}
    options: dict[str, object]
    if panel.kind == "stat":
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value"}
    else:
        custom: dict[str, object] = {"fillOpacity": 10, "showPoints": "never"}
        if panel.stack:
            custom |= {"stacking": {"mode": "normal"}, "fillOpacity": 40}
        defaults |= {"custom": custom, "min": 0}
        options = {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": _DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + position),
                "datasource": _DATASOURCE,
                "expr": written(query),
                "legendFormat": legend,
            }
            for position, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def _thresholds(panel: Panel) -> dict[str, object]:
    steps: list[dict[str, object]] = [{"color": "green", "value": None}]
    if panel.worry_above is not None:
        steps.append({"color": "red", "value": panel.worry_above})
    if panel.worry_below is not None:
        steps = [
            {"color": "red", "value": None},
            {"color": "green", "value": panel.worry_below},
        ]
    return {"mode": "absolute", "steps": steps}


def text() -> str:
    """Return the file."""
    return json.dumps(dashboard(), indent=2) + "\n"


def main() -> int:
    """Write the file; return the exit code."""
    path = Path(__file__).parents[1] / TARGET
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
