"""Faults that the simulated engine commits on request: what, and when."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Fault", "FaultKind", "Faults", "parse_fault"]


class FaultKind(StrEnum):
    """What goes wrong, and what is counted to say when."""

    DIE = "die"
    """The engine dies at its Nth step."""
    FREEZE = "freeze"
    """It takes no step from the Nth on, and says nothing."""
    SLOW = "slow"
    """The Nth step takes ``=MS`` longer; without N, every step."""
    FAIL_HANDOVER = "fail-handover"
    """The Nth read of KV fails; without N, every read."""
    DROP_FINISH = "drop-finish"
    """The Nth end of a request is kept back; without N, every end."""
    FAIL_UPDATE = "fail-update"
    """The Nth update of the weights fails, and leaves the old ones."""
    BREAK_UPDATE = "break-update"
    """The Nth update of the weights fails when a part of them is loaded."""
    HANG_ADMIN = "hang-admin"
    """The Nth admin action, of any kind, never ends by itself."""


_SPEC = re.compile(
    r"(?P<kind>[a-z-]+)(?:=(?P<value>\d+(?:\.\d+)?))?(?:@(?P<at>[1-9]\d*))?"
)


@dataclass(slots=True, frozen=True)
class Fault:
    """One fault: ``KIND[=VALUE][@N]``."""

    kind: FaultKind
    at: int | None = None  # counted from 1; None: always
    value: float = 0.0


def parse_fault(spec: str) -> Fault:
    """Return the fault that *spec* describes.

    Raises:
        ValueError: It describes none.
    """
    match = _SPEC.fullmatch(spec)
    known = {kind.value for kind in FaultKind}
    if match is None or match["kind"] not in known:
        msg = f"fault {spec!r} is not KIND[=VALUE][@N], KIND one of {sorted(known)}"
        raise ValueError(msg)
    kind = FaultKind(match["kind"])
    at = None if match["at"] is None else int(match["at"])
    if kind in {FaultKind.DIE, FaultKind.FREEZE} and at is None:
        msg = f"fault {spec!r} needs a step: {kind.value}@N"
        raise ValueError(msg)
    if (kind is FaultKind.SLOW) != (match["value"] is not None):
        msg = f"fault {spec!r}: slow, and only slow, takes a value (slow=MS@N)"
        raise ValueError(msg)
    return Fault(kind, at, float(match["value"] or 0))


class Faults:
    """The faults of one engine, and how far each count has come."""

    def __init__(self, faults: Sequence[Fault] = ()) -> None:
        self._faults = tuple(faults)
        self._num_reads = 0
        self._num_ends = 0
        self._num_updates = 0
        self._num_actions = 0

    def dies(self, step: int) -> bool:
        """Return whether the engine dies at *step*."""
        return any(f.kind is FaultKind.DIE and f.at == step for f in self._faults)

    def freezes(self, step: int) -> bool:
        """Return whether the engine is frozen at *step*."""
        return any(
            f.kind is FaultKind.FREEZE and f.at is not None and step >= f.at
            for f in self._faults
        )

    def extra_s(self, step: int) -> float:
        """Return how much longer *step* takes, in s."""
        return sum(
            f.value / 1000
            for f in self._faults
            if f.kind is FaultKind.SLOW and f.at in {None, step}
        )

    def fails_read(self) -> bool:
        """Count a read of KV, and return whether it fails."""
        self._num_reads += 1
        return self._is_due(FaultKind.FAIL_HANDOVER, self._num_reads)

    def drops_end(self) -> bool:
        """Count an end, and return whether it is kept back."""
        if not self._faults:
            return False
        self._num_ends += 1
        return self._is_due(FaultKind.DROP_FINISH, self._num_ends)

    def update_fails(self) -> FaultKind | None:
        """Count an update of the weights, and return how it fails, if it does."""
        self._num_updates += 1
        for kind in (FaultKind.FAIL_UPDATE, FaultKind.BREAK_UPDATE):
            if self._is_due(kind, self._num_updates):
                return kind
        return None

    def hangs(self) -> bool:
        """Count an admin action, and return whether it hangs."""
        self._num_actions += 1
        return self._is_due(FaultKind.HANG_ADMIN, self._num_actions)

    def _is_due(self, kind: FaultKind, count: int) -> bool:
        return any(f.kind is kind and f.at in {None, count} for f in self._faults)
