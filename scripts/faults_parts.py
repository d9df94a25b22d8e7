"""What a case of the fault suite is made of: requests, points, strikes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import msgspec

__all__ = ["TOPOLOGIES", "Ask", "Case", "Point", "Strike", "digest"]

TOPOLOGIES = {
    "single": ("aggregated",),
    "twins": ("aggregated", "aggregated"),
    "trio": ("prefill", "decode", "decode"),
    "quartet": ("prefill", "prefill", "decode", "decode"),
    "mixed": ("prefill", "decode", "aggregated"),
}


@dataclass(frozen=True)
class Ask:
    """One request, and how its client behaves."""

    chat: bool
    stream: bool
    num_prompt: int
    max_tokens: int
    sampling: str  # "greedy" | "seeded" | "unseeded"
    seed: int
    ids: bool = True  # with completion_token_ids
    logprobs: bool = False
    n: int = 1
    stop_after: int | None = (
        None  # a stop string that ends there, taken from the output
    )
    stop_token_after: int | None = None  # likewise a stop token
    leaves_after: int | None = None  # the client is gone after so many events
    reads_slowly: bool = False


@dataclass(frozen=True)
class Point:
    """When a fault strikes: at a frame of this message, as it passes."""

    message: str  # a message's tag, or "tokens" | "prefilled" | "finished" (in a batch)
    request: int | None = None
    leg: str | None = None  # of a submit
    count: int = 1  # the how manieth such frame, or the token for "tokens"
    early: bool = False  # before the frame is passed on


@dataclass(frozen=True)
class Strike:
    """One fault."""

    point: Point
    action: str
    target: str = "here"  # of the frame; or the request's "prefill" or "output" worker
    value: float = 0.0


@dataclass(frozen=True)
class Case:
    """One case: who serves, who asks, what goes wrong."""

    seed: int
    number: int
    kind: str
    topology: str
    asks: tuple[Ask, ...]
    strikes: tuple[Strike, ...]
    num_frontends: int = 1
    engine: dict[str, list[str]] = field(
        default_factory=dict[str, list[str]]
    )  # by worker
    frontend: tuple[str, ...] = ()
    max_requests: int = 1_000  # of a worker
    refusals: bool = False  # whether 429 and 503 are right answers here


def digest(value: object) -> str:
    """Return a digest that does not depend on the process."""
    data = msgspec.json.encode(value, order="deterministic")
    return hashlib.sha256(data).hexdigest()[:16]
