"""The settings of resumable generations."""

from __future__ import annotations

import argparse

import msgspec

from tokenwire.protocol.settings import SettingsParser, seconds

from .checkpoint import MAX_LIFE_S

__all__ = ["ResumeSettings", "add_resume_options", "resume_settings"]


class ResumeSettings(msgspec.Struct, frozen=True):
    """How checkpoints are made."""

    key_file: str | None = None  # None: they are not signed
    checkpoint_life_s: float = MAX_LIFE_S


def add_resume_options(parser: SettingsParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add(
        "--resume-key-file",
        metavar="FILE",
        help="one or two keys, in hexadecimal or base64, one a line: checkpoints are "
        "signed with the first, and refused unless signed with one of them",
    )
    add(
        "--checkpoint-life-s",
        type=seconds(),
        default=float(MAX_LIFE_S),
        metavar="S",
        help="how long a checkpoint may be resumed (default: %(default)s)",
    )


def resume_settings(given: argparse.Namespace) -> ResumeSettings:
    """Return what was given."""
    return ResumeSettings(given.resume_key_file, given.checkpoint_life_s)
