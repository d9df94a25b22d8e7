"""docs/configuration.md has every option and every environment variable."""

from __future__ import annotations

import ast
import re

import pytest
from config_docs import COMMANDS, PAGE, options, parser_of, rendered

from support.pages import ROOT

PACKAGES = ("frontend", "worker", "protocol", "deploy")
VARIABLE = re.compile(
    r"(TOKENWIRE|VLLM|NIXL|UCX|OMP|CUDA|HF|XDG|PYTHON|TOKENIZERS|TIKTOKEN|OTEL)_?[A-Z_]+"
)
NO_VARIABLES = {"TOKENWIRE_"}  # the beginning that all options share


def test_the_tables_are_fresh() -> None:
    """They are what `make docs` makes of the parsers as they are."""
    assert PAGE.read_text() == rendered(), "run `make docs`"


def test_the_parsers_are_the_real_ones() -> None:
    """Caught where they would read the command line, with all their options."""
    flags = {
        command: {
            flag for one in options(parser_of(command)) for flag in one.option_strings
        }
        for command in COMMANDS
    }

    assert {"--workers-dns", "--routing", "--admin-port"} <= flags["tokenwire-frontend"]
    assert {"--role", "--capture-layers"} <= flags["tokenwire-worker"]
    assert "--force" in flags["tokenwire-keys"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_says_what_it_does(command: str) -> None:
    """More than its default."""
    for action in options(parser_of(command)):
        text = re.sub(r"\(default: .*\)", "", action.help or "").strip()
        assert text, action.option_strings


def test_every_variable_is_explained() -> None:
    """Each that stands in the source: read, set, or passed on."""
    named: set[str] = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found = VARIABLE.fullmatch(node.value)
                    named |= {node.value} if found else set()

    assert {"TOKENWIRE_ADMIN_KEY", "OMP_NUM_THREADS"} <= named
    explained = set(re.findall(r"`([A-Z][A-Z_]+)`", PAGE.read_text()))
    assert named - explained - NO_VARIABLES == set()


UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def number(text: str) -> float | str:
    """Return what a default amounts to, however a page writes it."""
    value, _, unit = text.replace(",", "").strip("`").partition(" ")
    try:
        return float(value) * UNITS.get(unit, 1)
    except ValueError:
        return value


def told_defaults() -> list[tuple[str, str, str]]:
    """Return page, option and default of all tables with such a column."""
    found: list[tuple[str, str, str]] = []
    for page in sorted((ROOT / "docs").glob("*.md")):
        column = 0
        for line in page.read_text().splitlines():
            cells = [cell.strip() for cell in line.split("|")]
            if "default" in cells:
                column = cells.index("default")
            elif not line.startswith("|"):
                column = 0
            elif column and page != PAGE and cells[1].startswith("`--"):
                option = cells[1].strip("`").split(" ")[0]
                found.append((page.name, option, cells[column]))
    return found


def test_defaults_of_other_pages_are_the_parsers() -> None:
    """Numbers, where a page repeats one beside its reason."""
    defaults: dict[str, set[float]] = {}
    for command in COMMANDS:
        for action in options(parser_of(command)):
            if isinstance(action.default, int | float):
                for flag in action.option_strings:
                    defaults.setdefault(flag, set()).add(float(action.default))
    told = [(page, flag, number(text)) for page, flag, text in told_defaults()]
    numbers = [one for one in told if isinstance(one[2], float)]
    wrong = [one for one in numbers if one[2] not in defaults.get(one[1], set())]

    assert len(numbers) > 5
    assert wrong == []
