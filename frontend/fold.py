"""One output's text: ids folded one at a time through detokenizer and stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .detokenize import Detokenizer
from .message import MessagePart
from .stop import StopStrings

__all__ = ["Fold"]


class Fold:
    """The text of one choice.

    Whatever batches the worker sends, the result is that of feeding single ids.
    """

    __slots__ = ("_include_stop", "_min_tokens", "_stop", "detokenizer", "num_tokens")

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: StopStrings | None = None,
        min_tokens: int = 0,
        *,
        include_stop: bool = False,
    ) -> None:
        self.detokenizer = detokenizer
        self._stop = stop
        self._min_tokens = min_tokens  # until then no stop string counts, as in vLLM
        self._include_stop = include_stop  # whether a stop token's text is output
        self.num_tokens = 0

    @property
    def has_stop(self) -> bool:
        """Whether there are stop strings."""
        return self._stop is not None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text."""
        return self._stop.matched if self._stop is not None else None

    @property
    def parses(self) -> bool:
        """Whether ``take`` has something to tell."""
        return False

    @property
    def called_tools(self) -> bool:
        """Whether the finish reason is ``tool_calls`` if the output stops here."""
        return False

    @property
    def num_reasoning_tokens(self) -> int:
        """How many of the ids so far are reasoning; 0 where nobody can tell."""
        return 0

    @property
    def feed_one(self) -> Callable[[int], str]:
        """The short way of one id to its text, where nothing but text is wanted."""
        return self.detokenizer.feed

    def take(self) -> MessagePart | None:
        """Return what was parsed since the last call; None without a parser."""
        return None

    def feed(
        self, token_ids: Sequence[int], *, stopped: bool = False
    ) -> tuple[str, int]:
        """Return the new text, and how many of *token_ids* belong to the output.

        Fewer than given if a stop string matched: the id that completes it is the
        last. *stopped*: the last id ended the output, as EOS or a stop token does.
        It belongs to the output, its text does not.
        """
        if stopped and token_ids and not self._include_stop:
            text, used = self.feed(token_ids[:-1])
            if self.matched is None:
                self.num_tokens += 1
                used += 1
            return text, used
        feed = self.detokenizer.feed
        stop = self._stop
        if stop is None:
            self.num_tokens += len(token_ids)
            if len(token_ids) == 1:
                return feed(token_ids[0]), 1
            return "".join([feed(token_id) for token_id in token_ids]), len(token_ids)
        text = ""
        used = 0
        for token_id in token_ids:
            piece = feed(token_id)
            used += 1
            can_match = self.num_tokens + used > self._min_tokens
            text += stop.feed(piece, can_match=can_match)
            if stop.matched is not None:
                break
        self.num_tokens += used
        return text, used

    def finish(self) -> str:
        """Return the text held back, now that the output has ended."""
        rest = self.detokenizer.flush()
        if self._stop is None:
            return rest
        if self._stop.matched is not None:
            return ""
        can_match = self.num_tokens > self._min_tokens
        text = self._stop.feed(rest, can_match=can_match) if rest else ""
        return text + self._stop.flush()
