"""Fixtures of all tests."""

from __future__ import annotations

from collections.abc import Generator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from support.tiny_model import write_tiny_model
from support.tracing import paused

# The same examples every time, and no time limit: timings belong in benchmarks.
hypothesis.settings.register_profile("tests", derandomize=True, deadline=None)
hypothesis.settings.load_profile("tests")

# `make setup-sim` installs no vLLM: then its parsers are no part of what is tested.
OF_VLLMS_PARSERS = [
    "contract/test_http_resumable_tools.py",
    "contract/test_http_tools.py",
    "contract/test_resume_client_tools.py",
    "faults/test_kill_demo.py",
    "unit/test_parser_formats.py",
    "unit/test_parser_startup.py",
]
collect_ignore = [] if find_spec("vllm") else OF_VLLMS_PARSERS
# What drives a browser is installed by `make check-ui`.
collect_ignore += [] if find_spec("playwright") else ["browser"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the real engine's tests last: they want the whole machine."""
    items.sort(key=lambda item: item.get_closest_marker("engine") is not None)


def process_group(nodeid: str) -> str:
    """Return what a test is in one process with: its module, or the real engine's."""
    module = nodeid.partition("::")[0]
    on_both = module.endswith("/test_engine_contract.py")
    on_engine = "/integration/" in module or (on_both and "[vllm" in nodeid)
    return "engine" if on_engine else module


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let no coverage follow what others cover, or leave out: it doubles the time."""
    if not any(item.get_closest_marker(name) for name in ("engine", "untraced")):
        return (yield)
    with paused():
        return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Give the processes of ``pytest -n`` modules, in their order, and one the engine."""
    config.option.loadscopereorder = False
    scheduler: Any = import_module("xdist.scheduler").LoadScopeScheduling(config, log)
    scheduler._split_scope = process_group
    return scheduler


def pytest_report_header() -> str | None:
    """Say what is left out."""
    return f"not installed is what needs {collect_ignore}" if collect_ignore else None


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a tokenizer and a template, and no weights."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
