"""Response bodies and stream chunks of both endpoints, as JSON bytes.

A chunk is a cached prefix, the delta, and a cached suffix: encoding the whole object
for every token costs three times as much. What was not selected adds not one key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec

from tokenwire.protocol.messages import Logprobs

from .choice import Delta
from .job import End
from .logprobs import chat_logprobs, completion_logprobs
from .nvext import Selection
from .tokenizer import TextModel

__all__ = ["ChatShape", "CompletionShape", "Finished", "Frame", "Shape", "usage"]

_json = msgspec.json.encode


@dataclass(slots=True)
class Finished:
    """All of one choice, for a response that is not streamed."""

    index: int
    text: str
    token_ids: list[int]  # (num_tokens,)
    logprobs: Logprobs | None
    end: End


@dataclass(slots=True, frozen=True)
class Frame:
    """What all chunks and the response of one request have in common."""

    response_id: str
    created: int  # Unix seconds
    model: str
    text_model: TextModel
    selection: Selection
    num_top_logprobs: int = 0
    tokens_as_ids: bool = False


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

    def usage_chunk(self, usage_json: bytes) -> bytes:
        """Return the event with the usage alone."""
        ...

    def response(self, choices: list[Finished], usage_json: bytes) -> bytes:
        """Return the body of a response that is not streamed."""
        ...


def usage(num_prompt: int, num_completion: int, num_cached: int) -> bytes:
    """Return the ``usage`` object."""
    return (
        b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,'
        b'"prompt_tokens_details":{"cached_tokens":%d}}'
        % (num_prompt, num_completion, num_prompt + num_completion, num_cached)
    )


class _Shape:
    """What the two endpoints share."""

    _chunk_object: str
    _object: str
    _text_key: bytes  # what stands between a choice's index and its text
    _plain_middle: bytes  # what stands between the text and ``nvext``

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        head = self._head(self._chunk_object)
        self._prefix = b"data: " + head + b',"choices":[{"index":'
        self._usage_prefix = b"data: " + head + b',"choices":[],"usage":'
        self._plain_end = self._plain_middle + b"}\n\n"
        self._ids = frame.selection.completion_token_ids
        self._any_final = frame.selection.any_final
        self._text_chars: dict[int, int] = {}
        self._plain_prefixes: dict[int, bytes] = {}

    def plain_chunk(self, index: int, text: str, token_ids: list[int]) -> bytes:
        """Return what ``chunk`` returns for text and ids alone; made for speed."""
        if not text:
            return self.chunk(index, Delta(text, token_ids, None, None), b"")
        prefix = self._plain_prefixes.get(index)
        if prefix is None:
            prefix = self._prefix + b"%d," % index + self._text_key
            self._plain_prefixes[index] = prefix
        if not self._ids:
            return b"%s%s%s" % (prefix, _json(text), self._plain_end)
        if len(token_ids) == 1:
            return b'%s%s%s,"nvext":{"completion_token_ids":[%d]}}\n\n' % (
                prefix,
                _json(text),
                self._plain_middle,
                token_ids[0],
            )
        return self.chunk(index, Delta(text, token_ids, None, None), b"")

    def chunk(self, index: int, delta: Delta, usage_json: bytes) -> bytes:
        """Return the event of *delta*; empty if there is nothing to say."""
        end = delta.end
        ids = self._ids and delta.token_ids
        if not delta.text and end is None and not ids and delta.logprobs is None:
            return b""
        logprobs = b"null"
        if delta.logprobs is not None:
            logprobs = self._logprobs(index, delta.logprobs)
        finish = b"null" if end is None else b'"%s"' % end.reason.value.encode()
        parts = [
            self._prefix,
            b"%d," % index,
            self._delta(delta.text),
            b',"logprobs":',
            logprobs,
            b',"finish_reason":',
            finish,
            b"}]",
        ]
        if end is not None and self._any_final:
            parts.append(b',"nvext":' + _json(self._final_nvext(delta.token_ids, end)))
        elif ids:
            parts.append(_ids_nvext(delta.token_ids))
        if usage_json:
            parts.append(b',"usage":' + usage_json)
        parts.append(b"}\n\n")
        if delta.text:
            self._text_chars[index] = self._text_chars.get(index, 0) + len(delta.text)
        return b"".join(parts)

    def usage_chunk(self, usage_json: bytes) -> bytes:
        """Return the event with the usage alone."""
        return self._usage_prefix + usage_json + b"}\n\n"

    def response(self, choices: list[Finished], usage_json: bytes) -> bytes:
        """Return the body of a response that is not streamed."""
        body = [self._head(self._object), b',"choices":[']
        for n, choice in enumerate(choices):
            logprobs = b"null"
            if choice.logprobs is not None:
                logprobs = self._logprobs(choice.index, choice.logprobs)
            body.append(
                b'%s{"index":%d,%s,"logprobs":%s,"finish_reason":"%s"}'
                % (
                    b"," if n else b"",
                    choice.index,
                    self._whole(choice.text),
                    logprobs,
                    choice.end.reason.value.encode(),
                )
            )
        body.append(b'],"usage":' + usage_json)
        if self._ids or self._any_final:
            [choice] = choices  # more are refused with a selector
            nvext = self._final_nvext(choice.token_ids, choice.end)
            body.append(b',"nvext":' + _json(nvext))
        body.append(b"}")
        return b"".join(body)

    def _head(self, kind: str) -> bytes:
        frame = self._frame
        return b'{"id":%s,"object":"%s","created":%d,"model":%s' % (
            _json(frame.response_id),
            kind.encode(),
            frame.created,
            _json(frame.model),
        )

    def _final_nvext(self, token_ids: list[int], end: End) -> dict[str, object]:
        """Return ``nvext`` of the last chunk, or of a whole response."""
        selection = self._frame.selection
        nvext: dict[str, object] = {}
        if selection.completion_token_ids:
            nvext["completion_token_ids"] = token_ids
        if selection.prompt_token_ids and end.prompt_token_ids is not None:
            nvext["prompt_token_ids"] = end.prompt_token_ids
        if selection.kv_transfer_params and end.kv_transfer_params is not None:
            nvext["kv_transfer_params"] = end.kv_transfer_params
        if selection.worker_id and end.worker_ids:
            nvext["worker_id"] = end.worker_ids
        if selection.timing:
            timing: dict[str, object] = {
                name: round(value, 3) for name, value in end.timing.items()
            }
            nvext["timing"] = {**timing, "cached_tokens": end.num_cached_tokens}
        if selection.stop_reason and end.stop_reason is not None:
            nvext["stop_reason"] = end.stop_reason
        return nvext

    def _delta(self, text: str) -> bytes:
        raise NotImplementedError

    def _whole(self, text: str) -> bytes:
        raise NotImplementedError

    def _logprobs(self, index: int, logprobs: Logprobs) -> bytes:
        raise NotImplementedError


class ChatShape(_Shape):
    """``chat.completion`` and ``chat.completion.chunk``."""

    _object = "chat.completion"
    _chunk_object = "chat.completion.chunk"
    _text_key = b'"delta":{"content":'
    _plain_middle = b'},"logprobs":null,"finish_reason":null}]'

    def opening(self, index: int) -> bytes:
        """Return the event that names the role."""
        return (
            self._prefix
            + b'%d,"delta":{"role":"assistant","content":""}' % index
            + b',"logprobs":null,"finish_reason":null}]}\n\n'
        )

    def _delta(self, text: str) -> bytes:
        return b'"delta":{"content":%s}' % _json(text) if text else b'"delta":{}'

    def _whole(self, text: str) -> bytes:
        return b'"message":{"role":"assistant","content":%s,"refusal":null}' % _json(
            text
        )

    def _logprobs(self, index: int, logprobs: Logprobs) -> bytes:
        del index
        frame = self._frame
        return _json(
            chat_logprobs(
                logprobs,
                frame.text_model,
                frame.num_top_logprobs,
                as_ids=frame.tokens_as_ids,
            )
        )


class CompletionShape(_Shape):
    """``text_completion``, streamed or not."""

    _object = _chunk_object = "text_completion"
    _text_key = b'"text":'
    _plain_middle = b',"logprobs":null,"finish_reason":null}]'

    def opening(self, index: int) -> bytes:
        """Return nothing: a completion's stream begins with its first text."""
        del index
        return b""

    def _delta(self, text: str) -> bytes:
        return b'"text":' + _json(text)

    _whole = _delta

    def _logprobs(self, index: int, logprobs: Logprobs) -> bytes:
        frame = self._frame
        return _json(
            completion_logprobs(
                logprobs,
                frame.text_model,
                frame.num_top_logprobs,
                self._text_chars.get(index, 0),
                as_ids=frame.tokens_as_ids,
            )
        )


def _ids_nvext(token_ids: list[int]) -> bytes:
    if len(token_ids) == 1:
        return b',"nvext":{"completion_token_ids":[%d]}' % token_ids[0]
    return b',"nvext":{"completion_token_ids":%s}' % _json(token_ids)
