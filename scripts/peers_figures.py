"""The figures of one arm: what is asked of it, and what is taken down."""

from __future__ import annotations

import json
import statistics
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import count

from peers_arms import MODEL_NAME, Arm
from peers_client import Client

__all__ = ["Figures", "Measure", "quantile"]

Figures = dict[str, float]
"""Values by the figure's name."""

MAX_TOKENS = 1_000
STREAMS = 48
WARM_S = 0.7
"""All streams are open, and the first of them not yet at their end."""

MAX_FAILED = 0.01
"""Of all answers: above, a figure is not of a server that works."""

LONG_TOKENS = 100_000
PANGRAM = "the quick brown fox jumps over a lazy dog, "
MARK = b"########"  # where a long prompt's number goes

BRISK_STEP_S = 0.001
"""48,000 tokens/s: near what a core can, with no step queued behind another."""

SLOW_STEP_S = 1.0
"""For thousands of streams: each has a token a second, so that none saturates a core."""

MIN_LONG_S = 4.0
"""For several long prompts: one takes a slow arm a second."""

AT_ONCE_S = 1e-6
"""For answers of one token: a step at once, whatever the client has seen."""

OPEN_S = 40.0
"""To open all streams, and half of it again for their first tokens."""

DIRECT_AHEAD = 64 * STREAMS
"""Without a server between, the simulated one may be further ahead: this is about what
the two sockets carry, not about events one by one."""


