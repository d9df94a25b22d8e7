"""Pauses, updates and sleep of the simulated engine: between two steps, by the clock.

An action waits until the engine stands where the action needs it: at once for most, with
nothing running for a pause that waits. ``stopped`` is called whenever no step is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from tokenwire.protocol.admin import (
    Action,
    CollectiveRpc,
    LoadLora,
    Pause,
    ResetPrefixCache,
    Resume,
    Sleep,
    UnloadLora,
    UpdateWeights,
    WakeUp,
)
from tokenwire.worker.engine import AdminOutcome
from tokenwire.worker.timers import Timers

from .faults import FaultKind, Faults
from .scheduler import Scheduler
from .weights import Weights

__all__ = ["Operator"]

Done = Callable[[AdminOutcome], None]


class _Errand:
    """An action under way."""

    __slots__ = ("action", "done", "has_begun", "waits")

    def __init__(self, action: Action, done: Done, *, waits: bool) -> None:
        self.action = action
        self.done = done
        self.waits = waits  # for what runs to end
        self.has_begun = False  # its own time runs; nothing more is waited for


class Operator:
    """Does what Admins ask for."""

    def __init__(
        self,
        scheduler: Scheduler,
        weights: Weights,
        faults: Faults,
        timers: Timers,
        update_s: float,
    ) -> None:
        self._scheduler = scheduler
        self._weights = weights
        self._faults = faults
        self._timers = timers
        self._update_s = update_s
        self._paused = False
        self._sleeping = False
        self._errand: _Errand | None = None

    @property
    def stands(self) -> bool:
        """Whether no step may begin."""
        errand = self._errand
        if errand is not None and errand.waits:
            return False  # what runs may end
        return self._paused or self._sleeping or errand is not None

    def begin(self, action: Action, timeout_s: float, done: Done) -> None:
        """Begin *action*; it is done when the engine stands, see ``stopped``."""
        crossed = self._errand
        if isinstance(action, Resume) and crossed is not None:
            self._end(crossed, AdminOutcome("it was resumed", "failed"))
        waits = isinstance(action, Pause | Sleep) and action.mode == "wait"
        errand = self._errand = _Errand(action, done, waits=waits)
        if waits:
            self._scheduler.admits = False
        if timeout_s:
            at = self._timers.time() + timeout_s
            self._timers.call_at(at, lambda: self._time_out(errand, timeout_s))
        if self._faults.hangs():
            errand.has_begun = True

    def stopped(self) -> None:
        """Take note that no step is under way."""
        errand = self._errand
        if errand is None or errand.has_begun:
            return
        if errand.waits and self._scheduler.num_under_way:
            return
        errand.has_begun, errand.waits = True, False
        seconds = self._update_s if isinstance(errand.action, UpdateWeights) else 0.0
        self._timers.call_at(
            self._timers.time() + seconds, lambda: self._finish(errand)
        )

    def down(self, reason: str) -> None:
        """Take note that the engine is gone."""
        if self._errand is not None:
            self._end(self._errand, AdminOutcome(reason, "failed"))

    def _time_out(self, errand: _Errand, timeout_s: float) -> None:
        text = f"it was not done within {timeout_s:g} s"
        is_broken = isinstance(errand.action, UpdateWeights) and errand.has_begun
        self._end(errand, AdminOutcome(text, "timeout", is_broken=is_broken))

    def _finish(self, errand: _Errand) -> None:
        if self._errand is errand:
            self._end(errand, self._do(errand.action))

    def _end(self, errand: _Errand, outcome: AdminOutcome) -> None:
        if self._errand is errand:
            self._errand = None
            self._scheduler.admits = True
            errand.done(outcome)

    def _do(self, action: Action) -> AdminOutcome:
        match action:
            case Pause():
                self._paused = True
                if action.clear_cache:
                    self._scheduler.reset_cache(reset_running=True)
            case Resume():
                self._paused = False
            case UpdateWeights():
                return self._update(action)
            case LoadLora():
                outcome = self._weights.load_adapter(action.lora_name, action.lora_path)
                self._scheduler.reweigh()
                if not outcome.error:
                    self._scheduler.forget_adapter(action.lora_name)
                return outcome
            case UnloadLora():
                self._weights.unload_adapter(action.lora_name)
                self._scheduler.forget_adapter(action.lora_name)
            case ResetPrefixCache():
                running = action.reset_running_requests
                self._scheduler.reset_cache(reset_running=running)
                return AdminOutcome(result={"success": True})
            case Sleep():
                self._paused = True
                self._sleeping = bool(action.level)
                if action.level:
                    self._scheduler.reset_cache(reset_running=True)
            case WakeUp():
                is_awake = action.tags is None or "kv_cache" in action.tags
                if is_awake:
                    self._paused = self._sleeping = False
                return AdminOutcome(result={"awake": is_awake}, is_awake=is_awake)
            case CollectiveRpc():
                return _called(action)
            case _:
                assert_never(action)
        return AdminOutcome()

    def _update(self, action: UpdateWeights) -> AdminOutcome:
        kind = self._faults.update_fails()
        if kind is not None:
            is_broken = kind is FaultKind.BREAK_UPDATE
            text = f"injected fault: {kind.value}"
            return AdminOutcome(text, "failed", is_broken=is_broken)
        outcome = self._weights.load(action.weight_dir)
        if not outcome.error:
            self._scheduler.reweigh()
            if action.reset_prefix_cache:
                self._scheduler.reset_cache(reset_running=False)
        return outcome


def _called(action: CollectiveRpc) -> AdminOutcome:
    """Answer the methods that trainers' extensions of vLLM's workers have."""
    if action.method in {"init_broadcaster", "echo"}:
        return AdminOutcome(result={"results": [[*action.args, action.kwargs]]})
    text = f"the engine's workers have no method {action.method!r}"
    return AdminOutcome(text, "unsupported")
