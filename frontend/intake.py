"""What this frontend takes in: requests at once, and their turn at the workers."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import random
import secrets
import time
from collections.abc import Callable
from functools import partial

from aiohttp import web

from .admission import Bounds, Gate, Reason, State, Ticket
from .calls import Call
from .capacity import UNLIMITED, Capacity
from .config import Config
from .connections import client_of
from .errors import ApiError, overloaded, unavailable
from .events import first_of
from .expectation import go_on
from .large import Large
from .metrics import Metrics
from .pool import Pool
from .visit import Visit

__all__ = ["Intake", "tenant_of", "ticket_of"]

_log = logging.getLogger(__name__)

TICK_S = 0.05
"""How often the queue is looked at while something waits: what has waited for too long
is told so at most this much late, and so is what waits for a worker to come back."""

MAX_RETRY_AFTER_S = 60
"""OpenAI's client ignores a longer wish, and then comes back after seconds."""

GIVE_UP_S = 1.0
"""How long the last words to a client may take when this frontend leaves before it has
served it: they fit into any socket's buffer."""

RETRY_SPREAD = 0.5
"""Clients turned away together come back spread over this part of their wait more."""

JSON = "application/json"
UNTYPED = "application/octet-stream"
"""What aiohttp calls a body without a ``Content-Type``."""

_TENANT_KEY = secrets.token_bytes(16)
_TENANT_BYTES = 16

_TEXTS = {
    Reason.REQUESTS: "too many requests wait for the workers",
    Reason.TOKENS: "too many prompt tokens wait for the workers",
    Reason.EVICTED: "this request made room in the queue for another: it was one of "
    "many of its client, or the other's priority comes first",
    Reason.EXPECTED_WAIT: "the workers are busy: this request would wait for about "
    "{wait_s:.0f} s, and may wait for {bound_s:g} s",
    Reason.TIMEOUT: "the workers are busy: this request has waited for {bound_s:g} s",
    Reason.CLOSED: "this frontend is shutting down",
}


