"""An open loop of requests: they come when their time has come, whatever became of others."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp
from bench_processes import MODEL_NAME, rss_mib

__all__ = ["Outcome", "Tenant", "load", "percentile"]

PROMPT_WORDS = (20, 200)
OUTPUT_TOKENS = (16, 32)
LOOK_S = 0.25


@dataclass(frozen=True)
class Tenant:
    """Who sends, and how much."""

    key: str
    per_s: float


@dataclass
class Sent:
    """One request and what became of it."""

    tenant: str
    at: float  # since the load began
    num_tokens: int
    status: int = 0  # 0: not answered before the load ended
    ttft_s: float = 0.0
    is_complete: bool = False
    retry_after_s: int = 0


@dataclass
class Outcome:
    """What became of a load; what came while it warmed up is left out."""

    seconds: float
    slo_s: float
    sent: list[Sent] = field(default_factory=list[Sent])
    rss_mib: float = 0.0  # the largest seen

    def of(self, tenant: str) -> Outcome:
        """Return the part of one tenant."""
        sent = [one for one in self.sent if one.tenant == tenant]
        return Outcome(self.seconds, self.slo_s, sent, self.rss_mib)

    @property
    def good(self) -> list[Sent]:
        """Those that had their first token in time, and all others then."""
        return [
            one for one in self.sent if one.is_complete and one.ttft_s <= self.slo_s
        ]

    @property
    def served(self) -> list[Sent]:
        """Those that got tokens, in time or not."""
        return [one for one in self.sent if one.ttft_s]

    @property
    def num_shed(self) -> int:
        """Those that were turned away."""
        return sum(one.status in {429, 503} for one in self.sent)

    @property
    def num_failed(self) -> int:
        """Those that were answered by anything else than tokens or come back later."""
        return sum(one.status not in {0, 200, 429, 503} for one in self.sent)

    @property
    def goodput(self) -> float:
        """Good requests per second."""
        return len(self.good) / self.seconds


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which *share* of the others are; 0 of none."""
    ordered = sorted(values)
    return ordered[int(share * (len(ordered) - 1))] if ordered else 0.0


async def load(
    port: int,
    pid: int,
    tenants: Sequence[Tenant],
    *,
    seed: int,
    warm_up_s: float,
    seconds: float,
    slo_s: float,
) -> Outcome:
    """Send what *tenants* send, and return what became of it.

    The load goes on for *slo_s* and some more after the part that counts, so that its
    last requests find what its first ones found. Then whoever still waits leaves.
    """
    chance = random.Random(seed)
    end = warm_up_s + seconds
    tail_s = slo_s + 2
    arrivals = sorted(
        (at, tenant.key)
        for tenant in tenants
        for at in _arrivals(chance, tenant.per_s, end + tail_s)
    )
    outcome = Outcome(seconds, slo_s)
    url = f"http://127.0.0.1:{port}/v1/completions"
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        began = time.monotonic()
        tasks: list[asyncio.Task[None]] = []
        next_look = 0.0
        for at, key in arrivals:
            await asyncio.sleep(max(0.0, began + at - time.monotonic()))
            if at >= next_look:
                outcome.rss_mib = max(outcome.rss_mib, rss_mib(pid))
                next_look = at + LOOK_S
            sent = Sent(key, at, chance.randint(*OUTPUT_TOKENS))
            words = chance.randint(*PROMPT_WORDS)
            prompt = " ".join(
                chance.choice(("one", "two", "ten")) for _ in range(words)
            )
            if warm_up_s <= at < end:
                outcome.sent.append(sent)
            tasks.append(asyncio.create_task(_send(session, url, sent, prompt)))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return outcome


def _arrivals(chance: random.Random, per_s: float, until: float) -> list[float]:
    """Return the times of a Poisson process."""
    times: list[float] = []
    at = 0.0
    while (at := at + chance.expovariate(per_s)) < until:
        times.append(at)
    return times


async def _send(
    session: aiohttp.ClientSession, url: str, sent: Sent, prompt: str
) -> None:
    body = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": sent.num_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    headers = {
        "Authorization": f"Bearer {sent.tenant}",
        "Content-Type": "application/json",
    }
    began = time.monotonic()
    async with session.post(url, data=json.dumps(body), headers=headers) as answer:
        sent.status = answer.status
        if answer.status != 200:
            sent.retry_after_s = int(answer.headers.get("Retry-After", "0"))
            await answer.read()
            return
        tail = b""
        async for chunk in answer.content.iter_any():
            if not sent.ttft_s:
                sent.ttft_s = time.monotonic() - began
            tail = (tail + chunk)[-64:]
        sent.is_complete = b"[DONE]" in tail
