"""One choice of a response: tokens come in, deltas of text and ids go out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tokenwire.protocol.messages import FinishReason, Logprobs, Recalled

from .continuation import ends_at
from .detokenize import ByteDetokenizer
from .fold import Fold
from .generation import Generation
from .job import End, Job
from .kept import History
from .legs import Leg
from .link import Link
from .message import MessagePart, merged
from .metrics import Metrics
from .pace import Pace
from .plain import Around, PlainWay
from .pool import Pool
from .rows import joined, rows
from .sse import EventStream

__all__ = ["Choice", "Collected", "Delta"]

OUR_FAULT = 500
"""The status from which on an error is not the client's."""

SLICE_TOKENS = 64
"""Of a resumable choice, delivered without a pause: a parser takes up to 0.3 ms for one,
and other streams wait meanwhile."""

SLICE_ROWS = 16
"""The same of tokens with logprobs, whose texts and numbers take up to 0.8 ms for one."""


@dataclass(slots=True)
class Delta:
    """What one chunk adds to one choice."""

    text: str
    token_ids: list[int]  # (num_new_tokens,)
    logprobs: Logprobs | None
    end: End | None
    parsed: MessagePart | None = None  # what a parser made of the text, in its place


@dataclass(slots=True)
class Collected:
    """What one choice has brought in many deltas, put together at once."""

    texts: list[str] = field(default_factory=list[str])
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[Logprobs] = field(default_factory=list[Logprobs])
    parsed: list[MessagePart] = field(default_factory=list[MessagePart])
    end: End | None = None

    def add(self, delta: Delta) -> None:
        """Take the next delta; the price is that of the delta alone."""
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs.append(delta.logprobs)
        if delta.parsed is not None:
            self.parsed.append(delta.parsed)
        if delta.end is not None:
            self.end = delta.end

    def whole(self) -> Delta:
        """Return all of it as one delta."""
        return Delta(
            "".join(self.texts),
            self.token_ids,
            joined(self.logprobs),
            self.end,
            merged(self.parsed) if self.parsed else None,
        )


