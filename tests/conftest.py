"""Fixtures of all tests."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import hypothesis
import pytest

from support.tiny_model import write_tiny_model

# The same examples every time, and no time limit: timings belong in benchmarks.
hypothesis.settings.register_profile("tests", derandomize=True, deadline=None)
hypothesis.settings.load_profile("tests")

# `make setup-sim` installs no vLLM: then its parsers are no part of what is tested.
OF_VLLMS_PARSERS = [
    "contract/test_http_tools.py",
    "unit/test_parser_formats.py",
    "unit/test_parser_startup.py",
]
collect_ignore = [] if find_spec("vllm") else OF_VLLMS_PARSERS


def pytest_report_header() -> str | None:
    """Say what is left out."""
    return (
        f"vLLM is not installed: without {collect_ignore}" if collect_ignore else None
    )


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a tokenizer and a template, and no weights."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
