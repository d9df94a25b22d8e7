"""Processes of a stack found below their starter, and what vLLM's metrics say."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from survive_scenarios import until

__all__ = [
    "TokenwireStack",
    "below",
    "command_of",
    "read",
    "signal_part",
    "vllm_counts",
]

ANSWER_S = 5.0
_FAMILIES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv",
    "vllm:request_success_total": "ended",
    "vllm:nixl_num_kv_expired_reqs_total": "expired",
}


def read(url: str) -> str:
    """Return what a loopback address answers.

    Raises:
        OSError: Nothing, or an error.
    """
    with urllib.request.urlopen(url, timeout=ANSWER_S) as answer:
        return str(answer.read().decode())


def vllm_counts(page_url: str) -> dict[str, float]:
    """Return what an engine has now and has had, from its Prometheus page."""
    counts = dict.fromkeys(_FAMILIES.values(), 0.0)
    for line in read(page_url).splitlines():
        name = line.partition("{")[0]
        if name in _FAMILIES:
            counts[_FAMILIES[name]] += float(line.rpartition(" ")[2])
    return counts


def below(pid: int) -> list[int]:
    """Return every process below *pid*, at any depth."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
            parents[int(entry.name)] = int(stat[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def command_of(pid: int) -> list[str]:
    """Return a process's arguments; nothing if it is gone."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []
    return [word.decode(errors="replace") for word in words]


def signal_part(pid: int, number: signal.Signals, part: str) -> None:
    """Send a signal to a server, to vLLM's processes below it, or to all."""
    engine = below(pid)
    pids = {"all": [pid, *engine], "server": [pid], "engine": engine}[part]
    for one in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, number)


class TokenwireStack:
    """A stack that ``tokenwire-up`` runs.

    Args:
        pid: Of ``tokenwire-up``.
        url: Where its frontend is.
        log: What it has said so far.
        roles: How many workers of each role it runs.
    """

    model = "smollm2"
    selector: Mapping[str, Any] = {"return_token_ids": True}
    repeatable = True
    shows_counts = True

    def __init__(self, pid: int, url: str, log: Path, roles: Mapping[str, int]) -> None:
        self.url = url
        self.remarks: list[str] = []
        self._pid = pid
        self._log = log
        self._roles = dict(roles)

    def workers(self, role: str) -> Sequence[str]:
        """Return their ids."""
        return [f"{role}-{number}" for number in range(self._roles.get(role, 0))]

    def pid(self, name: str) -> int:
        """Return a worker's process, or 0 while it has none."""
        for pid in below(self._pid):
            words = command_of(pid)
            if "tokenwire.worker" in words and name in words and "-I" not in words:
                return pid
        return 0

    def signal(self, name: str, number: signal.Signals, part: str = "all") -> None:
        """Send a signal."""
        pid = self.pid(name)
        assert pid, f"{name} does not run"
        signal_part(pid, number, part)

    async def whole(self, *but: str) -> None:
        """Wait until every worker but some is usable."""
        roles = {
            role: len([name for name in self.workers(role) if name not in but])
            for role in self._roles
        }
        await until(lambda: self._has(roles), f"{roles} serve")

    async def restart(self, name: str) -> None:
        """SIGTERM; ``tokenwire-up`` starts another."""
        before = self.pid(name)
        os.kill(before, signal.SIGTERM)
        await until(lambda: self.pid(name) not in (before, 0), f"another {name}")
        await self.whole()

    def counts(self, name: str) -> Mapping[str, float]:
        """Return what its engine says."""
        pages = re.findall(rf"{name} +(?:up at .*)?(http://\S+/metrics)", self._text())
        if not pages:
            msg = f"{name} has not said where its metrics are"
            raise OSError(msg)
        return vllm_counts(pages[-1])

    def metric(self, name: str) -> float:
        """Return a frontend's number, over all its labels."""
        return sum(
            float(line.rpartition(" ")[2])
            for line in read(self.url + "/metrics").splitlines()
            if re.match(rf"{name}[ {{]", line)
        )

    def _text(self) -> str:
        return self._log.read_text()

    def _has(self, roles: Mapping[str, int]) -> bool:
        try:
            body: Any = json.loads(read(self.url + "/ready"))
        except OSError:
            return False
        return all(
            body["workers"].get(role, 0) >= count for role, count in roles.items()
        )
