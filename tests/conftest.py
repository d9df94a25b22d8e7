"""Fixtures of all tests."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import pytest

from support.tiny_model import write_tiny_model

# The same examples every time, and no time limit: timings belong in benchmarks.
hypothesis.settings.register_profile("tests", derandomize=True, deadline=None)
hypothesis.settings.load_profile("tests")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a tokenizer and a template, and no weights."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
