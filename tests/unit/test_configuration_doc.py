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
