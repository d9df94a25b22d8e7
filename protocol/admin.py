"""What an Admin may ask of a worker's engine: one struct per action.

The names of actions and arguments are those of vLLM's routes. On the wire they are
``Admin.action`` and ``Admin.arguments``; both sides make them and read them here.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from .limits import MAX_ADAPTER_NAME_CHARS
from .messages import JsonObject, Status

__all__ = [
    "Action",
    "BadAction",
    "CollectiveRpc",
    "LoadLora",
    "Pause",
    "PauseMode",
    "ResetPrefixCache",
    "Resume",
    "Sleep",
    "UnloadLora",
    "UpdateWeights",
    "WakeUp",
    "action_and_arguments",
    "adapter_update",
    "check_adapter_name",
    "read_action",
    "update_of",
]

PauseMode = Literal["abort", "wait", "keep"]
"""What becomes of running requests: they are ended, run to their end, or stand still."""

_ADAPTER_NAME = re.compile(
    rf"[A-Za-z0-9][A-Za-z0-9._/:@=+-]{{0,{MAX_ADAPTER_NAME_CHARS - 1}}}"
)
"""What a model may be called in a request, a log and a URL."""


class BadAction(Exception):
    """Not an action, or not its arguments; one sentence for the caller."""


class Pause(msgspec.Struct, tag="pause", tag_field="action", frozen=True):
    """Compute nothing more; what comes waits. Done when the engine stands still."""

    mode: PauseMode = "abort"
    clear_cache: bool = True


class Resume(msgspec.Struct, tag="resume", tag_field="action", frozen=True):
    """Go on after a pause; nothing where there is none."""


class UpdateWeights(
    msgspec.Struct, tag="update_weights", tag_field="action", frozen=True
):
    """Load weights in place; without a pause, the engine stands still meanwhile."""

    weight_version: str  # what responses call them
    update: int  # larger than that of any earlier ones
    weight_dir: str | None = None  # of safetensors files; None: the engine knows where
    reset_prefix_cache: bool = True


class LoadLora(
    msgspec.Struct, tag="load_lora_adapter", tag_field="action", frozen=True
):
    """Load a LoRA adapter; with ``load_inplace`` also in the place of one of its name."""

    lora_name: str
    lora_path: str
    update: int
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class UnloadLora(
    msgspec.Struct, tag="unload_lora_adapter", tag_field="action", frozen=True
):
    """Forget a LoRA adapter."""

    lora_name: str


class ResetPrefixCache(
    msgspec.Struct, tag="reset_prefix_cache", tag_field="action", frozen=True
):
    """Reuse no KV that was computed before."""

    reset_running_requests: bool = False
    reset_external: bool = False


class Sleep(msgspec.Struct, tag="sleep", tag_field="action", frozen=True):
    """Pause, and from level 1 on give the device's memory back."""

    level: int = 1
    mode: PauseMode = "abort"


class WakeUp(msgspec.Struct, tag="wake_up", tag_field="action", frozen=True):
    """Take the memory again, or that of *tags* alone; then go on."""

    tags: list[str] | None = None


class CollectiveRpc(
    msgspec.Struct, tag="collective_rpc", tag_field="action", frozen=True
):
    """Call a method of the engine's workers by its name."""

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


Action = (
    Pause
    | Resume
    | UpdateWeights
    | LoadLora
    | UnloadLora
    | ResetPrefixCache
    | Sleep
    | WakeUp
    | CollectiveRpc
)


def action_and_arguments(action: Action) -> tuple[str, JsonObject]:
    """Return what stands in an Admin for *action*."""
    arguments: JsonObject = msgspec.to_builtins(action)
    return str(arguments.pop("action")), arguments


def read_action(action: str, arguments: JsonObject) -> Action:
    """Return what an Admin asks for.

    Raises:
        BadAction: It is unknown, or its arguments are not its.
    """
    try:
        read: Action = msgspec.convert({**arguments, "action": action}, Action)
    except msgspec.ValidationError as error:
        msg = f"{action!r:.80} is no action of this worker, or not so: {error}"
        raise BadAction(msg) from error
    return read


def check_adapter_name(name: str) -> None:
    """Refuse a name that an adapter cannot have.

    Raises:
        BadAction: It is empty, too long, or has characters that names do not have.
    """
    if _ADAPTER_NAME.fullmatch(name) is None:
        msg = f"lora_name must match {_ADAPTER_NAME.pattern}"
        raise BadAction(msg)


def update_of(status: Status, lora: str) -> int | None:
    """Return which update a request's weights are of; None: no such adapter there."""
    if not lora:
        return status.update
    loaded = adapter_update(status, lora)
    return None if loaded is None else max(loaded, status.update)


def adapter_update(status: Status, name: str) -> int | None:
    """Return which update loaded an adapter; None: it is not there."""
    return next((one.update for one in status.adapters if one.name == name), None)
