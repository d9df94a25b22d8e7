"""One response: its choices run, their deltas are streamed or collected."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from aiohttp import web

from tokenwire.protocol.logs import about

from .calls import Call
from .choice import Choice, Collected, Delta
from .errors import ApiError, internal_error
from .frame import Finished, usage
from .generation import Generation
from .job import End
from .metrics import Metrics
from .pool import Pool
from .resumable import OWN_ENDS
from .sse import DONE, EventStream, LivelyStream, error_event
from .stages import Stage
from .trail import CURRENT

__all__ = ["Session"]

_log = logging.getLogger(__name__)


def _nobody(end: End) -> None:
    """Tell nobody of an end: it had no turn, so there is none to give back."""
    del end


def _nothing() -> None:
    """Hold nothing: all is over."""


class Session:
    """Runs a call's choices and answers it once, whole or as a stream.

    Args:
        call: What to run.
        pool: The workers.
        metrics: Where it counts.
        on_end: Told when a choice has ended, which may be before its client reads it.
        arrived_at: When its request came, by ``time.monotonic``; None: now.
    """

    def __init__(
        self,
        call: Call,
        pool: Pool,
        metrics: Metrics,
        on_end: Callable[[End], None] = _nobody,
        arrived_at: float | None = None,
    ) -> None:
        self._call = call
        self._trail = CURRENT.get()
        self._metrics = metrics
        self._woken = False  # by news that nobody has looked at
        self._waiter: asyncio.Future[None] | None = None
        self._stream: EventStream | Unread | None = None
        self._is_followed = False  # it goes on with what a worker keeps
        self._last_end: End | None = None
        self._collected: list[Collected] = []
        self._num_running = len(call.jobs)
        self._num_cached = 0
        self._num_delivered = self._num_made = 0  # by choices that are over
        self._error: ApiError | None = None
        self._slow = False
        self._kept: dict[int, Collected] = {}  # by choice, until the client has read
        self._choices = [
            Choice(
                index,
                job,
                fold,
                pool=pool,
                metrics=metrics,
                clock=time.monotonic,  # uvloop's own clock has steps of 1 ms
                deliver=self._deliver,
                on_end=on_end,
                broke=self._broke,
                resumable=call.resumable is not None,
                arrived_at=arrived_at,
            )
            for index, (job, fold) in enumerate(call.jobs)
        ]
        if call.resumable is not None:
            call.resumable.source = self._choices[0].generation

    @property
    def call(self) -> Call:
        """What it runs."""
        return self._call

    @property
    def generations(self) -> list[Generation]:
        """Those of its choices; to be looked at."""
        return [choice.generation for choice in self._choices]

    @property
    def stage(self) -> Stage:
        """What it waits for; of several choices, what the one waits for that is behind."""
        if self._slow or not self._choices:
            return Stage.STREAMING
        choices = self._choices
        if len(choices) == 1:
            return choices[0].generation.stage
        return min(choice.generation.stage for choice in choices)

    @property
    def num_tokens(self) -> int:
        """Tokens of all choices that were delivered."""
        return self._num_delivered + sum(one.num_tokens for one in self._choices)

    @property
    def num_made(self) -> int:
        """Tokens of all choices that came, also those that wait for a slow client."""
        made = sum(one.num_tokens + one.waiting[0] for one in self._choices)
        return self._num_made + made

    @property
    def num_let_go(self) -> int:
        """Tokens that may come for nobody: a generation that goes on without its client."""
        resumable = self._call.resumable
        is_told = self._stream is not None and self._error is None
        if (
            not is_told
            or not self._num_running
            or not resumable
            or not resumable.outlives
        ):
            return 0
        job, _ = self._call.jobs[0]
        num_left = job.sampling.max_tokens - len(job.output_token_ids)
        return max(0, num_left - self.num_made)

    def close(self) -> None:
        """Let go of what it was to run, or has told nobody; harmless when all has run."""
        for choice in self._choices:
            choice.generation.drop()
        self._choices = []

    def give_up(self, error: ApiError) -> None:
        """End the response with *error*, unless all is over."""
        if self._num_running and self._error is None:
            self._fail(error)
            self._wake()

    def _broke(self, error: Exception) -> None:
        """End the response: a bug here, or a worker's answer that makes no sense."""
        trail = self._trail
        _log.error(
            "response %s failed",
            self._call.response_id,
            exc_info=error,
            extra=about(None if trail is None else trail.about),
        )
        self._fail(self._error or internal_error())
        self._wake()

    def _fail(self, error: ApiError) -> None:
        """Send nothing more of the choices."""
        self._error = error
        for choice in self._choices:
            choice.bend()

    async def whole(self, headers: dict[str, str]) -> web.Response:
        """Return the response when every choice has ended.

        Raises:
            ApiError: A choice failed; the others were cancelled.
        """
        self._collected = [Collected() for _ in self._choices]
        prior = self._call.prior
        if prior is not None:
            # Who did not stream has not seen the beginning of the message.
            self._collected[0].texts.append(prior.text)
            if prior.parsed is not None:
                self._collected[0].parsed.append(prior.parsed)
        try:
            self._start()
            self._released()  # at most an end has come yet
            while self._num_running and self._error is None:
                await self._next_wake()
            wholes = [one.whole() for one in self._collected]
            if self._error is not None:
                raise self._interrupted_whole(wholes[0])
            body = self._body(wholes)
            for choice in self._choices:
                # Its connection was there a moment ago: what is written now is told.
                choice.generation.told()
        finally:
            self._cancel()
        return web.Response(body=body, content_type="application/json", headers=headers)

    def _body(self, wholes: list[Delta]) -> bytes:
        """Return the JSON of a whole response."""
        choices = [
            Finished(index, one.text, one.token_ids, one.logprobs, one.end, one.parsed)
            for index, one in enumerate(wholes)
            if one.end is not None
        ]
        return self._call.shape.response(choices, self._usage())

    async def streamed(
        self,
        request: web.Request,
        headers: dict[str, str],
        write_timeout_s: float,
        follow: Callable[[Choice], Awaitable[None]] | None = None,
    ) -> web.StreamResponse:
        """Stream the response; returns it when all has been sent.

        Args:
            request: The client's.
            headers: Of the response.
            write_timeout_s: How long its client may read nothing.
            follow: Has its one choice go on with what a worker keeps; None: it begins.

        Raises:
            ApiError: A choice failed before anything was sent.
        """
        try:
            if follow is not None:
                self._is_followed = True
                await follow(self.only_choice)
                self.only_choice.generation.followed()
            else:
                await self._begun()
            kind = EventStream if self._call.resumable is None else LivelyStream
            stream = kind(request, headers)
            stream.on_full = self._hold
            openings = self._openings()
            await stream.open(openings)
            if self._trail is not None:
                counts = self._trail.counts_bytes
                counted = stream.count(len(openings)) if counts else None
                self._trail.opened(HTTPStatus.OK, counted)
            self._stream = stream
            try:
                await self._until_sent(stream, write_timeout_s)
                tail = self._tail()
                if tail:
                    stream.send(tail)
                return await stream.close(write_timeout_s)
            except TimeoutError:
                _log.warning(
                    "response %s: dropped, its client read nothing for %.0f s",
                    self._call.response_id,
                    write_timeout_s,
                )
                self._metrics.failed("slow_reader")
                if self._trail is not None:
                    self._trail.failed("slow_reader")
                return stream.abort()
            finally:
                stream.be_quiet()
                stream.on_full = _nothing  # no cycle is left
        finally:
            self._cancel()

    async def silently(
        self, follow: Callable[[Choice], object]
    ) -> tuple[int, End | None]:
        """Make all events of what a worker keeps, for nobody.

        Args:
            follow: Has its one choice go on with that.

        Returns:
            The number of events before the first id; and the end, if there is one.
        """
        self._stream, self._trail = Unread(), None
        follow(self.only_choice)
        self._openings()
        resumable = self._call.resumable
        num_openings = 0 if resumable is None else resumable.num_events
        while not self._released():
            self._slow = False
            await _others_turn()
        if self._last_end is not None:
            self._tail()
        return num_openings, self._last_end

    @property
    def only_choice(self) -> Choice:
        """The choice of an answer that has but one."""
        [choice] = self._choices
        return choice

    async def _begun(self) -> None:
        """Start, and wait for the first token, or an end.

        Nothing is sent before, so that a request which a worker refuses is answered by
        its status.

        Raises:
            ApiError: A choice failed before anything came.
        """
        self._start()
        while not any(self._has_news(choice) for choice in self._choices):
            if self._error is not None:
                raise self._error
            await self._next_wake()
        for choice in self._choices:
            num_tokens, end = choice.waiting
            if end is not None and end.error is not None and not num_tokens:
                raise end.error

    def _openings(self) -> bytes:
        """Return the events before the first ids."""
        if self._call.prior is not None:
            return b""
        openings = [self._call.shape.opening(c.index) for c in self._choices]
        return b"".join(openings)

    async def _until_sent(self, stream: EventStream, write_timeout_s: float) -> None:
        """Send until every choice has ended and the client keeps up."""
        try:
            plain = [one for one in self._choices if one.plain and self._call.is_plain]
            for choice in plain:
                choice.deliver_plain = self._deliver_plain
            if not self._released():
                self._slow = True
            for choice in plain if self._error is None else ():
                choice.straighten(self._call.shape.around(choice.index), stream)
            await self._rest_sent(stream, write_timeout_s)
        except OSError:  # its client is gone, or reads nothing
            raise
        except Exception as error:  # noqa: BLE001 - the headers are sent: no 500
            self._broke(error)

    async def _rest_sent(self, stream: EventStream, write_timeout_s: float) -> None:
        while True:
            if self._slow:
                await stream.drained(write_timeout_s)
                await _others_turn()  # draining may not have waited
                self._slow = False
                if not self._released():
                    self._slow = True
                kept, self._kept = self._kept, {}
                for index, collected in kept.items():
                    self._deliver(self._choices[index], collected.whole())
            elif not self._num_running or self._error is not None:
                return
            else:
                await self._next_wake()

    def _start(self) -> None:
        prior = self._call.prior
        if prior is not None and prior.ended is not None:
            [choice] = self._choices
            choice.end_before(prior.ended.reason, prior.ended.stop_reason)
            return
        for choice in self._choices:
            choice.generation.start()

    def _cancel(self) -> None:
        """Stop whatever still runs (nothing, after a good end), and count.

        What has ended, but its client was not told so, leaves nothing either.
        """
        resumable = self._call.resumable
        is_told = self._stream is not None or self._is_followed
        for choice in self._choices:
            if is_told and resumable is not None and resumable.outlives:
                choice.generation.leave()
            else:
                choice.generation.cancel()
        self._num_delivered, self._num_made = self.num_tokens, self.num_made
        self._metrics.generation_tokens.inc(self._num_delivered)
        # They know of this session, too: it would be left to the collector of cycles.
        self._choices = []

    def _has_news(self, choice: Choice) -> bool:
        num_tokens, end = choice.waiting
        return bool(num_tokens) or end is not None

    async def _next_wake(self) -> None:
        if not self._woken:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._woken = False

    def _wake(self) -> None:
        self._woken = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _deliver(self, choice: Choice, delta: Delta) -> None:
        """Take a choice's delta; called per token, must be cheap."""
        stream = self._stream
        end = delta.end
        if stream is None:
            if self._collected:
                self._collect(choice, delta)
            self._wake()
            return
        if self._error is not None:
            return
        if self._slow and choice.parses_ahead:
            # One delta comes of all that waits for the client.
            self._kept.setdefault(choice.index, Collected()).add(delta)
            return
        if end is not None:
            self._count_end(choice, end)
            if end.error is not None:
                delta.end = None  # the error event follows in place of a finish reason
        usage_json = b""
        if self._call.continuous_usage:
            usage_json = self._usage()
        data = self._call.shape.chunk(choice.index, delta, usage_json)
        if data:
            stream.send(data)
        if end is not None:
            if stream.is_open:
                # Its client may act on a choice's end while the others go on.
                choice.generation.told()
            self._wake()

    def _deliver_plain(self, choice: Choice, text: str, token_ids: list[int]) -> None:
        """Stream text and ids, the common case of ``_deliver``."""
        stream = self._stream
        if stream is None or self._error is not None:
            return
        data = self._call.shape.plain_chunk(choice.index, text, token_ids)
        if data:
            stream.send(data)

    def _released(self) -> bool:
        """Deliver what was held; return whether that was all of it."""
        left = [choice for choice in self._choices if not choice.release()]
        return not left

    def _hold(self) -> None:
        """Stop sending until the client has read.

        Choices with a parser go on, and what they say is kept: parsing a long backlog
        at once, at up to 0.3 ms a token, would stall every other stream. Resumable ones
        need not: theirs leaves in slices.
        """
        self._slow = True
        for choice in self._choices:
            if not choice.parses_ahead:
                choice.hold()
        self._wake()

    def _collect(self, choice: Choice, delta: Delta) -> None:
        self._collected[choice.index].add(delta)
        if delta.end is not None:
            self._count_end(choice, delta.end)

    def _count_end(self, choice: Choice, end: End) -> None:
        self._num_running -= 1
        self._last_end = end
        if choice.index % self._call.choices_per_prompt == 0:
            # Each prompt counts once; of what is resumed, more than it may be cached.
            self._num_cached += min(end.num_cached_tokens, end.num_prompt_tokens)
        if end.error is not None:
            self._fail(end.error)
        else:
            self._metrics.succeeded(end.reason.value)

    def _usage(self) -> bytes:
        num_completion, prior = self.num_tokens, self._call.prior
        num_reasoning: int | None = None
        if self._call.counts_reasoning:
            num_reasoning = sum(choice.num_reasoning_tokens for choice in self._choices)
            if prior is not None:
                num_reasoning = max(0, num_reasoning - prior.num_reasoning_tokens)
        return usage(
            self._call.num_prompt_tokens,
            num_completion,
            self._num_cached,
            num_reasoning,
            None if prior is None else prior.num_tokens,
        )

    def _tail(self) -> bytes:
        """Return the last events."""
        events: list[bytes] = []
        resumable, error = self._call.resumable, self._error
        is_own = error is None or error.code in OWN_ENDS  # not this answer's alone
        if error is not None:
            self._metrics.failed(error.code or error.kind)
            if self._trail is not None:
                self._trail.failed(error)
            if resumable is not None:
                error = resumable.interruption(error) or error
            events.append(error_event(error.body()))
        elif self._call.include_usage:
            events.append(self._call.shape.usage_chunk(self._usage()))
        events.append(DONE)
        if resumable is not None:
            numbered = resumable.event if is_own else resumable.aside
            events = [numbered(event) for event in events]
        return b"".join(events)

    def _interrupted_whole(self, delta: Delta) -> ApiError:
        """Return the error of an answer that was not streamed: *delta* is all there is."""
        error = self._error or internal_error()
        resumable = self._call.resumable
        if resumable is None or not delta.token_ids:
            return error
        resumable.add(delta.token_ids, delta.logprobs)
        return resumable.interruption(error) or error


class Unread:
    """Where the events go of an answer that nobody reads."""

    is_open = False

    def send(self, data: bytes) -> None:
        """Send nothing."""


async def _others_turn() -> None:
    """Let other streams go on."""
    await asyncio.sleep(0)
