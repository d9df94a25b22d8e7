"""A client of the resume report: it reads a stream as it comes, and leaves at a token.

It keeps what a client keeps: ids, and what the deltas have made of them so far.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

__all__ = ["Answer", "Request", "View", "read"]

REQUEST_S = 300.0  # an engine on two cores, with a restart of it in between


@dataclass(frozen=True)
class View:
    """A message as far as it has come."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()  # names and arguments

    def plus(self, delta: dict[str, Any]) -> View:
        """Return it with one more delta."""
        calls = list(self.calls)
        for part in delta.get("tool_calls") or ():
            index, function = part["index"], part["function"]
            calls += [("", "")] * (index + 1 - len(calls))
            name, arguments = calls[index]
            calls[index] = (
                name + (function.get("name") or ""),
                arguments + (function.get("arguments") or ""),
            )
        return View(
            self.reasoning + (delta.get("reasoning") or ""),
            self.content + (delta.get("content") or ""),
            tuple(calls),
        )


@dataclass(frozen=True)
class Request:
    """A streamed chat, or the rest of one, and when its client leaves."""

    url: str  # of a frontend
    body: dict[str, Any] = field(default_factory=dict[str, Any])
    leave_at: int | None = None  # with so many ids; None: at the end
    behind: str = ""  # the last event of a stream that is asked for again


@dataclass
class Answer:
    """What one client has heard."""

    view: View = field(default_factory=View)
    """What the deltas make, on top of what there was."""
    num_before: int = 0  # ids that the client had already
    status: int = 0
    error: dict[str, Any] = field(default_factory=dict[str, Any])
    interruption: dict[str, Any] = field(default_factory=dict[str, Any])
    ids: list[int] = field(default_factory=list[int])
    prompt_ids: list[int] = field(default_factory=list[int])
    views: dict[int, View] = field(default_factory=dict[int, View])  # by number of ids
    checkpoints: dict[int, dict[str, Any]] = field(
        default_factory=dict[int, dict[str, Any]]
    )
    generation: dict[str, Any] = field(default_factory=dict[str, Any])
    resume: dict[str, Any] = field(default_factory=dict[str, Any])
    usage: dict[str, Any] = field(default_factory=dict[str, Any])
    worker_ids: list[str] = field(default_factory=list[str])
    finish_reason: str | None = None
    done: bool = False
    last_event_id: str = ""
    num_lost: int = 0  # ids that an offset passes over
    num_dup: int = 0  # ids that the client had
    first_id_s: float = 0.0  # from the request to the first new id
    arrived: list[float] = field(default_factory=list[float])  # of each id

    def view_at(self, num_ids: int) -> View:
        """Return the message as it was with so many ids."""
        return self.views[max(known for known in self.views if known <= num_ids)]

    async def has(self, num_ids: int, timeout_s: float = REQUEST_S) -> None:
        """Return when so many ids are here, or the answer is at its end."""
        async with asyncio.timeout(timeout_s):
            while len(self.ids) < num_ids:
                if self.done or self.error:
                    return
                await asyncio.sleep(0.005)

    def hear(self, body: dict[str, Any]) -> None:
        """Take one event's JSON."""
        if "error" in body:
            self.error = body["error"]
            self.interruption = body.get("nvext") or {}
            return
        self.usage = body.get("usage") or self.usage
        nvext: dict[str, Any] = body.get("nvext") or {}
        self.generation = nvext.get("generation") or self.generation
        self.resume = nvext.get("resume") or self.resume
        self.prompt_ids = nvext.get("prompt_token_ids") or self.prompt_ids
        if not body.get("choices"):
            return
        [choice] = body["choices"]
        new_ids: list[int] = nvext.get("completion_token_ids") or []
        have = self.num_before + len(self.ids)
        offset = nvext.get("token_offset", have)
        self.num_lost += max(0, offset - have)
        self.num_dup += max(0, have - offset) if new_ids else 0
        self.ids += new_ids
        self.arrived += [time.perf_counter()] * len(new_ids)
        self.view = self.view.plus(choice.get("delta") or {})
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        num_ids = self.num_before + len(self.ids)
        if self.finish_reason is None:
            self.views[num_ids] = self.view
        if "checkpoint" in nvext:
            self.checkpoints[num_ids] = nvext["checkpoint"]


async def read(
    http: aiohttp.ClientSession, asked: Request, answer: Answer | None = None
) -> Answer:
    """Return what came; it is filled while it comes.

    Args:
        http: The client's connections.
        asked: What to ask, and when to leave.
        answer: To fill: with what the client has before.
    """
    found = Answer() if answer is None else answer
    began = time.perf_counter()
    async with contextlib.aclosing(_events(_call(http, asked), found)) as stream:
        async for body in stream:
            found.hear(body)
            if found.ids and not found.first_id_s:
                found.first_id_s = time.perf_counter() - began
            if asked.leave_at is not None and len(found.ids) >= asked.leave_at:
                break
    return found


def _call(http: aiohttp.ClientSession, asked: Request) -> Any:
    if not asked.behind:
        more = {"stream": True, "stream_options": {"include_usage": True}}
        return http.post(
            f"{asked.url}/v1/chat/completions", json={**asked.body, **more}
        )
    generation = asked.behind.rpartition(":")[0]
    return http.get(
        f"{asked.url}/v1/generations/{generation}/stream",
        headers={"Last-Event-ID": asked.behind},
    )


async def _events(call: Any, answer: Answer) -> AsyncGenerator[dict[str, Any]]:
    """Yield the JSON of a response's events; a refusal is the answer's ``error``."""
    async with asyncio.timeout(REQUEST_S), call as response:
        answer.status = response.status
        if response.content_type != "text/event-stream":
            if response.status != 204:
                refused = json.loads(await response.text())
                answer.error = refused["error"]
            return
        async for raw in response.content:
            name, _, value = raw.decode().rstrip("\n").partition(": ")
            if name == "id":
                answer.last_event_id = value
            elif name == "data" and value == "[DONE]":
                answer.done = True
            elif name == "data":
                yield json.loads(value)
