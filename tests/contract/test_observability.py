"""The dashboard and the alert rules ask for what the processes really export."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path

import dashboard
import pytest_asyncio
from alert_docs import alerts
from alert_tests import read_tests
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from support.pages import ROOT, anchors
from support.promql import Selector, asked, matches
from support.stack import SimWorker, Stack, eventually, frontend
from tokenwire.frontend.disaggregation import PrefillPlace
from tokenwire.frontend.pages import Books
from tokenwire.protocol.messages import Role

CHART = ROOT / "deploy/helm/tokenwire"
DASHBOARD = CHART / "files/dashboards/tokenwire.json"
SCALING = CHART / "templates/autoscaling.yaml"

OF_SCRAPES = {"job", "instance", "namespace", "pod"}
"""Labels that Prometheus gives each series of a target."""

OF_VLLM_ALONE = {"vllm:num_preemptions_total"}
"""What no simulated engine has; tests/integration looks for these."""

ANY = {"engine", "engine_version", "model_name", "version", "worker_id"}
"""Labels whose values are whatever somebody has installed or named."""

VLLM_OPTIONS = {"--gpu-memory-utilization", "--max-model-len", "--max-num-seqs"}

Series = list[tuple[str, dict[str, str]]]


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
    for rule in alerts():
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
    for path in ("/v1/models", "/ready"):
        assert (await served.get(path)).status == 200


@pytest_asyncio.fixture
async def series(tiny_model: Path) -> AsyncIterator[Series]:
    """What Prometheus gets of a stack: of its workers, its frontend, and one of several processes."""
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
            several = Books(2)
            several.told(0, pages[0])
            several.told(1, pages[0])
            pages.append(several.page({0, 1}))
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


def _strangers(given: Iterable[Selector], series: Series) -> Iterator[str]:
    """Yield which of the *given* series no process exports: name, labels and values."""
    shapes: dict[str, set[frozenset[str]]] = {}
    values: set[tuple[str, str, str]] = set()
    for name, labels in series:
        shapes.setdefault(name, set()).add(frozenset(labels))
        values |= {(name, *pair) for pair in labels.items()}
    for one in given:
        own = {k: v for k, _, v in one.matchers if k not in OF_SCRAPES}
        if frozenset(own) not in shapes.get(one.name, set()):
            yield f"{one.name} has not the labels {sorted(own)}"
        for pair in own.items():
            if pair[0] not in ANY and (one.name, *pair) not in values:
                yield f"{one.name} has no {pair[0]}={pair[1]}"


async def test_alerts_are_tested_with_series_that_exist(series: Series) -> None:
    """Names, all labels and their values are those of processes, not somebody's idea."""
    given = [
        asked(name).selectors[0] for test in read_tests() for name in test["series"]
    ]

    assert list(_strangers(given, series)) == []
    found = _strangers(
        asked('a_total{kind="y"} + a_total{sort="x"}').selectors,
        [("a_total", {"kind": "x"})],
    )
    assert list(found) == [
        "a_total has no kind=y",
        "a_total has not the labels ['sort']",
        "a_total has no sort=x",
    ]


async def test_what_texts_and_autoscalers_name_exists(series: Series) -> None:
    """Whoever follows a runbook finds metric, label, code and option; an autoscaler does, too."""
    texts = [text for rule in alerts() for text in rule["annotations"].values()]
    text = " ".join([*texts, SCALING.read_text()])
    names = {name for name, _ in series}
    names |= {re.sub(r"_(bucket|count|sum|total)$", "", name) for name in names}
    words = {word for _, labels in series for pair in labels.items() for word in pair}
    words |= set(re.findall(r"`(\w+)` \|", (ROOT / "docs/api.md").read_text()))
    options = set(
        re.findall(r"--[a-z-]+", (ROOT / "docs/configuration.md").read_text())
    )

    for said, known in (
        (set(re.findall(r"\btokenwire_\w+", text)), names),
        (set(re.findall(r"`(\w+)`", text)), words),
        (set(re.findall(r"--[a-z-]+", " ".join(texts))), options | VLLM_OPTIONS),
    ):
        assert len(said) > 5
        assert said - known == set()


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
    for rule in alerts():
        texts = " ".join(rule["annotations"].values())
        used = set(re.findall(r"\$labels\.(\w+)", texts))
        left = asked(rule["expr"]).labels
        if " by " not in rule["expr"]:
            left |= OF_SCRAPES
        assert used <= left, rule["alert"]


def test_every_alert_says_what_happened_and_what_to_do() -> None:
    """Whoever is woken reads these."""
    rules = alerts()
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["alert"].startswith("Tokenwire")
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        for name in ("summary", "description", "runbook"):
            assert rule["annotations"][name].strip().endswith((".", ":")), rule["alert"]


def test_every_runbook_is_a_link_that_leads_to_it() -> None:
    """To the alert's own heading."""
    for rule in alerts():
        page, _, heading = rule["annotations"]["runbook_url"].partition("#")
        assert heading == rule["alert"].lower()
        assert heading in anchors(ROOT / page), rule["alert"]


def test_every_alert_is_tested() -> None:
    """`make check-observability` runs the tests; each must fire once, and once not."""
    tests = read_tests()
    assert [test["alert"] for test in tests] == [rule["alert"] for rule in alerts()]
    for test in tests:
        assert any(test["at"].values()), test["alert"]
        assert not all(test["at"].values()), test["alert"]


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
    text = f"{DASHBOARD.read_text()} {alerts()}"
    named = set(re.findall(r"\blocal_[a-z_]+", text))
    assert named
    assert named <= {place.value for place in PrefillPlace}
