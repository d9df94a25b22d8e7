"""The worker's desk: frontends and their requests on one side, the engine on the other.

Laws:
- Every Submit is answered by exactly one Finished, as long as its frontend is there.
- What a frontend that is lost has open is aborted, and nothing more is sent to it.
No socket, no clock and no event loop in here: the link, the engine and the timers are
given, and each can be a fake.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import assert_never

from tokenwire.protocol.errors import Incompatible, ProtocolError
from tokenwire.protocol.handshake import check_hello
from tokenwire.protocol.limits import MAX_ERROR_CHARS
from tokenwire.protocol.liveness import Liveness
from tokenwire.protocol.messages import (
    STATUS,
    Admin,
    AdminDone,
    Bye,
    Cancel,
    Card,
    Discard,
    EngineDead,
    ErrorKind,
    Finished,
    FinishReason,
    FromFrontend,
    Hello,
    Leg,
    LetGo,
    Load,
    MetricsText,
    Ping,
    Recall,
    Recalled,
    Refused,
    ReleaseKV,
    ScrapeMetrics,
    Settled,
    Submit,
    Tokens,
    Told,
)
from tokenwire.protocol.tokens import TOKEN_BYTES, pack_ids, unpack_ids
from tokenwire.worker.captures import Captures
from tokenwire.worker.engine import Engine, EngineFinished, EngineRequest, EngineTokens

from .administration import Administration
from .admission import Admission, Bounds, Refusal
from .delivery import Delivery, Sender
from .exposition import Exposition
from .frontends import EndedBy, Frontend, Request
from .metrics import Metrics
from .orphans import Orphans
from .timers import Timers
from .untold import Untold

__all__ = ["Bounds", "Sender", "Service"]

logger = logging.getLogger(__name__)

MAX_FRONTENDS = 1_024
"""Far above any deployment's; each costs a Load message a second."""

ABORT_GRACE_S = 15.0
"""An engine that has not ended a cancelled request by then never will: the Finished is
made up. Longer than the simulated engine's longest read of KV, and NIXL's usual ones."""


