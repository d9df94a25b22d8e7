"""A client of any OpenAI-compatible stack that notes what came, and when.

It neither retries nor forgives: whatever a stack does under a fault is in the ``Answer``.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

__all__ = ["Answer", "Client", "prompt_of"]

GIVE_UP_S = 60.0
"""For one request: what takes longer counts as lost."""


def prompt_of(number: int, num_tokens: int = 40) -> list[int]:
    """Return a prompt of ids, unlike those of other numbers from its first id on."""
    return [
        1_000 + (number * 7_919 + n * 104_729 + n * n * number) % 40_000
        for n in range(num_tokens)
    ]


@dataclass
class Answer:
    """What one request got."""

    number: int
    token_ids: list[int] = field(default_factory=list[int])
    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    error: str = ""
    done: bool = False  # the stream said that it is over
    times: list[float] = field(default_factory=list[float])  # of each chunk with output

    @property
    def failed(self) -> bool:
        """Whether its client would call it a failure."""
        return bool(self.error) or not self.done or self.finish_reason is None

    @property
    def longest_pause_s(self) -> float:
        """The longest time between two chunks."""
        gaps = [b - a for a, b in zip(self.times, self.times[1:], strict=False)]
        return max(gaps, default=0.0)

    @property
    def counts(self) -> tuple[int, ...] | None:
        """What usage says, without what a cache had."""
        names = ("prompt_tokens", "completion_tokens", "total_tokens")
        return None if self.usage is None else tuple(self.usage[one] for one in names)

    def same_as(self, other: Answer, *, repeatable: bool = True) -> bool:
        """Return whether ids, text and finish reason are equal.

        Args:
            other: What an undisturbed run got.
            repeatable: False for an engine that makes its tokens up: then only their
                number can be compared.
        """
        if not repeatable:
            return (len(self.token_ids), self.finish_reason) == (
                len(other.token_ids),
                other.finish_reason,
            )
        return (self.token_ids, self.text, self.finish_reason) == (
            other.token_ids,
            other.text,
            other.finish_reason,
        )


class Client:
    """Streams completions; one HTTP connection a request."""

    def __init__(
        self,
        url: str,
        model: str,
        max_tokens: int,
        selector: Mapping[str, Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = url
        self._model = model
        self._max_tokens = max_tokens
        self._selector = selector  # how token ids are asked for
        self._clock = clock
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()

    async def ask(
        self,
        answer: Answer,
        *,
        on_output: Callable[[], None] | None = None,
        **fields: Any,
    ) -> Answer:
        """Fill *answer* with what its request brings, to the end or an error."""
        body = {
            "model": self._model,
            "prompt": prompt_of(answer.number),
            "max_tokens": self._max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._selector,
            **fields,
        }
        try:
            async with (
                asyncio.timeout(GIVE_UP_S),
                self._session.post(self._url + "/v1/completions", json=body) as got,
            ):
                if got.status != 200:
                    answer.error = f"{got.status}: {(await got.text())[:200]}"
                    return answer
                async for line in got.content:
                    if self._take(answer, line) and on_output is not None:
                        on_output()
        except TimeoutError:
            answer.error = f"nothing more within {GIVE_UP_S:.0f} s"
            answer.times.append(self._clock())  # the wait was a pause
        except aiohttp.ClientError as error:
            answer.error = f"{type(error).__name__}: {error}"
        return answer

    async def ask_all(
        self, answers: Sequence[Answer], **fields: Any
    ) -> Sequence[Answer]:
        """Ask for all at once."""
        await asyncio.gather(*(self.ask(one, **fields) for one in answers))
        return answers

    def _take(self, answer: Answer, line: bytes) -> bool:
        """Take a line of the stream; return whether it brought output."""
        if not line.startswith(b"data: "):
            return False
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            answer.done = True
            return False
        chunk: dict[str, Any] = json.loads(data)
        if "error" in chunk:
            answer.error = json.dumps(chunk["error"])[:200]
            return False
        answer.usage = chunk.get("usage") or answer.usage
        nvext: dict[str, Any] = chunk.get("nvext") or {}
        ids: list[int] = nvext.get("completion_token_ids") or []
        choices: list[dict[str, Any]] = chunk.get("choices") or []
        for choice in choices:
            answer.text += choice.get("text") or ""
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            ids = ids or choice.get("token_ids") or []
            answer.times.append(self._clock())
        answer.token_ids += ids
        return bool(choices)
