"""One choice's text through a parser of tool calls and reasoning, id by id.

Laws:
- The parser hears one id at a time, whatever the batches, and then the end: what a
  message is cannot depend on how a worker batched it, nor on whether it is streamed.
- Ids never wait for the parser: it holds back text, not ids.
- A parser that fails ends nothing: what it had not told yet, and all text after it,
  becomes content, and no finish reason speaks of tool calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .detokenize import Detokenizer
from .fold import Fold
from .message import MessagePart, merged
from .stop import StopStrings

__all__ = ["MessageParser", "ParsingFold"]

RECOUNT_AT = 16
"""Reasoning is counted anew when the ids are more by one in so many. A parser goes
through all of them, so that a count for each chunk (``continuous_usage_stats``) would
be the square of the output; this is at most 18 times the output in all."""


class MessageParser(Protocol):
    """Makes one message of an output's text and ids."""

    @property
    def called_tools(self) -> bool:
        """Whether the finish reason is ``tool_calls`` if the output stops here."""
        ...

    def feed(self, text: str, token_ids: list[int], *, finished: bool) -> MessagePart:
        """Return what *text*, of *token_ids*, adds; *finished*: nothing follows."""
        ...

    def count_reasoning(self, token_ids: Sequence[int]) -> int:
        """Return how many of the output's ids are reasoning."""
        ...


class ParsingFold(Fold):
    """A fold whose text also goes through a parser."""

    __slots__ = (
        "_finished",
        "_num_counted",
        "_num_reasoning",
        "_parsed",
        "_parser",
        "_token_ids",
    )

    def __init__(
        self,
        parser: MessageParser,
        detokenizer: Detokenizer,
        stop: StopStrings | None = None,
        min_tokens: int = 0,
        *,
        include_stop: bool = False,
    ) -> None:
        super().__init__(detokenizer, stop, min_tokens, include_stop=include_stop)
        self._parser = parser
        self._parsed: list[MessagePart] = []
        self._finished = False
        self._token_ids: list[int] = []
        self._num_counted = 0  # ids when the reasoning was last counted
        self._num_reasoning = 0

    @property
    def parses(self) -> bool:
        """Whether ``take`` has something to tell."""
        return True

    @property
    def called_tools(self) -> bool:
        """Whether the finish reason is ``tool_calls`` if the output stops here."""
        return self._parser.called_tools

    @property
    def num_reasoning_tokens(self) -> int:
        """How many of the ids so far are reasoning.

        Exact at the end; before, as it was at most a sixteenth of the ids ago.
        """
        num_ids, num_counted = len(self._token_ids), self._num_counted
        if num_ids > num_counted and (
            self._finished or num_ids > num_counted + num_counted // RECOUNT_AT
        ):
            self._num_reasoning = self._parser.count_reasoning(self._token_ids)
            self._num_counted = num_ids
        return self._num_reasoning

    def feed(
        self, token_ids: Sequence[int], *, stopped: bool = False
    ) -> tuple[str, int]:
        """Return the new text, and how many of *token_ids* belong to the output."""
        text = ""
        silent = len(token_ids) - 1 if stopped and not self._include_stop else -1
        for number, token_id in enumerate(token_ids):
            if number == silent:
                # As vLLM does it: what was held back comes with the stop token.
                self.num_tokens += 1
                piece = super().finish()
                finished = True
            else:
                piece, _ = super().feed((token_id,))
                finished = self.matched is not None
            text += piece
            self._token_ids.append(token_id)
            self._parse(piece, [token_id], finished=finished)
            if finished:
                return text, number + 1
        return text, len(token_ids)

    def finish(self) -> str:
        """Return the text held back, now that the output has ended."""
        if self._finished:
            return ""
        rest = super().finish()
        self._parse(rest, [], finished=True)
        return rest

    def take(self) -> MessagePart:
        """Return what was parsed since the last call."""
        parsed, self._parsed = self._parsed, []
        return merged(parsed)

    def _parse(self, text: str, token_ids: list[int], *, finished: bool) -> None:
        self._finished = finished
        self._parsed.append(self._parser.feed(text, token_ids, finished=finished))
