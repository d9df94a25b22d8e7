"""How many processes ``auto`` is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenwire.frontend.cores import allowed_cores


def write(path: Path, text: str) -> None:
    """Write a file of the kernel's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("max 100000", 16),
        ("400000 100000", 4),
        ("250000 100000", 2),  # a process that has half a core falls behind
        ("50000 100000", 1),
        ("3200000 100000", 16),
        ("nonsense", 16),
    ],
)
def test_a_quota_counts_in_whole_cores(tmp_path: Path, quota: str, cores: int) -> None:
    """Never more than the mask has, and never none."""
    write(tmp_path / "own", "0::/")
    write(tmp_path / "cpu.max", quota)
    assert allowed_cores(16, tmp_path, tmp_path / "own") == cores


def test_the_groups_above_count_too(tmp_path: Path) -> None:
    """A service's group has no limit of its own, its slice has one."""
    write(tmp_path / "own", "0::/apps.slice/frontend.service")
    write(tmp_path / "apps.slice/frontend.service/cpu.max", "max 100000")
    write(tmp_path / "apps.slice/cpu.max", "300000 100000")
    assert allowed_cores(16, tmp_path, tmp_path / "own") == 3


def test_the_older_hierarchy(tmp_path: Path) -> None:
    """In a container it is mounted at its root, while its path is the host's."""
    write(tmp_path / "own", "5:memory:/docker/a\n4:cpu,cpuacct:/docker/a")
    write(tmp_path / "cpu/cpu.cfs_quota_us", "200000")
    write(tmp_path / "cpu/cpu.cfs_period_us", "100000")
    assert allowed_cores(16, tmp_path, tmp_path / "own") == 2
    write(tmp_path / "cpu/cpu.cfs_quota_us", "-1")
    assert allowed_cores(16, tmp_path, tmp_path / "own") == 16


def test_where_nothing_is_known_the_mask_counts(tmp_path: Path) -> None:
    """Also of this very process there is a number."""
    assert allowed_cores(3, tmp_path, tmp_path / "own") == 3
    assert allowed_cores() >= 1
