"""The import rules of ARCHITECTURE.md, checked on the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

MAY_IMPORT: dict[str, set[str]] = {
    "protocol": set(),
    "frontend": {"protocol"},
    "worker": {"protocol"},
    "deploy": {"protocol"},
}

# Where a dependency may be imported; a folder stands for every module in it.
DOORS: dict[str, list[str]] = {
    "fastokens": ["frontend/encoding.py"],
    "jinja2": ["frontend/template.py"],
    "nixl": ["worker/vllm"],
    "opentelemetry": ["protocol/tracing.py"],
    "requests": ["protocol/collector.py"],
    "prometheus_client": ["frontend/metrics.py", "worker/metrics.py"],
    "tokenizers": ["frontend/encoding.py", "frontend/tokenizer.py"],
    "torch": ["worker/vllm"],
    "transformers": ["frontend/parsers.py"],
    "uvloop": ["frontend/app.py", "worker/app.py"],
    "vllm": ["frontend/parsers.py", "worker/vllm"],
    "zmq": [
        "deploy/keys.py",
        "frontend/dealer.py",
        "worker/gate.py",
        "worker/link.py",
        "worker/vllm/kv_subscriber.py",
    ],
}

SOURCES = sorted(path for top in MAY_IMPORT for path in (ROOT / top).rglob("*.py"))


def module_name(path: Path) -> str:
    """Return the name under which *path* installs."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(["tokenwire", *parts]).removesuffix(".__init__")


def imported_modules(path: Path, source: str | None = None) -> Iterator[str]:
    """Yield the absolute name of all that *path* imports, wherever in the file.

    For `from x import y` both `x` and `x.y` come: either may be the module.
    """
    text = path.read_text() if source is None else source
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package.pop()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield origin
            yield from (f"{origin}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and is_import_module(node.func):
            yield from (
                argument.value
                for argument in node.args[:1]
                if isinstance(argument, ast.Constant)
                and isinstance(argument.value, str)
            )


def is_import_module(function: ast.expr) -> bool:
    """Return whether *function* is `import_module` or `importlib.import_module`."""
    name = function.attr if isinstance(function, ast.Attribute) else None
    return "import_module" in {name, getattr(function, "id", None)}


def may_enter(path: Path, doors: list[str]) -> bool:
    """Return whether *path* is one of *doors*, or in one."""
    return any(path.is_relative_to(ROOT / door) for door in doors)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import zmq.asyncio", {"zmq.asyncio"}),
        ("def f():\n    import vllm", {"vllm"}),
        ('import_module("vllm.inputs")', {"vllm.inputs"}),
        ('importlib.import_module("zmq")', {"zmq"}),
        ("from . import pool", {"tokenwire.frontend", "tokenwire.frontend.pool"}),
        (
            "from .pool import P",
            {"tokenwire.frontend.pool", "tokenwire.frontend.pool.P"},
        ),
        ("from ..worker import x", {"tokenwire.worker", "tokenwire.worker.x"}),
    ],
)
def test_imports_are_found_in_every_form(source: str, names: set[str]) -> None:
    """The reader that the rules stand on misses no way to write an import."""
    assert set(imported_modules(ROOT / "frontend" / "a.py", source)) == names


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_only_what_they_may(package: str) -> None:
    """Protocol imports none of ours; the others import protocol, never each other."""
    allowed = {package, *MAY_IMPORT[package]}
    for path in (ROOT / package).rglob("*.py"):
        for name in imported_modules(path):
            top, _, rest = name.partition(".")
            assert top not in MAY_IMPORT, f"{path}: {name} is not its installed name"
            if top == "tokenwire" and rest:
                assert rest.split(".")[0] in allowed, f"{path} imports {name}"


def test_protocol_needs_only_msgspec() -> None:
    """The wire can be read by a program that has none of our dependencies."""
    allowed = {*sys.stdlib_module_names, "msgspec", "tokenwire"}
    for path in (ROOT / "protocol").rglob("*.py"):
        extra = {"tracing.py": "opentelemetry", "collector.py": "requests"}.get(
            path.name
        )
        for name in imported_modules(path):
            assert name.split(".")[0] in {*allowed, extra}, f"{path} imports {name}"


def test_tracing_is_imported_without_opentelemetry() -> None:
    """It is an extra: whoever traces nothing has nothing of it in memory."""
    code = (
        "import sys, tokenwire.frontend.trails, tokenwire.worker.service;"
        "sys.exit(any(name.startswith(('opentelemetry', 'requests')) for name in sys.modules))"
    )
    assert not subprocess.run([sys.executable, "-c", code], check=False).returncode


@pytest.mark.parametrize("dependency", DOORS)
def test_each_dependency_has_one_door(dependency: str) -> None:
    """A dependency is imported behind its door, so that it can be replaced there."""
    for path in SOURCES:
        for name in imported_modules(path):
            if name.split(".")[0] == dependency:
                assert may_enter(path, DOORS[dependency]), f"{path} imports {name}"


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_inside_a_package_have_no_cycle(package: str) -> None:
    """The modules of a package can be read from bottom to top."""
    paths = {module_name(path): path for path in (ROOT / package).rglob("*.py")}
    graph = {
        name: {other for other in imported_modules(path) if other in paths} - {name}
        for name, path in paths.items()
        if path.name
        != "__init__.py"  # they re-export, and every module imports its own
    }

    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
