"""The settings of the admin plane, and of what happens to requests meanwhile."""

from __future__ import annotations

import argparse
import os

import msgspec

from tokenwire.protocol.admin import PauseMode
from tokenwire.protocol.keys import stays_here
from tokenwire.protocol.settings import SettingsParser, port_or_off, seconds

from .admin_key import KEY_VARIABLE

__all__ = ["AdminSettings", "add_admin_options", "admin_settings"]

TIMEOUT_S = 300.0
"""Prime-RL's own limit for a pause, which may wait for requests to end."""

UPDATE_TIMEOUT_S = 720.0
"""Prime-RL's own limit for an update: hundreds of gigabytes from a shared file system."""


class AdminSettings(msgspec.Struct, frozen=True):
    """How the admin plane runs."""

    host: str = "127.0.0.1"
    port: int | None = None  # None: off
    key_file: str | None = None
    timeout_s: float = TIMEOUT_S
    update_timeout_s: float = UPDATE_TIMEOUT_S
    update_mode: PauseMode = "keep"
    allow_collective_rpc: bool = False


def add_admin_options(parser: SettingsParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add(
        "--admin-host",
        default="127.0.0.1",
        metavar="HOST",
        help="address of the admin plane; beyond loopback it needs a key "
        "(default: %(default)s)",
    )
    add(
        "--admin-port",
        type=port_or_off,
        default=None,
        metavar="PORT|off",
        help="port of the admin plane, for trainers; 0: any free one (default: off)",
    )
    add(
        "--admin-key-file",
        metavar="FILE",
        help="file with the key that admin requests must have, as Bearer; or the key "
        f"itself in the variable {KEY_VARIABLE}",
    )
    add(
        "--admin-timeout-s",
        type=seconds(),
        default=TIMEOUT_S,
        metavar="S",
        help="how long an admin action may take at a worker (default: %(default)s)",
    )
    add(
        "--admin-update-timeout-s",
        type=seconds(),
        default=UPDATE_TIMEOUT_S,
        metavar="S",
        help="the same for an update of the weights (default: %(default)s)",
    )
    add(
        "--admin-allow-collective-rpc",
        action="store_true",
        help="let /collective_rpc call any method of the engine's workers",
    )
    add(
        "--during-update",
        choices=["keep", "wait", "abort"],
        default="keep",
        help="what running requests do while weights are updated without a pause: stand "
        "still and go on with the new ones, end first, or be ended "
        "(default: %(default)s)",
    )
    add(
        "--while-paused",
        choices=["wait", "refuse"],
        default="wait",
        help="whether new requests wait in the queue while the workers are paused, or "
        "get 503 (default: %(default)s)",
    )


def admin_settings(parser: SettingsParser, given: argparse.Namespace) -> AdminSettings:
    """Return what was given for ``add_admin_options``.

    Raises:
        SystemExit: 2 after one sentence, if anybody could use the plane.
    """
    has_key = bool(given.admin_key_file or os.environ.get(KEY_VARIABLE))
    is_near = stays_here(f"tcp://{given.admin_host}:0")
    if given.admin_port is not None and not is_near and not has_key:
        parser.error(
            f"--admin-host {given.admin_host} without a key would let everyone who "
            f"reaches it change the model: give --admin-key-file, or {KEY_VARIABLE}"
        )
    return AdminSettings(
        host=given.admin_host,
        port=given.admin_port,
        key_file=given.admin_key_file,
        timeout_s=given.admin_timeout_s,
        update_timeout_s=given.admin_update_timeout_s,
        update_mode=given.during_update,
        allow_collective_rpc=given.admin_allow_collective_rpc,
    )
