"""What `make audit` makes of pip-audit's words."""

from __future__ import annotations

import datetime
from pathlib import Path

import audit
import msgspec
import pytest

TODAY = datetime.date(2026, 11, 30)
ALLOWED = """
[[allowed]]
id = "CVE-1"
package = "bad"
reason = "that part is not used"
until = 2026-11-30
"""


def report(**vulns: object) -> audit.Report:
    """Return what pip-audit says of a package with and of one without."""
    bad = {"name": "bad", "version": "1.0", "vulns": [vulns] if vulns else []}
    good = {"name": "good", "version": "2.0"}
    skipped = {"name": "unknown", "skip_reason": "Dependency not found on PyPI"}
    data = {"dependencies": [bad, good, skipped]}
    return msgspec.json.decode(msgspec.json.encode(data), type=audit.Report)


FOUND = report(id="GHSA-1", aliases=["CVE-1"], fix_versions=["1.1"], description="x")


def test_a_known_vulnerability_fails() -> None:
    """By its name, with the release that mends it; what is not in the database is said."""
    verdict = audit.judged([FOUND], [], TODAY)
    assert verdict.failures == ["bad 1.0: GHSA-1, fixed in 1.1"]
    assert (verdict.num_looked_up, verdict.skipped) == (2, {"unknown"})
    assert audit.judged([report()], [], TODAY).failures == []


def test_what_is_allowed_passes_until_its_last_day() -> None:
    """By id or alias, for its package alone; then it fails again."""
    allowed = audit.read_allowed(ALLOWED)
    verdict = audit.judged([FOUND], allowed, TODAY)
    assert not verdict.failures
    assert verdict.passed == ["bad 1.0: GHSA-1; that part is not used"]
    late = audit.judged([FOUND], allowed, TODAY + datetime.timedelta(1))
    assert late.failures == ["bad 1.0: GHSA-1, fixed in 1.1; allowed until 2026-11-30"]
    other = [msgspec.structs.replace(allowed[0], package="good")]
    assert audit.judged([FOUND], other, TODAY).failures


@pytest.mark.parametrize("missing", ["reason", "until", "package"])
def test_nothing_is_allowed_without_a_reason(missing: str) -> None:
    """Nor for ever."""
    lines = [line for line in ALLOWED.splitlines() if not line.startswith(missing)]
    with pytest.raises(msgspec.ValidationError, match=missing):
        audit.read_allowed("\n".join(lines))


def test_our_own_list_can_be_read() -> None:
    """Also when it is empty."""
    assert isinstance(audit.read_allowed(audit.ALLOWED.read_text()), list)


@pytest.mark.parametrize("answer", [None, report(), FOUND])
def test_what_cannot_be_reached_fails_nothing(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: audit.Report | None,
) -> None:
    """It is said plainly, after one question; where it can, the exit code tells."""
    questions: list[Path] = []

    def asked(lock: Path) -> audit.Report | None:
        questions.append(lock)
        if len(questions) > 1 and answer is not None:
            return answer
        return None if answer is None else audit.Report([audit.Dependency("good")])

    monkeypatch.setattr(audit, "asked", asked)
    monkeypatch.setattr("sys.argv", ["audit.py"])
    if answer is None:
        audit.main()
        assert capsys.readouterr().out == f"{audit.UNREACHABLE}\n"
        assert len(questions) == 1
        return
    with pytest.raises(SystemExit) as ended:
        audit.main()
    assert ended.value.code == (1 if answer is FOUND else 0)
    assert ("VULNERABLE" in capsys.readouterr().out) == (answer is FOUND)
