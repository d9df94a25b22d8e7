"""The options of routing: the policy, the weights of the cost, the index's bound."""

from __future__ import annotations

import argparse

import msgspec

from tokenwire.protocol.settings import SettingsParser, whole_number

from .kv_index import MAX_BLOCKS
from .routing import (
    QUEUE_WEIGHT,
    SEQUENCE_TOKENS,
    SESSION_TOKENS,
    WAITING_TOKENS,
    CostWeights,
    Policy,
)

__all__ = ["RoutingSettings", "add_routing_options", "routing_settings"]

MAX_WEIGHT = 1_000.0
"""Of waiting tokens: with a thousand, a queue of one outweighs most prompts."""


class RoutingSettings(msgspec.Struct, frozen=True):
    """How workers are chosen."""

    policy: Policy = Policy.KV
    weights: CostWeights = CostWeights()
    max_index_blocks: int = MAX_BLOCKS


def add_routing_options(parser: SettingsParser) -> None:
    """Add the options to *parser*."""
    add = parser.add_argument
    add(
        "--routing",
        choices=[policy.value for policy in Policy],
        default=Policy.KV.value,
        help="how workers are chosen: kv: by what they have cached and by their load; "
        "load: by their load alone; round-robin: in turns (default: %(default)s)",
    )
    add(
        "--routing-queue-weight",
        type=_weight,
        default=QUEUE_WEIGHT,
        metavar="X",
        help="what a prompt token that waits at a worker counts beside one that this "
        "request would have computed there (default: %(default)s)",
    )
    add(
        "--routing-sequence-tokens",
        type=whole_number(0),
        default=SEQUENCE_TOKENS,
        metavar="N",
        help="what each request at a worker counts, in prompt tokens; more: evener load, "
        "fewer hits (default: %(default)s)",
    )
    add(
        "--routing-waiting-tokens",
        type=whole_number(0),
        default=WAITING_TOKENS,
        metavar="N",
        help="what each request beyond a worker's slots counts more, in prompt tokens, "
        "and a full KV cache (default: %(default)s)",
    )
    add(
        "--routing-session-tokens",
        type=whole_number(0),
        default=SESSION_TOKENS,
        metavar="N",
        help="by how many prompt tokens a session's worker may cost more than others; "
        "0: sessions are not looked at (default: %(default)s)",
    )
    add(
        "--kv-index-blocks",
        type=whole_number(1),
        default=MAX_BLOCKS,
        metavar="N",
        help="blocks of all workers' caches that are known at most; about 90 bytes "
        "each (default: %(default)s)",
    )


def routing_settings(given: argparse.Namespace) -> RoutingSettings:
    """Return what was given for ``add_routing_options``."""
    return RoutingSettings(
        Policy(given.routing),
        CostWeights(
            given.routing_queue_weight,
            given.routing_sequence_tokens,
            given.routing_waiting_tokens,
            given.routing_session_tokens,
        ),
        given.kv_index_blocks,
    )


def _weight(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= MAX_WEIGHT:
        msg = f"{text!r} is not a number from 0 to {MAX_WEIGHT:.0f}"
        raise argparse.ArgumentTypeError(msg)
    return value
