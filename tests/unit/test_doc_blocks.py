"""Every fenced block of the documents can be read by what it is for.

Commands are parsed by our own parsers, targets of make exist, JSON and YAML are whole.
What a block does is run by tests/contract/test_docs_examples.py; one that cannot be says why:
`<!-- not run: REASON -->`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from config_docs import COMMANDS, parser_of

from support.blocks import SHELLS, Block, all_blocks, blocks, commands
from support.pages import ROOT
from tokenwire.frontend.config import parse_config as parse_frontend
from tokenwire.protocol.settings import SettingsParser
from tokenwire.worker.config import parse_config as parse_worker
from tokenwire.worker.sim.options import parse_options as parse_sim

BLOCKS = all_blocks()
SHELL = [block for block in BLOCKS if block.language in SHELLS]
MAKEFILE = (ROOT / "Makefile").read_text()
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]

WITHOUT_OPTIONS = {"tokenwire-healthy"}
"""Commands of ours that have none."""

READ_ONLY = {"text", "http", "mermaid", "promql", "diff"}
"""Languages of blocks that are looked at; `http` has tests of its own."""

HARMLESS = {
    *(
        "cat",
        "cd",
        "chgrp",
        "chmod",
        "cp",
        "echo",
        "export",
        "grep",
        "head",
        "jq",
        "kill",
    ),
    *("ls", "mkdir", "openssl", "set", "sleep", "sort", "ss", "tail", "ulimit"),
}
"""Commands of the system that no block can get wrong in a way of ours."""


def id_of(block: Block) -> str:
    """Return the name of a test."""
    return block.name


@pytest.mark.parametrize("block", BLOCKS, ids=id_of)
def test_blocks_are_of_known_languages(block: Block) -> None:
    """One without a language is a picture, not commands."""
    parsed = {"sh", "bash", "console", "json", "yaml", "python", "toml"}
    assert block.language in {*parsed, *READ_ONLY, ""}
    if not block.language:
        firsts = {line.split(" ")[0] for line in block.text.splitlines()}
        assert not firsts & {
            "make",
            "curl",
            "pip",
            "helm",
            "kubectl",
            "docker",
            *SCRIPTS,
        }


def test_bash_reads_every_script() -> None:
    """In one go: each as a function that is never called."""
    script = "".join(
        f": {block.name}\nblock_{number}() {{\n{block.script}\n}}\n"
        for number, block in enumerate(SHELL)
    )
    done = subprocess.run(
        ["bash", "-n"],  # noqa: S607 - the shell that is there
        input=script, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert len(SHELL) > 10
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "block", [block for block in SHELL if not block.reason], ids=id_of
)
def test_commands_are_known_and_right(
    block: Block, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As their own parsers, or the files that they name, say."""
    for name in [name for name in os.environ if name.startswith("TOKENWIRE_")]:
        monkeypatch.delenv(name)
    for words in commands(block.script):
        try:
            fault = fault_of(words)
        except SystemExit as end:
            fault = f"exit code {end.code}: {capsys.readouterr().err}"
        assert not fault, f"{' '.join(words)}: {fault}"


@pytest.mark.parametrize(
    "block",
    [
        b
        for b in BLOCKS
        if b.language in {"json", "yaml", "toml", "python"} and not b.reason
    ],
    ids=id_of,
)
def test_blocks_are_whole(block: Block) -> None:
    """They can be parsed as what they say they are."""
    match block.language:
        case "json":
            json.loads(block.text)
        case "yaml":
            yaml: Any = import_module("yaml")
            assert list(yaml.safe_load_all(block.text))
        case "toml":
            tomllib.loads(block.text)
        case _:
            compile(block.text, block.name, "exec")


def fault_of(words: list[str]) -> str:
    """Return what is wrong with a command; empty: nothing."""
    name, arguments = Path(words[0]).name, words[1:]
    if words[0] in HARMLESS or name == "curl" or (ROOT / words[0]).is_file():
        return ""
    check = CHECKS.get(name)
    if check is not None:
        return check(arguments)
    if name in SCRIPTS:
        known = name in COMMANDS or name in WITHOUT_OPTIONS
        return "" if known else f"{name} is not in config_docs.COMMANDS"
    return "unknown: mark the block as not run, with the reason"


