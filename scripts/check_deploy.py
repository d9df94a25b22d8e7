"""Prove the Helm chart as far as it goes without a cluster; `make check-deploy`.

With the real `helm`: lint, every file of values in the chart's ci/, what it must refuse, its
table of values. What it renders is held against the schemas of Kubernetes and against the
policies of chart_pods.py, chart_wiring.py and chart_commands.py. With the real `kubectl`: the
secrets that the documents have an operator make, against what the pods mount. With the
processes themselves: the simulated stack's, as chart_processes.py runs them.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import yaml
from chart_commands import COMMAND_POLICIES
from chart_manifests import (
    CHART,
    ChartError,
    Json,
    lint,
    manifests_of,
    notes,
    of_kind,
    pods_of,
    render,
)
from chart_pods import POD_POLICIES
from chart_processes import process_problems
from chart_schemas import schema_problems
from chart_values import table_problems
from chart_wiring import WIRING_POLICIES
from deploy_tools import Tools, ToolsError, fetch_tools

__all__ = ["POLICIES", "policy_problems"]

DOCS = CHART.parents[2] / "docs"
SECURITY = DOCS / "security.md"

Policy = Callable[[Sequence[Json]], Iterator[str]]
POLICIES: tuple[Policy, ...] = (*POD_POLICIES, *WIRING_POLICIES, *COMMAND_POLICIES)

EVERYTHING = "everything-values.yaml"
SIM = "sim-values.yaml"

REFUSED: dict[str, tuple[str, ...]] = {
    # What is refused: the settings, and a part of the sentence that says why.
    "additional properties 'replica' not allowed": ("defaults.frontend.replica=2",),
    "additional properties 'x' not allowed": ("x=1",),
    "in plain text": ("defaults.engine=vllm",),
    "are needed": ("defaults.links.insecurePlaintext=false",),
    "or neither": ("defaults.links.frontendKeysSecret=a",),
    "nothing would generate": (
        "defaults.pools.decode.enabled=false",
        "defaults.pools.prefill.enabled=false",
    ),
    "enable pools.decode": (
        "defaults.pools.decode.enabled=false",
        "defaults.pools.aggregated.enabled=true",
    ),
    "not model.hubId": ("defaults.model.claim=c", "defaults.model.hubId=h"),
    "needs frontend.admin.keySecret": ("defaults.frontend.admin.enabled=true",),
    "needs frontend.tls.secret": ("defaults.frontend.tls.clientCaSecret.name=a",),
    "needs capture.layers": ("defaults.capture.enabled=true",),
    "capture.job needs": ("defaults.capture.job.enabled=true",),
    "for engine vllm": ("defaults.worker.nodes=2",),
    "multiple of nodes": (
        "defaults.engine=vllm",
        "defaults.links.insecurePlaintext=true",
        "defaults.worker.nodes=2",
    ),
    "worker/image/tag": ("defaults.worker.image.tag=latest",),
    "maxUnavailable": ("defaults.worker.podDisruptionBudget.maxUnavailable=0",),
    "no gateway": ("defaults.route.enabled=true",),
    "nothing to look at": (
        "defaults.frontend.autoscaling.mode=hpa",
        "defaults.frontend.autoscaling.cpuPercent=0",
        "defaults.frontend.autoscaling.inflight=0",
    ),
    "minReplicas above maxReplicas": (
        "defaults.frontend.autoscaling.mode=keda",
        "defaults.frontend.autoscaling.minReplicas=9",
    ),
    "what vLLM needs": (
        "defaults.engine=vllm",
        "defaults.links.insecurePlaintext=true",
    ),
    "models": ("models.Not_A_Name.engine=sim",),
}


def policy_problems(manifests: Sequence[Json]) -> Iterator[str]:
    """Yield what is against a policy, with the policy's name."""
    for policy in POLICIES:
        for problem in policy(manifests):
            yield f"{policy.__name__}: {problem}"


class Report:
    """Prints what was checked, and counts what was found."""

    def __init__(self) -> None:
        self.num_problems = 0
        self.num_checks = 0

    def __call__(self, what: str, problems: Sequence[str]) -> None:
        """Print that *what* was checked, and the *problems*."""
        self.num_checks += 1
        self.num_problems += len(problems)
        print(f"{'FAIL' if problems else 'ok  '} {what}")
        for problem in problems:
            print(f"       {problem}")


def check_values(report: Report, tools: Tools, values: Path) -> None:
    """Lint, render and check the chart with one file of values."""
    name = values.name.removesuffix("-values.yaml")
    try:
        lint(tools.helm, values)
        manifests = manifests_of(render(tools.helm, values))
    except ChartError as error:
        report(f"{name}: helm", [str(error)])
        return
    report(f"{name}: helm lint, helm template: {len(manifests)} objects", [])
    given = cast("Json", yaml.safe_load(values.read_text()) or {})
    # Not one more, that values of ours bring along.
    wanted = sorted(given.get("models", {})) or ["demo"]
    models = sorted(
        one["metadata"]["labels"]["tokenwire.dev/model"]
        for one in of_kind(manifests, "Deployment")
    )
    report(f"{name}: models", [] if models == wanted else [f"{models} are served"])
    report(f"{name}: schemas", list(schema_problems(manifests)))
    report(f"{name}: policies", list(policy_problems(manifests)))


def check_refusals(report: Report, tools: Tools) -> None:
    """See that values which would not run are refused, with a sentence."""
    wrong: list[str] = []
    for sentence, settings in REFUSED.items():
        try:
            render(tools.helm, settings=settings)
        except ChartError as error:
            if sentence not in str(error):
                wrong.append(f"{' '.join(settings)}: not for {sentence!r}: {error}")
        else:
            wrong.append(f"{' '.join(settings)}: taken")
    report(f"{len(REFUSED)} settings are refused", wrong)


