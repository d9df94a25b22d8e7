"""Cases of the resume report: one request, its uninterrupted run, and ways to break it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
from report_client import Answer, Request, View, read
from report_compare import Metrics, compare
from report_cuts import Cut
from report_kinds import Kind, Sampling, Text
from report_stack import MODEL_NAME

__all__ = [
    "BASELINES",
    "Case",
    "Outcome",
    "baseline",
    "client_resume",
    "judge",
    "refer",
]

T = TypeVar("T")

AT_ONCE = 16  # requests under way: two cores have no more to give

PENALTIES = {"frequency_penalty": 0.6, "presence_penalty": 0.4}

BASELINES = ("text re-tokenized", "parsed deltas", "naive P + O")
"""What is done elsewhere: the client sends back the text it has, or the message as its
deltas made it; or a router sends prompt and output ids as a prompt."""


@dataclass(frozen=True)
class Case:
    """One request."""

    kind: Kind
    sampling: Sampling
    penalized: bool
    tag: str
    """Its words that no other case has: its prompt is its own."""
    max_tokens: int
    more: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def body(self, **nvext: Any) -> dict[str, Any]:
        """Return the request."""
        if not self.sampling.is_seeded:
            nvext = {"exactness": "same_rng", **nvext}
        return {
            "model": MODEL_NAME,
            "messages": [{"role": "user", "content": f"{self.kind.asks} {self.tag}"}],
            "max_tokens": self.max_tokens,
            **self.kind.body,
            **self.sampling.fields,
            **(PENALTIES if self.penalized else {}),
            **self.more,
            "nvext": {
                "resumable": True,
                "checkpoint": {"every_tokens": 16},
                "extra_fields": ["worker_id"],
                **nvext,
            },
        }


@dataclass(frozen=True)
class Outcome:
    """One case, cut once, one way."""

    method: str  # "raw ids", or one of ``BASELINES``
    path: str  # "client resume", "migration", "drain", "replay"
    case: Case
    cut: Cut
    metrics: Metrics


async def refer(
    http: aiohttp.ClientSession, url: str, case: Case, seed: int | None = None
) -> Answer:
    """Return the uninterrupted run of a case, or of a run that drew by *seed*.

    Raises:
        RuntimeError: It was refused.
    """
    body = case.body()
    if seed is not None:
        body["seed"] = seed
    whole = await read(http, Request(url, body))
    if whole.error or not whole.done:
        msg = f"{case.kind.name}, {case.sampling.name}: {whole.status} {whole.error}"
        raise RuntimeError(msg)
    return whole


async def _reference(
    http: aiohttp.ClientSession, url: str, case: Case, whole: Answer, broken: Answer
) -> Answer:
    """Return what a broken run is to be compared with: a run by the same seed."""
    seed = broken.generation.get("seed")
    if case.sampling.is_seeded or seed is None:
        return whole
    return await refer(http, url, case, seed)


async def client_resume(
    http: aiohttp.ClientSession, urls: list[str], case: Case, whole: Answer, cut: Cut
) -> Outcome:
    """Leave a stream at the cut, and go on at another frontend with what there is.

    That is the stream's own checkpoint where it has just come, else the ids.
    """
    body = case.body()
    body["cache_salt"] = "broken"
    broken = await read(http, Request(urls[0], body, leave_at=cut.k))
    k = len(broken.ids)
    nvext = body["nvext"]
    if k in broken.checkpoints:
        nvext["resume_from"] = {"checkpoint": broken.checkpoints[k]}
    else:
        nvext["resume_from"] = {
            "output_token_ids": broken.ids,
            "prompt_token_ids": broken.prompt_ids,
            "contract": broken.generation["contract"],
        }
        if "seed" in broken.generation:  # the frontend's, maybe
            body["seed"] = broken.generation["seed"]
    rest = Answer(view=broken.view, num_before=k)
    await read(http, Request(urls[-1], body), rest)
    reference = await _reference(http, urls[0], case, whole, broken)
    usage, num_new = rest.usage, len(rest.ids)
    details: dict[str, Any] = usage.get("completion_tokens_details") or {}
    metrics = compare(
        reference,
        k,
        rest,
        prefix=rest.prompt_ids + broken.ids,
        ids=broken.ids + rest.ids,
        num_sampled=usage.get("completion_tokens"),
        usage_ok=usage.get("completion_tokens") == num_new
        and usage.get("prompt_tokens") == len(reference.prompt_ids)
        and details.get("resumed_prefix_tokens") == k,
        claim=rest.resume.get("exactness", ""),
        ttft_s=rest.first_id_s or None,
    )
    return Outcome("raw ids", "client resume", case, Cut(cut.name, k), metrics)


async def replay(
    http: aiohttp.ClientSession, urls: list[str], case: Case, whole: Answer, cut: Cut
) -> Outcome:
    """Leave a stream that goes on, and ask another frontend for what was missed."""
    body = case.body(resumable={"on_disconnect": "continue"})
    body["cache_salt"] = "left"
    broken = await read(http, Request(urls[0], body, leave_at=cut.k))
    k = len(broken.ids)
    rest = Answer(view=broken.view, num_before=k)
    await read(http, Request(urls[-1], behind=broken.last_event_id), rest)
    reference = await _reference(http, urls[0], case, whole, broken)
    num_ids = k + len(rest.ids)
    metrics = compare(
        reference,
        k,
        rest,
        prefix=broken.prompt_ids + broken.ids,
        ids=broken.ids + rest.ids,
        num_sampled=rest.usage.get("completion_tokens", k) - k,
        usage_ok=rest.usage.get("completion_tokens") == num_ids
        and rest.usage.get("prompt_tokens") == len(reference.prompt_ids),
        claim=broken.generation.get("exactness", ""),
        ttft_s=rest.first_id_s or None,
    )
    return Outcome("raw ids", "replay", case, Cut(cut.name, k), metrics)


async def judge(
    http: aiohttp.ClientSession,
    url: str,
    case: Case,
    whole: Answer,
    cut: Cut,
    path: str,
    moved: Answer,
    struck_at: float,
) -> Outcome:
    """Return what a stream shows that its client has not seen break."""
    reference = await _reference(http, url, case, whole, moved)
    k, usage = cut.k, moved.usage
    later = [at - struck_at for at in moved.arrived[k:]]
    metrics = compare(
        reference,
        k,
        moved,
        prefix=moved.prompt_ids + moved.ids[:k],
        ids=moved.ids,
        num_sampled=usage.get("completion_tokens", k) - k,
        usage_ok=usage.get("completion_tokens") == len(moved.ids)
        and usage.get("prompt_tokens") == len(reference.prompt_ids),
        claim=moved.generation.get("exactness", ""),
        ttft_s=later[0] if later else None,
    )
    return Outcome("raw ids", path, case, cut, metrics)


async def baseline(
    http: aiohttp.ClientSession,
    url: str,
    method: str,
    case: Case,
    whole: Answer,
    cut: Cut,
    text: Text,
) -> Outcome:
    """Go on as it is done without ids, or with ids alone."""
    k = cut.k
    body = case.body()
    nvext: dict[str, Any] = {"extra_fields": ["completion_token_ids"]}
    body |= {"nvext": nvext, "max_tokens": case.max_tokens - k}
    view = whole.view_at(k)
    prefix = [*whole.prompt_ids, *whole.ids[:k]]
    if method == "parsed deltas":
        body |= {
            "messages": [*body["messages"], _message(view)],
            "continue_final_message": True,
            "add_generation_prompt": False,
        }
    else:
        if method == "text re-tokenized":
            # Half a character is in no text that a client has.
            said = text.says(whole.ids[:k]).rstrip("\N{REPLACEMENT CHARACTER}")
            prefix = text.ids(text.says(whole.prompt_ids) + said)
        nvext["token_data"] = prefix
    rest = Answer(view=view, num_before=k)
    await read(http, Request(url, body), rest)
    metrics = compare(
        whole,
        k,
        rest,
        prefix=rest.prompt_ids,
        ids=whole.ids[:k] + rest.ids,
        num_sampled=None,
        usage_ok=True,
        claim="",
        ttft_s=rest.first_id_s or None,
    )
    return Outcome(method, "client resume", case, cut, metrics)


def _message(view: View) -> dict[str, Any]:
    """Return a message as a client keeps it in its history."""
    message: dict[str, Any] = {"role": "assistant", "content": view.content}
    if view.reasoning:
        message["reasoning_content"] = view.reasoning
    if view.calls:
        message["tool_calls"] = [
            {
                "id": f"call-{index}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for index, (name, arguments) in enumerate(view.calls)
        ]
    return message


async def each(calls: Iterable[Awaitable[T]], at_once: int = AT_ONCE) -> list[T]:
    """Return what all calls return, *at_once* at a time."""
    slots = asyncio.Semaphore(at_once)

    async def one(call: Awaitable[T]) -> T:
        async with slots:
            return await call

    return await asyncio.gather(*map(one, calls))
