"""How many cores this process may keep busy: its affinity mask, and its cgroups' quotas."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["allowed_cores"]

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def allowed_cores(
    mask: int | None = None, root: Path = CGROUPS, own: Path = OWN_CGROUPS
) -> int:
    """Return the number of whole cores, at least 1.

    Args:
        mask: Cores of the affinity mask; None: this process's own.
        root: Where the cgroups are mounted.
        own: The file that says in which ones this process is.
    """
    cores = len(os.sched_getaffinity(0)) if mask is None else mask
    return max(1, int(min([cores, *_quotas(root, own)])))


def _quotas(root: Path, own: Path) -> Iterator[float]:
    """Yield the limit, in cores, of each cgroup that this process is in or below."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            base, read = root, _quota_of_v2
        elif "cpu" in controllers.split(","):
            base, read = root / "cpu", _quota_of_v1
        else:
            continue
        # In a container the path may be that on the host: the root is the own one then.
        folder = base / path.lstrip("/")
        for group in [folder, *folder.parents]:
            quota = read(group)
            if quota is not None:
                yield quota
            if group == base:
                break


def _quota_of_v2(group: Path) -> float | None:
    """Return what ``cpu.max`` says ("200000 100000", "max 100000"); None: no limit."""
    quota, _, period = _text(group / "cpu.max").partition(" ")
    return _cores(quota, period)


def _quota_of_v1(group: Path) -> float | None:
    """Return the same of the two files that there were before; -1: no limit."""
    quota = _text(group / "cpu.cfs_quota_us")
    return _cores(quota, _text(group / "cpu.cfs_period_us"))


def _cores(quota: str, period: str) -> float | None:
    if not quota.isdecimal() or not period.isdecimal() or not int(period):
        return None
    return int(quota) / int(period)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
