"""Log probabilities in OpenAI's two shapes; ids and numbers come from one record."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterator, Sequence
from typing import cast

from tokenwire.protocol.messages import Logprobs
from tokenwire.protocol.tokens import unpack_floats, unpack_ids

from .tokenizer import TextModel

__all__ = [
    "TokenTexts",
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


class TokenTexts:
    """The text that each token of one choice brings, and where it stands in the whole.

    A character that is cut into tokens is the last one's, the others are empty, as in
    vLLM: the texts, joined, are the output's, and none is half a character. A special
    token that is not shown has its name as its text, but takes no place.
    """

    __slots__ = ("_decode", "_detokenizer", "_hidden", "_model", "_waiting", "length")

    def __init__(
        self,
        model: TextModel,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        length: int = 0,
    ) -> None:
        self.length = length
        """Characters until now; behind the echo of a prompt not 0 at the beginning."""
        self._model = model
        self._detokenizer = model.detokenizer(
            prompt_token_ids, skip_special_tokens=skip_special_tokens
        )
        self._hidden = model.special_ids if skip_special_tokens else frozenset[int]()
        self._decode = codecs.getincrementaldecoder("utf-8")("replace")
        self._waiting = b""  # bytes of a character that is not whole

    def next(self, token_id: int) -> str:
        """Return the text of the token that comes next."""
        if token_id in self._hidden:
            return self._alone(token_id)
        text = self._detokenizer.feed(token_id)
        self.length += len(text)
        self._alternative(token_id)
        self._waiting, _ = self._decode.getstate()
        return text

    def candidate(self, token_id: int) -> str:
        """Return the text that a token would bring if it came next."""
        if token_id in self._hidden:
            return self._alone(token_id)
        return self._alternative(token_id)

    def _alone(self, token_id: int) -> str:
        return self._model.token_bytes(token_id).decode(errors="replace")

    def _alternative(self, token_id: int) -> str:
        self._decode.setstate((self._waiting, 0))
        return self._decode.decode(self._model.token_bytes(token_id))


def chat_logprobs(
    logprobs: Logprobs,
    model: TextModel,
    num_top: int,
    texts: TokenTexts,
    *,
    as_ids: bool,
) -> dict[str, JsonValue]:
    """Return ``choices[].logprobs`` of a chat response.

    Args:
        logprobs: Of the chunk's tokens, in order.
        model: Gives the tokens' bytes.
        num_top: Entries in each ``top_logprobs``.
        texts: Gives the tokens' texts; goes on where the last chunk ended.
        as_ids: Write tokens as ``token_id:N``.
    """
    content: list[dict[str, JsonValue]] = []
    for row in _rows(logprobs):
        names = _names(row, num_top, texts, as_ids=as_ids)
        entries = [
            {
                "token": names[token_id],
                "logprob": logprob,
                "bytes": list(model.token_bytes(token_id)),
            }
            for token_id, logprob in (row[0], *_top(row, num_top))
        ]
        content.append({**entries[0], "top_logprobs": entries[1:]})
    return {"content": content, "refusal": None}


def completion_logprobs(
    logprobs: Logprobs, num_top: int, texts: TokenTexts, *, as_ids: bool
) -> dict[str, JsonValue]:
    """Return ``choices[].logprobs`` of a completion.

    Args:
        logprobs: Of the chunk's tokens, in order.
        num_top: Most likely tokens in each ``top_logprobs``, beside the sampled one.
        texts: Gives the tokens' texts; goes on where the last chunk ended.
        as_ids: Write tokens as ``token_id:N``.
    """
    tokens: list[str] = []
    offsets: list[int] = []
    numbers: list[float] = []
    tops: list[dict[str, float]] = []
    for row in _rows(logprobs):
        offsets.append(texts.length)
        names = _names(row, num_top, texts, as_ids=as_ids)
        tokens.append(names[row[0][0]])
        numbers.append(row[0][1])
        # The sampled token is there whatever its rank, as in OpenAI's API and in vLLM;
        # of tokens with one text the first counts.
        best = {tokens[-1]: numbers[-1]}
        for token_id, value in _top(row, num_top):
            best.setdefault(names[token_id], value)
        tops.append(best)
    return {
        "text_offset": offsets,
        "token_logprobs": numbers,
        "tokens": tokens,
        "top_logprobs": tops,
    }


def echoed_logprobs(
    echo: str,
    prompt_token_ids: list[int],
    prompt: Logprobs | None,
    output: Logprobs | None,
    num_top: int,
    model: TextModel,
    texts: TokenTexts,
    *,
    as_ids: bool,
) -> dict[str, JsonValue]:
    """Return ``choices[].logprobs`` of a completion that repeats its prompt.

    Args:
        echo: The prompt's text.
        prompt_token_ids: The prompt; nothing precedes its first id, whose entries are
            null, as OpenAI's are.
        prompt: Of the others.
        output: Of the output's tokens.
        num_top: As for ``completion_logprobs``.
        model: Gives the prompt's tokens' texts.
        texts: Gives the output's.
        as_ids: Write tokens as ``token_id:N``.
    """
    # A BOS that the tokenizer has put before the text is not in it.
    added = not echo.startswith(
        model.token_bytes(prompt_token_ids[0]).decode("utf-8", "replace").lstrip()
    )
    prompt_texts = TokenTexts(model, (), skip_special_tokens=added)
    first = prompt_texts.next(prompt_token_ids[0])
    lists: dict[str, list[JsonValue]] = {
        "text_offset": [0],
        "token_logprobs": [None],
        "tokens": [f"token_id:{prompt_token_ids[0]}" if as_ids else first],
        "top_logprobs": [None],
    }
    for part, of_part in ((prompt, prompt_texts), (output, texts)):
        if part is None:
            continue
        more = completion_logprobs(part, num_top, of_part, as_ids=as_ids)
        for name, values in lists.items():
            values += cast("list[JsonValue]", more[name])
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


def _names(
    row: list[tuple[int, float]], num_top: int, texts: TokenTexts, *, as_ids: bool
) -> dict[int, str]:
    """Return what the sampled token and its best alternatives are called, by id."""
    sampled = row[0][0]
    others = [one for one, _ in _top(row, num_top) if one != sampled]
    if as_ids:
        texts.next(sampled)
        return {one: f"token_id:{one}" for one in (sampled, *others)}
    names = {one: texts.candidate(one) for one in others}
    return {**names, sampled: texts.next(sampled)}
