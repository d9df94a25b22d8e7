"""Log probabilities in OpenAI's two shapes; ids and numbers come from one record."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tokenwire.protocol.messages import Logprobs
from tokenwire.protocol.tokens import unpack_floats, unpack_ids

from .tokenizer import TextModel

__all__ = ["chat_logprobs", "completion_logprobs"]

FLOOR = -9999.0
"""What JSON says for -inf and NaN; vLLM's number."""

JsonValue = object


def chat_logprobs(
    logprobs: Logprobs, model: TextModel, num_top: int, *, as_ids: bool
) -> dict[str, JsonValue]:
    """Return ``choices[].logprobs`` of a chat response.

    Args:
        logprobs: Of the chunk's tokens, in order.
        model: Gives the tokens' text.
        num_top: Entries in each ``top_logprobs``.
        as_ids: Write tokens as ``token_id:N``.
    """

    def entry(token_id: int, logprob: float) -> dict[str, JsonValue]:
        raw = model.token_bytes(token_id)
        return {
            "token": _token(token_id, raw, as_ids=as_ids),
            "logprob": logprob,
            "bytes": list(raw),
        }

    content = [
        {**entry(*row[0]), "top_logprobs": [entry(*one) for one in _top(row, num_top)]}
        for row in _rows(logprobs)
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    logprobs: Logprobs, model: TextModel, num_top: int, offset: int, *, as_ids: bool
) -> dict[str, JsonValue]:
    """Return ``choices[].logprobs`` of a completion.

    Args:
        logprobs: Of the chunk's tokens, in order.
        model: Gives the tokens' text.
        num_top: Entries in each ``top_logprobs``.
        offset: Characters of output text before this chunk.
        as_ids: Write tokens as ``token_id:N``.
    """
    tokens: list[str] = []
    offsets: list[int] = []
    numbers: list[float] = []
    tops: list[dict[str, float]] = []
    for row in _rows(logprobs):
        token_id, logprob = row[0]
        raw = model.token_bytes(token_id)
        tokens.append(_token(token_id, raw, as_ids=as_ids))
        offsets.append(offset)
        offset += len(raw.decode(errors="replace"))
        numbers.append(logprob)
        tops.append(
            {
                _token(one, model.token_bytes(one), as_ids=as_ids): value
                for one, value in _top(row, num_top)
            }
        )
    return {
        "text_offset": offsets,
        "token_logprobs": numbers,
        "tokens": tokens,
        "top_logprobs": tops,
    }


def _rows(logprobs: Logprobs) -> Iterator[list[tuple[int, float]]]:
    """Yield (id, logprob) of each token's candidates, the sampled first."""
    token_ids = unpack_ids(logprobs.token_ids)
    values = [
        value if math.isfinite(value) else FLOOR
        for value in unpack_floats(logprobs.logprobs)
    ]
    width = logprobs.width
    for start in range(0, len(token_ids), width):
        end = start + width
        yield list(zip(token_ids[start:end], values[start:end], strict=True))


def _top(row: list[tuple[int, float]], num_top: int) -> list[tuple[int, float]]:
    """Return the most likely candidates, most likely first, none twice."""
    best = sorted(dict(row).items(), key=lambda one: -one[1])
    return best[:num_top]


def _token(token_id: int, raw: bytes, *, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else raw.decode(errors="replace")
