"""The options of hidden-state capture, and what they make together."""

from __future__ import annotations

import argparse
import grp
import os
from itertools import pairwise

from tokenwire.protocol.messages import Role
from tokenwire.protocol.settings import SettingsParser, seconds, whole_number
from tokenwire.worker.capture_files import Access
from tokenwire.worker.captures import MAX_BYTES, TTL_S, CaptureSettings

__all__ = ["add_capture_options", "capture_settings"]

FILE_MODE = 0o660
"""A client reads the file and opens its lock for writing. Others get nothing: hidden
states give away the prompt."""

CLIENT_NEEDS = 0o600
"""The owner, this process, reads and writes what it made."""


def add_capture_options(parser: SettingsParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add(
        "--capture-hidden-states",
        default="",
        metavar="DIR",
        help="save hidden states of prompts there, for requests that can see the path "
        "(default: save none)",
    )
    add(
        "--capture-layers",
        default=(),
        type=_layers,
        metavar="L,L,...",
        help="whose hidden states: 0 is the embedding's output, N the Nth layer's; a "
        "decode worker needs those of its prefill workers",
    )
    add(
        "--capture-file-mode",
        default=FILE_MODE,
        type=_mode,
        metavar="MODE",
        help=f"octal permissions of the files and their locks (default: {FILE_MODE:04o})",
    )
    add(
        "--capture-file-group",
        default=None,
        type=_group,
        metavar="GROUP",
        help="group of the files, a name or a number (default: this process's)",
    )
    add(
        "--capture-ttl-s",
        default=TTL_S,
        type=seconds(),
        metavar="S",
        help=f"delete what nobody has taken for so long (default: {TTL_S})",
    )
    add(
        "--capture-max-bytes",
        default=MAX_BYTES,
        type=whole_number(1),
        metavar="N",
        help="bytes of files in the folder; above, the oldest are deleted, and requests "
        f"fail while that is not enough (default: {MAX_BYTES})",
    )


def capture_settings(
    parser: SettingsParser, settings: argparse.Namespace
) -> CaptureSettings | None:
    """Return what was given for ``add_capture_options``; None: nothing is captured.

    Raises:
        SystemExit: 2 after one sentence, if the options contradict each other.
    """
    folder, layers = settings.capture_hidden_states, settings.capture_layers
    is_decode = settings.role == Role.DECODE.value
    if folder and not layers:
        parser.error("--capture-hidden-states needs --capture-layers")
    if layers and not folder and not is_decode:
        parser.error("--capture-layers needs --capture-hidden-states")
    if not layers:
        return None
    return CaptureSettings(
        # The prompt is not computed on a decode worker: it keeps the layers alone.
        folder="" if is_decode else os.path.abspath(folder),
        layers=layers,
        access=Access(settings.capture_file_mode, settings.capture_file_group),
        ttl_s=settings.capture_ttl_s,
        max_bytes=settings.capture_max_bytes,
    )


def _layers(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        msg = f"{text!r} is no list of layers like 2,15,28,30"
        raise argparse.ArgumentTypeError(msg)
    layers = tuple(map(int, parts))
    if any(second <= first for first, second in pairwise(layers)):
        # The engine would put them in order: a client that counts on its own gets
        # other layers than it believes.
        msg = f"{text!r} is not in ascending order, each layer once"
        raise argparse.ArgumentTypeError(msg)
    return layers


def _mode(text: str) -> int:
    try:
        mode = int(text, 8)
    except ValueError:
        mode = -1
    if not 0 <= mode <= 0o777 or mode & CLIENT_NEEDS != CLIENT_NEEDS:
        msg = f"{text!r} is no octal mode from 0600 to 0777 that its owner can use"
        raise argparse.ArgumentTypeError(msg)
    return mode


def _group(text: str) -> int:
    if text.isdecimal():
        return int(text)
    try:
        return grp.getgrnam(text).gr_gid
    except KeyError:
        msg = f"there is no group {text!r}"
        raise argparse.ArgumentTypeError(msg) from None
