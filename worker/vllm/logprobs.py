"""vLLM's log probabilities as packed rows of one width.

A row is the sampled token, then the most likely tokens, best first: ``width - 1`` of
them. The sampled token is there a second time when it is one of the most likely, so
``row[1:]`` alone answers "top logprobs".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from tokenwire.protocol.messages import Logprobs
from tokenwire.protocol.tokens import pack_floats, pack_ids

__all__ = ["FlatLogprobs", "pack"]


class FlatLogprobs(Protocol):
    """vLLM's ``FlatLogprobs``: rows are ranges of three parallel lists."""

    @property
    def start_indices(self) -> Sequence[int]:
        """Where each row begins: (num_rows,)."""
        ...

    @property
    def end_indices(self) -> Sequence[int]:
        """Where each row ends: (num_rows,)."""
        ...

    @property
    def token_ids(self) -> Sequence[int]:
        """The candidates' ids."""
        ...

    @property
    def logprobs(self) -> Sequence[float]:
        """Their log probabilities."""
        ...

    @property
    def ranks(self) -> Sequence[int]:
        """Their ranks, from 1."""
        ...


def pack(flat: FlatLogprobs, num_top: int) -> Logprobs | None:
    """Return *flat* packed; ``None`` if it has no row.

    Args:
        flat: Its empty rows (the first prompt token has none) are left out.
        num_top: The candidates asked for beside the sampled token; -1 is all.
    """
    spans = [
        (start, end)
        for start, end in zip(flat.start_indices, flat.end_indices, strict=True)
        if end > start
    ]
    if not spans:
        return None
    width = max(end - start for start, end in spans) if num_top < 0 else num_top + 1
    first, last = spans[0][0], spans[-1][1]
    if all(end - start == width for start, end in spans):
        return Logprobs(
            width=width,
            token_ids=pack_ids(flat.token_ids[first:last]),
            logprobs=pack_floats(flat.logprobs[first:last]),
            ranks=pack_ids(flat.ranks[first:last]),
        )
    token_ids: list[int] = []
    values: list[float] = []
    ranks: list[int] = []
    for start, end in spans:
        for token_id, value, rank in _row(flat, start, end, width):
            token_ids.append(token_id)
            values.append(value)
            ranks.append(rank)
    return Logprobs(
        width=width,
        token_ids=pack_ids(token_ids),
        logprobs=pack_floats(values),
        ranks=pack_ids(ranks),
    )


def _row(
    flat: FlatLogprobs, start: int, end: int, width: int
) -> list[tuple[int, float, int]]:
    """Return one row at full width.

    vLLM 0.32 merges two outputs of a slow consumer through dictionaries: a sampled
    token that is also a likely one then comes once, and its row is one short.
    """
    row = [
        (flat.token_ids[i], flat.logprobs[i], flat.ranks[i]) for i in range(start, end)
    ]
    sampled = row[0]
    top = row[1:] if len(row) >= width else sorted(row, key=lambda item: item[2])
    row = [sampled, *top][:width]
    row += [(sampled[0], -math.inf, 0)] * (width - len(row))
    return row
