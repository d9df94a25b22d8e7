"""Parsers at start-up: what is refused, in one sentence, with exit code 2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.awake import STANDSTILL_S
from support.formats import HERMES, write_format_model
from support.tiny_model import write_tiny_model


def start(
    model: Path, *arguments: str, code: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a frontend that must refuse; *code* runs before it."""
    script = f"{code}\nfrom tokenwire.frontend.app import main; main()"
    own = ["--model", str(model), "--worker", "tcp://127.0.0.1:1", "--port", "0"]
    return subprocess.run(
        [sys.executable, "-c", script, *own, *arguments],
        capture_output=True,
        text=True,
        timeout=90 + STANDSTILL_S,
        check=False,
    )


def test_an_unknown_parser_is_one_sentence(tmp_path: Path) -> None:
    """It lists the known ones."""
    model = write_format_model(tmp_path / "model", HERMES)
    done = start(model, "--tool-call-parser", "hermez")

    assert done.returncode == 2
    *_, last = done.stderr.strip().splitlines()
    assert last.startswith("tokenwire-frontend: argument --tool-call-parser: ")
    assert "'hermez'" in last
    assert "hermes, hf" in last


def test_a_missing_library_is_one_sentence(tmp_path: Path) -> None:
    """A frontend installed alone says what it lacks."""
    hide = "import sys; sys.modules['vllm'] = None"
    model = write_tiny_model(tmp_path / "model")
    done = start(model, "--tool-call-parser", "hermes", code=hide)

    assert done.returncode == 2
    [line] = done.stderr.strip().splitlines()
    assert "need vLLM" in line


def test_vllms_switch_needs_a_parser(tmp_path: Path) -> None:
    """``--enable-auto-tool-choice`` alone would enable nothing."""
    done = start(write_tiny_model(tmp_path / "model"), "--enable-auto-tool-choice")

    assert done.returncode == 2
    assert "--tool-call-parser" in done.stderr
