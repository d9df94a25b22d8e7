"""One sequence through its workers: prefill leg, hand-over, decode leg; or one leg.

Laws:
- The sink hears exactly one ``ended``, and nothing after it, unless it left first.
- A generation that was cancelled costs nothing: what runs is cancelled, and KV that a
  prefill worker holds for it is released, also when its answer crosses the cancel.
- A failed worker is replaced, before the first token and after it: the sequence goes on
  at another worker with the prompt and the output so far as its prompt, and the sink
  hears nothing but a pause. Each leg has its own request id, so that what a worker that
  was only frozen still says finds nobody.
- Where no other worker is there, it waits for one, within a bound.

The first token of an unseeded sampled request is drawn on the decode worker. Taking
the prefill worker's draw as an end when it is a stop token, and drawing again when it
is not, would end such outputs too often; where both draws are equal (greedy, seeded),
a stop token ends the request at the prefill worker.
"""

from __future__ import annotations

import itertools
import logging
import time
from typing import Any

from tokenwire.protocol.errors import MessageTooLarge
from tokenwire.protocol.logs import about
from tokenwire.protocol.messages import (
    BY_PAUSE,
    CANCELLED,
    GOES_ON,
    JOURNAL,
    ErrorKind,
    Finished,
    FinishReason,
    JsonObject,
    Leg,
    Recalled,
    Role,
    Tokens,
    Trace,
)
from tokenwire.protocol.tokens import unpack_ids

from . import legs
from .attempts import Attempts
from .checkpoint import Holder
from .continuation import (
    Ended,
    draws_again,
    drifts,
    obstacle,
)
from .errors import ApiError, from_worker
from .handover import Handover
from .job import End, Job, Nobody, Sink
from .kept import History
from .link import Link
from .metrics import Metrics
from .patience import Patience
from .pool import Pool
from .record import discard
from .resume_errors import ended_elsewhere
from .router import Route
from .sequence import Sequence
from .stages import Stage
from .submission import counts
from .trail import CURRENT

__all__ = ["Generation"]

_log = logging.getLogger(__name__)

UNAVAILABLE = 503
"""The status of "no worker": one may come, so a request that was accepted waits."""

NOT_FOUND = 404
"""The status of an adapter that nobody has any more: none comes back by itself."""

_GOOD_ENDS = {FinishReason.STOP, FinishReason.LENGTH}
_numbers = itertools.count(1)


