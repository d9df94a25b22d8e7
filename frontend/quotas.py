"""The limits of API keys: requests and tokens a minute, requests at once.

A request is paid for when it comes, its prompt when it is tokenized, its output when it
ends: nothing is done per token. So an output may be worth more than its key has left;
what is owed then is waited for by the next requests, and the average holds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from tokenwire.protocol.api_keys import ApiKey

from .errors import bad_request, overloaded
from .ledger import MINUTE_NS, Ledger

__all__ = ["Grant", "Quotas"]

CONCURRENCY_RETRY_S = 1
"""Nobody knows when a request ends; a second is what OpenAI's client begins with."""

_NS = 10**9
_HEADERS = "x-ratelimit-"  # as OpenAI writes them


@dataclass(slots=True, frozen=True)
class _Rate:
    """What is limited by time."""

    name: str  # in headers, errors and metrics
    place: int  # in the ledger
    of: Callable[[ApiKey], int]  # a minute; 0: no limit


_REQUESTS = _Rate(
    "requests", Ledger.REQUESTS, lambda key: key.limits.requests_per_minute
)
_TOKENS = _Rate("tokens", Ledger.TOKENS, lambda key: key.limits.tokens_per_minute)


class Quotas:
    """Counts what keys use against what they may.

    Args:
        ledger: Where it is counted.
        counted: Told of each request once: its key's name, and ``ok`` or the limit that
            it was above.
        used: Told of a key's name, of ``prompt`` or ``generation``, and of tokens.
    """

    def __init__(
        self,
        ledger: Ledger,
        counted: Callable[[str, str], None],
        used: Callable[[str, str, int], None],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._ledger = ledger
        self._counted = counted
        self._used = used
        self._clock = clock

    def enter(self, key: ApiKey, *, is_counted: bool = True) -> Grant:
        """Let a request of *key* in; ``leave`` follows.

        Args:
            key: Whose.
            is_counted: Whether it counts among those at once.

        Raises:
            ApiError: 429, with ``Retry-After``.
        """
        limits = key.limits
        now = self._clock()
        self._check(key, _TOKENS, 1, now)
        self._check(key, _REQUESTS, 1, now)
        is_counted = is_counted and bool(limits.concurrency)
        if is_counted and self._ledger.running(key.name) >= limits.concurrency:
            self._counted(key.name, "concurrency")
            msg = (
                f"the key {key.name} has {limits.concurrency} requests under way, as many "
                "as it may"
            )
            raise overloaded(msg, "concurrency_limit_exceeded", CONCURRENCY_RETRY_S)
        self._take(key, _REQUESTS, 1, now)
        if is_counted:
            self._ledger.run(key.name, 1)
        return Grant(self, key, is_counted=is_counted)

    def leave(self, grant: Grant) -> None:
        """Take note that a request is over."""
        if not grant.is_refused:
            self._counted(grant.key.name, "ok")
        if grant.is_counted:
            self._ledger.run(grant.key.name, -1)

    def pay(self, key: ApiKey, num_tokens: int) -> None:
        """Pay for a prompt.

        Raises:
            ApiError: 429, its key has not so many tokens left.
        """
        now = self._clock()
        self._check(key, _TOKENS, num_tokens, now)
        self._take(key, _TOKENS, num_tokens, now)

    def settle(
        self, key: ApiKey, num_prompt: int, num_output: int, num_more: int
    ) -> None:
        """Pay for an output, also with what its key has not got.

        Args:
            key: Whose.
            num_prompt: Tokens of the prompt, which is paid.
            num_output: Tokens that were made.
            num_more: Tokens that may be, with nobody there to count them.
        """
        self._take(key, _TOKENS, num_output + num_more, self._clock())
        self._used(key.name, "prompt", num_prompt)
        self._used(key.name, "generation", num_output)

    def give_back(self, key: ApiKey, num_tokens: int) -> None:
        """Take back what was paid for a prompt that is not computed."""
        self._take(key, _TOKENS, -num_tokens, self._clock())

    def headers(self, key: ApiKey) -> dict[str, str]:
        """Return OpenAI's headers for the limits that *key* has."""
        headers: dict[str, str] = {}
        now = self._clock()
        for rate in (_REQUESTS, _TOKENS):
            limit = rate.of(key)
            if limit:
                owed = self._ledger.owed_ns(key.name, rate.place, now)
                left = max(0, (MINUTE_NS - owed) * limit // MINUTE_NS)
                headers[f"{_HEADERS}limit-{rate.name}"] = str(limit)
                headers[f"{_HEADERS}remaining-{rate.name}"] = str(left)
                headers[f"{_HEADERS}reset-{rate.name}"] = f"{owed / _NS:.3f}s"
        return headers

    def _check(self, key: ApiKey, rate: _Rate, amount: int, now: int) -> None:
        limit = rate.of(key)
        if not limit:
            return
        each_ns = MINUTE_NS / limit
        wait_ns = self._ledger.wait_ns(key.name, rate.place, each_ns, amount, now)
        if not wait_ns:
            return
        self._counted(key.name, rate.name)
        retry_after_s = math.ceil(wait_ns / _NS)
        msg = (
            f"the key {key.name} has its limit of {limit} {rate.name} a minute reached; "
            f"try again in {retry_after_s} s"
        )
        raise overloaded(msg, "rate_limit_exceeded", retry_after_s)

    def _take(self, key: ApiKey, rate: _Rate, amount: int, now: int) -> None:
        limit = rate.of(key)
        if limit:
            self._ledger.take(key.name, rate.place, MINUTE_NS / limit, amount, now)


@dataclass(slots=True)
class Grant:
    """One request that was let in."""

    quotas: Quotas
    key: ApiKey
    is_counted: bool  # among those at once
    is_refused: bool = False  # for its prompt, and counted as that

    def check_priority(self, priority: int) -> None:
        """Refuse to go before others further than its key may.

        Raises:
            ApiError: 400.
        """
        lowest = -self.key.limits.urgency
        if priority < lowest:
            msg = f"priority must be at least {lowest} with the key {self.key.name}"
            raise bad_request(msg, "priority")

    def prompt(self, num_tokens: int) -> None:
        """Pay for its prompt; ``output`` or ``give_back`` follows.

        Raises:
            ApiError: 429, its key has not so many tokens left.
        """
        self.is_refused = True
        self.quotas.pay(self.key, num_tokens)
        self.is_refused = False

    def output(self, num_prompt: int, num_output: int, num_more: int) -> None:
        """Pay for its output, of so many tokens and maybe more."""
        self.quotas.settle(self.key, num_prompt, num_output, num_more)

    def give_back(self, num_prompt: int) -> None:
        """Take back what was paid for its prompt: it was turned away."""
        self.quotas.give_back(self.key, num_prompt)
