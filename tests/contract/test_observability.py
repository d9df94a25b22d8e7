"""The dashboard and the alert rules ask for what the processes really export."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import dashboard
import pytest_asyncio
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from support.promql import Selector, asked, matches
from support.stack import SimWorker, Stack, eventually, frontend
from tokenwire.frontend.disaggregation import PrefillPlace
from tokenwire.protocol.messages import Role

CHART = Path(__file__).parents[2] / "deploy/helm/tokenwire/files"
DASHBOARD = CHART / "dashboards/tokenwire.json"
RULES = CHART / "alerts/tokenwire.yaml"

OF_SCRAPES = {"job", "instance", "namespace", "pod"}
"""Labels that Prometheus gives each series of a target."""

OF_VLLM_ALONE = {"vllm:num_preemptions_total"}
"""What no simulated engine has; tests/integration looks for these."""

Series = list[tuple[str, dict[str, str]]]


def _rules() -> list[dict[str, Any]]:
    file = yaml.safe_load(RULES.read_text())
    return [rule for group in file["groups"] for rule in group["rules"]]


def _targets() -> list[tuple[str, dict[str, str]]]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [
        (panel["title"], target)
        for panel in panels
        for target in panel.get("targets", [])
    ]


def _queries() -> Iterator[tuple[str, str]]:
    """Yield where each query stands, and the query as Prometheus gets it."""
    for title, target in _targets():
        query = target["expr"].replace("$job", ".*")
        yield f"panel {title}", query.replace("$__rate_interval", "1m")
    for rule in _rules():
        yield f"alert {rule['alert']}", rule["expr"]


async def _use(served: Stack, decode: SimWorker) -> None:
    """Have happen what some series tell of."""
    refused = await served.complete(prompt=[5] * 8, max_tokens=1)
    assert refused.status == 503  # nobody is there yet
    await served.know(served.workers)
    for _ in range(2):  # the second finds its prefix
        reply = await served.complete(prompt=list(range(5, 45)), max_tokens=4)
        assert reply.status == 200
    # The decode worker goes under an output, which goes on elsewhere.
    running = asyncio.create_task(
        served.complete(prompt=[7] * 40, max_tokens=400, seed=1, temperature=1.0)
    )
    await eventually(lambda: decode.engine.load().num_running > 0, "it decodes")
    await decode.die()
    assert (await running).status == 200
    assert (await served.get("/v1/models")).status == 200


@pytest_asyncio.fixture
async def series(tiny_model: Path) -> AsyncIterator[Series]:
    """What Prometheus gets of a stack, the pages of its frontend and its workers."""
    roles = (Role.PREFILL, Role.DECODE, Role.AGGREGATED)
    workers = [
        SimWorker(tiny_model, role, role.value, ("--step-ms", "1"), kv_events=True)
        for role in roles
    ]
    async with frontend(tiny_model) as served:
        served.workers = workers
        try:
            for worker in workers:
                await worker.start()
            await _use(served, workers[1])
            pages = [(await served.get("/metrics")).text]
            pages += [generate_latest(worker.registry).decode() for worker in workers]
            yield [
                (sample.name, sample.labels)
                for page in pages
                for family in text_string_to_metric_families(page)
                for sample in family.samples
            ]
        finally:
            for worker in workers:
                await worker.stop()


def _is_there(selector: Selector, series: Series) -> bool:
    if selector.name == "up" or selector.name in OF_VLLM_ALONE:
        return True
    own = [matcher for matcher in selector.matchers if matcher[0] not in OF_SCRAPES]
    wanted = Selector(selector.name, own)
    return any(matches(wanted, name, labels) for name, labels in series)


async def test_every_query_names_series_that_exist(series: Series) -> None:
    """A renamed metric, label or value fails here, and not in a blank panel."""
    labels_of: dict[str, set[str]] = {}
    for name, labels in series:
        labels_of.setdefault(name, set()).update(labels)

    for where, query in _queries():
        names = asked(query)
        assert names.selectors, where
        for selector in names.selectors:
            assert _is_there(selector, series), f"{where}: nothing is {selector}"
        known = {
            label for one in names.selectors for label in labels_of.get(one.name, ())
        }
        assert names.labels <= known | OF_SCRAPES, f"{where}: {names.labels - known}"


def test_a_query_that_names_nothing_is_found() -> None:
    """The check above can fail: by name, by label, by a label's value."""
    there: Series = [("a_total", {"kind": "x"})]

    assert _is_there(
        Selector("a_total", [("job", "=~", "y"), ("kind", "=", "x")]), there
    )
    assert not _is_there(Selector("b_total"), there)
    assert not _is_there(Selector("a_total", [("kind", "=", "y")]), there)
    assert not _is_there(Selector("a_total", [("sort", "=", "x")]), there)
    query = (
        'sum by (le, role) (rate(a_total{kind=~"x|y",job="$j"}[5m] offset 1h)) > 2 or b'
    )
    names = asked(query)
    assert [one.name for one in names.selectors] == ["a_total", "b"]
    assert names.selectors[0].matchers == [("kind", "=~", "x|y"), ("job", "=", "$j")]
    assert names.labels == {"le", "role"}
    assert asked("a * on (i) group_left (w) b").labels == {"i", "w"}


def test_legends_and_texts_use_labels_that_their_queries_leave() -> None:
    """An aggregation drops all labels but those that it names."""
    for title, target in _targets():
        used = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert used <= asked(target["expr"]).labels, title
    for rule in _rules():
        texts = " ".join(rule["annotations"].values())
        used = set(re.findall(r"\$labels\.(\w+)", texts))
        left = asked(rule["expr"]).labels
        if " by " not in rule["expr"]:
            left |= OF_SCRAPES
        assert used <= left, rule["alert"]


def test_every_alert_says_what_happened_and_what_to_do() -> None:
    """Whoever is woken reads these."""
    rules = _rules()
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["alert"].startswith("Tokenwire")
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        for name in ("summary", "description", "runbook"):
            assert rule["annotations"][name].strip().endswith((".", ":")), rule["alert"]


def test_the_dashboard_is_fresh() -> None:
    """It is what `make docs` makes of scripts/dashboard.py."""
    assert DASHBOARD.read_text() == dashboard.text(), "run `make docs`"


def test_panels_stand_in_the_grid() -> None:
    """None lies on another, and each says what it shows."""
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert all(x < dashboard.WIDTH for x, _ in cells), panel["title"]
        taken |= cells
        assert panel["type"] == "row" or panel["description"], panel["title"]


def test_places_of_prompts_are_told_before_they_happen() -> None:
    """A runbook names them: they are the code's."""
    text = DASHBOARD.read_text() + RULES.read_text()
    named = set(re.findall(r"\blocal_[a-z_]+", text))
    assert named
    assert named <= {place.value for place in PrefillPlace}
