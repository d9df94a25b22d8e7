"""Records of log probabilities, taken apart and put together."""

from __future__ import annotations

from collections.abc import Sequence

from tokenwire.protocol.messages import Logprobs
from tokenwire.protocol.tokens import TOKEN_BYTES

__all__ = ["joined", "rows"]


def rows(logprobs: Logprobs, start: int, stop: int) -> Logprobs:
    """Return the records of the tokens from *start* to before *stop*."""
    size = logprobs.width * TOKEN_BYTES
    part = slice(start * size, stop * size)
    return Logprobs(
        logprobs.width,
        logprobs.token_ids[part],
        logprobs.logprobs[part],
        logprobs.ranks[part],
    )


def joined(parts: Sequence[Logprobs]) -> Logprobs | None:
    """Return the records of consecutive tokens as one; None if there are none."""
    if not parts:
        return None
    if len(parts) == 1:
        return parts[0]
    return Logprobs(
        parts[0].width,
        b"".join(part.token_ids for part in parts),
        b"".join(part.logprobs for part in parts),
        b"".join(part.ranks for part in parts),
    )