class Generation:
    """One sequence, from routing to its end.

    ``start``, ``told``, ``cancel``, ``drop`` and ``stop_here`` are for the HTTP side, the
    rest for legs.
    """

    def __init__(
        self, job: Job, sink: Sink, pool: Pool, metrics: Metrics, index: int = 0
    ) -> None:
        self.request_id = f"{pool.incarnation}-{next(_numbers):x}"
        self.attempt = 0
        self._job = job
        self._sink: Sink | None = sink
        self._pool = pool
        self._metrics = metrics
        self._sequence = Sequence(job)
        self._record = self._sequence.record
        self._output = self._sequence.output
        self._patience: Patience | None = None  # from its first wait to the next token
        self._failure = (ErrorKind.ENGINE, "")  # why it waits
        self._attempts = Attempts()
        self._paused_at: float | None = None  # when a worker failed under the output
        self._leg: legs.Leg | None = None
        self._handover: Handover | None = None  # while KV is read
        self._decoding = False  # this leg has brought a token of the output
        self._stopped = False  # at a stop string; the worker's end is awaited
        self._is_left = False  # its client is gone, and it goes on
        self._kept_end: Finished | None = None  # that another frontend had waited for
        self._trail = trail = CURRENT.get()
        self.spans = None if trail is None else trail.sequence(index)

    @property
    def new_token_ids(self) -> list[int]:
        """Ids that this generation has brought, (num_new_tokens,)."""
        return self._sequence.new_token_ids

    @property
    def num_new_tokens(self) -> int:
        """How many these are."""
        return self._sequence.num_new

    @property
    def stage(self) -> Stage:
        """What it waits for now. It is found out when somebody asks, and not kept."""
        leg = self._leg
        if leg is None:
            return Stage.STREAMING if self._sink is None else Stage.MOVING
        if isinstance(leg, legs.PrefillLeg):
            return Stage.PREFILL
        if self._decoding:
            return Stage.DECODE
        is_handed_over = self._record.prefill_end is not None
        return Stage.HANDOVER if is_handed_over else Stage.PREFILL

    @property
    def worker_ids(self) -> tuple[str, str]:
        """The workers of its prompt, where another one has that, and of its output."""
        return self._record.worker_ids(
            is_prefilling=isinstance(self._leg, legs.PrefillLeg)
        )

    @property
    def peer(self) -> Link | None:
        """The worker of the output, or of what was last heard of it."""
        route = self._record.route
        return None if route is None else route.decode

    @property
    def num_cached_tokens(self) -> int:
        """Of prompt and earlier output: what was there where the output began."""
        return self._record.num_cached_tokens

    def holder(self, num_tokens: int) -> Holder | None:
        """Return who has computed the first *num_tokens* new ids; None: nobody yet."""
        return self._record.holder(num_tokens)

    def weight_version_of(self, num_tokens: int) -> str | None:
        """Return of which weights the last of *num_tokens* new ids is; None: of none."""
        return self._record.weight_version_of(num_tokens)

    def start(self) -> None:
        """Send the request, or what is left of it, to a worker.

        Raises:
            ApiError: No worker takes it, or it is too large; the sink hears nothing.
        """
        while True:
            self.attempt += 1
            sequence, excluded = self._sequence, self._attempts.excluded
            packed, needs = sequence.packed, sequence.needs()
            begun_at = time.perf_counter()
            route = self._pool.router.route(packed, sequence.chain, excluded, needs)
            self._metrics.routing.observe(time.perf_counter() - begun_at)
            self._record.prefill_end = None
            leg: legs.Leg
            prefill = route.prefill
            if prefill is None:
                leg, kind = legs.OutputLeg(self, route.decode), Leg.FULL
            elif sequence.is_last(prefill, needs):
                # It needs no decode worker: nothing is handed over.
                route = Route(prefill, prefill, num_cached=route.num_cached)
                leg, kind = legs.OutputLeg(self, prefill), Leg.FULL
            else:
                leg, kind = legs.PrefillLeg(self, prefill), Leg.PREFILL
            self._record.route = route
            try:
                self._submit(leg, kind, packed, num_cached=route.num_cached)
            except ConnectionError as error:
                _log.warning(
                    "request %s: %s", self.request_id, error, extra=self._about(leg)
                )
                if self.spans is not None:
                    self.spans.failed(ErrorKind.ENGINE)
                self._attempts.unreachable(leg.link)
                continue
            self._metrics.prompt_placed(route.place)
            return

    def told(self) -> None:
        """Take note that the client has got the end, and what it says was saved."""
        self._record.told()

    def cancel(self) -> None:
        """Forget the sink and stop whatever runs; have deleted what nobody was told of.

        Harmless when all is over and told.
        """
        if self._sink is None:
            self._record.discard()
            return
        self._sink = None
        self.bend()
        self._rest()
        self._metrics.cancelled()
        if self.spans is not None:
            self.spans.left()
        self._record.discard()
        if self._leg is not None:
            self._leg.link.cancel(self._leg.request_id)
            if self._decoding:
                self._sequence.remember(self._leg.link)

    def drop(self) -> None:
        """Forget the sink of what has sent nothing to a worker."""
        self._sink = None

    def leave(self) -> None:
        """Let the sequence go on without its client, who has left.

        Its worker goes on with it and keeps it, so nothing of it stays here. Where that
        worker is yet to be found, it is the first that can; one that cannot is not used.
        """
        if self._sink is None:
            self.told()  # whoever asks for it again is told the end
            return
        leg = self._leg
        is_kept = isinstance(leg, legs.OutputLeg) and leg.link.can(JOURNAL)
        if leg is not None and is_kept:
            self.bend()
            self._leg = self._sink = None
            self._rest()
            self._record.told()
            self._metrics.let_go()
            if self.spans is not None:
                self.spans.left(goes_on=True)
            leg.link.let_go(leg.request_id)
        elif isinstance(leg, legs.OutputLeg):
            self.cancel()
        else:
            self._is_left = True
            self._sink = Nobody()

    def follow(self, link: Link, kept: Recalled, history: History) -> legs.Leg | None:
        """Go on with what *link*'s worker keeps, in place of ``start``.

        Args:
            link: Of the worker.
            kept: All that it has; its request id is that of what will come.
            history: What others had brought before.

        Returns:
            Who hears what comes; None: it has ended, see ``kept_end``.
        """
        self._sequence.follow(link, kept, history)
        self._decoding = bool(kept.num_new_tokens)
        if kept.finished is not None:
            self._sink, self._kept_end = None, kept.finished
            return None
        self._leg = legs.OutputLeg(self, link, kept.request_id)
        return self._leg

    def followed(self) -> None:
        """Take note that a client is told what comes now, behind what was kept."""
        if self.spans is not None and self._leg is not None:
            self.spans.followed(self._leg.link)

    def kept_end(self) -> End | None:
        """Return the end of what is followed, if it had one."""
        finished = self._kept_end
        if finished is None:
            return None
        if _is_good(finished):
            # What it saved is not ours to have deleted: others may have been told of it.
            return self._record.good_end(finished)
        end = self._record.end(FinishReason.ERROR)
        end.error = ended_elsewhere(finished)
        return end

    def stop_here(self) -> End | None:
        """End the sequence from this side, at a stop string; returns its end.

        None: the sink hears it, with what the worker alone knows (``cached_tokens``).
        """
        if self._kept_end is not None:  # then, too, a stop string had ended it
            return self._record.good_end(self._kept_end)
        self.bend()
        if self._leg is not None:
            self._leg.link.cancel(self._leg.request_id)
            if self._record.prefill_end is None:
                self._stopped = True
                return None
            self._sequence.remember(self._leg.link)
        self._wait_ended()
        self._sink = None
        return self._record.good_end(None)

    def straighten(self, way: legs.Way) -> None:
        """Have what the leg brings go *way*, past this and the sink, until ``bend``.

        For its sink, while that takes ids: the leg's first ones have come this way, and
        all that they bring about is done.
        """
        leg, is_over = self._leg, self._sink is None or self._stopped
        if isinstance(leg, legs.OutputLeg) and not is_over:
            way.begin(self._output, leg)
            leg.straighten(way)

    def bend(self) -> None:
        """Have what the leg brings come here again."""
        if self._leg is not None:
            self._leg.bend()

    def prefilled(self, leg: legs.Leg, first: Tokens | None, end: Finished) -> None:
        """Go on after the prefill leg: hand over, or end with its token."""
        sink = self._sink
        self._leg = None
        if sink is None or self._stopped:
            self._release(leg, end)
            discard(leg.link, end)
            self._sink = None
            if sink is not None:
                sink.ended(self._record.good_end(None))
            return
        if _is_paused(end):
            self._release(leg, end)
            self._sink = None
            sink.ended(self._record.good_end(end, leg.link))
            return
        if end.reason not in _GOOD_ENDS:
            self._release(leg, end)
            text = end.error or f"worker {leg.link.worker_id} aborted the request"
            leg.told(end)
            self.leg_failed(leg, end.error_kind or ErrorKind.ENGINE, text)
            return
        self._record.prefilled(
            leg.link, end, is_prompt_alone=not self._sequence.num_new
        )
        self._count_cached(end.num_cached_tokens)
        self._sequence.computed_by(leg.link)
        token_ids = unpack_ids(first.token_ids) if first is not None else []
        is_last = end.reason is FinishReason.STOP
        if (
            token_ids
            and is_last
            and counts(self._job, leg.link, self._sequence.num_tokens)
        ):
            self._release(leg, end)
            self._sink = None
            self._note_weights(leg)
            self._output += first.token_ids if first is not None else b""
            self._first_of_leg(leg, 1, end.num_cached_tokens, handed_over=False)
            logprobs = first.logprobs if first is not None else None
            sink.tokens(token_ids, logprobs, self._record.good_end(end, leg.link))
            return
        if end.handover is None:
            self.leg_failed(
                leg,
                ErrorKind.HANDOVER,
                f"prefill worker {leg.link.worker_id} answered without KV to hand over",
            )
            return
        excluded, needs = self._attempts.excluded, self._sequence.needs()
        packed, chain = self._sequence.packed, self._sequence.chain
        link = self._pool.router.decode_for(leg.link, packed, chain, excluded, needs)
        if link is None:
            self._release(leg, end)
            self._record.prefill_end = None
            self.leg_failed(leg, ErrorKind.DRAINING, "no decode worker is left")
            return
        self._record.route = Route(link, leg.link)
        decode = legs.OutputLeg(self, link)
        try:
            self._submit(decode, Leg.DECODE, packed, end.handover, leg.update)
            flows = self._pool.flows
            if flows is not None:
                flows.was_handed_over(leg.link.worker_id, link.worker_id)
            if self._sink is not None:
                self._handover = Handover(leg.link, self._read_overdue)
        except ConnectionError as error:
            self.leg_failed(decode, ErrorKind.ENGINE, str(error))  # releases the KV
        except ApiError as error:  # the hand-over made the message too large
            self._release(leg, end)
            self._fail(ErrorKind.INVALID, error.message)

    def output(self, leg: legs.Leg, item: Tokens, end: Finished | None) -> None:
        """Pass tokens of the output on."""
        token_ids = unpack_ids(item.token_ids)
        if leg.link.weight_version != self._record.weight_version:
            self._note_weights(leg)
        self._output += item.token_ids
        if item.logprobs is not None and self._job.keeping is not None:
            self._sequence.logprobs.append(item.logprobs)
        if not self._decoding:
            leg.link.began(leg.request_id)
            is_handed_over = self._record.prefill_end is not None
            if not is_handed_over:
                self._count_cached(item.num_cached_tokens)
            self._first_of_leg(
                leg, len(token_ids), item.num_cached_tokens, handed_over=is_handed_over
            )
        sink = None if self._stopped else self._sink
        if end is None:
            if sink is not None:
                sink.tokens(token_ids, item.logprobs, None)
        elif sink is not None and _is_good(end):
            self._leg = self._sink = None
            self._sequence.remember(leg.link)
            sink.tokens(token_ids, item.logprobs, self._record.good_end(end, leg.link))
        else:
            if sink is not None:
                sink.tokens(token_ids, item.logprobs, None)
            self.output_ended(leg, end)

    def output_ended(self, leg: legs.Leg, end: Finished) -> None:
        """Pass the end on, or try another worker."""
        sink = self._sink
        self._leg = None
        self._read_ended()
        if sink is not None and (self._stopped or _is_good(end)):
            self._sink = None
            self._sequence.remember(leg.link)
            sink.ended(self._record.good_end(end, leg.link))
        elif sink is None and end.reason is not FinishReason.ERROR:
            discard(leg.link, end)
        elif end.stop_reason in (CANCELLED, GOES_ON):
            error = ended_elsewhere(end)
            self._fail(ErrorKind.INVALID, error.message, error)
        elif end.reason is FinishReason.ABORT:
            text = f"worker {leg.link.worker_id} aborted the request"
            self.leg_failed(leg, ErrorKind.ENGINE, text)
        else:
            leg.told(end)
            self.leg_failed(leg, end.error_kind or ErrorKind.ENGINE, end.error)

    def leg_failed(self, leg: legs.Leg, kind: ErrorKind, text: str) -> None:
        """Go on at another worker where that may be, else end with an error."""
        self._leg = None
        self._read_ended()
        if self._record.prefill_end is not None and not self._decoding:
            # The decode worker may not have read the KV; a second release is harmless.
            self._release(leg, self._record.prefill_end)
        sink = self._sink
        if sink is None:
            return
        if self._stopped:
            self._sink = None
            sink.ended(self._record.good_end(None))
            return
        self._metrics.leg_failed(kind)
        if self.spans is not None:
            self.spans.failed(kind)
        if self._attempts.failed(kind):
            reason = self._obstacle(leg, kind)
            if not reason:
                how = "is sent again" if leg.again else "goes on elsewhere"
                _log.warning(
                    "request %s: %s: %s",
                    self.request_id,
                    how,
                    text,
                    extra=self._about(leg),
                )
                route, prefillers = self._record.route, self._prefillers
                self._attempts.exclude(leg, kind, route, prefillers)
                if self._output and self._paused_at is None:
                    self._paused_at = time.monotonic()
                self._go_on(kind, text)
                return
            text = f"{text}; it cannot go on elsewhere: {reason}"
        self._fail(kind, text, leg.error)

    def _obstacle(self, leg: legs.Leg, kind: ErrorKind) -> str:
        """Return why the output may not go on elsewhere; empty: it may."""
        reason = obstacle(self._job, self._pool.offers) if self._output else ""
        if kind is ErrorKind.CAPTURE and isinstance(leg, legs.OutputLeg):
            # Its last token was drawn, and came no further than its worker.
            reason = reason or draws_again(self._job, self._sequence.num_tokens)
        return reason

    def _prefillers(self) -> list[Link]:
        return self._pool.usable(Role.PREFILL)

    def _read_overdue(self, reason: str) -> None:
        """Have the prompt computed anew: the source of its KV is lost."""
        leg = self._leg
        if leg is not None:
            leg.drop()
            text = f"worker {leg.link.worker_id} could not read the KV: {reason}"
            self.leg_failed(leg, ErrorKind.HANDOVER, text)

    def _go_on(self, kind: ErrorKind, text: str) -> None:
        """Try another worker, or wait for one; *kind* and *text* say why."""
        ended = self._sequence.ended
        if ended is not None:
            self._end_complete(ended)
            return
        try:
            self.start()
        except ApiError as error:
            self._failure = kind, f"{text}; then {error.message}"
            if error.status == NOT_FOUND:
                self._fail(*self._failure, error)
            elif error.status != UNAVAILABLE:
                self._fail(*self._failure)
            elif kind is ErrorKind.CAPTURE or (
                kind is ErrorKind.BUSY and not self._output
            ):
                self._fail(kind, text)  # waiting in yet another place is no help
            else:
                if self._patience is None:
                    self._patience = Patience(
                        self._pool, self._worker_is_there, self._gave_up
                    )
                self._patience.wait()
            return
        if self._patience is not None:
            self._patience.pause()
        if self._paused_at is not None:
            self._record.moved = True
            route = self._record.route
            is_exact = route is not None and bool(route.decode.exactness)
            is_exact = is_exact or not drifts(self._job.sampling)
            self._metrics.migrated(kind, exact=is_exact)

    def _worker_is_there(self) -> None:
        """Go on after a wait, also at a worker that failed before: it has come back."""
        self._attempts.waited()
        self._go_on(*self._failure)

    def _gave_up(self) -> None:
        self._fail(*self._failure)

    def _fail(self, kind: ErrorKind, text: str, error: ApiError | None = None) -> None:
        """End with an error, *error* if it is given."""
        self._wait_ended()
        sink, self._sink = self._sink, None
        if sink is None:
            return
        self._record.discard()
        if kind is not ErrorKind.INVALID:
            _log.error(
                "request %s failed: %s", self.request_id, text, extra=self._about()
            )
        end = self._record.end(FinishReason.ERROR)
        end.error = error or from_worker(kind, text)
        sink.ended(end)

    def _end_complete(self, ended: Ended) -> None:
        """End an output whose last token came before its worker was lost."""
        sink, self._sink = self._sink, None
        if sink is not None:
            end = self._record.good_end(None)
            end.reason, end.stop_reason = ended.reason, ended.stop_reason
            sink.ended(end)

    # Both know of this, too: kept, they would leave it, and its prompt, to the collector
    # of cycles.

    def _wait_ended(self) -> None:
        patience, self._patience = self._patience, None
        if patience is not None:
            patience.end()

    def _read_ended(self) -> None:
        handover, self._handover = self._handover, None
        if handover is not None:
            handover.end()

    def _rest(self) -> None:
        """Wait for nothing any more."""
        self._wait_ended()
        self._read_ended()

    def _first_of_leg(
        self,
        leg: legs.Leg,
        num_tokens: int,
        num_cached_tokens: int,
        *,
        handed_over: bool,
    ) -> None:
        """Take note that a leg has brought tokens of the output."""
        self._decoding = True
        self._record.computed_by(self._sequence.num_new - num_tokens, leg.link)
        self._attempts.brought_a_token()
        self._rest()
        if self.spans is not None:
            self.spans.first_token(leg.link, num_cached_tokens)
        handover_s = self._record.first_token(
            num_cached_tokens, handed_over=handed_over
        )
        if handover_s is not None:
            self._metrics.handed_over(handover_s)
        if self._paused_at is not None:
            self._metrics.migration_pause.observe(time.monotonic() - self._paused_at)
            self._paused_at = None

    def _count_cached(self, num_cached_tokens: int) -> None:
        """Count what a worker had cached, beside what was expected of it."""
        route = self._record.route
        if route is not None:
            self._metrics.prefix_found(route.num_cached, num_cached_tokens)

    def _note_weights(self, leg: legs.Leg) -> None:
        """Note which weights the next ids are of."""
        self._record.weights(self._sequence.num_new, leg.link.weight_version)

    def _submit(
        self,
        leg: legs.Leg,
        kind: Leg,
        packed: bytes,
        handover: JsonObject | None = None,
        handover_update: int | None = None,
        num_cached: int = 0,
    ) -> None:
        leg.update = leg.link.update_of(self._job.lora)
        trace = self._trace(leg, kind)
        message = self._sequence.submit(
            leg, kind, packed, handover, handover_update, trace
        )
        try:
            leg.link.submit(message, leg, num_cached)
        except MessageTooLarge as error:
            raise ApiError(413, str(error), param="prompt") from error
        self._sequence.sent(leg.link, packed)
        flows = self._pool.flows
        if flows is not None:
            flows.was_sent(leg.link.worker_id)
        self._leg = leg
        self._decoding = False
        if self._is_left and kind is not Leg.PREFILL:
            if message.keep is None:
                self.cancel()
            else:
                self.leave()

    def _trace(self, leg: legs.Leg, kind: Leg) -> Trace | None:
        """Return what a worker is told of the request that this is part of."""
        trail = self._trail
        if trail is None or self.spans is None:
            return None if trail is None else trail.trace
        num_prior = self._sequence.num_tokens
        return self.spans.submitted(
            *(leg.link, kind, self.attempt, leg.request_id, self._record, num_prior),
            response_id=trail.request_id,
        )

    def _about(self, leg: legs.Leg | None = None) -> dict[str, Any]:
        """What is beside a line of the log: whose sequence it is, and which worker."""
        trail = self._trail
        fields = {} if trail is None else dict(trail.about)
        if leg is not None:
            fields["worker"] = leg.link.worker_id
        return about(fields)

    def _release(self, leg: legs.Leg, end: Finished) -> None:
        if end.handover is not None:
            self._metrics.released()
            self._pool.release_kv(leg.request_id, end.handover)


def _is_good(end: Finished) -> bool:
    """Return whether an output is complete, or as complete as the operator wants it."""
    return end.reason in _GOOD_ENDS or _is_paused(end)


def _is_paused(end: Finished) -> bool:
    return end.reason is FinishReason.ABORT and end.stop_reason == BY_PAUSE
