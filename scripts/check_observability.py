"""Check dashboard, alerts, compose file and Dockerfile with other people's programs.

- `hadolint` on the Dockerfile, the Compose Specification's schema and our own checks on
  compose.yaml;
- `promtool check rules` on the alerts and on the dashboard's queries, and a test for each alert,
  which must tell it from one that is broken (alert_tests.py);
- the compose services of the profile `sim` and a Prometheus, all run as processes wired as
  in the file: every query of the dashboard must bring data, every rule be evaluated.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import yaml
from alert_docs import RULES, alerts
from alert_tests import AlertTestsError, problems
from compose_file import COMPOSE, DOCKERFILE, complaints, load
from compose_here import HereError, ask, chat, services_here
from dashboard import written
from dashboard_rows import ROWS
from image_tools import ToolError, compose_schema, debian

HADOLINT = Path(sys.executable).parent / "hadolint"

OF_VLLM_ALONE = ("vllm:num_preemptions_total",)

DATA_S = 60.0
"""Every series is there after two scrapes, 0.6 s; a machine that is busy takes longer."""

WINDOW = "30s"  # in the place of Grafana's


class CheckError(Exception):
    """A check has failed."""


def check_files() -> None:
    """Check what needs no process.

    Raises:
        CheckError: Something is wrong with a file.
    """
    _run([str(HADOLINT), str(DOCKERFILE)])
    schema = jsonschema_rs.validator_for(json.loads(compose_schema().read_text()))
    compose = load({})
    found = [error.message for error in schema.iter_errors(compose.raw)]
    found += list(complaints(compose))
    if found:
        raise CheckError("\n".join(f"{COMPOSE}: {one}" for one in found))
    promtool = str(debian("prometheus") / "usr/bin/promtool")
    _run([promtool, "check", "rules", str(RULES)])
    if found := list(problems(Path(promtool))):
        raise CheckError("\n".join(found))
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        # Each query as a rule: promtool has no other way to read one.
        rules = [
            {"record": f"query_{number}", "expr": query}
            for number, (_, query) in enumerate(queries())
        ]
        yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}, file)
        file.flush()
        _run([promtool, "check", "rules", file.name])


def queries() -> Iterator[tuple[str, str]]:
    """Yield each panel and query of the dashboard, as Grafana would send it."""
    for panels in ROWS.values():
        for panel in panels:
            for query in panel.queries.values():
                text = written(query).replace("$job", ".*")
                yield panel.title, text.replace("$__rate_interval", WINDOW)


def check_live(model: Path) -> None:
    """Run services and a Prometheus; ask each query of it.

    Raises:
        CheckError: One brings nothing, or a rule cannot be evaluated.
        HereError: A service does not run as it should.
    """
    with services_here("sim", model=model) as here:
        url = here.url("sim-frontend", 8000)
        chat(url, "Tell me of the sea. " * 20, 32)
        with here.program("prometheus", debian("prometheus") / "usr/bin/prometheus"):
            prometheus = here.url("prometheus", 9090)
            deadline = time.monotonic() + DATA_S
            chat(url, "Tell me of the sea. " * 20, 32)
            _be_refused(url)
            while missing := _without_data(prometheus):
                _be_refused(url)
                if time.monotonic() > deadline:
                    text = "\n".join(f"{title}: {query}" for title, query in missing)
                    msg = f"these queries bring nothing:\n{text}"
                    raise CheckError(msg)
                time.sleep(0.5)
            _check_rules(prometheus)


def _be_refused(url: str) -> None:
    """Have an error counted."""
    with contextlib.suppress(urllib.error.HTTPError):
        chat(url, "", -1)


def _without_data(prometheus: str) -> list[tuple[str, str]]:
    missing: list[tuple[str, str]] = []
    for title, query in queries():
        if any(name in query for name in OF_VLLM_ALONE):
            continue
        path = f"/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        if not ask(prometheus, path)["data"]["result"]:
            missing.append((title, query))
    return missing


def _check_rules(prometheus: str) -> None:
    """Check that each rule was evaluated, and that none fires at rest.

    Raises:
        CheckError: One was not, or does.
    """
    groups = ask(prometheus, "/api/v1/rules")["data"]["groups"]
    rules: list[dict[str, Any]] = [rule for group in groups for rule in group["rules"]]
    wanted = len(alerts())
    bad = [r["name"] for r in rules if r["health"] == "err" or r["state"] == "firing"]
    if len(rules) != wanted or bad:
        msg = f"{len(rules)} of {wanted} rules are loaded, these are not well: {bad}"
        raise CheckError(msg)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CheckError(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")


def main() -> int:
    """Run all checks; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="any model's folder")
    given = parser.parse_args()
    began = time.monotonic()
    try:
        check_files()
        took_s = time.monotonic() - began
        print(f"files are well, {len(alerts())} alerts are tested ({took_s:.1f} s)")
        check_live(given.model)
    except (AlertTestsError, CheckError, HereError, ToolError) as error:
        print(error, file=sys.stderr)
        return 1
    number = sum(1 for _ in queries())
    print(f"{number} queries bring data ({time.monotonic() - began:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
