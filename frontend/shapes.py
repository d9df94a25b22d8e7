"""Response bodies and stream chunks of both endpoints, as JSON bytes.

A chunk is a cached prefix, the delta, and a cached suffix: encoding the whole object
for every token costs three times as much. What was not selected adds not one key.
"""

from __future__ import annotations

import msgspec

from tokenwire.protocol.messages import Logprobs

from .choice import Delta
from .extras import EngineData, final_nvext
from .frame import Finished, Frame
from .job import End
from .logprobs import (
    TokenTexts,
    chat_logprobs,
    completion_logprobs,
    echoed_logprobs,
    prompt_logprobs,
)
from .message import delta_object, message_object
from .nvext import Placement
from .plain import Around
from .resumable import Resumable

__all__ = ["ChatShape", "CompletionShape"]

_json = msgspec.json.encode


class _Shape:
    """What the two endpoints share."""

    _chunk_object: str
    _object: str
    _text_key: bytes  # what stands between a choice's index and its text
    _plain_middle: bytes  # what stands between the text and the choice's last brace
    _plain_end: bytes  # the same to the end; one for all, so it stays in the caches
    _prompt_in_choice: bool  # where vLLM puts what belongs to a prompt

    def __init__(self, frame: Frame, resumable: Resumable | None = None) -> None:
        self._frame = frame
        self._resumable = resumable
        head = self._head(self._chunk_object)
        self._prefix = b"data: " + head + b',"choices":[{"index":'
        self._usage_prefix = b"data: " + head + b',"choices":[],"usage":'
        selection = frame.selection
        self._ids = selection.completion_token_ids
        self._native = selection.native
        self._native_ids = self._ids and selection.native is not None
        self._any_final = selection.any_final
        self._engine_data: EngineData | None = None
        if selection.engine_data:
            self._engine_data = EngineData()
        self._shows_logprobs = frame.num_logprobs is not None
        self._token_texts: dict[int, TokenTexts] = {}  # of choices with logprobs
        self._plain_prefixes: dict[int, bytes] = {}
        self._prompt_due: set[int] = set()  # choices whose first chunk has the prompt
        middle = self._plain_middle
        # One id's chunk: what stands before the id, wherever it stands, and after it.
        native = b""
        if self._native_ids:
            native = middle + b',"token_ids":['
            middle = b"]"
        self._before_native_id = native
        self._before_id = middle + b'}],"nvext":{"completion_token_ids":['

    def plain_chunk(self, index: int, text: str, token_ids: list[int]) -> bytes:
        """Return what ``chunk`` returns for text and ids alone; made for speed."""
        if not text:
            return self.chunk(index, Delta(text, token_ids, None, None), b"")
        prefix = self._plain_prefixes.get(index)
        if prefix is None:
            if index in self._prompt_due:
                return self.chunk(index, Delta(text, token_ids, None, None), b"")
            prefix = self._prefix + b"%d," % index + self._text_key
            self._plain_prefixes[index] = prefix
        if not self._ids:
            return b"".join((prefix, _json(text), self._plain_end))
        if len(token_ids) != 1:
            return self.chunk(index, Delta(text, token_ids, None, None), b"")
        token_id = _json(token_ids[0])
        native = (self._before_native_id, token_id) if self._native_ids else ()
        parts = (prefix, _json(text), *native, self._before_id, token_id, b"]}}\n\n")
        return b"".join(parts)

    def around(self, index: int) -> Around | None:
        """Return what ``plain_chunk`` has around a text and an id; None: not now."""
        if index in self._prompt_due:
            return None
        before = self._prefix + b"%d," % index + self._text_key
        if not self._ids:
            return Around(before, (self._plain_end,))
        native = (self._before_native_id,) if self._native_ids else ()
        return Around(before, (*native, self._before_id, b"]}}\n\n"))

    def chunk(self, index: int, delta: Delta, usage_json: bytes) -> bytes:
        """Return the event of *delta*; empty if there is nothing to say."""
        end = delta.end
        ids = self._ids and delta.token_ids
        if self._engine_data is not None:
            self._engine_data.add(delta.token_ids, delta.logprobs)
        logprobs = b"null"
        if delta.logprobs is not None and self._shows_logprobs:
            logprobs = self._logprobs(index, delta.logprobs)
        elif end is None and not ids:
            said = delta.text if delta.parsed is None else delta.parsed
            if not said:
                return b""
        finish = b"null" if end is None else b'"%s"' % end.finish_reason.encode()
        parts = [
            self._prefix,
            b"%d," % index,
            self._delta(delta),
            b',"logprobs":',
            logprobs,
            b',"finish_reason":',
            finish,
        ]
        if ids and self._native_ids:
            parts.append(b',"token_ids":' + _json(delta.token_ids))
        if index in self._prompt_due:
            self._prompt_due.remove(index)
            parts.append(_members(self._native_prompt(index)))
        parts.append(b"}]")
        if end is not None:
            parts.append(self._native_kv(end))
        if self._resumable is not None:
            nvext = self._resumable_nvext(self._resumable, delta)
            parts.append(b',"nvext":' + _json(nvext))
        elif end is not None and self._any_final:
            parts.append(b',"nvext":' + _json(self._nvext(delta.token_ids, end)))
        elif ids:
            parts.append(_ids_nvext(delta.token_ids))
        if usage_json:
            parts.append(b',"usage":' + usage_json)
        parts.append(b"}\n\n")
        data = b"".join(parts)
        return data if self._resumable is None else self._resumable.event(data)

    def _opened(self, choice: bytes) -> bytes:
        """Return the first event, of a choice without ids yet."""
        if self._resumable is None:
            return self._prefix + choice + b"}\n\n"
        nvext = b',"nvext":' + _json(self._resumable.chunk([], None))
        return self._resumable.event(self._prefix + choice + nvext + b"}\n\n")

    def usage_chunk(self, usage_json: bytes) -> bytes:
        """Return the event with the usage alone."""
        return self._usage_prefix + usage_json + b"}\n\n"

    def go_on(self, token_ids: list[int]) -> None:
        """Take note of earlier output, which this answer goes on behind."""
        if self._shows_logprobs:  # their texts stand behind that output's
            texts = self._texts(0)
            for token_id in token_ids:
                texts.next(token_id)

    def response(self, choices: list[Finished], usage_json: bytes) -> bytes:
        """Return the body of a response that is not streamed."""
        body = [self._head(self._object), b',"choices":[']
        for n, choice in enumerate(choices):
            if self._engine_data is not None:
                self._engine_data.add(choice.token_ids, choice.logprobs)
            body.append(
                b'%s{"index":%d,%s,"logprobs":%s,"finish_reason":"%s"%s}'
                % (
                    b"," if n else b"",
                    choice.index,
                    self._whole(choice, self._frame.echo_of(choice.index) or ""),
                    self._whole_logprobs(choice),
                    choice.end.finish_reason.encode(),
                    self._choice_extras(choice),
                )
            )
        body.append(b'],"usage":' + usage_json)
        body.append(self._root_extras(choices))
        if self._ids or self._any_final:
            [choice] = choices  # more are refused with a selector
            nvext = self._nvext(choice.token_ids, choice.end)
            if self._resumable is not None:
                nvext |= self._resumable.whole(choice.token_ids, choice.logprobs)
            body.append(b',"nvext":' + _json(nvext))
        body.append(b"}")
        return b"".join(body)

    def _choice_extras(self, choice: Finished) -> bytes:
        """Return what other servers put into a choice of a whole response."""
        extras: dict[str, object] = {}
        if self._native_ids:
            extras["token_ids"] = choice.token_ids
        if self._prompt_in_choice or self._native is Placement.SGLANG:
            extras |= self._native_prompt(choice.index)
        if self._prompt_in_choice:
            extras |= self._prompt_logprobs(choice)
        return _members(extras)

    def _root_extras(self, choices: list[Finished]) -> bytes:
        """Return what vLLM puts at the root of a whole response."""
        extras: dict[str, object] = {}
        if not self._prompt_in_choice and choices:
            if self._native is Placement.VLLM:
                extras |= self._native_prompt(choices[0].index)
            extras |= self._prompt_logprobs(choices[0])
        kv = self._native_kv(choices[0].end) if choices else b""
        return _members(extras) + kv

    def _native_prompt(self, index: int) -> dict[str, object]:
        if self._native is None or not self._frame.selection.prompt_token_ids:
            return {}
        return {"prompt_token_ids": self._frame.prompt_of(index)}

    def _native_kv(self, end: End) -> bytes:
        wanted = (
            self._native is Placement.VLLM and self._frame.selection.kv_transfer_params
        )
        if not wanted or end.kv_transfer_params is None:
            return b""
        return b',"kv_transfer_params":' + _json(end.kv_transfer_params)

    def _prompt_logprobs(self, choice: Finished) -> dict[str, object]:
        frame = self._frame
        num_top = frame.num_prompt_logprobs
        if num_top is None or frame.selection.prompt_logprobs:
            return {}
        made = prompt_logprobs(choice.end.prompt_logprobs, frame.text_model, num_top)
        return {"prompt_logprobs": made}

    def _nvext(self, token_ids: list[int], end: End) -> dict[str, object]:
        frame = self._frame
        nvext = final_nvext(frame.selection, token_ids, end)
        if frame.selection.prompt_logprobs:
            nvext["prompt_logprobs"] = prompt_logprobs(
                end.prompt_logprobs, frame.text_model, frame.num_prompt_logprobs or 0
            )
        if frame.prefix is not None:
            nvext["prefix"] = frame.prefix
        if self._engine_data is not None:
            nvext["engine_data"] = self._engine_data.body(end.prompt_token_ids)
        return nvext

    def _resumable_nvext(self, resumable: Resumable, delta: Delta) -> dict[str, object]:
        """Return the ``nvext`` of a chunk that a client can resume behind."""
        end = delta.end
        own = resumable.chunk(delta.token_ids, delta.logprobs, is_last=end is not None)
        if end is None or not self._any_final:
            return own
        return self._nvext(delta.token_ids, end) | own

    def _whole_logprobs(self, choice: Finished) -> bytes:
        if choice.logprobs is None or not self._shows_logprobs:
            return b"null"
        return self._logprobs(choice.index, choice.logprobs)

    def _texts(self, index: int) -> TokenTexts:
        """Return the texts of a choice's tokens, which go on with every chunk."""
        texts = self._token_texts.get(index)
        if texts is None:
            frame = self._frame
            texts = self._token_texts[index] = TokenTexts(
                frame.text_model,
                frame.prompt_of(index),
                skip_special_tokens=frame.skip_special_tokens,
                length=len(frame.echo_of(index) or ""),
            )
        return texts

    def _head(self, kind: str) -> bytes:
        frame = self._frame
        return b'{"id":%s,"object":"%s","created":%d,"model":%s' % (
            _json(frame.response_id),
            kind.encode(),
            frame.created,
            _json(frame.model),
        )

    def _delta(self, delta: Delta) -> bytes:
        raise NotImplementedError

    def _whole(self, choice: Finished, echo: str) -> bytes:
        raise NotImplementedError

    def _logprobs(self, index: int, logprobs: Logprobs) -> bytes:
        raise NotImplementedError


