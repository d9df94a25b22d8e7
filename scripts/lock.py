"""Write requirements/*.lock from the packages of the environment that runs this.

`make lock` resolves everything into a new environment and runs this there. Each lock adds
to the one before, names every package it needs, and is installed with `--no-deps`:

- `base.lock`: what tokenwire itself requires (no torch).
- `cpu.lock`: what the extra `cpu` adds, for an engine without a GPU.
- `dev.lock`: what the group `dev` adds to `base.lock`.
- `browser.lock`: what the group `browser` adds to all of these.
- `otel.lock`: what the extra `otel` adds to `base.lock`; an image without an engine wants it.

`lock.py clients` writes `clients.lock` instead, from an environment that has the group
`clients` alone: those clients ask for other versions than we do.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]

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


def requirements_of(
    found: Distribution, extras: Iterable[str]
) -> Iterator[Requirement]:
    """Yield what *found* requires on this platform, with *extras*."""
    for text in found.requires or []:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(
            marker.evaluate({"extra": extra}) for extra in ("", *extras)
        ):
            yield requirement


def closure(roots: Iterable[str]) -> dict[str, str]:
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
        found = distribution(requirement.name)
        pins[name] = f"{name}=={found.version}"
        queue += requirements_of(found, requirement.extras)
    return pins


def write(path: Path, title: str, pins: Iterable[str]) -> None:
    """Write one lock file."""
    head = f"# {title}\n# Written by `make lock`; install with --no-deps.\n"
    path.write_text(head + "\n".join(sorted(pins)) + "\n")
    print(
        f"{path.relative_to(ROOT)}: {len(path.read_text().splitlines()) - 2} packages"
    )


def main() -> int:
    """Write the lock files; return the exit code."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    try:
        if sys.argv[1:] == ["clients"]:
            clients = closure(project["dependency-groups"]["clients"])
            title = "Other people's clients, for the tests; in their own environment"
            write(ROOT / "requirements/clients.lock", title, clients.values())
            return 0
        base = closure([*project["project"]["dependencies"], *BUILD])
        cpu = closure(extras["cpu"])
        dev = closure(project["dependency-groups"]["dev"])
        browser = closure(project["dependency-groups"]["browser"])
        otel = closure(extras["otel"])
    except PackageNotFoundError as error:
        print(f"lock: {error.name} is not installed here", file=sys.stderr)
        return 1
    folder = ROOT / "requirements"
    folder.mkdir(exist_ok=True)
    write(folder / "base.lock", "tokenwire itself, without an engine", base.values())
    left_out = ", ".join(sorted(LEFT_OUT))
    write(
        folder / "cpu.lock",
        f"A real engine on CPUs, on top of base.lock; left out: {left_out}",
        (pin for name, pin in cpu.items() if name not in base),
    )
    write(
        folder / "dev.lock",
        "Tests and checks, on top of base.lock",
        (pin for name, pin in dev.items() if name not in base),
    )
    write(
        folder / "browser.lock",
        "The live page's tests in a browser, on top of base.lock and dev.lock",
        (pin for name, pin in browser.items() if name not in {**base, **cpu, **dev}),
    )
    write(
        folder / "otel.lock",
        "Traces, on top of base.lock",
        (pin for name, pin in otel.items() if name not in base),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
