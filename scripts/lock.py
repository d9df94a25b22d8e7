"""Resolve pyproject.toml's requirements into requirements/*.lock; `make lock`.

pip resolves them, and installs nothing. What is pinned stays as it is, unless it is named
(`lock.py ruff mypy`; `all`: everything), does not fit any more or is not needed any more. Each lock
adds to the one before, names every package it needs, and is installed with `--no-deps`:

- `base.lock`: what tokenwire itself requires (no torch).
- `cpu.lock`: what the extra `cpu` adds, for an engine without a GPU.
- `dev.lock`: what the group `dev` adds to `base.lock`.
- `browser.lock`: what the group `browser` adds to all of these.
- `otel.lock`: what the extra `otel` adds to `base.lock`; an image without an engine wants it.
- `clients.lock`: the group `clients` alone, in an environment of its own: those clients ask for
  other versions than we do.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

__all__ = ["Found", "LockError", "closure", "kept"]

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / "requirements"
TOGETHER = ("base", "cpu", "dev", "browser", "otel")  # fit into one environment

LEFT_OUT = {
    # nixl asks for the CUDA 13 backend; the extra `cpu` names the CUDA 12 one, and one
    # is enough.
    "nixl-cu13": "another backend is there",
    # Builds that do not fit a CPU torch: with them in the environment, importing a model of
    # transformers dies with "operator torchvision::nms does not exist".
    "torchaudio": "does not fit a CPU torch",
    "torchcodec": "does not fit a CPU torch",
    "torchvision": "does not fit a CPU torch",
    # pip-api asks for it.
    "pip": "every environment has one",
    # 1 GB on disk, required by xgrammar for its CUDA kernels alone.
    "triton": "needs a GPU",
}

BUILD = ["setuptools"]  # tokenwire is installed without build isolation


class LockError(Exception):
    """There is no set of versions; pip has said why."""


@dataclass(frozen=True, slots=True)
class Found:
    """A package in the version that fits."""

    version: str
    requires: tuple[str, ...]


def resolved(roots: Iterable[str], pins: Iterable[str]) -> dict[str, Found]:
    """Return what pip would install for *roots*, by canonical name.

    Args:
        roots: Requirements, and the folder of the project.
        pins: Versions that must stay.

    Raises:
        LockError: Nothing fits.
    """
    with tempfile.TemporaryDirectory(prefix="tokenwire-lock-") as name:
        report, constraints = Path(name, "report.json"), Path(name, "pins.txt")
        constraints.write_text("".join(f"{pin}\n" for pin in pins))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run"]
        command += ["--ignore-installed", "--report", str(report)]
        if subprocess.run([*command, "-c", str(constraints), *roots]).returncode:
            raise LockError
        installed = json.loads(report.read_text())["install"]
    return {
        canonicalize_name(one["metadata"]["name"]): Found(
            one["metadata"]["version"], tuple(one["metadata"].get("requires_dist", []))
        )
        for one in installed
    }


def kept(lock: str, upgraded: Collection[str]) -> Iterator[str]:
    """Yield the pins in the text of a lock that are to stay."""
    for line in lock.splitlines():
        name = line.partition("==")[0]
        if not line.startswith("#") and "all" not in upgraded and name not in upgraded:
            yield line


def requirements_of(found: Found, extras: Iterable[str]) -> Iterator[Requirement]:
    """Yield what *found* requires on this platform, with *extras*."""
    for text in found.requires:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(
            marker.evaluate({"extra": extra}) for extra in ("", *extras)
        ):
            yield requirement


def closure(roots: Iterable[str], known: Mapping[str, Found]) -> dict[str, str]:
    """Return the pin of every package that *roots* need, by canonical name."""
    pins: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    queue = [Requirement(text) for text in roots]
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        key = (name, frozenset(requirement.extras))
        if name in LEFT_OUT or key in seen:
            continue
        seen.add(key)
        pins[name] = f"{name}=={known[name].version}"
        queue += requirements_of(known[name], requirement.extras)
    return pins


def write(name: str, title: str, pins: Iterable[str]) -> None:
    """Write one lock file, and say what is new in it."""
    path = LOCKS / f"{name}.lock"
    before = set(kept(path.read_text(), ())) if path.exists() else set[str]()
    now = set(pins)
    head = f"# {title}\n# Written by `make lock`; install with --no-deps.\n"
    path.write_text(head + "\n".join(sorted(now)) + "\n")
    print(f"lock: {path.name}: {len(now)} packages")
    for line in sorted(before ^ now):
        print(f"lock:   {'+' if line in now else '-'} {line}")


def read(names: Iterable[str], upgraded: Collection[str]) -> list[str]:
    """Return the pins of some locks that are to stay, each once."""
    paths = [LOCKS / f"{name}.lock" for name in names]
    there = (path.read_text() for path in paths if path.exists())
    return sorted({pin for lock in there for pin in kept(lock, upgraded)})


def lock_together(project: dict[str, Any], upgraded: Collection[str]) -> None:
    """Write the locks that fit into one environment."""
    groups = project["dependency-groups"]
    extras = project["project"]["optional-dependencies"]
    needed = {
        "base": [*project["project"]["dependencies"], *BUILD],
        "cpu": extras["cpu"],
        "dev": groups["dev"],
        "browser": groups["browser"],
        "otel": extras["otel"],
    }
    roots = [one for part in needed.values() for one in part]
    known = resolved(roots, read(TOGETHER, upgraded))
    base, cpu, dev, browser, otel = (closure(needed[one], known) for one in TOGETHER)
    left_out = ", ".join(sorted(LEFT_OUT))
    write("base", "tokenwire itself, without an engine", base.values())
    write(
        "cpu",
        f"A real engine on CPUs, on top of base.lock; left out: {left_out}",
        (pin for name, pin in cpu.items() if name not in base),
    )
    write(
        "dev",
        "Tests and checks, on top of base.lock",
        (pin for name, pin in dev.items() if name not in base),
    )
    write(
        "browser",
        "The live page's tests in a browser, on top of base.lock and dev.lock",
        (pin for name, pin in browser.items() if name not in {**base, **cpu, **dev}),
    )
    write(
        "otel",
        "Traces, on top of base.lock",
        (pin for name, pin in otel.items() if name not in base),
    )


def lock_clients(project: dict[str, Any], upgraded: Collection[str]) -> None:
    """Write the lock of other people's clients."""
    roots = project["dependency-groups"]["clients"]
    known = resolved(roots, read(["clients"], upgraded))
    title = "Other people's clients, for the tests; in their own environment"
    write("clients", title, closure(roots, known).values())


def main() -> int:
    """Write the lock files; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("upgraded", nargs="*", metavar="PACKAGE", help="or `all`")
    upgraded = {canonicalize_name(one) for one in parser.parse_args().upgraded}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    try:
        lock_together(project, upgraded)
        lock_clients(project, upgraded)
    except LockError:
        print(
            "lock: no versions fit together with what is pinned; let some go: "
            "make lock UPGRADE='NAME ...', or UPGRADE=all",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