MIN_SCRAPE_S = 0.5
"""A frontend that asks for metrics more often is not answered: its question is a few
bytes, the answer some 60 KB. Frontends of this release leave 1 s between two."""


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
    ) -> None:
        self._card = card
        self._engine = engine
        self._timers = timers
        self._metrics = metrics
        self._bounds = bounds
        self._exposition = exposition  # with the capability METRICS
        self._captures = captures
        self._admission = Admission(card, bounds)
        self._frontends: dict[bytes, Frontend] = {}
        self._requests: dict[str, Request] = {}  # by the engine's id
        self._aborting: dict[str, float] = {}  # engine id -> when to give up, ascending
        self._orphans = Orphans()
        self._untold = Untold(captures)
        self._num_submits = 0
        self._sender = sender
        self._delivery = Delivery(sender, timers, metrics, self._lose)
        self._administration = Administration(
            engine, self, model=card.model, weight_version=card.weight_version
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
            if not isinstance(message, Bye):
                self._sender.send(identity, Refused("say hello first"))
            return
        frontend.liveness.heard(self._timers.time())
        frontend.incoming.check(message)
        match message:
            case Submit():
                self._submit(frontend, message)
            case Cancel() | LetGo():
                request = frontend.requests.get(message.request_id)
                if request is not None:
                    self._cancel(request)
            case ReleaseKV():
                self._metrics.kv_released()
                self._engine.release_kv(message.request_id, message.handover)
            case Settled():
                self._orphans.settled(frontend, message.request_id)
            case ScrapeMetrics():
                self._tell_metrics(frontend)
            case Discard():
                self._untold.discard(frontend, message.hidden_states_path)
            case Told():
                self._untold.told(frontend, message.hidden_states_path)
            case Admin():
                self._administration.begin(message, partial(self._admin_done, frontend))
            case Recall():
                answer = Recalled(message.request_id, "unknown")
                self._delivery.send(frontend, answer)
            case Ping():
                pass  # it has been heard
            case Bye():
                self._lose(frontend, message.reason or "it said bye")
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
        self._send_status(frontend)
        self._delivery.send(frontend, self._load())

    def _lose_earlier(self, identity: bytes, hello: Hello) -> None:
        """Forget the connection that a link gave up for the one it says hello on.

        What it sent before may only just have been read, if this worker was frozen, and
        would keep its requests for another heartbeat timeout.
        """
        for earlier in list(self._frontends.values()):
            if earlier.identity == identity or earlier.hello == hello:
                self._lose(earlier, "it has begun anew")

    def _submit(self, frontend: Frontend, submit: Submit) -> None:
        is_open = submit.request_id in frontend.requests
        refusal = self._admission.refusal(
            submit,
            is_open=is_open,
            update=self._administration.update_of(submit.lora),
            fault=self._administration.status.fault,
        )
        if refusal is not None:
            self._refuse(frontend, submit, refusal)
            return
        self._num_submits += 1
        engine_id = f"{self._card.incarnation}-{self._num_submits}"
        request = Request(frontend, submit, engine_id, self._timers.time())
        frontend.requests[submit.request_id] = request
        self._requests[engine_id] = request
        self._admission.num_requests += 1
        self._admission.num_queued_tokens += request.num_queued_tokens
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
            )
        )

    def _tell_metrics(self, frontend: Frontend) -> None:
        now = self._timers.time()
        if now - frontend.scraped_at < MIN_SCRAPE_S:
            return
        frontend.scraped_at = now

        def tell(text: str) -> None:
            self._delivery.send(frontend, MetricsText(text))

        if self._exposition is None:
            tell("")
        else:
            self._exposition.ask(frontend.identity, tell)

    def _refuse(self, frontend: Frontend, submit: Submit, refusal: Refusal) -> None:
        """Answer a Submit that never becomes a request."""
        num_prompt = len(submit.token_ids) // TOKEN_BYTES
        if 0 <= submit.num_prior <= num_prompt:
            num_prompt -= submit.num_prior
        prompt = submit.token_ids[: num_prompt * TOKEN_BYTES]
        end = Finished(
            request_id=submit.request_id,
            reason=FinishReason.ERROR,
            num_output_tokens=0,
            num_prompt_tokens=num_prompt,
            error_kind=refusal.kind,
            error=refusal.error,
            prompt_token_ids=prompt if submit.echo_prompt else None,
        )
        self._metrics.failed(refusal.kind)
        self._delivery.finished(frontend, end)

    def _cancel(self, request: Request) -> None:
        if request.engine_id not in self._aborting:
            self._aborting[request.engine_id] = self._timers.time() + ABORT_GRACE_S
            self._metrics.cancelled()
            self._engine.abort(request.engine_id)

    def _lose(self, frontend: Frontend, why: str) -> None:
        """Forget a frontend, and abort what it has open."""
        self._frontends.pop(frontend.identity, None)
        frontend.is_lost = True
        logger.info("frontend %s is gone: %s", frontend.hello.frontend_id, why)
        requests = list(frontend.requests.values())
        for request in requests:
            self._forget(request)
        if requests:
            self._metrics.cancelled(len(requests))
        for request in requests:
            self._engine.abort(request.engine_id)
        self._metrics.orphaned(self._orphans.lost(frontend, self._timers.time()))
        self._untold.lost(frontend)
        self._tell_if_idle()

    # -- what Admins do (an ``administration.Owner``) --------------------------------

    def status_changed(self) -> None:
        """Tell the frontends, behind all that came before."""
        self.flush()
        for frontend in list(self._frontends.values()):
            self._send_status(frontend)

    def abort_all(self) -> None:
        """End what runs, on purpose: what an output has by now is the answer."""
        self._end_by_admin(EndedBy.PAUSE, list(self._requests.values()))

    def kv_is_old(self, concerns: Callable[[Submit], bool]) -> None:
        """Have sent again what may use KV of before now, and has brought nothing.

        vLLM decides when a request is added which blocks it will find. What waits there
        would find those that running requests keep.
        """
        self._end_by_admin(
            EndedBy.OLD_KV,
            [
                request
                for request in self._requests.values()
                if not request.exchange.num_tokens and concerns(request.submit)
            ],
        )

    def adapter_leaves(self, lora: str) -> None:
        """End what runs on it: a step of such a request would load it again."""
        requests = self._requests.values()
        self._end_by_admin(
            EndedBy.UNLOAD, [one for one in requests if one.submit.lora == lora]
        )

    def give_up_all(self) -> None:
        """Let what runs go on elsewhere."""
        self.evict_all()

    def _end_by_admin(self, why: EndedBy, requests: list[Request]) -> None:
        for request in requests:
            if request.engine_id not in self._aborting:
                request.ended_by = why
                self._cancel(request)

    def _send_status(self, frontend: Frontend) -> None:
        if STATUS in frontend.hello.capabilities:
            self._delivery.send(frontend, self._administration.status)

    def _admin_done(self, frontend: Frontend, done: AdminDone) -> None:
        try:
            self._delivery.send(frontend, done)
        except ProtocolError as error:  # a result that no message can carry
            text = f"it is done, but its result cannot be sent: {error}"
            instead = AdminDone(done.request_id, text[:MAX_ERROR_CHARS], "failed")
            self._delivery.send(frontend, instead)

    # -- from the engine ------------------------------------------------------------

    def outputs(
        self, tokens: list[EngineTokens], finished: list[EngineFinished]
    ) -> None:
        """Take what one step brought."""
        requests, deliver = self._requests, self._delivery.tokens
        num_tokens = 0
        for new in tokens:
            request = requests.get(new.request_id)
            if request is None or request.ended_by is EndedBy.OLD_KV:
                continue  # its frontend is gone; or it will compute them anew
            exchange = request.exchange
            if not exchange.num_tokens:
                self._first_token(request)
            item = Tokens(
                request.submit.request_id,
                exchange.num_tokens,
                pack_ids(new.token_ids),
                new.logprobs,
                new.num_cached_tokens,
            )
            exchange.tokens(item)
            num_tokens += len(new.token_ids)
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
        for request in list(self._requests.values()):
            self._answer(
                request,
                request.made_up_end(FinishReason.ERROR, ErrorKind.ENGINE, reason),
            )
        self.flush()
        for frontend in list(self._frontends.values()):
            self._delivery.send(frontend, EngineDead(self.dead_reason))
        self.on_change()

    def _first_token(self, request: Request) -> None:
        self._admission.num_queued_tokens -= request.num_queued_tokens
        request.num_queued_tokens = 0
        seconds = self._timers.time() - request.submitted_at
        of_handover = request.submit.leg is Leg.DECODE
        self._metrics.first_token(seconds, of_handover=of_handover)

    def _answer(self, request: Request, end: Finished) -> None:
        request.exchange.finished(end)
        self._forget(request)
        if end.handover is not None:
            self._orphans.given(request, end.handover, self._timers.time())
        self._untold.given(request.frontend, end, self._timers.time())
        self._metrics.finished(end, self._timers.time() - request.submitted_at)
        self._delivery.finished(request.frontend, end)
        self._tell_if_idle()

    def _forget(self, request: Request) -> None:
        del self._requests[request.engine_id]
        self._admission.num_requests -= 1
        del request.frontend.requests[request.submit.request_id]
        self._aborting.pop(request.engine_id, None)
        self._admission.num_queued_tokens -= request.num_queued_tokens

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
        for engine_id, give_up_at in list(self._aborting.items()):
            if give_up_at > now:
                break
            logger.error("the engine did not end request %s after abort", engine_id)
            request = self._requests[engine_id]
            self._answer(request, request.given_up_end())
        self._metrics.engine_load(
            self._engine.load(), self.num_requests, len(self._frontends)
        )
        if self._captures is not None:
            self._metrics.captured(self._captures.usage, len(self._untold))

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
        for request in list(self._requests.values()):
            request.is_evicted = True
            self._cancel(request)

    def end_all(self) -> None:
        """End what is open although the engine has not; the worker is leaving."""
        for request in list(self._requests.values()):
            self._answer(request, request.evicted_end())
        self.flush()

    def _tell_if_idle(self) -> None:
        if self._admission.is_draining and not self._requests:
            self.on_change()


def _nothing() -> None:
    """Do nothing."""
