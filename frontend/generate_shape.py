"""Answers of ``/inference/v1/generate``: vLLM's shape, ids in place of text.

The keys are those of vLLM 0.32, each time all of them, null where there is nothing:
its clients read some without asking. Beside ``token_id`` every logprob entry has
``token``, as releases before it and the renderers library want it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from tokenwire.protocol.messages import JsonObject, Logprobs

from .choice import Delta
from .frame import Finished
from .job import End
from .logprobs import prompt_logprobs, ranked_rows
from .tokenizer import TextModel

__all__ = ["GenerateFrame", "GenerateShape", "NoText"]

_json = msgspec.json.encode

_PLAIN_MIDDLE = b',"finish_reason":null,"stop_reason":null,"token_ids":'
_PLAIN_END = (
    b',"routed_experts":null,"sampling_mask":null,"weight_versions":null,'
    b'"logprobs":null}]}\n\n'
)


class NoText:
    """A detokenizer for answers that show no text."""

    def feed(self, token_id: int) -> str:
        """Return nothing."""
        del token_id
        return ""

    def flush(self) -> str:
        """Return nothing."""
        return ""


@dataclass(slots=True, frozen=True)
class GenerateFrame:
    """What all chunks and the response of one request have in common."""

    request_id: str
    created: int  # Unix seconds
    model: str
    text_model: TextModel
    prompt_token_ids: list[int] | None  # if they are to be repeated
    num_logprobs: int | None
    num_prompt_logprobs: int | None = None


class GenerateShape:
    """The JSON of one request."""

    def __init__(self, frame: GenerateFrame) -> None:
        self._frame = frame
        self._prefix = b'data: {"request_id":' + _json(frame.request_id)
        self._plain_prefix = (
            self._prefix + b',"usage":null,"output_mode":"tokens","choices":[{"index":'
        )
        self._prompt_token_ids = frame.prompt_token_ids
        """Still to be sent: on the first chunk."""
        self._counts: dict[int, int] = {}  # ids sent, by choice

    def opening(self, index: int) -> bytes:
        """Return nothing: the stream begins with its first ids."""
        del index
        return b""

    def chunk(self, index: int, delta: Delta, usage_json: bytes) -> bytes:
        """Return the event of *delta*; empty if there is nothing to say."""
        if not delta.token_ids and delta.end is None:
            return b""
        prompt = b""
        if self._prompt_token_ids is not None:
            prompt = b',"prompt_token_ids":' + _json(self._prompt_token_ids)
            self._prompt_token_ids = None
        end = delta.end
        kv = b""
        if end is not None and end.kv_transfer_params is not None:
            kv = b',"kv_transfer_params":' + _json(end.kv_transfer_params)
        return b'%s,"usage":%s%s%s,"output_mode":"tokens","choices":[%s]}\n\n' % (
            self._prefix,
            usage_json or b"null",
            prompt,
            kv,
            self._choice(index, delta.token_ids, delta.logprobs, end),
        )

    def plain_chunk(self, index: int, text: str, token_ids: list[int]) -> bytes:
        """Return what ``chunk`` returns for ids alone; made for speed."""
        if not token_ids or self._prompt_token_ids is not None:
            return self.chunk(index, Delta(text, token_ids, None, None), b"")
        self._counts[index] = self._counts.get(index, 0) + len(token_ids)
        return b"%s%d%s%s%s" % (
            self._plain_prefix,
            index,
            _PLAIN_MIDDLE,
            _json(token_ids),
            _PLAIN_END,
        )

    def around(self, index: int) -> None:
        """Return that there is no text in its events."""

    def usage_chunk(self, usage_json: bytes) -> bytes:
        """Return the event with the usage alone."""
        return (
            self._prefix
            + b',"usage":'
            + usage_json
            + b',"output_mode":"tokens","choices":[]}\n\n'
        )

    def response(self, choices: list[Finished], usage_json: bytes) -> bytes:
        """Return the body of a response that is not streamed."""
        frame = self._frame
        first = choices[0].end
        prompt_token_ids: Sequence[int] | None = None
        if frame.prompt_token_ids is not None:
            # As the engine saw them, if it says so.
            prompt_token_ids = first.prompt_token_ids or frame.prompt_token_ids
        body: JsonObject = {
            "request_id": frame.request_id,
            "model": frame.model,
            "created": frame.created,
            "usage": msgspec.Raw(usage_json),
            "prompt_logprobs": self._prompt_logprobs(first),
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": prompt_token_ids,
            "mm_placeholders": None,
            "metrics": None,
            "kv_transfer_params": first.kv_transfer_params,
            "ec_transfer_params": None,
            "output_mode": "tokens",
            "choices": [
                msgspec.Raw(
                    self._choice(one.index, one.token_ids, one.logprobs, one.end)
                )
                for one in choices
            ],
        }
        return _json(body)

    def _choice(
        self,
        index: int,
        token_ids: list[int],
        logprobs: Logprobs | None,
        end: End | None,
    ) -> bytes:
        """Return one choice; *end* is None on all chunks but its last."""
        finish: str | None = None
        stop_reason: int | str | None = None
        weights: list[JsonObject] | None = None
        if end is not None:
            finish, stop_reason = end.reason.value, end.stop_reason
            weights = _weights(end, self._counts.pop(index, 0) + len(token_ids))
        else:
            self._counts[index] = self._counts.get(index, 0) + len(token_ids)
        choice: JsonObject = {
            "index": index,
            "finish_reason": finish,
            "stop_reason": stop_reason,
            "token_ids": token_ids,
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": weights,
            "logprobs": self._logprobs(logprobs),
        }
        return _json(choice)

    def _logprobs(self, logprobs: Logprobs | None) -> JsonObject | None:
        """Return one entry for each token: it, then its most likely rivals."""
        if logprobs is None or self._frame.num_logprobs is None:
            return None
        num_top = max(self._frame.num_logprobs, 1)  # with 0 too, as in vLLM
        content: list[JsonObject] = []
        for row in ranked_rows(logprobs):
            candidates: dict[int, JsonObject] = {}
            for token_id, logprob, rank in row:
                # The sampled one is first, and again if it is among the most likely.
                candidates.setdefault(token_id, _entry(token_id, logprob, rank))
            top = list(candidates.values())[:num_top]
            content.append({**top[0], "top_logprobs": top})
        return {"content": content}

    def _prompt_logprobs(self, end: End) -> object:
        frame = self._frame
        if frame.num_prompt_logprobs is None:
            return None
        return prompt_logprobs(
            end.prompt_logprobs, frame.text_model, frame.num_prompt_logprobs
        )


def _weights(end: End, num_tokens: int) -> list[JsonObject] | None:
    """Return vLLM's spans of weight versions over the output."""
    if end.weight_version is None:
        return None
    known = end.weight_versions or [(0, end.weight_version)]
    ends = [index for index, _ in known[1:]] + [num_tokens]
    return [
        {"version": version, "start": start, "end": until}
        for (start, version), until in zip(known, ends, strict=True)
    ]


def _entry(token_id: int, logprob: float, rank: int) -> JsonObject:
    return {
        "token": f"token_id:{token_id}",
        "token_id": token_id,
        "logprob": logprob,
        "rank": rank or None,  # 0: of a NaN, which has none
    }