class Choice:
    """The sink of one generation.

    It begins held, and is held again while its client reads too slowly: tokens then
    pile up here, bounded by the request's ``max_tokens``, and come out by ``release``.

    Args:
        arrived_at: When its request came, by *clock*; None: now.
    """

    __slots__ = (
        "_broke",
        "_clock",
        "_deliver",
        "_end",
        "_feed_one",
        "_fold",
        "_held",
        "_is_followed",
        "_job",
        "_logprobs",
        "_metrics",
        "_on_end",
        "_pace",
        "_prompt_only",
        "_resumable",
        "_token_ids",
        "_way",
        "deliver_plain",
        "generation",
        "index",
    )

    def __init__(
        self,
        index: int,
        job: Job,
        fold: Fold,
        *,
        pool: Pool,
        metrics: Metrics,
        clock: Callable[[], float],
        deliver: Callable[[Choice, Delta], None],
        on_end: Callable[[End], None],
        broke: Callable[[Exception], None],
        resumable: bool = False,
        arrived_at: float | None = None,
    ) -> None:
        self.index = index
        self.generation = Generation(job, self, pool, metrics, index)
        self.deliver_plain: Callable[[Choice, str, list[int]], None] | None = None
        """A short way for text and ids alone; not for choices with stop strings."""
        self._pace = Pace(metrics, clock)
        if arrived_at is not None:
            self._pace.started_at = arrived_at
        self._way: PlainWay | None = None
        """The shortest, which is its pace then: past the choice, for one id at a time."""
        self._fold = fold
        self._feed_one = fold.feed_one
        self._job = job
        self._prompt_only = job.prompt_only
        self._resumable = resumable  # after an error it goes on, maybe elsewhere
        self._deliver = deliver
        self._broke = broke  # told of a bug: no end may come
        self._on_end = on_end  # told at once, also while deltas are held
        self._metrics = metrics
        self._clock = clock
        self._held = True
        self._token_ids: list[int] = []
        self._logprobs: list[Logprobs] = []
        self._end: End | None = None
        self._is_followed = False  # another frontend had begun it

    def tokens(
        self, token_ids: list[int], logprobs: Logprobs | None, end: End | None
    ) -> None:
        """Take new ids, and the end if it is known with them."""
        try:
            self._pace.tick()
            if end is not None:
                self._ended(end)
            if not self._held:
                plain = self.deliver_plain
                if plain is not None and end is None and logprobs is None:
                    num_tokens = len(token_ids)
                    self._pace.num_tokens += num_tokens
                    if num_tokens > 1:
                        plain(self, self._fold.feed(token_ids)[0], token_ids)
                    else:
                        plain(self, self._feed_one(token_ids[0]), token_ids)
                    if self._way is not None:
                        self.generation.straighten(self._way)
                else:
                    self._emit(token_ids, logprobs, end)
                return
            self._token_ids += token_ids
            if logprobs is not None:
                self._logprobs.append(logprobs)
            self._end = end
            self._deliver(self, NOTHING)
        except Exception as error:  # noqa: BLE001 - the others in its batch go on
            self._broke(error)

    def ended(self, end: End) -> None:
        """Take an end that came alone."""
        try:
            self._ended(end)
            if end.error is not None and end.error.status >= OUR_FAULT:
                self._metrics.ended_badly()
            if not self._held:
                self._emit([], None, end)
                return
            self._end = end
            self._deliver(self, NOTHING)
        except Exception as error:  # noqa: BLE001 - as above
            self._broke(error)

    def _ended(self, end: End) -> None:
        if self._fold.matched is not None and end.error is None:
            end.reason = FinishReason.STOP  # its worker calls that an abort
        spans = self.generation.spans
        if spans is not None:
            spans.ended(end)
        self._on_end(end)

    def _stopped(self, end: End | None) -> End | None:
        """Return the end of an output in which a stop string was found; None: it comes.

        Args:
            end: What is known of it already.
        """
        if end is not None and end.error is None:
            return end
        here = self.generation.stop_here()
        if here is not None and end is None:
            self._ended(here)
        return here

    def end_before(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        """End without asking a worker: there is nothing to add to earlier output."""
        end = self.generation.stop_here()
        if end is not None:
            end.reason, end.stop_reason = reason, stop_reason
            self.ended(end)

    def follow(self, link: Link, kept: Recalled, history: History) -> Leg | None:
        """Go on with what a worker keeps, and hold it; in place of ``generation.start``.

        Args:
            link: That worker's.
            kept: What it has.
            history: What others had brought before.

        Returns:
            Who hears what comes; None: it has ended.
        """
        leg = self.generation.follow(link, kept, history)
        self._token_ids = self.generation.new_token_ids
        self._logprobs = [] if kept.logprobs is None else [kept.logprobs]
        self._end = self.generation.kept_end()
        self._is_followed = True
        self._pace.last_at = self._clock()
        return leg

    def held(self, num_tokens: int) -> tuple[list[int], Logprobs | None]:
        """Return the first ids that are held, and their logprobs."""
        logprobs = joined(self._logprobs)
        if logprobs is not None:
            logprobs = rows(logprobs, 0, num_tokens)
        return self._token_ids[:num_tokens], logprobs

    @property
    def plain(self) -> bool:
        """Whether tokens always become text as they are: ``deliver_plain`` may be set."""
        fold = self._fold
        return not (fold.has_stop or fold.parses or self._prompt_only)

    @property
    def num_tokens(self) -> int:
        """Ids delivered; equals ``usage.completion_tokens`` at the end."""
        return self._pace.num_tokens

    @property
    def parses_ahead(self) -> bool:
        """Whether what comes is parsed, and delivered, also while its client is slow."""
        return self._fold.parses and not self._resumable

    @property
    def num_reasoning_tokens(self) -> int:
        """Ids delivered that are reasoning; 0 where nobody can tell."""
        return self._fold.num_reasoning_tokens

    @property
    def waiting(self) -> tuple[int, End | None]:
        """How many ids are held, and the end if it has come."""
        return len(self._token_ids), self._end

    def straighten(self, around: Around | None, stream: EventStream) -> None:
        """Let single ids go straight to their events, behind the next that comes here.

        Args:
            around: Of its events; None: they say more, and it does nothing.
            stream: Where they go.
        """
        detokenizer = self._fold.detokenizer
        if around is not None and isinstance(detokenizer, ByteDetokenizer):
            way = PlainWay(self._pace, around, detokenizer, stream, self._broke)
            self._pace = self._way = way

    def bend(self) -> None:
        """Let nothing go straight any more."""
        self._way = None
        self.generation.bend()

    def hold(self) -> None:
        """Keep what comes until ``release``."""
        self._held = True
        self.generation.bend()

    def release(self) -> bool:
        """Deliver what was held, as one delta, and go on.

        Returns False if not all of it is out: that of a resumable choice, whose deltas
        are of one id each, leaves in slices. It is still held then, to be released again.
        """
        if not self._held:
            return True
        self._held = False
        token_ids, self._token_ids = self._token_ids, []
        logprobs, self._logprobs = joined(self._logprobs), []
        end, self._end = self._end, None
        if token_ids or end is not None:
            self._emit(token_ids, logprobs, end)
        return not self._held

    def _emit(
        self, token_ids: list[int], logprobs: Logprobs | None, end: End | None
    ) -> None:
        """Deliver ids, and the end if it is known."""
        if self._resumable:
            self._emit_singly(token_ids, logprobs, end)
        else:
            self._emit_at_once(token_ids, logprobs, end)

    def _emit_singly(
        self, token_ids: list[int], logprobs: Logprobs | None, end: End | None
    ) -> None:
        """Deliver each id as a delta, then the end alone.

        So the deltas of an output are the same whenever they are told, and however its
        worker, or a slow client, batched it.
        """
        fold = self._fold
        most = SLICE_TOKENS if logprobs is None else SLICE_ROWS
        for number, token_id in enumerate(token_ids):
            if self._held or number == most:
                self._held = True
                self._token_ids = token_ids[number:]
                if logprobs is not None:
                    self._logprobs = [rows(logprobs, number, len(token_ids))]
                self._end = end
                return
            text, _ = fold.feed((token_id,), stopped=self._stops(token_id))
            row = logprobs and rows(logprobs, number, number + 1)
            self._pace.num_tokens += 1
            self._deliver(self, Delta(text, [token_id], row, None, fold.take()))
            if fold.matched is not None:
                end = self._stopped(end)
                break
        if end is None:
            return
        if self._held:
            self._end = end
            return
        text = (
            "" if end.error is not None or fold.matched is not None else fold.finish()
        )
        self._tell_end(text, [], None, end)

    def _stops(self, token_id: int) -> bool:
        """Return whether the next id ends the output; its worker may be lost then."""
        job = self._job
        num_tokens = len(job.output_token_ids) + self.num_tokens + 1
        return ends_at(job.sampling, token_id, num_tokens, job.end_ids)

    def _emit_at_once(
        self, token_ids: list[int], logprobs: Logprobs | None, end: End | None
    ) -> None:
        if self._prompt_only:
            token_ids, logprobs = [], None
            if end is not None and end.error is None:
                end.reason = FinishReason.LENGTH
        # With its end a worker sends the last ids, so the stop token is among them.
        stopped = end is not None and end.by_token
        text, used = self._fold.feed(token_ids, stopped=stopped)
        if self._fold.matched is not None:
            if used < len(token_ids):
                token_ids = token_ids[:used]
                logprobs = logprobs and rows(logprobs, 0, used)
            end = self._stopped(end)
        elif end is not None:
            text += self._fold.finish()
        self._pace.num_tokens += len(token_ids)
        if end is not None:
            self._tell_end(text, token_ids, logprobs, end)
        else:
            parsed = self._fold.take()
            self._deliver(self, Delta(text, token_ids, logprobs, None, parsed))

    def _tell_end(
        self, text: str, token_ids: list[int], logprobs: Logprobs | None, end: End
    ) -> None:
        """Deliver the last delta, with what the fold knows of the end."""
        matched = self._fold.matched
        if matched is not None:
            end.reason, end.stop_reason = FinishReason.STOP, matched
        end.cut(self.num_tokens)
        if not self._is_followed:  # it did not begin here
            pace = self._pace
            latency_s = self._clock() - pace.started_at
            self._metrics.e2e_request_latency.observe(latency_s)
            if end.error is None:
                self._metrics.ended_well(
                    pace.first_at - pace.started_at,
                    pace.last_at - pace.first_at,
                    pace.num_tokens,
                )
        end.called_tools = end.reason is FinishReason.STOP and self._fold.called_tools
        parsed = self._fold.take()
        self._deliver(self, Delta(text, token_ids, logprobs, end, parsed))


NOTHING = Delta("", [], None, None)
"""Delivered while a choice is held: something waits in it."""
