"""Log probabilities in OpenAI's two shapes; ids and numbers come from one record."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import cast

from tokenwire.protocol.messages import Logprobs
from tokenwire.protocol.tokens import unpack_floats, unpack_ids

from .tokenizer import TextModel

__all__ = [
    "chat_logprobs",
    "completion_logprobs",
    "echoed_logprobs",
    "prompt_logprobs",
    "ranked_rows",
    "sampled_logprobs",
]

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


def echoed_logprobs(
    prompt_token_ids: list[int],
    prompt: Logprobs | None,
    output: Logprobs | None,
    model: TextModel,
    num_top: int,
    *,
    as_ids: bool,
) -> dict[str, JsonValue]:
    """Return ``choices[].logprobs`` of a completion that repeats its prompt.

    Args:
        prompt_token_ids: The prompt; nothing precedes its first id, whose entries are
            null, as OpenAI's are.
        prompt: Of the others.
        output: Of the output's tokens.
        model: Gives the tokens' text.
        num_top: Entries in each ``top_logprobs``.
        as_ids: Write tokens as ``token_id:N``.
    """
    first = model.token_bytes(prompt_token_ids[0])
    lists: dict[str, list[JsonValue]] = {
        "text_offset": [0],
        "token_logprobs": [None],
        "tokens": [_token(prompt_token_ids[0], first, as_ids=as_ids)],
        "top_logprobs": [None],
    }
    offset = len(first.decode(errors="replace"))
    for part in (prompt, output):
        if part is None:
            continue
        more = completion_logprobs(part, model, num_top, offset, as_ids=as_ids)
        for name, values in lists.items():
            values += cast("list[JsonValue]", more[name])
        offset += sum(
            len(model.token_bytes(row[0][0]).decode(errors="replace"))
            for row in _rows(part)
        )
    return {**lists}


def prompt_logprobs(
    logprobs: Logprobs | None, model: TextModel, num_top: int
) -> list[dict[int, dict[str, JsonValue]] | None]:
    """Return vLLM's ``prompt_logprobs``: per prompt token its candidates by id.

    Args:
        logprobs: Of the prompt's tokens but the first, whose entry is null; None: the
            prompt has one.
        model: Gives the tokens' text.
        num_top: Candidates beside the prompt's own token.
    """
    result: list[dict[int, dict[str, JsonValue]] | None] = [None]
    if logprobs is None:
        return result
    ranks = unpack_ids(logprobs.ranks)
    for number, row in enumerate(_rows(logprobs)):
        start = number * logprobs.width
        entries: dict[int, dict[str, JsonValue]] = {}
        for (token_id, value), rank in zip(
            row, ranks[start : start + logprobs.width], strict=True
        ):
            if token_id in entries or (entries and rank > num_top):
                continue
            raw = model.token_bytes(token_id)
            entries[token_id] = {
                "logprob": value,
                "rank": rank,
                "decoded_token": raw.decode(errors="replace"),
            }
        result.append(entries)
    return result


def sampled_logprobs(logprobs: Logprobs) -> list[float]:
    """Return the sampled tokens' log probabilities."""
    return [row[0][1] for row in _rows(logprobs)]


def ranked_rows(logprobs: Logprobs) -> Iterator[list[tuple[int, float, int]]]:
    """Yield (id, logprob, rank) of each token's candidates, the sampled first."""
    ranks = unpack_ids(logprobs.ranks)
    start = 0
    for row in _rows(logprobs):
        end = start + len(row)
        yield [(*one, rank) for one, rank in zip(row, ranks[start:end], strict=True)]
        start = end


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
    # The first of two counts: what fills a row up repeats the sampled token with -inf.
    once = dict(reversed(row))
    best = sorted(((one, once[one]) for one in dict(row)), key=lambda one: -one[1])
    return best[:num_top]


def _token(token_id: int, raw: bytes, *, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else raw.decode(errors="replace")