class Measure:
    """Takes the figures of an arm that runs.

    Args:
        arm: Started with a step of 0.
        seconds: For each load.
        tokens_of: Counts the tokens of a text.
    """

    def __init__(
        self, arm: Arm, seconds: float, tokens_of: Callable[[str], int]
    ) -> None:
        self._arm = arm
        self._seconds = seconds
        self._tokens_of = tokens_of

    def idle(self) -> Figures:
        """Return what it takes before the first load."""
        return {"rss_idle_mib": self._arm.rss_mib()}

    def first_token(self) -> Figures:
        """Return the time to an answer of one token, one at a time."""
        self._pace(AT_ONCE_S)
        with self._client(1, chat(1, stream=False), 1) as client:
            client.run(WARM_S / 2)
            client.first_ms.clear()
            client.run(self._seconds / 2)
            times = self._answers(client)
        return {
            "ttft_ms": statistics.median(times),
            "ttft_p99_ms": quantile(times, 0.99),
        }

    def requests(self) -> Figures:
        """Return requests/s of one token each, 32 at once."""
        self._pace(AT_ONCE_S)
        with self._client(32, chat(1, stream=False), 1) as client:
            client.run(WARM_S / 2)
            number, cpu_s = client.num_answers, self._arm.cpu_s()
            elapsed_s = client.run(self._seconds)
            number, cpu_s = client.num_answers - number, self._arm.cpu_s() - cpu_s
            self._answers(client)
        return {
            "requests_per_s": number / elapsed_s,
            "request_us": 1e6 * cpu_s / number,
        }

    def saturated(self, *, ids: bool) -> Figures:
        """Return CPU per token as fast as it goes; the arm runs with a step of 0."""
        self._pace(0)
        taken = self._streamed("sat_ids" if ids else "sat", ids=ids)
        if not ids:
            rate, busy = taken["sat_rate"], taken["sat_busy"]
            taken["tokens_per_s_per_core"] = rate / busy if busy else 0.0
        return taken

    def paced(self, name: str, seconds: float, *, ids: bool) -> Figures:
        """Return CPU per token at the engine's step, in one window.

        Args:
            name: What the figures' keys begin with.
            seconds: How long the window is.
            ids: Whether the token ids are asked for.
        """
        taken = self._streamed(f"{name}_ids" if ids else name, ids=ids, seconds=seconds)
        if not ids:
            taken[f"{name}_step_ms"] = 1e3 * STREAMS / taken[f"{name}_rate"]
        return taken

    def brisk(self) -> Figures:
        """Return CPU per token at a step of 1 ms."""
        return self._streamed("brisk", ids=False)

    def inter_token(self) -> Figures:
        """Return the time between a stream's tokens, 64 streams, at the paced step."""
        with self._client(64, chat(MAX_TOKENS, stream=True), MAX_TOKENS) as client:
            client.run(WARM_S)
            gaps: list[tuple[float, int]] = []
            client.gaps_ms = gaps
            client.run(self._seconds)
            self._answers(client)
        # Tokens that arrive at once have no time between them.
        times = sorted(gap for gap, _ in gaps)
        zeros = sum(number - 1 for _, number in gaps)
        return {
            "itl_p50_ms": quantile_with_zeros(times, zeros, 0.5),
            "itl_p99_ms": quantile_with_zeros(times, zeros, 0.99),
        }

    def long_prompts(self) -> Figures:
        """Return the time to an answer of one token while prompts of 100k tokens come."""
        self._pace(AT_ONCE_S)
        numbers = count()
        head, _, tail = chat(
            1, stream=False, content=MARK.decode() + self._long_text()
        ).partition(MARK)

        def long() -> bytes:
            # Another beginning each time, so that nothing of it is in a cache.
            return b"%s%0*d %s" % (head, len(MARK) - 1, next(numbers), tail)

        with (
            self._client(1, chat(1, stream=False), 1) as short,
            self._client(1, long(), 1) as slow,
        ):
            slow.next_request = long
            seconds = max(MIN_LONG_S, 2 * self._seconds)
            # A thread: to send a prompt waits until the server has read it.
            sender = threading.Thread(target=slow.run, args=(seconds,))
            sender.start()
            short.run(seconds)
            sender.join()
            times = self._answers(short)
            if not slow.num_answers:
                msg = f"no long prompt was answered: {slow.failure or 'too slow'}"
                raise RuntimeError(msg)
            return {
                "short_ttft_ms": statistics.median(times),
                "short_ttft_p99_ms": quantile(times, 0.99),
                "long_prompts_per_s": slow.num_answers / seconds,
            }

    def _long_text(self) -> str:
        num_per_pangram = self._tokens_of(PANGRAM * 100) / 100
        return PANGRAM * int(LONG_TOKENS / num_per_pangram)

    def open_streams(self, number: int) -> Figures:
        """Return what so many streams take, each with a token a second."""
        request = chat(MAX_TOKENS, stream=True)
        with self._client(number, request, MAX_TOKENS, OPEN_S) as client:
            # Every stream has its first token, or will not have one.
            client.run(
                OPEN_S / 2,
                lambda: all(one.num_events > 1 for one in client.connections.values()),
            )
            silent = sum(one.num_events < 2 for one in client.connections.values())
            tokens, cpu_s = client.num_tokens, self._arm.cpu_s()
            elapsed_s = client.run(max(3.0, self._seconds))
            tokens, cpu_s = client.num_tokens - tokens, self._arm.cpu_s() - cpu_s
            name = f"open_{number}"
            return {
                f"{name}_rss_mib": self._arm.rss_mib(),
                f"{name}_failed": float(client.num_failed + silent),
                f"{name}_busy": cpu_s / elapsed_s,
                f"{name}_rate": tokens / elapsed_s,
            }

    def _pace(self, step_s: float) -> None:
        """Tell an engine of ours its step; the others were started with one of 0."""
        if self._arm.control is not None:
            self._arm.control.begin(step_s)

    def _streamed(
        self, name: str, *, ids: bool, seconds: float | None = None
    ) -> Figures:
        extra = self._arm.ids if ids else None
        request = chat(MAX_TOKENS, stream=True, extra=extra)
        with self._client(STREAMS, request, MAX_TOKENS) as client:
            client.run(WARM_S)
            events, cpu_s = client.num_events, self._arm.cpu_s()
            elapsed_s = client.run(seconds or self._seconds)
            events, cpu_s = client.num_events - events, self._arm.cpu_s() - cpu_s
            self._answers(client)
            if not events:
                raise RuntimeError("no event came")
            taken = {
                f"{name}_us": 1e6 * cpu_s / events,
                f"{name}_rate": events / elapsed_s,
                f"{name}_busy": cpu_s / elapsed_s,
            }
            if client.event_counts:
                mean = statistics.mean(client.event_counts)
                taken[f"{name}_events_per_token"] = mean / MAX_TOKENS
        return taken

    @contextmanager
    def _client(
        self, number: int, request: bytes, max_tokens: int, limit_s: float = 30.0
    ) -> Generator[Client]:
        control = self._arm.control
        ahead = 0 if self._arm.pids() else DIRECT_AHEAD
        on_tokens: Callable[[int], None] | None = None
        if control is not None:
            on_tokens = lambda num: control.arrived(num + ahead)  # noqa: E731
        client = Client(self._arm.port, number, request, max_tokens, on_tokens)
        try:
            client.open(limit_s)
            yield client
        finally:
            client.close()

    @staticmethod
    def _answers(client: Client) -> list[float]:
        """Return the times to the answers, if nearly all are good."""
        if client.num_failed > MAX_FAILED * max(client.num_answers, 100):
            msg = f"{client.num_failed} requests failed: {client.failure[:200]}"
            raise RuntimeError(msg)
        return client.first_ms


def chat(
    max_tokens: int,
    *,
    stream: bool,
    extra: object = None,
    content: str = "Tell me a long story.",
) -> bytes:
    """Return a chat request, head and body."""
    body = json.dumps(
        {
            "model": MODEL_NAME,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": max_tokens,
            "stream": stream,
            "temperature": 0,
            **(extra if isinstance(extra, dict) else {}),
        }
    ).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
        % (len(body), body)
    )


def quantile(values: list[float], q: float) -> float:
    """Return the value that a share *q* of all does not exceed."""
    ordered = sorted(values)
    return quantile_with_zeros(ordered, 0, q)


def quantile_with_zeros(ordered: list[float], num_zeros: int, q: float) -> float:
    """Return a quantile of *ordered* values and *num_zeros* zeros before them.

    Raises:
        RuntimeError: There is no value at all.
    """
    total = len(ordered) + num_zeros
    if not total:
        raise RuntimeError("nothing came")
    at = min(int(q * total), total - 1) - num_zeros
    return ordered[at] if at >= 0 else 0.0
