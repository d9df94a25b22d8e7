"""The worker's desk: frontends and their requests on one side, the engine on the other.

Laws:
- Every Submit is answered by exactly one Finished, as long as its frontend is there.
- Nothing more is sent to a frontend that is lost. What it has open is aborted, but for
  what it asked to outlive it (see ``keeper``).
No socket, no clock and no event loop in here: the link, the engine and the timers are
given, and each can be a fake.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import assert_never

import msgspec

from tokenwire.protocol.errors import Incompatible
from tokenwire.protocol.handshake import check_hello
from tokenwire.protocol.limits import MAX_ERROR_CHARS
from tokenwire.protocol.liveness import Liveness
from tokenwire.protocol.messages import (
    Admin,
    Bye,
    Cancel,
    Card,
    Discard,
    EngineDead,
    Finished,
    FromFrontend,
    Hello,
    Leg,
    LetGo,
    Load,
    Ping,
    Recall,
    Refused,
    ReleaseKV,
    ScrapeMetrics,
    Settled,
    Submit,
    Tokens,
    Told,
    WatchKV,
)
from tokenwire.protocol.tokens import pack_ids, unpack_ids
from tokenwire.protocol.tracing import Tracing
from tokenwire.worker.captures import Captures
from tokenwire.worker.engine import Engine, EngineFinished, EngineRequest, EngineTokens
from tokenwire.worker.kv_blocks import CachedBlocks

from .admission import Admission, Bounds
from .delivery import Delivery, Sender
from .exposition import Exposition
from .frontends import EndedBy, Frontend, Request, refused_end
from .interventions import Interventions
from .journal import Journal
from .keeper import Keeper, is_same
from .kv_watch import KVWatch
from .metrics import Metrics
from .orphans import Orphans
from .requests import Requests
from .scrapes import Scrapes
from .spans import begun
from .timers import Timers
from .untold import Untold

__all__ = ["Bounds", "Sender", "Service"]

logger = logging.getLogger(__name__)

MAX_FRONTENDS = 1_024
"""Far above any deployment's; each costs a Load message a second."""


