"""What a client of resumable generations keeps, and how patient it is; no I/O, no clock.

Laws:
- An event is taken whole and once, in its place, or it is an error.
- The ids are what one goes on behind; text never is.
- Attempts that bring no new id are bounded, and so is each wait.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

__all__ = [
    "BadStream", "Event", "EventParser", "GaveUp", "Json", "Message", "Outcome",
    "Patience", "Progress", "Refused", "ResumeError", "Retries", "member",
]  # fmt: skip

Json = dict[str, Any]

MAX_EVENT_BYTES = 64 * 1024 * 1024
"""A checkpoint has some 7 bytes an id: this is far above a million of them."""


class ResumeError(Exception):
    """The generation does not go on; the stream's ``progress`` has all that came."""


class BadStream(ResumeError):
    """Events have a gap, come twice, or are not those of a resumable stream."""


class GaveUp(ResumeError):
    """As many attempts as there may be have brought nothing new."""


class Refused(ResumeError):
    """A server's answer that trying again will not change."""

    def __init__(self, status: int, error: Mapping[str, Any]) -> None:
        self.status = status
        self.code = str(error.get("code") or error.get("type") or "")
        self.message = str(error.get("message") or "")
        self.param: str | None = error.get("param")
        super().__init__(f"{status} {self.code}: {self.message}")


def member(body: Mapping[str, Any], name: str) -> Json:
    """Return an object in an object; an empty one in place of null, true or nothing."""
    found = body.get(name)
    return cast("Json", found) if isinstance(found, dict) else {}


@dataclass(frozen=True)
class Event:
    """One server-sent event."""

    id: str
    data: str


class EventParser:
    """Bytes of an event stream to events; a last one that is not whole never comes."""

    def __init__(self) -> None:
        self.retry_s = 0.0  # what the server asks to wait before a connection anew
        self._rest = b""
        self._id = ""
        self._data: list[str] = []

    def feed(self, data: bytes) -> list[Event]:
        """Return the events that *data* completes.

        Raises:
            BadStream: A line is longer than any event.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            msg = f"a line above {MAX_EVENT_BYTES} bytes"
            raise BadStream(msg)
        events = [self._line(line.rstrip(b"\r").decode()) for line in lines]
        return [event for event in events if event is not None]

    def _line(self, line: str) -> Event | None:
        name, _, value = line.partition(":")  # a comment has no name
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "id":
            self._id = value
        elif name == "retry" and value.isdecimal():
            self.retry_s = int(value) / 1000
        elif not line and self._data:
            event = Event(self._id, "\n".join(self._data))
            self._data.clear()
            return event
        return None


@dataclass
class Message:
    """The deltas so far, joined; ``content`` is the text of a completion."""

    role: str = ""
    content: str = ""
    reasoning: str = ""
    tool_calls: list[Json] = field(default_factory=list[Json])

    def add(self, choice: Mapping[str, Any]) -> None:
        """Add a chunk's choice."""
        delta = member(choice, "delta") or {"content": choice.get("text")}
        self.role = delta.get("role") or self.role
        self.content += delta.get("content") or ""
        self.reasoning += delta.get("reasoning") or ""
        parts: list[Json] = delta.get("tool_calls") or []
        for part in parts:
            index: int = part["index"]
            while len(self.tool_calls) <= index:
                self.tool_calls.append({"function": {"name": "", "arguments": ""}})
            call = self.tool_calls[index]
            call.update({key: part[key] for key in ("id", "type") if part.get(key)})
            function = member(part, "function")
            for key in ("name", "arguments"):
                call["function"][key] += function.get(key) or ""


