"""Tests of the alert rules by promtool, and broken rules that these tests must tell.

A test of tests/support/alerts.yaml is about one alert: its series, and what fires when. It runs
on that rule alone, without the texts but the summary, which is compared as somebody would read it.

Then each rule is broken in every way that `mutants` knows (a threshold moved by a bit, a matcher
that takes everything, no `for`, no `and`, half of an `or`), one at a time, and its test must fail: so each alert
has a series just above its threshold that fires, and one just below that does not.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from alert_docs import alerts

__all__ = ["TESTS", "AlertTestsError", "Mutant", "mutants", "problems", "read_tests"]

TESTS = Path(__file__).parents[1] / "tests/support/alerts.yaml"

LOOSER, TIGHTER = 0.8, 1.4
"""What a threshold is moved by. A test has a series within each: near enough to be called
just below and just above, and no further off than whole numbers such as 3 and 4 are."""


class AlertTestsError(Exception):
    """The tests could not be run."""


Rule = dict[str, Any]
Test = dict[str, Any]

_THRESHOLD = re.compile(r"(?<![=<>!])(>=|<=|==|>|<) *([0-9.]+)")
_TWO_SERIES = re.compile(r"(?<![=<>!])< *(?=[a-z_:]+(?: |\{|$))")
_MATCHER = re.compile(r'(=~|!~|!=|=)"[^"]*"')


@dataclass(frozen=True, slots=True)
class Mutant:
    """A rule that is not what it should be."""

    what: str
    rule: Rule


def read_tests() -> list[Test]:
    """Return the tests, in the file's order."""
    # All as text: values such as 0x9 would be numbers else.
    return list(yaml.load(TESTS.read_text(), Loader=yaml.BaseLoader))


def mutants(rule: Rule) -> Iterator[Mutant]:
    """Yield *rule*, broken in one place each."""
    text = " ".join(str(rule["expr"]).split())
    if "for" in rule:
        yield Mutant("without `for`", {k: v for k, v in rule.items() if k != "for"})
    for found in _THRESHOLD.finditer(text):
        for moved in _moved(found[1], float(found[2])):
            whole = text[: found.start()] + moved + text[found.end() :]
            yield Mutant(f"with `{moved}`", rule | {"expr": whole})
    for found in _TWO_SERIES.finditer(text):
        whole = f"{text[: found.start()]}<= {text[found.end() :]}"
        yield Mutant("with `<=`", rule | {"expr": whole})
    for found in _MATCHER.finditer(text):
        whole = f'{text[: found.start()]}=~".*"{text[found.end() :]}'
        yield Mutant(f"without {found[0]}", rule | {"expr": whole})
    for found in re.finditer(r" and on \(", text):
        left = text[: found.start()]
        if left.count("(") == left.count(")"):
            yield Mutant(f"without{text[found.start() :]}", rule | {"expr": left})

    for found in re.finditer(r" unless on \(", text):
        for word in ("and", "or"):
            whole = f"{text[: found.start()]} {word} on ({text[found.end() :]}"
            yield Mutant(f"with `{word}` for `unless`", rule | {"expr": whole})
    for found in re.finditer(r" or (?!on \()", text):
        left, right = text[: found.start()], text[found.end() :]
        if left.count("(") == left.count(")"):
            yield Mutant(f"without {left}", rule | {"expr": right})
            yield Mutant(f"without {right}", rule | {"expr": left})


def _moved(sign: str, number: float) -> Iterator[str]:
    """Yield the comparison, looser and tighter."""
    if sign == "==":
        yield f">= {number:g}"
        yield f"== {number - 1:g}"
    elif sign == "<":  # of a share: what is missing of 1 counts
        yield f"< {1 - (1 - number) * LOOSER:g}"
        yield f"< {1 - (1 - number) * TIGHTER:g}"
    elif sign == ">=":
        yield f">= {number - 1:g}"
        yield f">= {number + 1:g}"
    elif number:
        yield f"> {number * LOOSER:g}"
        yield f"> {number * TIGHTER:g}"
    else:
        yield ">= 0"
        yield "> 1"


def problems(promtool: Path) -> Iterator[str]:
    """Yield which alerts have no test, do not fire as theirs says, or could be others.

    Raises:
        AlertTestsError: promtool did not run.
    """
    rules, tests = {rule["alert"]: rule for rule in alerts()}, read_tests()
    named = {test["alert"] for test in tests}
    yield from (f"{name} has no test" for name in rules if name not in named)
    yield from (f"{name} is no alert" for name in named if name not in rules)
    tested = [test for test in tests if test["alert"] in rules]
    whole = [(test, Mutant("", rules[test["alert"]])) for test in tested]
    for (test, _), said in zip(whole, _run(promtool, whole), strict=True):
        if said:
            yield f"{test['alert']}:\n{said}"
    broken = [(t, mutant) for t in tested for mutant in mutants(rules[t["alert"]])]
    for (test, mutant), said in zip(broken, _run(promtool, broken), strict=True):
        if not said:
            yield f"{test['alert']}: its test does not tell it from one {mutant.what}"
        elif "got:[" not in said:
            yield f"{test['alert']} {mutant.what} is no rule:\n{said}"


def _run(promtool: Path, cases: Sequence[tuple[Test, Mutant]]) -> list[str]:
    """Return what promtool finds wrong with each of *cases*; empty: nothing."""
    with tempfile.TemporaryDirectory(prefix="tokenwire-alerts-") as name:
        folder = Path(name)
        files: list[str] = []
        for number, (test, mutant) in enumerate(cases):
            rules = {"groups": [{"name": "tested", "rules": [_short(mutant.rule)]}]}
            (folder / f"rules-{number}.yaml").write_text(yaml.safe_dump(rules))
            files.append(f"test-{number}.yaml")
            whole = _for_promtool(test, mutant.rule, f"rules-{number}.yaml")
            (folder / files[-1]).write_text(yaml.safe_dump(whole))
        done = subprocess.run(
            [str(promtool), "test", "rules", *files],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # in order: a file's name, and what is wrong with it
            text=True,
            cwd=folder,
        )
    # "Unit Testing:  FILE", then "  SUCCESS" or "  FAILED:" and why.
    parts = re.split(r"^Unit Testing:\s+(\S+)\n", done.stdout, flags=re.MULTILINE)
    said = dict(zip(parts[1::2], parts[2::2], strict=True))
    if said.keys() != set(files):
        msg = f"promtool test rules ended with {done.returncode}: {done.stdout}"
        raise AlertTestsError(msg)
    return ["" if "SUCCESS" in said[file] else said[file].strip() for file in files]


def _short(rule: Rule) -> Rule:
    return rule | {"annotations": {"summary": rule["annotations"]["summary"]}}


def _for_promtool(test: Test, rule: Rule, file: str) -> dict[str, Any]:
    """Return a test in promtool's form."""
    checks = [
        {
            "alertname": test["alert"],
            "eval_time": time,
            "exp_alerts": [
                {
                    "exp_labels": rule["labels"]
                    | {key: value for key, value in one.items() if key != "summary"},
                    "exp_annotations": {"summary": one["summary"]},
                }
                for one in firing
            ],
        }
        for time, firing in test["at"].items()
    ]
    series = [
        {"series": name, "values": values} for name, values in test["series"].items()
    ]
    return {
        "rule_files": [file],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": test.get("interval", "1m"),
                "input_series": series,
                "alert_rule_test": checks,
            }
        ],
    }
