"""A client of resumable streams: it keeps ids, text and the laws of the stream."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from support.stack import Event, Stack, eventually
from tokenwire.frontend.checkpoint import ids_sha256
from tokenwire.frontend.fold import Fold
from tokenwire.frontend.tokenizer import TextModel

__all__ = [
    "PATHS",
    "Stream",
    "cut",
    "laws",
    "resumed",
    "text_of",
    "texts_after_each_id",
]

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass
class Stream:
    """One resumable stream, read as it comes."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict[str, str])
    events: list[Event] = field(default_factory=list[Event])
    num_pings: int = 0
    done: bool = False
    status: int = 0
    _task: asyncio.Task[None] | None = None

    async def run(self, served: Stack) -> Stream:
        """Read to the end; returns itself."""
        url = served.url + self.path
        body = {**self.body, "stream": True}
        async with served.client.post(url, json=body, headers=self.headers) as answer:
            await self._read(answer)
        return self

    async def again(self, served: Stack, generation_id: str, seq: int) -> Stream:
        """Return the same stream, told again from behind an event."""
        told = Stream(self.path, self.body, self.headers)
        url = f"{served.url}/v1/generations/{generation_id}/stream"
        headers = {**self.headers, "Last-Event-ID": f"{generation_id}:{seq}"}
        async with served.client.get(url, headers=headers) as answer:
            await told._read(answer)
        return told

    async def _read(self, answer: aiohttp.ClientResponse) -> None:
        self.status = answer.status
        event_id = ""
        async for raw in answer.content:
            name, _, value = raw.decode().rstrip("\n").partition(": ")
            if name == "" and value == "ping":
                self.num_pings += 1
            elif name == "id":
                event_id = value
            elif name == "data":
                self.done = value == "[DONE]"
                body_of = None if self.done else json.loads(value)
                self.events.append(Event(body_of, event_id))
            else:
                assert name in {"", "retry"}, raw

    def start(self, served: Stack) -> asyncio.Task[Stream]:
        """Read in the background."""
        return asyncio.create_task(self.run(served))

    async def has(self, num_tokens: int) -> None:
        """Return when so many ids are here."""
        await eventually(lambda: len(self.token_ids) >= num_tokens, "ids")

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The chunks with a choice."""
        bodies = [event.body for event in self.events if event.body is not None]
        return [body for body in bodies if body.get("choices")]

    @property
    def token_ids(self) -> list[int]:
        """All ids, joined."""
        return [
            token_id
            for chunk in self.chunks
            for token_id in chunk["nvext"]["completion_token_ids"]
        ]

    @property
    def text(self) -> str:
        """All content, or all text, joined."""
        return "".join(text_of(chunk["choices"][0]) for chunk in self.chunks)

    @property
    def first(self) -> dict[str, Any]:
        """The first chunk's nvext."""
        return dict(self.chunks[0]["nvext"])

    @property
    def last(self) -> dict[str, Any]:
        """The last chunk's nvext."""
        return dict(self.chunks[-1]["nvext"])

    @property
    def finish_reason(self) -> str | None:
        """That of the last chunk."""
        reason: str | None = self.chunks[-1]["choices"][0]["finish_reason"]
        return reason

    @property
    def usage(self) -> dict[str, Any]:
        """The usage chunk's."""
        [usage] = [
            event.body["usage"]
            for event in self.events
            if event.body is not None and event.body.get("choices") == []
        ]
        return dict(usage)

    @property
    def interruption(self) -> dict[str, Any]:
        """The error event."""
        [body] = [
            event.body
            for event in self.events
            if event.body is not None and "error" in event.body
        ]
        return body


def text_of(choice: dict[str, Any]) -> str:
    """Return what a chunk's choice adds to the text."""
    if "delta" in choice:
        return str(choice["delta"].get("content", ""))
    return str(choice["text"])


def texts_after_each_id(model: TextModel, ids: Sequence[int]) -> list[str]:
    """Return the text after no id, after one, ...: folded by themselves, one by one."""
    fold = Fold(model.detokenizer([], skip_special_tokens=True))
    pieces = [fold.feed([token_id])[0] for token_id in ids]
    return list(itertools.accumulate(pieces, initial=""))


def laws(stream: Stream, first_offset: int = 0) -> None:
    """Assert what holds for every resumable stream: numbers and offsets without a gap.

    That it is interrupted, and the end behind that, are no events of the generation.
    """
    assert stream.status == 200
    assert stream.done
    generation_id = stream.first["generation"]["id"]
    is_error = ["error" in (event.body or {}) for event in stream.events]
    num_own = is_error.index(True) if True in is_error else len(is_error)
    numbers = [min(at + 1, num_own) for at in range(len(is_error))]
    assert [event.id for event in stream.events] == [
        f"{generation_id}:{number}" for number in numbers
    ]
    offset = first_offset
    for event in stream.events:
        if event.body is None or not event.body.get("choices"):
            continue
        nvext = event.nvext
        assert nvext["seq"] == int(event.id.rpartition(":")[2])
        assert nvext["token_offset"] == offset
        offset += len(nvext["completion_token_ids"])
        assert ("generation" in nvext) is (nvext["seq"] == 1)


def cut(checkpoint: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    """Return an unsigned checkpoint as it would have been after fewer ids."""
    made: dict[str, Any] = json.loads(json.dumps(checkpoint))
    state = made["state"]
    ids = state["output"]["ids"][:num_tokens]
    state["output"] = {"len": len(ids), "sha256": ids_sha256(ids), "ids": ids}
    state["cumulative_logprob"] = None
    state["rng"]["draws"] = min(state["rng"]["draws"], num_tokens)
    return made


def resumed(stream: Stream, **resume_from: Any) -> Stream:
    """Return the request of *stream* again, to go on from somewhere."""
    nvext = {**stream.body.get("nvext", {}), "resume_from": resume_from}
    nvext.pop("resumable", None)
    return Stream(stream.path, {**stream.body, "nvext": nvext}, stream.headers)