class Service:
    """Takes messages (a link's ``Receiver``) and outputs (an ``EngineSink``)."""

    def __init__(
        self,
        *,
        card: Card,
        engine: Engine,
        sender: Sender,
        timers: Timers,
        metrics: Metrics,
        bounds: Bounds,
        exposition: Exposition | None = None,
        captures: Captures | None = None,
        journal: Journal | None = None,
        blocks: CachedBlocks | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._card = card
        self._tracing = tracing
        self._engine = engine
        self._timers = timers
        self._metrics = metrics
        metrics.serves(card)
        self._bounds = bounds
        self._captures = captures
        self._admission = Admission(card, bounds)
        self._frontends: dict[bytes, Frontend] = {}
        self._orphans = Orphans()
        self._untold = Untold(captures)
        self._num_submits = 0
        self._sender = sender
        self._delivery = Delivery(sender, timers, metrics, self._lose)
        self._blocks = CachedBlocks() if blocks is None else blocks
        self._kv_watch = KVWatch(self._blocks, self._delivery, timers)
        self._scrapes = Scrapes(exposition, self._delivery, timers)
        self._requests = Requests(
            engine, self._admission, timers, metrics, lambda: self.on_change()
        )
        self._interventions = Interventions(
            card, engine, self._requests, self._frontends, self._delivery
        )
        self._keeper = Keeper(
            Journal(0, 0.0) if journal is None else journal,
            self._requests,
            self._delivery,
            timers,
            metrics,
            self._interventions.weight_version,
        )
        self.dead_reason: str | None = None
        self.on_change: Callable[[], None] = _nothing
        """Called when the engine has died, and when a drained worker is empty."""

    @property
    def num_requests(self) -> int:
        """Submits without a Finished."""
        return len(self._requests)

    # -- from the frontends ---------------------------------------------------------

    def received(self, identity: bytes, message: FromFrontend) -> None:
        """Take a message of the peer *identity*.

        Raises:
            SequenceError: Messages before it are missing, or it is not in its place.
        """
        if isinstance(message, Hello):
            self._hello(identity, message)
            return
        frontend = self._frontends.get(identity)
        if frontend is None:
            if isinstance(message, Bye):  # it was lost before
                self._keeper.given_up(lambda one: one.identity == identity)
            else:
                self._sender.send(identity, Refused("say hello first"))
            return
        frontend.liveness.heard(self._timers.time())
        frontend.incoming.check(message)
        match message:
            case Submit():
                self._submit(frontend, message)
            case Cancel():
                request = frontend.requests.get(message.request_id)
                if request is not None:
                    self._requests.cancel(request)
            case LetGo():
                request = frontend.requests.get(message.request_id)
                if request is not None:
                    self._keeper.let_go(request)
            case Recall():
                self._keeper.recall(frontend, message)
            case ReleaseKV():
                self._metrics.kv_released()
                self._engine.release_kv(message.request_id, message.handover)
            case Settled():
                self._orphans.settled(frontend, message.request_id)
            case ScrapeMetrics():
                self._scrapes.answer(frontend)
            case Discard():
                self._untold.discard(frontend, message.hidden_states_path)
            case Told():
                self._untold.told(frontend, message.hidden_states_path)
            case WatchKV():
                self._kv_watch.watch(frontend)
            case Admin():
                self._interventions.begin(frontend, message)
            case Ping():
                pass  # it has been heard
            case Bye():
                why = message.reason or "it said bye"
                self._lose(frontend, why, has_given_up=True)
            case _:
                assert_never(message)

    def broken(self, identity: bytes, reason: str) -> None:
        """Take note that a peer broke the protocol: it is as lost."""
        self._metrics.protocol_broken()
        frontend = self._frontends.get(identity)
        if frontend is not None:
            self._lose(frontend, reason)

    def expelled(self, identity: bytes, reason: str) -> None:
        """Take note that a peer is no longer allowed: it is as lost."""
        frontend = self._frontends.get(identity)
        if frontend is not None:
            self._lose(frontend, reason)

    def _hello(self, identity: bytes, hello: Hello) -> None:
        try:
            check_hello(hello)
        except Incompatible as error:
            self._sender.send(identity, Refused(str(error)))
            return
        self._lose_earlier(identity, hello)
        self._keeper.given_up(lambda one: is_same(one.hello, hello))
        if len(self._frontends) >= MAX_FRONTENDS:
            reason = f"this worker has {MAX_FRONTENDS} frontends, its limit"
            self._sender.send(identity, Refused(reason))
            return
        liveness = Liveness(
            self._timers.time(),
            self._bounds.heartbeat_interval_s,
            self._bounds.heartbeat_timeout_s,
        )
        frontend = Frontend(identity, hello, liveness)
        self._frontends[identity] = frontend
        logger.info("frontend %s is here", hello.frontend_id)
        self._delivery.send(frontend, self._card)
        self._interventions.send_status(frontend)
        self._delivery.send(frontend, self._load())

    def _lose_earlier(self, identity: bytes, hello: Hello) -> None:
        """Forget the connection that a link gave up for the one it says hello on.

        What it sent before may only just have been read, if this worker was frozen, and
        would keep its requests for another heartbeat timeout.
        """
        for earlier in list(self._frontends.values()):
            if earlier.identity == identity or earlier.hello == hello:
                has_given_up = is_same(earlier.hello, hello)
                self._lose(earlier, "it has begun anew", has_given_up=has_given_up)

    def _submit(self, frontend: Frontend, submit: Submit) -> None:
        is_open = submit.request_id in frontend.requests
        refusal = self._admission.refusal(
            submit,
            is_open=is_open,
            update=self._interventions.update_of(submit.lora),
            fault=self._interventions.fault,
        )
        if refusal is not None:
            self._metrics.failed(refusal.kind)
            self._delivery.finished(frontend, refused_end(submit, refusal))
            return
        self._num_submits += 1
        engine_id = f"{self._card.incarnation}-{self._num_submits}"
        keep = submit.keep
        if keep is not None:  # it is large, and the journal's
            submit = msgspec.structs.replace(submit, keep=None)
        request = Request(frontend, submit, engine_id, self._timers.time())
        request.spans, trace = begun(self._tracing, submit, engine_id, self._card)
        self._requests.add(request)
        if keep is not None:
            self._keeper.begin(request, keep)
        self._engine.submit(
            EngineRequest(
                request_id=engine_id,
                token_ids=unpack_ids(submit.token_ids),
                sampling=submit.sampling,
                leg=submit.leg,
                handover=submit.handover,
                kv_transfer_params=submit.kv_transfer_params,
                priority=submit.priority,
                cache_salt=submit.cache_salt,
                reasoning_ended=submit.reasoning_ended,
                reasoning_parser_kwargs=submit.reasoning_parser_kwargs,
                capture_tokens=submit.capture_tokens,
                lora=submit.lora,
                num_prior=submit.num_prior,
                trace=trace,
            )
        )

    def _lose(
        self, frontend: Frontend, why: str, *, has_given_up: bool = False
    ) -> None:
        """Forget a frontend, and abort what it has open and what does not outlive it.

        Args:
            frontend: Who is gone.
            why: Told the operator.
            has_given_up: It is alive, and has sent elsewhere what it had here.
        """
        self._frontends.pop(frontend.identity, None)
        frontend.is_lost = True
        self._kv_watch.lost(frontend)
        logger.info("frontend %s is gone: %s", frontend.hello.frontend_id, why)
        self._keeper.lose(frontend, has_given_up=has_given_up)
        self._metrics.orphaned(self._orphans.lost(frontend, self._timers.time()))
        self._untold.lost(frontend)

    # -- from the engine ------------------------------------------------------------

    def outputs(
        self, tokens: list[EngineTokens], finished: list[EngineFinished]
    ) -> None:
        """Take what one step brought."""
        requests, deliver = self._requests.by_engine_id, self._delivery.tokens
        keep = self._keeper.tokens
        num_tokens = 0
        for new in tokens:
            request = requests.get(new.request_id)
            if request is None or request.ended_by is EndedBy.OLD_KV:
                continue  # its frontend is gone; or it will compute them anew
            exchange = request.exchange
            if not exchange.num_tokens:
                self._first_token(request)
            item = Tokens(
                request.request_id,
                exchange.num_tokens,
                pack_ids(new.token_ids),
                new.logprobs,
                new.num_cached_tokens,
            )
            exchange.tokens(item)
            num_tokens += len(new.token_ids)
            entry = request.entry
            if entry is None or keep(request, entry, item):
                deliver(request.frontend, item)
        if num_tokens:
            self._metrics.generated(num_tokens)
        for end in finished:
            request = requests.get(end.request_id)
            if request is None or request.ended_by is EndedBy.OLD_KV:
                self._untold.undelivered(end)
            if request is not None:
                self._answer(request, request.end(end))
            elif end.handover is not None:
                self._metrics.orphaned(1)
                now = self._timers.time()
                self._orphans.undelivered(end.request_id, end.handover, now)

    def died(self, reason: str) -> None:
        """End what is still open, tell every frontend, and note the reason."""
        self.dead_reason = reason[:MAX_ERROR_CHARS]
        self._admission.is_draining = True
        for request in self._requests:
            self._answer(request, request.dead_end(reason))
        self.flush()
        for frontend in list(self._frontends.values()):
            self._delivery.send(frontend, EngineDead(self.dead_reason))
        self.on_change()

    def _first_token(self, request: Request) -> None:
        self._requests.begun(request)
        if request.spans is not None:
            request.spans.first_token()
        seconds = self._timers.time() - request.submitted_at
        of_handover = request.submit.leg is Leg.DECODE
        self._metrics.first_token(seconds, of_handover=of_handover)

    def _answer(self, request: Request, end: Finished) -> None:
        request.exchange.finished(end)
        self._requests.forget(request)
        if request.spans is not None:
            request.spans.ended(end)
        if request.entry is not None:
            self._keeper.ended(request, request.entry, end)
        if end.handover is not None:
            self._orphans.given(request, end.handover, self._timers.time())
        self._metrics.finished(end, self._timers.time() - request.submitted_at)
        if request.is_followed:
            self._untold.given(request.frontend, end, self._timers.time())
            self._delivery.finished(request.frontend, end)

    def flush(self) -> None:
        """Send what is collected."""
        self._delivery.flush()

    # -- by the clock ---------------------------------------------------------------

    def tick(self) -> None:
        """Look at the clock; several times per heartbeat interval."""
        now = self._timers.time()
        for frontend in list(self._frontends.values()):
            if frontend.liveness.slept(now):
                continue  # this process was stopped: what it was sent is not read yet
            if frontend.liveness.lost(now):
                silence_s = frontend.liveness.silence_s(now)
                self._lose(frontend, f"nothing heard for {silence_s:.1f} s")
            elif frontend.liveness.beat_due(now):
                self._delivery.send(frontend, self._load())
        for frontend, orphan in list(
            self._orphans.offers(self._frontends.values(), now)
        ):
            self._delivery.send(frontend, orphan)
        for request in self._requests.overdue(now):
            self._answer(request, request.given_up_end())
        self._keeper.tick()
        self._metrics.engine_load(
            self._engine.load(), self.num_requests, len(self._frontends)
        )
        if self._captures is not None:
            self._metrics.captured(self._captures.usage, len(self._untold))
        self._metrics.blocks(self._blocks.usage)

    def _load(self) -> Load:
        load = self._engine.load()
        return Load(
            incarnation=self._card.incarnation,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            kv_usage=load.kv_usage,
            num_waiting_tokens=self._admission.num_queued_tokens,
            draining=self._admission.is_draining,
            num_requests=self.num_requests,
            num_steps=load.num_steps,
            num_frontends=len(self._frontends),
        )

    # -- the end --------------------------------------------------------------------

    def drain(self) -> None:
        """Take nothing new from now on, and say so."""
        self._admission.is_draining = True
        for frontend in list(self._frontends.values()):
            self._delivery.send(frontend, self._load())

    def evict_all(self) -> None:
        """Cancel every open request: each ends as ``draining``, and goes on elsewhere."""
        self._requests.evict_all()

    def end_all(self) -> None:
        """End what is open although the engine has not; the worker is leaving."""
        for request in self._requests:
            self._answer(request, request.evicted_end())
        self.flush()


def _nothing() -> None:
    """Do nothing."""
