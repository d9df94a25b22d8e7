"""Other people's programs and schemas that the checks of deploy/ want, fetched once.

Debian's packages are unpacked, not installed: nothing on the machine changes, and root is
not needed (but for the first `apt-get update` of a new machine). apt checks signatures.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

__all__ = ["ToolError", "compose_schema", "debian"]

ROOT = Path(__file__).parents[1]

# The linter of compose files that carries the Compose Specification's schema.
SCHEMA_PACKAGE = "dclint@3.1.0"
SCHEMA_MEMBER = "package/schemas/compose.schema.json"
SCHEMA_SHA256 = "46b7d35f19dd93a05f8fea530291bf84d881c1791ec167ecf0e6fb94e639d496"

DOWNLOAD_TIMEOUT_S = 300.0
"""20 MB at most; a mirror that stalls must not hang a build."""


class ToolError(Exception):
    """Something cannot be had; one sentence."""


def folder() -> Path:
    """Return where all is kept: below `TOKENWIRE_CACHE`, or in `build/`."""
    given = os.environ.get("TOKENWIRE_CACHE")
    base = Path(given).expanduser().absolute() if given else ROOT / "build"
    return base / "tools"


def debian(package: str) -> Path:
    """Return the folder of Debian's *package*, unpacked (``usr/bin/...``).

    Raises:
        ToolError: apt does not have it, or cannot fetch it.
    """
    target = folder() / package
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as name:
            work = Path(name)
            try:
                _run(["apt-get", "download", package], work)
            except ToolError:
                _run(["apt-get", "update"], work)
                _run(["apt-get", "download", package], work)
            [file] = work.glob("*.deb")
            _run(["dpkg-deb", "--extract", file.name, "root"], work)
            (work / "root").rename(target)
    return target


def compose_schema() -> Path:
    """Return the JSON schema of compose files.

    Raises:
        ToolError: npm's client cannot fetch it, or it is another one.
    """
    target = folder() / "compose.schema.json"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as name:
            work = Path(name)
            _run(["npm", "pack", "--silent", SCHEMA_PACKAGE], work)
            [file] = work.glob("*.tgz")
            with tarfile.open(file) as archive:
                member = archive.extractfile(SCHEMA_MEMBER)
                assert member is not None
                (work / "schema").write_bytes(member.read())
            shutil.move(work / "schema", target)
    found = hashlib.sha256(target.read_bytes()).hexdigest()
    if found != SCHEMA_SHA256:
        msg = f"{target} has the SHA-256 {found}, not {SCHEMA_SHA256}"
        raise ToolError(msg)
    return target


def _run(command: list[str], cwd: Path) -> None:
    try:
        subprocess.run(
            command,
            cwd=cwd,
            check=True,
            timeout=DOWNLOAD_TIMEOUT_S,
            capture_output=True,
            text=True,
        )
    except FileNotFoundError as error:
        msg = f"{command[0]} is not installed"
        raise ToolError(msg) from error
    except subprocess.TimeoutExpired as error:
        msg = f"{' '.join(command)} took more than {DOWNLOAD_TIMEOUT_S:.0f} s"
        raise ToolError(msg) from error
    except subprocess.CalledProcessError as error:
        msg = f"{' '.join(command)}: {error.stderr.strip()[-500:]}"
        raise ToolError(msg) from error