def fault_of_make(words: list[str]) -> str:
    """Targets exist, and the Makefile knows the variables."""
    for word in words:
        variable, is_set, _ = word.partition("=")
        if is_set and not re.search(
            rf"\$\((or )?{variable}\b|^{variable} \?=", MAKEFILE, re.MULTILINE
        ):
            return f"no variable {variable}"
        if not is_set and not re.search(
            rf"^{re.escape(word)}:", MAKEFILE, re.MULTILINE
        ):
            return f"no target {word}"
    return ""


def fault_of_python(words: list[str]) -> str:
    """The script is there, and has the options; `-m` is the system's."""
    if words[:2] == ["-m", "venv"]:
        return ""
    script = ROOT / words[0]
    if not script.is_file():
        return f"no script {words[0]}"
    source = script.read_text()
    unknown = [
        word
        for word in words[1:]
        if word.startswith("--") and f'"{word}"' not in source
    ]
    return f"no options {unknown}" if unknown else ""


def fault_of_frontend(words: list[str]) -> str:
    """The real parser takes it, or exits."""
    parse_frontend(words)
    return ""


def fault_of_worker(words: list[str]) -> str:
    """The real parser takes it, and the simulated engine its arguments."""
    config = parse_worker(words)
    if config.engine == "sim":
        parse_sim(config.engine_args)
    return ""


def fault_of_others(command: str) -> Callable[[list[str]], str]:
    """Return the check of a command that would begin its work at once: parsed alone."""

    def check(words: list[str]) -> str:
        below = " ".join([command, *words[:1]])
        if below in COMMANDS:
            parser, words = parser_of(below), words[1:]
        else:
            parser = parser_of(command)
        own = words[: words.index("--")] if "--" in words else words
        if isinstance(parser, SettingsParser):
            parser.parse_settings(own)
        else:
            parser.parse_args(own)
        return ""

    return check


CHECKS: dict[str, Callable[[list[str]], str]] = {
    **{name: fault_of_others(name) for name in COMMANDS if " " not in name},
    "make": fault_of_make,
    "python": fault_of_python,
    "python3": fault_of_python,
    "python3.11": fault_of_python,
    "bash": fault_of_python,
    "pre-commit": lambda _: "",
    "tokenwire-frontend": fault_of_frontend,
    "tokenwire-worker": fault_of_worker,
}

PAGE = """
<!-- not run: needs a cluster -->
```sh
helm install x
```

```console
$ tokenwire-worker --role aggregated \\
    --model DIR
serving
$ make run  # a comment; "with a quote
```

  ```sh
  export KEY=$(openssl rand -hex 32) && A='b # c' curl -s "$URL" 2>/dev/null | grep -c '^a|b'
  until curl -sf x; do sleep 1; done
  ```
"""


def test_blocks_and_their_commands_are_found(tmp_path: Path) -> None:
    """With their reasons, without prompts, comments and what is around a command."""
    page = ROOT / "docs" / "example.md"
    real = tmp_path / "page.md"
    real.write_text(PAGE)
    helm, console, shell = blocks(real)

    assert helm.reason == "needs a cluster"
    assert (console.reason, shell.reason, page.exists()) == ("", "", False)
    assert list(commands(console.script)) == [
        ["tokenwire-worker", "--role", "aggregated", "--model", "DIR"],
        ["make", "run"],
    ]
    assert list(commands(shell.script)) == [
        ["export", "KEY=$"],
        ["openssl", "rand", "-hex", "32"],
        ["curl", "-s", "$URL"],
        ["grep", "-c", "^a|b"],
        ["curl", "-sf", "x"],
        ["sleep", "1"],
    ]


@pytest.mark.parametrize(
    "line",
    [
        "tokenwire-worker --role nobody --model m",
        "tokenwire-worker --role decode --model m --listen tcp://0.0.0.0:1",
        "tokenwire-worker --role decode --model m --engine sim -- --no-such-option",
        "tokenwire-frontend --model m",
        "tokenwire-up --prefil 1",
        "make no-such-target",
        "make run NO_SUCH=1",
        "python scripts/none.py",
        "python scripts/soak.py --no-such-option",
        "helm install x",
    ],
)
def test_what_is_wrong_is_found(line: str) -> None:
    """Each of these would fail the test of its block."""
    [words] = commands(line)
    try:
        fault = fault_of(words)
    except SystemExit as end:
        fault = str(end.code)

    assert fault