class ChatShape(_Shape):
    """``chat.completion`` and ``chat.completion.chunk``."""

    _object = "chat.completion"
    _chunk_object = "chat.completion.chunk"
    _text_key = b'"delta":{"content":'
    _plain_middle = b'},"logprobs":null,"finish_reason":null'
    _plain_end = _plain_middle + b"}]}\n\n"
    _prompt_in_choice = False

    def opening(self, index: int) -> bytes:
        """Return the event that names the role, and repeats what is to be repeated."""
        prompt = _members(self._native_prompt(index))
        in_choice = self._native is Placement.SGLANG
        return self._opened(
            b'%d,"delta":{"role":"assistant","content":%s}'
            % (index, _json(self._frame.echo_of(index) or ""))
            + b',"logprobs":null,"finish_reason":null%s}]%s'
            % ((prompt, b"") if in_choice else (b"", prompt))
        )

    def _delta(self, delta: Delta) -> bytes:
        if delta.parsed is not None:
            return b'"delta":' + _json(delta_object(delta.parsed))
        text = delta.text
        return b'"delta":{"content":%s}' % _json(text) if text else b'"delta":{}'

    def _whole(self, choice: Finished, echo: str) -> bytes:
        if choice.parsed is not None:
            choice.parsed.content = echo + choice.parsed.content
            message = message_object(
                choice.parsed,
                with_reasoning=self._frame.with_reasoning,
                call_forced=self._frame.call_forced,
            )
            return b'"message":' + _json(message)
        return b'"message":{"role":"assistant","content":%s,"refusal":null}' % _json(
            echo + choice.text
        )

    def _logprobs(self, index: int, logprobs: Logprobs) -> bytes:
        frame = self._frame
        return _json(
            chat_logprobs(
                logprobs,
                frame.text_model,
                frame.num_logprobs or 0,
                self._texts(index),
                as_ids=frame.tokens_as_ids,
            )
        )


