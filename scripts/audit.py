"""Look for known vulnerabilities of what requirements/*.lock pin.

`make audit` runs this. It asks pip-audit, which asks PyPI's database. A vulnerability fails
it, unless requirements/audit-allowed.toml lets it pass with a reason and a last day. A
database that cannot be reached fails nothing: that is said, and nothing was looked at.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

__all__ = ["Allowed", "Report", "Verdict", "judged", "read_allowed"]

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / "requirements"
ALLOWED = LOCKS / "audit-allowed.toml"

TIMEOUT_S = 600
"""For the three hundred questions of a lock; a second for ten of them is usual."""

UNREACHABLE = (
    "audit: NOT DONE: PyPI's database of vulnerabilities cannot be reached from here"
)


class Vulnerability(msgspec.Struct, frozen=True):
    """One, as pip-audit tells it."""

    id: str
    aliases: list[str] = []
    fix_versions: list[str] = []


class Dependency(msgspec.Struct, frozen=True):
    """One pin; one that could not be looked up has a reason for that."""

    name: str
    version: str = ""
    skip_reason: str = ""
    vulns: list[Vulnerability] = []


class Report(msgspec.Struct, frozen=True):
    """What pip-audit says of a lock."""

    dependencies: list[Dependency]


class Allowed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is let pass."""

    id: str
    package: str
    reason: str
    until: datetime.date


class _AllowedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    allowed: list[Allowed] = []


@dataclass
class Verdict:
    """What the reports come to."""

    failures: list[str] = field(default_factory=list[str])
    passed: list[str] = field(default_factory=list[str])  # allowed, with the reason
    skipped: set[str] = field(default_factory=set[str])
    num_looked_up: int = 0


def judged(
    reports: Iterable[Report], allowed: Sequence[Allowed], today: datetime.date
) -> Verdict:
    """Return what fails, and what is let pass."""
    verdict = Verdict()
    for dependency in (one for report in reports for one in report.dependencies):
        if dependency.skip_reason:
            verdict.skipped.add(dependency.name)
            continue
        verdict.num_looked_up += 1
        for found in dependency.vulns:
            names = {found.id, *found.aliases}
            what = f"{dependency.name} {dependency.version}: {found.id}"
            fixed = f", fixed in {', '.join(found.fix_versions) or 'no release yet'}"
            reason = next(
                (
                    one
                    for one in allowed
                    if one.id in names and one.package == dependency.name
                ),
                None,
            )
            if reason is None:
                verdict.failures.append(what + fixed)
            elif reason.until < today:
                verdict.failures.append(f"{what}{fixed}; allowed until {reason.until}")
            else:
                verdict.passed.append(f"{what}; {reason.reason}")
    return verdict


def read_allowed(text: str) -> list[Allowed]:
    """Return what a file lets pass.

    Raises:
        msgspec.ValidationError: An entry lacks its reason or its last day.
    """
    return msgspec.convert(tomllib.loads(text), _AllowedFile).allowed


def asked(lock: Path) -> Report | None:
    """Return what pip-audit says of a lock; None: it could not ask."""
    command = [sys.executable, "-m", "pip_audit", "--no-deps", "--disable-pip"]
    command += ["--progress-spinner", "off", "--format", "json", "-r", str(lock)]
    try:
        done = subprocess.run(
            command, capture_output=True, check=False, timeout=TIMEOUT_S
        )
        return msgspec.json.decode(done.stdout, type=Report)
    except (subprocess.TimeoutExpired, msgspec.DecodeError):
        return None


def is_reachable() -> bool:
    """Return whether one pin is known to the database: all others need not be asked."""
    pins = (LOCKS / "base.lock").read_text().splitlines()
    first = next(pin for pin in pins if not pin.startswith("#"))
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(f"{first}\n")
        file.flush()
        report = asked(Path(file.name))
    return report is not None and not any(
        one.skip_reason for one in report.dependencies
    )


def main() -> None:
    """Audit all locks; exit with 1 for a vulnerability."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.parse_args()
    allowed = read_allowed(ALLOWED.read_text())
    locks = sorted(LOCKS.glob("*.lock"))
    reports = [asked(lock) for lock in locks] if is_reachable() else []
    known = [report for report in reports if report is not None]
    if len(known) < len(locks):
        print(UNREACHABLE)
        return
    verdict = judged(known, allowed, datetime.datetime.now(datetime.UTC).date())
    for line in verdict.passed:
        print(f"audit: let pass: {line}")
    for line in verdict.failures:
        print(f"audit: VULNERABLE: {line}")
    print(
        f"audit: {verdict.num_looked_up} pins of {len(locks)} locks looked up, "
        f"{len(verdict.failures)} known vulnerabilities; "
        f"not in the database: {', '.join(sorted(verdict.skipped)) or 'none'}"
    )
    sys.exit(1 if verdict.failures else 0)


if __name__ == "__main__":
    main()
