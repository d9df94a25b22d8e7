"""What an answer is made of, and the interface of those who make its JSON."""

from __future__ import annotations

from typing import Protocol

import msgspec

from tokenwire.protocol.messages import Logprobs

from .choice import Delta
from .job import End
from .message import MessagePart
from .nvext import Selection
from .plain import Around
from .tokenizer import TextModel
from .turns import Prefix

__all__ = ["Finished", "Frame", "Shape", "usage"]


class Finished(msgspec.Struct):
    """All of one choice, for a response that is not streamed."""

    index: int
    text: str
    token_ids: list[int]  # (num_tokens,)
    logprobs: Logprobs | None
    end: End
    parsed: MessagePart | None = None  # what a parser made of the text, in its place


class Frame(msgspec.Struct, frozen=True):
    """What all chunks and the response of one request have in common."""

    response_id: str
    created: int  # Unix seconds
    model: str
    text_model: TextModel
    selection: Selection
    prompts: list[list[int]]  # (num_prompts,) of ids
    echoes: list[str | None] = []  # if any
    choices_per_prompt: int = 1
    num_logprobs: int | None = None  # alternatives per token; None: not asked for
    num_prompt_logprobs: int | None = None
    tokens_as_ids: bool = False
    prefix: Prefix | None = None  # ids of earlier turns, kept
    skip_special_tokens: bool = True
    with_reasoning: bool = False  # whether messages have the key ``reasoning``
    call_forced: bool = False  # by ``tool_choice``: vLLM's content is then never null

    def prompt_of(self, index: int) -> list[int]:
        """Return the prompt of a choice."""
        return self.prompts[index // self.choices_per_prompt]

    def echo_of(self, index: int) -> str | None:
        """Return what a choice repeats before its output."""
        if not self.echoes:
            return None
        return self.echoes[index // self.choices_per_prompt]


class Shape(Protocol):
    """One endpoint's JSON."""

    def opening(self, index: int) -> bytes:
        """Return the event before a choice's first delta; may be empty."""
        ...

    def chunk(self, index: int, delta: Delta, usage_json: bytes) -> bytes:
        """Return the event of *delta*; empty if there is nothing to say."""
        ...

    def plain_chunk(self, index: int, text: str, token_ids: list[int]) -> bytes:
        """Return what ``chunk`` returns for text and ids alone; made for speed."""
        ...

    def around(self, index: int) -> Around | None:
        """Return what stands around a text that is not empty, and one id, in that event.

        None: it says more, or not now.
        """
        ...

    def usage_chunk(self, usage_json: bytes) -> bytes:
        """Return the event with the usage alone."""
        ...

    def response(self, choices: list[Finished], usage_json: bytes) -> bytes:
        """Return the body of a response that is not streamed."""
        ...


def usage(
    num_prompt: int,
    num_completion: int,
    num_cached: int,
    num_reasoning: int | None = None,
    num_resumed: int | None = None,
) -> bytes:
    """Return the ``usage`` object; without the last two it says nothing of them."""
    details = b""
    parts: list[bytes] = []
    if num_reasoning is not None:
        parts.append(b'"reasoning_tokens":%d' % num_reasoning)
    if num_resumed is not None:
        parts.append(b'"resumed_prefix_tokens":%d' % num_resumed)
    if parts:
        details = b',"completion_tokens_details":{%s}' % b",".join(parts)
    return (
        b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,'
        b'"prompt_tokens_details":{"cached_tokens":%d}%s}'
        % (num_prompt, num_completion, num_prompt + num_completion, num_cached, details)
    )