@dataclass
class Progress:
    """What a client must keep to go on; plain data: ``asdict`` and ``of`` store it."""

    generation_id: str = ""
    seq: int = 0  # of the last event
    is_gone: bool = False  # it was interrupted: nobody has more of its events
    is_done: bool = False
    token_ids: list[int] = field(default_factory=list[int])  # of all generations
    prompt_token_ids: list[int] | None = None  # None: no chunk has come yet
    contract: str = ""
    seed: int | None = None  # chosen by a frontend
    checkpoint: Json | None = None  # the latest
    message: Message = field(default_factory=Message)
    finish_reason: str | None = None
    usage: Json | None = None  # of the last generation: its own tokens
    claims: list[Json] = field(default_factory=list[Json])  # how exactly, each resume

    @classmethod
    def of(cls, stored: Json) -> Self:
        """Return what ``dataclasses.asdict`` was made of."""
        message: Any = Message(**stored["message"])
        return cls(**{**stored, "message": message})

    def begin(self, generation_id: str) -> None:
        """Take note of a generation whose events come now."""
        self.generation_id, self.seq, self.is_gone = generation_id, 0, False

    def request(self, body: Json) -> Json:
        """Return the body of the request that begins, or goes on."""
        nvext: Json = {"resumable": True, **member(body, "nvext")}
        made: Json = {**body, "stream": True, "nvext": nvext}
        if self.prompt_token_ids is None:
            return made
        held = self.checkpoint
        if held is not None and held["state"]["output"]["ids"] == self.token_ids:
            nvext["resume_from"] = {"checkpoint": held}
            return made
        nvext["resume_from"] = {
            "output_token_ids": self.token_ids,
            "prompt_token_ids": self.prompt_token_ids,
            "contract": self.contract,
        }
        return made if self.seed is None else {**made, "seed": self.seed}

    def take(self, event: Event) -> Json | None:
        """Take an event; return its body if that is new for the client's user.

        Raises:
            BadStream: It is not the next one.
        """
        generation_id, _, seq = event.id.rpartition(":")
        self.generation_id = self.generation_id or generation_id
        if event.id == f"{self.generation_id}:{self.seq}" and event.data != "[DONE]":
            interruption: Json = json.loads(event.data)
            if "error" in interruption:
                return interruption  # the generation itself may go on
        expected = f"{self.generation_id}:{self.seq + 1}"
        if event.id != expected:
            msg = f"event {event.id!r:.80} in place of {expected!r:.80}"
            raise BadStream(msg)
        self.seq = int(seq)
        if event.data == "[DONE]":
            self.is_done = True
            return None
        body: Json = json.loads(event.data)
        self.usage = body.get("usage") or self.usage
        return self._chunk(body) if body.get("choices") else body

    def _chunk(self, body: Json) -> Json | None:
        nvext = member(body, "nvext")
        offset, num_ids = nvext.get("token_offset"), len(self.token_ids)
        if offset != num_ids:
            msg = f"ids from {offset} on, where {num_ids} have come"
            raise BadStream(msg)
        prompt = nvext.get("prompt_token_ids", self.prompt_token_ids)
        if self.prompt_token_ids not in (None, prompt):
            msg = f"another prompt, of {len(prompt or ())} ids"
            raise BadStream(msg)
        self.prompt_token_ids = prompt
        self.token_ids += nvext["completion_token_ids"]
        self.checkpoint = nvext.get("checkpoint") or self.checkpoint
        generation = member(nvext, "generation")
        self.contract = generation.get("contract", self.contract)
        if generation.get("seed_source") == "frontend":
            self.seed = generation["seed"]
        if "resume" in nvext:
            self.claims.append(nvext["resume"])
        if self.finish_reason is not None:
            return None  # the end again: only usage or [DONE] had been lost
        choice: Json = body["choices"][0]
        self.message.add(choice)
        self.finish_reason = choice.get("finish_reason")
        return body


@dataclass(frozen=True)
class Outcome:
    """A finished generation, and what it took."""

    token_ids: list[int]
    message: Message
    finish_reason: str | None
    usage: Json | None  # of the last generation: ``resumed_prefix_tokens`` are earlier
    claims: list[Json]  # ``nvext.resume`` of each generation that went on
    num_reconnects: int  # streams whose rest came
    num_resumes: int  # generations that went on behind the ids
    log: list[str]  # what happened

    @property
    def text(self) -> str:
        """The content, or a completion's text."""
        return self.message.content


@dataclass(frozen=True)
class Patience:
    """Bounds; each with room for a stack's own waits."""

    max_attempts: int = 12  # in a row that bring no new id
    first_s: float = 0.2  # wait before a frontend is tried again; doubles each time
    longest_s: float = 10.0
    longest_asked_s: float = 60.0  # a server's wish beyond it is not granted
    connect_s: float = 5.0
    answer_s: float = 150.0  # a queue of 60 s, a long prompt
    silence_s: float = 10.0  # ten comments of a stream that lives


class Retries:
    """Which frontend is tried next, and when; *now* is anybody's monotonic clock."""

    def __init__(
        self,
        urls: Sequence[str],
        patience: Patience,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.url = urls[0]
        self._patience = patience
        self._jitter = jitter
        self._num_failed = dict.fromkeys(urls, 0)
        self._not_before = dict.fromkeys(urls, 0.0)

    def progressed(self) -> None:
        """Forget failures: an id has come."""
        self._num_failed = dict.fromkeys(self._num_failed, 0)

    def failed(
        self, now: float, asked_s: float = 0.0, *, everywhere: bool = False
    ) -> None:
        """Take note that an attempt at ``url`` has failed.

        Args:
            now: When.
            asked_s: How long the server wants to be left alone.
            everywhere: So do the others.

        Raises:
            GaveUp: It was the last.
        """
        self._num_failed[self.url] += 1
        if sum(self._num_failed.values()) >= self._patience.max_attempts:
            raise GaveUp
        doubled_s = self._patience.first_s * 2 ** (self._num_failed[self.url] - 1)
        wait_s = min(self._patience.longest_s, doubled_s) * (1 + self._jitter()) / 2
        asked_s = min(asked_s, self._patience.longest_asked_s)
        for url in self._not_before if everywhere else (self.url,):
            not_before = now + max(wait_s * (url == self.url), asked_s)
            self._not_before[url] = max(self._not_before[url], not_before)

    def turn(self, now: float) -> float:
        """Choose the next ``url``; return how long to wait before."""
        if self._not_before[self.url] > now:
            self.url = min(self._not_before, key=self._not_before.__getitem__)
        return max(0.0, self._not_before[self.url] - now)