class CompletionShape(_Shape):
    """``text_completion``, streamed or not."""

    _object = _chunk_object = "text_completion"
    _text_key = b'"text":'
    _plain_middle = b',"logprobs":null,"finish_reason":null'
    _plain_end = _plain_middle + b"}]}\n\n"
    _prompt_in_choice = True

    def opening(self, index: int) -> bytes:
        """Return the event that repeats the prompt; without one, nothing.

        A completion's stream begins with its first text; native prompt ids are there.
        """
        prompt = self._native_prompt(index)
        echo = self._frame.echo_of(index)
        if echo is None:
            if prompt:
                self._prompt_due.add(index)
            return b""
        return self._opened(
            b'%d,"text":%s%s%s}]'
            % (index, _json(echo), self._plain_middle, _members(prompt))
        )

    def _delta(self, delta: Delta) -> bytes:
        return b'"text":' + _json(delta.text)

    def _whole(self, choice: Finished, echo: str) -> bytes:
        return b'"text":' + _json(echo + choice.text)

    def _logprobs(self, index: int, logprobs: Logprobs) -> bytes:
        frame = self._frame
        return _json(
            completion_logprobs(
                logprobs,
                frame.num_logprobs or 0,
                self._texts(index),
                as_ids=frame.tokens_as_ids,
            )
        )

    def _whole_logprobs(self, choice: Finished) -> bytes:
        frame = self._frame
        echo = frame.echo_of(choice.index)
        if echo is None or not self._shows_logprobs:
            return super()._whole_logprobs(choice)
        return _json(
            echoed_logprobs(
                echo,
                frame.prompt_of(choice.index),
                choice.end.prompt_logprobs,
                choice.logprobs,
                frame.num_logprobs or 0,
                frame.text_model,
                self._texts(choice.index),
                as_ids=frame.tokens_as_ids,
            )
        )


def _members(fields: dict[str, object]) -> bytes:
    """Return *fields* as members that follow others in an object."""
    return b"".join(b",%s:%s" % (_json(name), _json(fields[name])) for name in fields)


def _ids_nvext(token_ids: list[int]) -> bytes:
    if len(token_ids) == 1:
        return b',"nvext":{"completion_token_ids":[%d]}' % token_ids[0]
    return b',"nvext":{"completion_token_ids":%s}' % _json(token_ids)