class Intake:
    """Counts and bounds what is served, and gives requests their turn."""

    def __init__(self, config: Config, pool: Pool, metrics: Metrics) -> None:
        self._config = config
        self._pool = pool
        self._metrics = metrics
        self._bounds = Bounds(
            config.max_queue_requests, config.max_queue_tokens, config.max_queue_wait_s
        )
        room = Capacity(lambda: pool.links).limit

        def limit(num_own: int) -> int:
            """Let nothing new begin while a worker is paused."""
            return 0 if pool.is_paused else room(num_own)

        if not config.queue_here:
            limit = _no_limit
        self._gate = gate = Gate(self._bounds, limit, time.monotonic)
        self._timer: asyncio.TimerHandle | None = None
        self.visits: dict[Visit, None] = {}
        """What is being served, in order of arrival."""
        self._num_body_bytes = 0  # read, and not parsed yet
        self.large = Large()
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False
        """Whether nothing new is taken."""
        self.give_up: dict[Callable[[ApiError], None], None] = {}
        """What ends a response early, of each that runs."""
        metrics.num_inflight.set_function(lambda: len(self.visits))
        metrics.queue_requests.set_function(lambda: gate.num_sequences)
        metrics.queue_tokens.set_function(lambda: gate.num_tokens)
        metrics.num_admitted.set_function(lambda: gate.num_admitted)
        metrics.limit.set_function(lambda: gate.limit)

    @property
    def gate(self) -> Gate:
        """Where requests wait for their turn; to be looked at."""
        return self._gate

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for their turn."""
        return self._gate.num_sequences

    def serving(self, request: web.Request) -> contextlib.AbstractContextManager[Visit]:
        """Count a request as being served, until the context ends.

        Raises:
            ApiError: 429 or 503, this frontend takes no more; 415, it is not JSON.
        """
        limit = self._config.max_inflight_requests
        if self.draining:
            raise unavailable(_TEXTS[Reason.CLOSED], code="draining")
        if len(self.visits) >= limit:
            self._metrics.shed("inflight", 0)
            msg = f"this frontend already serves {limit} requests"
            raise overloaded(msg)
        if request.method == "POST" and not _may_be_json(request):
            msg = f"the body must be {JSON}, not {request.content_type}"
            raise ApiError(415, msg)
        visit = Visit(request.path)
        self.visits[visit] = None
        self._idle.clear()
        return _Serving(self, visit)

    def served(self, visit: Visit) -> None:
        """Take note that a request is over."""
        self.parsed(visit)
        del self.visits[visit]
        if not self.visits:
            self._idle.set()

    async def body(self, request: web.Request, visit: Visit) -> bytes:
        """Return the body, whose bytes count from when they have come until ``parsed``.

        Raises:
            ApiError: 408, it takes too long; 429, too much is held already.
            HTTPRequestEntityTooLarge: It is above the limit, maybe once unpacked.
        """
        content = request.content
        self._check_size(request.content_length or 0)
        if content.is_eof():
            # Most bodies are there with their heads: nothing is waited for then.
            whole = content.read_nowait()
            self._has_come(visit, len(whole))
            visit.is_read = True
            return whole
        go_on(request)
        timeout_s = self._config.client_read_timeout_s
        body = bytearray()
        try:
            async with asyncio.timeout(timeout_s):
                async for part in content.iter_any():
                    body += part
                    self._has_come(visit, len(body))
            visit.is_read = True
            return bytes(body)
        except TimeoutError as error:
            msg = f"the body has not arrived within {timeout_s:g} s"
            raise ApiError(408, msg, code="request_timeout") from error

    def _has_come(self, visit: Visit, num_bytes: int) -> None:
        """Count what is there of a body.

        Raises:
            ApiError: As ``_hold``.
            HTTPRequestEntityTooLarge: It is above the limit.
        """
        self._check_size(num_bytes)
        self._hold(visit, num_bytes)

    def parsed(self, visit: Visit) -> None:
        """Take note that a body is no longer needed."""
        self.large.is_over(visit.num_body_bytes)
        self._num_body_bytes -= visit.num_body_bytes
        visit.num_body_bytes = 0

    def _check_size(self, num_bytes: int) -> None:
        """Refuse a body as soon as it is too large, or says that it will be.

        Raises:
            HTTPRequestEntityTooLarge: It is.
        """
        limit = self._config.max_body_bytes
        if num_bytes > limit:
            raise web.HTTPRequestEntityTooLarge(limit, num_bytes)

    def _hold(self, visit: Visit, num_bytes: int) -> None:
        """Count so many bytes for a body, those it has already included.

        What is only announced does not count, or who sends nothing would have it all. And
        a body that is within a request's equal part is taken however much others hold.

        Raises:
            ApiError: 429, with those of other bodies they are too many.
        """
        others = self._num_body_bytes - visit.num_body_bytes
        limit = self._config.max_inflight_body_bytes
        part = limit // self._config.max_inflight_requests
        if others and others + num_bytes > limit and num_bytes > part:
            self._metrics.shed("body_bytes", 0)
            msg = (
                f"this frontend holds bodies of {others} bytes, near its limit, {limit}"
            )
            raise overloaded(msg)
        self._num_body_bytes = others + num_bytes
        visit.num_body_bytes = num_bytes

    async def drain(self, timeout_s: float, force: asyncio.Event) -> None:
        """Take nothing new; wait until all requests have ended, *force*, or the bound.

        What waits for its turn may still get it: no client need be told to go elsewhere.
        """
        self.draining = True
        _log.info(
            "stopping: %d requests may go on for %.0f s", len(self.visits), timeout_s
        )
        await first_of(self._idle, force, timeout_s=timeout_s)
        self._gate.close()
        if self.visits:
            _log.warning("%d requests did not end in time", len(self.visits))
            error = unavailable(_TEXTS[Reason.CLOSED], code="draining")
            for give_up in self.give_up:
                give_up(error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), GIVE_UP_S)

    # --- the turn ------------------------------------------------------------------

    def check(
        self, tenant: bytes, priority: int | None, num_choices: int | None
    ) -> None:
        """Refuse a request that would be turned away, before it is tokenized.

        Raises:
            ApiError: 429 or 503.
        """
        self._check_pause()
        ticket = Ticket(tenant, priority or 0, num_choices or 1, 0)
        reason = self._gate.refusal(ticket)
        if reason is not None:
            raise self._refused(ticket, reason)

    async def turn(self, ticket: Ticket) -> None:
        """Return when the workers have room for *ticket*; at once if they have it now.

        Raises:
            ApiError: 429 or 503, it is turned away.
        """
        self._check_pause()
        gate = self._gate
        if self._pool.is_paused:
            gate.look_anew()  # a pause counts from now on, for every request
        gate.enter(ticket)
        if ticket.state is State.WAITING:
            if not self._pool.ready:
                gate.leave(ticket)
                raise self._pool.no_worker()
            decided = asyncio.get_running_loop().create_future()
            ticket.decided = partial(_decide, decided)
            self._tick_later()
            await decided
        if ticket.reason is not None:
            raise self._refused(ticket, ticket.reason)
        self._metrics.queue_time.observe(ticket.admitted_at - ticket.arrived_at)

    def _check_pause(self) -> None:
        if self._config.refuse_while_paused and self._pool.is_paused:
            msg = "the workers are paused by their operator"
            raise unavailable(msg, code="paused")

    def ended(self, ticket: Ticket, *, well: bool) -> None:
        """Take note that one sequence has ended, also if its client still reads."""
        self._gate.ended(ticket, well=well)

    def leave(self, ticket: Ticket, num_output_tokens: int) -> None:
        """Take note that a request is over, wherever it was."""
        self._gate.leave(ticket, num_output_tokens)

    def _tick_later(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._gate.tick()
        if self._gate.num_sequences:
            self._tick_later()

    def _refused(self, ticket: Ticket, reason: Reason) -> ApiError:
        """Return the answer for a request that is turned away, and count it."""
        self._metrics.shed(reason.value, ticket.priority)
        wait_s = self._gate.expected_wait_s(ticket)
        bound_s = self._bounds.max_wait_s
        text = _TEXTS[reason].format(wait_s=wait_s, bound_s=bound_s)
        spread = 1 + RETRY_SPREAD * random.random()  # noqa: S311 - no secret
        retry_after_s = min(max(1, math.ceil(wait_s * spread)), MAX_RETRY_AFTER_S)
        match reason:
            case Reason.REQUESTS | Reason.TOKENS:
                return overloaded(text, "queue_full", retry_after_s)
            case Reason.EVICTED:
                return overloaded(text, "evicted", retry_after_s)
            case Reason.EXPECTED_WAIT:
                return unavailable(text, "queue_wait", retry_after_s)
            case Reason.TIMEOUT:
                if not self._pool.ready:
                    return self._pool.no_worker()
                return unavailable(text, "queue_timeout", retry_after_s)
            case Reason.CLOSED:
                return unavailable(text, "draining")


class _Serving(contextlib.AbstractContextManager[Visit]):
    """A request being served; a generator would cost twice as much."""

    __slots__ = ("_intake", "_visit")

    def __init__(self, intake: Intake, visit: Visit) -> None:
        self._intake = intake
        self._visit = visit

    def __enter__(self) -> Visit:
        return self._visit

    def __exit__(self, *_: object) -> None:
        self._intake.served(self._visit)


def ticket_of(tenant: bytes, call: Call) -> Ticket:
    """Return what *call* brings to the gate: each prompt and choice is a sequence."""
    jobs = [job for job, _ in call.jobs]
    return Ticket(
        tenant,
        jobs[0].priority,
        num_sequences=len(jobs),
        num_prompt_tokens=sum(
            len(job.prompt_token_ids) + len(job.output_token_ids) for job in jobs
        ),
        max_tokens=jobs[0].sampling.max_tokens - len(jobs[0].output_token_ids),
    )


def tenant_of(request: web.Request, identity: str | None) -> bytes:
    """Return who a request is of: its API key, hashed so that none is kept, or its client.

    Args:
        request: What is asked.
        identity: See ``access.identity_of``.
    """
    if identity is None:
        return client_of(request.remote or "").encode()
    data = identity.encode(errors="surrogateescape")
    return hashlib.blake2b(data, digest_size=_TENANT_BYTES, key=_TENANT_KEY).digest()


def _may_be_json(request: web.Request) -> bool:
    """Return whether a body is JSON, by its type; without one it is taken for it.

    But from no page: a browser sends what has no type to any site, and asks it nothing
    before. It says where such a request comes from.
    """
    if request.content_type == JSON or not request.body_exists:
        return True
    return request.content_type == UNTYPED and "Origin" not in request.headers


def _no_limit(num_own: int) -> int:
    """Let everything go to the workers, and wait there."""
    del num_own
    return UNLIMITED


def _decide(decided: asyncio.Future[None]) -> None:
    if not decided.done():  # its client may be leaving
        decided.set_result(None)
