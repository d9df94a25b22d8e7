"""The clients of the fault suite: what they ask, what they hear, what it must equal."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from faults_parts import Ask

__all__ = ["Answer", "Difference", "ask", "body_of", "compare"]

SLOW_READ_S = 0.02  # between two reads of a client that reads slowly
SLOW_READS = 10  # then it has shown what it wanted to show, and reads on


@dataclass
class Choice:
    """One choice, put together."""

    ids: list[int] = field(default_factory=list[int])
    text: str = ""
    logprobs: list[Any] = field(default_factory=list[Any])
    finish_reason: str | None = None


@dataclass
class Answer:
    """What one client has heard, and when."""

    status: int = 0
    choices: dict[int, Choice] = field(default_factory=dict[int, Choice])
    usage: dict[str, Any] = field(default_factory=dict[str, Any])
    prompt_token_ids: list[int] = field(default_factory=list[int])
    error: str = ""
    retry_after: bool = False
    done: bool = False  # the answer is complete, [DONE] and all
    left: bool = False  # its client left, as it meant to
    num_events: int = 0
    longest_pause_s: float = 0.0

    def choice(self, index: int) -> Choice:
        """Return a choice to add to."""
        return self.choices.setdefault(index, Choice())


@dataclass
class Difference:
    """How an answer differs from that of an undisturbed run."""

    num_lost: int = 0
    num_repeated: int = 0  # or wrong: tokens that are not the undisturbed run's
    other: list[str] = field(default_factory=list[str])

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self.num_lost or self.num_repeated or self.other)


def body_of(one: Ask, prompt: list[int], salt: str) -> dict[str, Any]:
    """Return the request's body, but for stops, which come out of a calm run."""
    body: dict[str, Any] = {
        "max_tokens": one.max_tokens,
        "stream": one.stream,
        "temperature": 0 if one.sampling == "greedy" else 0.8,
        "cache_salt": salt,
        "n": one.n,
    }
    if one.stream:
        body["stream_options"] = {"include_usage": True}
    if one.sampling == "seeded":
        body["seed"] = one.seed
    if one.ids:
        body["nvext"] = {"extra_fields": ["completion_token_ids"]}
    if one.chat:
        words = " ".join(str(token_id) for token_id in prompt)
        body["messages"] = [{"role": "user", "content": words}]
        if one.logprobs:
            body |= {"logprobs": True, "top_logprobs": 2}
    else:
        body["prompt"] = prompt
        if one.logprobs:
            body["logprobs"] = 2
    return body


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    one: Ask,
    body: dict[str, Any],
    heard: Callable[[], None] | None = None,
) -> Answer:
    """Send a request and read its answer; *heard* is called after every event.

    A failure of the connection is an answer that is not done.
    """
    answer = Answer()
    last = time.monotonic()  # the loop's clock may leap
    path = "/v1/chat/completions" if one.chat else "/v1/completions"
    try:
        async with session.post(url + path, json=body) as response:
            answer.status = response.status
            answer.retry_after = "Retry-After" in response.headers
            if response.status != 200 or not one.stream:
                _take_whole(answer, await response.json())
            else:
                if one.leaves_after == 0:
                    answer.left = True
                    return answer
                async for line in response.content:
                    now = time.monotonic()
                    answer.longest_pause_s = max(answer.longest_pause_s, now - last)
                    if not line.strip():
                        continue
                    last = now
                    _take_event(answer, line)
                    if answer.num_events == one.leaves_after:
                        answer.left = True
                        return answer
                    if one.reads_slowly and answer.num_events < SLOW_READS:
                        await asyncio.sleep(SLOW_READ_S)
                        last = time.monotonic()
                    if heard is not None:
                        heard()
    except (OSError, aiohttp.ClientError) as error:
        answer.error = answer.error or f"{type(error).__name__}: {error}"
    finally:
        pause_s = time.monotonic() - last
        answer.longest_pause_s = max(answer.longest_pause_s, pause_s)
    return answer


def _take_whole(answer: Answer, body: dict[str, Any]) -> None:
    if "error" in body:
        answer.error = str(body["error"]["message"])
        return
    for choice in body["choices"]:
        _take_choice(answer, choice, choice.get("message"))
    answer.usage = body["usage"]
    _take_nvext(answer, body)
    answer.done = True


def _take_event(answer: Answer, line: bytes) -> None:
    answer.num_events += 1
    data = line.removeprefix(b"data: ").strip()
    if data == b"[DONE]":
        answer.done = not answer.error
        return
    body = json.loads(data)
    if "error" in body:
        answer.error = str(body["error"]["message"])
        return
    for choice in body["choices"]:
        _take_choice(answer, choice, choice.get("delta"))
    _take_nvext(answer, body)
    if body.get("usage"):
        answer.usage = body["usage"]


def _take_choice(
    answer: Answer, choice: dict[str, Any], message: dict[str, Any] | None
) -> None:
    into = answer.choice(choice["index"])
    text = choice.get("text") if message is None else message.get("content")
    into.text += text or ""
    if choice.get("finish_reason"):
        into.finish_reason = choice["finish_reason"]
    logprobs = choice.get("logprobs")
    if logprobs and message is not None:
        into.logprobs += logprobs["content"] or []
    elif logprobs:
        keys = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        rows: list[list[Any]] = [logprobs[key] or [] for key in keys]
        into.logprobs += [list(row) for row in zip(*rows, strict=True)]


def _take_nvext(answer: Answer, body: dict[str, Any]) -> None:
    nvext: dict[str, Any] = body.get("nvext") or {}
    answer.choice(0).ids += nvext.get("completion_token_ids") or []
    if nvext.get("prompt_token_ids"):
        answer.prompt_token_ids = nvext["prompt_token_ids"]


def compare(got: Answer, calm: Answer) -> Difference:
    """Return how *got* differs from the undisturbed *calm*."""
    found = Difference()
    if got.choices.keys() != calm.choices.keys():
        found.other.append(f"choices {sorted(got.choices)} not {sorted(calm.choices)}")
    for index, right in calm.choices.items():
        choice = got.choices.get(index, Choice())
        same = _num_common(choice.ids, right.ids)
        found.num_lost += len(right.ids) - same
        found.num_repeated += len(choice.ids) - same
        for name in ("text", "logprobs", "finish_reason"):
            ours, theirs = getattr(choice, name), getattr(right, name)
            if ours != theirs:
                found.other.append(
                    f"{name} of {index}: {ours!r:.200} not {theirs!r:.200}"
                )
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    for count in counts:
        if got.usage.get(count) != calm.usage.get(count):
            found.other.append(
                f"usage.{count} {got.usage.get(count)} not {calm.usage.get(count)}"
            )
    if got.prompt_token_ids != calm.prompt_token_ids:
        found.other.append("the prompt's ids differ")
    return found


def _num_common(left: list[int], right: list[int]) -> int:
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))
