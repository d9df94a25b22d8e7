"""What Admins make of a worker: one action at a time, its answer, and the Status.

Laws:
- Every Admin is answered by exactly one AdminDone, as long as its frontend is there.
- A Status that an action leads to is sent before its answer, so who has the answer of
  all workers knows the state of all.
- Weights that were loaded in part serve nobody: ``Status.fault`` says so until an
  update succeeds. An engine that does not go on after a failure serves nobody, until it
  is resumed, woken or updated.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol, assert_never

import msgspec

from tokenwire.protocol.admin import (
    Action,
    BadAction,
    CollectiveRpc,
    LoadLora,
    Pause,
    ResetPrefixCache,
    Resume,
    Sleep,
    UnloadLora,
    UpdateWeights,
    WakeUp,
    check_adapter_name,
    read_action,
    update_of,
)
from tokenwire.protocol.limits import MAX_ADAPTERS, MAX_ERROR_CHARS, MAX_VERSION_CHARS
from tokenwire.protocol.messages import (
    Adapter,
    Admin,
    AdminDone,
    Leg,
    Status,
    Submit,
)
from tokenwire.worker.engine import AdminOutcome, Engine

__all__ = ["Administration", "Owner"]

logger = logging.getLogger(__name__)


class Owner(Protocol):
    """The service, as far as the administration needs it."""

    def status_changed(self) -> None:
        """Tell the frontends."""

    def abort_all(self) -> None:
        """End what runs, on purpose."""

    def kv_is_old(self, concerns: Callable[[Submit], bool]) -> None:
        """End what has brought nothing yet, and may use KV of before now."""

    def adapter_leaves(self, lora: str) -> None:
        """Let what runs on an adapter go on elsewhere, or end where none has it."""

    def give_up_all(self) -> None:
        """Let what runs go on elsewhere: this worker cannot serve."""


Answer = Callable[[AdminDone], None]


class Administration:
    """The state of one worker's engine, as Admins have made it.

    Args:
        engine: What does it.
        owner: Who is told.
        model: The served name, which no adapter may have.
        weight_version: What the weights are called that the engine started with.
    """

    def __init__(
        self, engine: Engine, owner: Owner, *, model: str, weight_version: str
    ) -> None:
        self._engine = engine
        self._owner = owner
        self._model = model
        self._action: Action | None = None  # under way
        self._was_paused = False  # before it
        self._is_stuck = False  # that is the Status's fault
        self.status = Status(weight_version)

    def update_of(self, lora: str) -> int | None:
        """Return the update that a request's weights are of; None: no such adapter.

        Nor one that is being unloaded: the engine would load it again.
        """
        if lora and self._action == UnloadLora(lora):
            return None
        return update_of(self.status, lora)

    @property
    def _adapters(self) -> dict[str, int]:
        """By name, the update that loaded it."""
        return {one.name: one.update for one in self.status.adapters}

    def begin(self, message: Admin, answer: Answer) -> None:
        """Do what *message* asks for; *answer* gets the one answer."""
        try:
            action = read_action(message.action, message.arguments)
        except BadAction as error:
            answer(_failed(message, "unsupported", str(error)))
            return
        crosses = isinstance(action, Resume) and isinstance(self._action, Pause)
        if self._action is not None and not crosses:
            text = f"{self.status.busy} is under way: one action at a time"
            answer(_failed(message, "busy", text))
            return
        refusal = self._refusal(action)
        if refusal is not None:
            answer(_failed(message, *refusal))
            return

        def done(outcome: AdminOutcome) -> None:
            self._done(action, outcome)
            answer(_done(message, outcome))

        logger.info("admin: %s", action)
        if not crosses:
            self._action = action
            self._prepare(action, message.action)
        self._engine.administer(action, message.timeout_s, done)

    def _refusal(self, action: Action) -> tuple[str, str] | None:
        """Return why *action* cannot be, as kind and sentence, or None."""
        match action:
            case LoadLora():
                return self._load_refusal(action)
            case UnloadLora(name) if name not in self._adapters:
                return "not_found", f"The lora adapter '{name:.128}' cannot be found."
            case Resume() if self.status.sleep_level:
                return "invalid", "the worker sleeps: wake it up"
            case UpdateWeights() if action.update <= self.status.update:
                text = f"update {action.update} is not above {self.status.update}"
                return "invalid", text
            case UpdateWeights(version) if len(version) > MAX_VERSION_CHARS:
                return (
                    "invalid",
                    f"weight_version is above {MAX_VERSION_CHARS} characters",
                )
            case _:
                text = self._engine.unable(action)
                return ("unsupported", text) if text else None

    def _load_refusal(self, action: LoadLora) -> tuple[str, str] | None:
        name = action.lora_name
        try:
            check_adapter_name(name)
        except BadAction as error:
            return "invalid", str(error)
        if name == self._model:
            text = f"The lora adapter '{name}' conflicts with a served base model."
            return "invalid", text
        if name in self._adapters and not action.load_inplace:
            text = (
                f"The lora adapter '{name}' has already been loaded. If you want to "
                "load the adapter in place, set 'load_inplace' to True."
            )
            return "invalid", text
        if name not in self._adapters and len(self._adapters) >= MAX_ADAPTERS:
            return "invalid", f"{MAX_ADAPTERS} adapters are loaded, the limit"
        return None

    def _prepare(self, action: Action, name: str) -> None:
        """Say what is about to be: the engine makes no steps meanwhile."""
        stops = isinstance(action, Pause | Sleep)
        self._was_paused = self.status.paused
        self._set(busy=name, paused=self.status.paused or stops)
        if isinstance(action, Pause | Sleep) and action.mode == "abort":
            self._owner.abort_all()
        if isinstance(action, UnloadLora):
            self._owner.adapter_leaves(action.lora_name)

    def _done(self, action: Action, outcome: AdminOutcome) -> None:
        if outcome.error:
            logger.warning("admin: %s failed: %s", action, outcome.error)
        if not outcome.error:
            self._forget_kv(action)
        if action is self._action:
            self._action = None
            changes = self._changes(action, outcome)
            self._set(busy="", **{**changes, **self._judged(action, outcome)})
        elif not outcome.error:  # a Resume that crossed a Pause
            self._was_paused = False
            self._set(paused=False, **self._judged(action, outcome))
        if outcome.is_broken or outcome.is_stuck:
            self._owner.give_up_all()

    def _forget_kv(self, action: Action) -> None:
        """Have nobody use KV that *action* was to make an end of."""
        match action:
            case UpdateWeights(reset_prefix_cache=False):
                # What is cached may be used; what was computed elsewhere was refused if
                # it came later, and a worker's answer must not depend on that.
                self._owner.kv_is_old(lambda submit: submit.leg is Leg.DECODE)
            case UpdateWeights() | ResetPrefixCache():
                self._owner.kv_is_old(lambda _: True)
            case LoadLora(name):
                self._owner.kv_is_old(lambda submit: submit.lora == name)
            case _:
                pass

    def _judged(self, action: Action, outcome: AdminOutcome) -> dict[str, object]:
        """Keep an engine out that does not go on; take it back when it does."""
        if outcome.is_stuck and not outcome.is_broken and not self.status.fault:
            self._is_stuck = True
            return {"fault": f"it stands still: {outcome.error}"[:MAX_ERROR_CHARS]}
        heals = not outcome.error and isinstance(action, Resume | WakeUp)
        was_stuck = self._is_stuck
        if heals or isinstance(action, UpdateWeights):
            self._is_stuck = False
        return {"fault": ""} if heals and was_stuck else {}

    def _changes(self, action: Action, outcome: AdminOutcome) -> dict[str, object]:
        """Return what of the Status *action* has changed."""
        is_done = not outcome.error
        match action:
            case Pause() | Sleep() if not is_done:
                return {"paused": self._was_paused}
            case Pause():
                return self._cleared() if action.clear_cache else {}
            case Resume() if is_done:
                return {"paused": False}
            case UpdateWeights():
                if outcome.is_broken:
                    return {"fault": outcome.error[:MAX_ERROR_CHARS]}
                if not is_done:
                    return {}
                cleared = self._cleared() if action.reset_prefix_cache else {}
                return {
                    "weight_version": action.weight_version,
                    "update": action.update,
                    "fault": "",
                    **cleared,
                }
            case LoadLora() if is_done:
                return _listed({**self._adapters, action.lora_name: action.update})
            case UnloadLora() if is_done:
                left = self._adapters
                left.pop(action.lora_name, None)
                return _listed(left)
            case ResetPrefixCache() if is_done:
                return self._cleared()
            case Sleep():
                cleared = self._cleared() if action.level else {}
                return {"sleep_level": action.level, **cleared}
            case WakeUp() if is_done and outcome.is_awake:
                return {"sleep_level": 0, "paused": False}
            case CollectiveRpc() | Resume() | LoadLora() | UnloadLora():
                return {}
            case ResetPrefixCache() | WakeUp():
                return {}
            case _:
                assert_never(action)

    def _cleared(self) -> dict[str, object]:
        return {"cache_epoch": self.status.cache_epoch + 1}

    def _set(self, **changes: object) -> None:
        status = msgspec.structs.replace(self.status, **changes)
        if status != self.status:
            self.status = status
            self._owner.status_changed()


def _listed(adapters: dict[str, int]) -> dict[str, object]:
    return {"adapters": [Adapter(*one) for one in adapters.items()]}


def _failed(message: Admin, kind: str, error: str) -> AdminDone:
    return AdminDone(message.request_id, error[:MAX_ERROR_CHARS], kind)


def _done(message: Admin, outcome: AdminOutcome) -> AdminDone:
    if outcome.error:
        return _failed(message, outcome.kind or "failed", outcome.error)
    return AdminDone(message.request_id, result=outcome.result)
