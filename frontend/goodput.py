"""Goodput: which outputs were as fast as the operator means to be."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from enum import StrEnum

from tokenwire.protocol.settings import SettingsParser, seconds

__all__ = ["Objectives", "Outcome", "add_goodput_options", "objectives"]

TTFT_S = 2.0
"""A person who has asked something begins to wonder after about two seconds."""

TPOT_S = 0.1
"""Ten tokens a second are some 450 words a minute: faster than most people read."""


class Outcome(StrEnum):
    """Whether an output met its objectives: the label of a metric."""

    MET = "met"
    TTFT = "ttft"
    """The first token was late."""
    TPOT = "tpot"
    """It was not, but those behind it were, on average."""
    FAILED = "failed"
    """It ended in an error that is not the client's."""


@dataclass(slots=True, frozen=True)
class Objectives:
    """What an output is to take; vLLM's words for it."""

    ttft_s: float = TTFT_S  # time to first token, from the request's arrival
    tpot_s: float = TPOT_S  # time per output token, the mean behind the first one

    def outcome(self, ttft_s: float, decode_s: float, num_tokens: int) -> Outcome:
        """Return how an output did that ended well.

        Args:
            ttft_s: From the request's arrival to the first token.
            decode_s: From there to the last one.
            num_tokens: All of them.
        """
        if ttft_s > self.ttft_s:
            return Outcome.TTFT
        if decode_s > self.tpot_s * max(0, num_tokens - 1):
            return Outcome.TPOT
        return Outcome.MET


def add_goodput_options(parser: SettingsParser) -> None:
    """Add the objectives."""
    add = parser.add_argument
    add(
        "--goodput-ttft-s",
        type=seconds(),
        default=TTFT_S,
        metavar="S",
        help="outputs whose first token comes later do not count as goodput "
        "(default: %(default)s)",
    )
    add(
        "--goodput-tpot-s",
        type=seconds(),
        default=TPOT_S,
        metavar="S",
        help="nor do those whose tokens behind it come slower, on average "
        "(default: %(default)s)",
    )


def objectives(given: argparse.Namespace) -> Objectives:
    """Return what was given for ``add_goodput_options``."""
    return Objectives(given.goodput_ttft_s, given.goodput_tpot_s)