def check_everything(report: Report, tools: Tools) -> None:
    """See that the file of everything leaves no kind out, and that no release is needed."""
    templates = "".join(
        path.read_text() for path in sorted(CHART.rglob("templates/*.yaml"))
    )
    kinds = set(re.findall(r"^kind: (\w+)$", templates, re.MULTILINE))
    rendered: set[str] = set()
    for values in sorted(CHART.glob("ci/*.yaml")):
        rendered |= {m["kind"] for m in manifests_of(render(tools.helm, values))}
    report(
        "every kind of the templates is in some file of values",
        sorted(kinds - rendered),
    )


def check_notes(report: Report, tools: Tools) -> None:
    """See that the notes name a Service that is there for each frontend."""
    values = CHART / "ci" / EVERYTHING
    text = notes(tools.helm, values)
    manifests = manifests_of(render(tools.helm, values))
    named = set(re.findall(r"service/(\S+)", text))
    frontends = {
        one["metadata"]["name"] for one in manifests if one["kind"] == "Deployment"
    }
    services = {
        one["metadata"]["name"] for one in manifests if one["kind"] == "Service"
    }
    wrong = [f"{name} is not named" for name in sorted(frontends - named)]
    wrong += [f"no Service is called {name}" for name in sorted(named - services)]
    report("the notes name a Service for each model", wrong)


def check_runbooks(report: Report, tools: Tools) -> None:
    """See that alerts lead to the documents that the values name."""
    values = CHART / "ci" / EVERYTHING
    url: str = yaml.safe_load(values.read_text())["monitoring"]["docsUrl"]
    (rules,) = of_kind(manifests_of(render(tools.helm, values)), "PrometheusRule")
    wrong = [
        f"{rule['alert']} leads to {link}"
        for group in rules["spec"]["groups"]
        for rule in group["rules"]
        if not (link := rule["annotations"]["runbook_url"]).startswith(
            f"{url}troubleshooting.md#"
        )
    ]
    report("alerts lead to their runbooks", wrong)


def check_secrets(report: Report, tools: Tools) -> None:
    """Make the secrets of docs/security.md with kubectl; pods must find their keys in them."""
    commands = re.findall(
        r"^kubectl create secret (?:.*\\\n)*.*$", SECURITY.read_text(), re.MULTILINE
    )
    secrets: dict[str, set[str]] = {}
    problems: list[str] = []
    for command in commands:
        ran = _kubectl(tools, shlex.split(command.replace("\\\n", " "))[1:])
        if ran.returncode:
            problems.append(f"{command}: {ran.stderr.strip()}")
            continue
        made = cast("Json", yaml.safe_load(ran.stdout))
        secrets[made["metadata"]["name"]] = set(made["data"])
    values = CHART / "ci" / EVERYTHING
    for pod in pods_of(manifests_of(render(tools.helm, values))):
        folders = {
            volume["name"]: volume["secret"]["secretName"]
            for volume in pod.spec.get("volumes", [])
            if "secret" in volume
        }
        for container in pod.containers:
            for mount in container.get("volumeMounts", []):
                secret = folders.get(mount["name"])
                if secret not in secrets:
                    continue
                prefix = re.escape(mount["mountPath"])
                text = " ".join(container.get("args", []))
                wanted = set(re.findall(rf"{prefix}/([\w.-]+)", text))
                problems += [
                    f"{pod.name}: {secret} has no {key}"
                    for key in sorted(wanted - secrets[str(secret)])
                ]
    if not secrets:
        problems.append(f"{SECURITY} has no commands that make secrets")
    report(f"kubectl makes {len(secrets)} secrets of docs/security.md", problems)


def _kubectl(tools: Tools, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run kubectl as far as it goes without a cluster, where its files exist."""
    with tempfile.TemporaryDirectory(prefix="tokenwire-kubectl-") as name:
        for argument in arguments:
            if argument.startswith("--from-file="):
                file = argument.rpartition("=")[2]
                (Path(name) / Path(file).name).write_text("x\n")
        return subprocess.run(
            [str(tools.kubectl), *arguments, "--dry-run=client", "--output=yaml"],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
            cwd=name,
            env={"HOME": name, "PATH": "/usr/bin:/bin"},
        )


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description="Prove the Helm chart.")
    parser.add_argument(
        "--model", type=Path, help="the demo model: run the simulated chart's commands"
    )
    options = parser.parse_args()
    began = time.monotonic()
    try:
        tools = fetch_tools()
    except ToolsError as error:
        print(f"check-deploy: {error}", file=sys.stderr)
        return 1
    report = Report()
    for values in sorted(CHART.glob("ci/*-values.yaml")):
        check_values(report, tools, values)
    check_everything(report, tools)
    check_refusals(report, tools)
    check_notes(report, tools)
    check_runbooks(report, tools)
    check_secrets(report, tools)
    if options.model is not None:
        manifests = manifests_of(render(tools.helm, CHART / "ci" / SIM))
        problems = list(process_problems(manifests, options.model))
        report("the simulated chart's commands run here, and pass helm test", problems)
    report("the table of values is as values.yaml has it", list(table_problems()))
    took_s = time.monotonic() - began
    print(
        f"check-deploy: {report.num_checks} checks, {report.num_problems} problems, "
        f"{took_s:.1f} s"
    )
    return int(report.num_problems > 0)


if __name__ == "__main__":
    sys.exit(main())
