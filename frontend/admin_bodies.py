"""What the admin routes take: bodies and query strings, into actions.

The shapes are those of vLLM's routes and of Prime-RL's server. A field that nobody
knows is refused: a switch that is not honoured would be worse.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Annotated, Any, TypeVar

import msgspec

from tokenwire.protocol.admin import (
    CollectiveRpc,
    LoadLora,
    Pause,
    PauseMode,
    ResetPrefixCache,
    Sleep,
    UnloadLora,
    UpdateWeights,
)
from tokenwire.protocol.limits import MAX_VERSION_CHARS

from .errors import bad_request

__all__ = [
    "Broadcaster",
    "broadcaster",
    "broadcaster_action",
    "collective_rpc",
    "load_lora",
    "pause",
    "reset_prefix_cache",
    "sleep",
    "unload_lora",
    "update_weights",
    "wake_tags",
]

T = TypeVar("T")

_MAX_NAME_CHARS = MAX_VERSION_CHARS - 16  # room for a number

_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]  # a path's bound
_Version = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_VERSION_CHARS)]

TRUE = {"true", "1", "yes", "on"}
FALSE = {"false", "0", "no", "off"}
"""As FastAPI, and so vLLM, reads a boolean of a query string."""


class _UpdateWeights(msgspec.Struct, forbid_unknown_fields=True):
    weight_dir: _Text | None = None
    weight_version: _Version | None = None
    reset_prefix_cache: bool | None = None
    skip_prefix_cache_reset: bool = False  # Prime-RL's word
    mode: PauseMode | None = None


class _LoadLora(msgspec.Struct, forbid_unknown_fields=True):
    lora_name: str
    lora_path: _Text
    load_inplace: bool | None = None
    is_3d_lora_weight: bool = False


class _UnloadLora(msgspec.Struct, forbid_unknown_fields=True):
    lora_name: str
    lora_int_id: int | None = None  # has no effect, as in vLLM


class Broadcaster(msgspec.Struct, forbid_unknown_fields=True):
    """``/init_broadcaster``, as Prime-RL sends it."""

    host: str
    port: int
    rank_offset: int
    inference_world_size: int
    timeout: float
    quantize_in_weight_transfer: bool = False


class _CollectiveRpc(msgspec.Struct, forbid_unknown_fields=True):
    method: _Text
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: float | None = None


def update_weights(
    body: bytes, *, current: str
) -> tuple[UpdateWeights, PauseMode | None, str]:
    """Return the action of ``/update_weights``, its mode, and what tells it from others.

    The action has no number yet. The mode is that for running requests.

    Args:
        body: JSON.
        current: What the weights are called that are served now.

    Raises:
        ApiError: 400.
    """
    given = _read(body, _UpdateWeights)
    reset = not given.skip_prefix_cache_reset
    if given.reset_prefix_cache is not None:
        reset = given.reset_prefix_cache
    version = given.weight_version
    what = f"version {version}"  # wherever each worker finds it
    if version is None:
        version = _name_of(given.weight_dir, current)
        what = f"folder {given.weight_dir} {version}"
    return UpdateWeights(version, 0, given.weight_dir, reset), given.mode, what


def load_lora(body: bytes, *, in_place: bool) -> LoadLora:
    """Return the action of ``/load_lora_adapter``, without a number yet.

    Args:
        body: JSON.
        in_place: Whether a loaded one is replaced where the body does not say.

    Raises:
        ApiError: 400.
    """
    given = _read(body, _LoadLora)
    if given.load_inplace is not None:
        in_place = given.load_inplace
    return LoadLora(
        given.lora_name, given.lora_path, 0, in_place, given.is_3d_lora_weight
    )


def unload_lora(body: bytes) -> UnloadLora:
    """Return the action of ``/unload_lora_adapter``.

    Raises:
        ApiError: 400.
    """
    return UnloadLora(_read(body, _UnloadLora).lora_name)


def broadcaster_action(given: Broadcaster, rank_offset: int) -> CollectiveRpc:
    """Return the action of ``/init_broadcaster`` for one worker."""
    args: list[Any] = [
        given.host,
        given.port,
        rank_offset,
        given.inference_world_size,
        given.timeout,
        given.quantize_in_weight_transfer,
    ]
    return CollectiveRpc("init_broadcaster", args)


def broadcaster(body: bytes) -> Broadcaster:
    """Return the body of ``/init_broadcaster``.

    Raises:
        ApiError: 400.
    """
    return _read(body, Broadcaster)


def collective_rpc(body: bytes) -> tuple[CollectiveRpc, float | None]:
    """Return the action of ``/collective_rpc``, and its own time limit.

    Raises:
        ApiError: 400.
    """
    given = _read(body, _CollectiveRpc)
    return CollectiveRpc(given.method, given.args, given.kwargs), given.timeout


def pause(query: Mapping[str, str]) -> Pause:
    """Return the action of ``/pause``.

    Raises:
        ApiError: 400.
    """
    _check_names(query, {"mode", "clear_cache"})
    return Pause(_mode(query), _flag(query, "clear_cache", default=True))


def reset_prefix_cache(query: Mapping[str, str]) -> ResetPrefixCache:
    """Return the action of ``/reset_prefix_cache``.

    Raises:
        ApiError: 400.
    """
    names = ("reset_running_requests", "reset_external")
    _check_names(query, set(names))
    return ResetPrefixCache(*(_flag(query, name, default=False) for name in names))


def sleep(query: Mapping[str, str]) -> Sleep:
    """Return the action of ``/sleep``.

    Raises:
        ApiError: 400.
    """
    _check_names(query, {"level", "mode"})
    level = query.get("level", "1")
    if level not in {"0", "1", "2"}:
        msg = f"level must be 0, 1 or 2, not {level!r:.40}"
        raise bad_request(msg, "level")
    return Sleep(int(level), _mode(query))


def wake_tags(tags: list[str]) -> list[str] | None:
    """Return the tags of ``/wake_up``; None: all.

    Raises:
        ApiError: 400.
    """
    known = {"weights", "kv_cache", "scheduling"}
    for tag in tags:
        if tag not in known:
            msg = f"tags must be of {sorted(known)}, not {tag!r:.40}"
            raise bad_request(msg, "tags")
    return tags or None


def _name_of(weight_dir: str | None, current: str) -> str:
    """Return what weights are called that nobody has named: as their folder.

    What is loaded from the folder of the current ones is another version all the same.
    """
    name = PurePath(weight_dir or "update").name[:_MAX_NAME_CHARS] or "update"
    before, _, number = current.partition("#")
    if before != name:
        return name
    return f"{name}#{int(number) + 1 if number.isdecimal() else 2}"


def _mode(query: Mapping[str, str]) -> PauseMode:
    match query.get("mode", "abort"):
        case "abort":
            return "abort"
        case "wait":
            return "wait"
        case "keep":
            return "keep"
        case other:
            msg = f"mode must be abort, wait or keep, not {other!r:.40}"
            raise bad_request(msg, "mode")


def _flag(query: Mapping[str, str], name: str, *, default: bool) -> bool:
    value = query.get(name)
    if value is None:
        return default
    lowered = value.lower()
    if lowered not in TRUE | FALSE:
        msg = f"{name} must be true or false, not {value!r:.40}"
        raise bad_request(msg, name)
    return lowered in TRUE


def _check_names(query: Mapping[str, str], known: set[str]) -> None:
    unknown = sorted(query.keys() - known)
    if unknown:
        msg = f"unknown parameters {unknown!r:.200}; known are {sorted(known)}"
        raise bad_request(msg, unknown[0][:100])


def _read(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"the body is not right: {error}") from error
