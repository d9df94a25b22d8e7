"""A connection to one worker: handshake, liveness, open requests."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable

from tokenwire.protocol.captures import saved_path
from tokenwire.protocol.codec import decode_from_worker
from tokenwire.protocol.errors import (
    Incompatible,
    ProtocolError,
    RemoteProtocolError,
)
from tokenwire.protocol.limits import (
    HEARTBEAT_INTERVAL_S,
    HEARTBEAT_TIMEOUT_S,
    MAX_ERROR_CHARS,
)
from tokenwire.protocol.messages import (
    ADMIN,
    CAPTURE_TOLD,
    JOURNAL,
    METRICS,
    ORPHANED_KV,
    Admin,
    AdminDone,
    Batch,
    BetweenBatches,
    Bye,
    Cancel,
    Card,
    Discard,
    EngineDead,
    Finished,
    JsonObject,
    KVBlocks,
    LetGo,
    Load,
    MetricsText,
    OrphanedKV,
    Ping,
    Recall,
    Recalled,
    Refused,
    ReleaseKV,
    ScrapeMetrics,
    Settled,
    Status,
    Submit,
    Told,
    WatchKV,
)

from .channel import Channel
from .conversation import HELLO_AGAIN_S
from .dealer import Context
from .errands import Errands
from .keyring import LOOPBACK_ONLY, Keyring
from .kv_index import KvIndex
from .opened import OpenRequests
from .peer import Peer
from .recalls import Recalls, TakeRecalled
from .reply import Reply
from .routing import Policy
from .stall import FIRST_TOKEN_TIMEOUT_S, STALL_TIMEOUT_S, SUSPECT_S
from .vigil import Vigil

__all__ = ["TICK_S", "Link", "LinkState"]

_log = logging.getLogger(__name__)

HANDSHAKE_AGAIN_S = 2.0
"""After a handshake of ZeroMQ's that failed: keys may be changed at any time, and it
costs the worker a tenth of a millisecond."""


class LinkState(enum.Enum):
    """Where a link is in its life."""

    CONNECTING = "connecting"
    HELLO = "hello"  # sent; waiting for the card
    READY = "ready"
    REFUSED = "refused"
    CLOSED = "closed"


class Link(Peer):
    """A connection to one worker; reconnects for ever, and says when it is ready.

    Args:
        endpoint: Where the worker listens, ``tcp://host:port``.
        context: The process's ZeroMQ context.
        identity: This frontend's id and incarnation.
        keyring: Says with which keys it connects, if it may.
        accept: Checks a card; raises ``Incompatible`` with a sentence.
        index: Where it is noted what the worker has cached.
        policy: See ``Peer``.
        heartbeat_timeout_s, stall_timeout_s, first_token_timeout_s: See ``Vigil``.
        on_ready: Called whenever it becomes ready.
        on_lost: Called whenever it no longer is.
        on_status: Called when the worker's Status has changed, also at its start, and
            when it begins to drain.
        on_orphan: Called with KV that is held for a lost frontend; returns whether that
            is seen to.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        context: Context,
        identity: tuple[str, str],
        accept: Callable[[Card], None],
        index: KvIndex | None = None,
        policy: Policy = Policy.KV,
        keyring: Keyring = LOOPBACK_ONLY,
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        first_token_timeout_s: float = FIRST_TOKEN_TIMEOUT_S,
        on_ready: Callable[[], None] | None = None,
        on_lost: Callable[[], None] | None = None,
        on_status: Callable[[], None] | None = None,
        on_orphan: Callable[[OrphanedKV], bool] | None = None,
    ) -> None:
        super().__init__(endpoint, index, policy)
        self.state = LinkState.CONNECTING
        self.reason = ""  # why it is not ready, for the operator
        self.num_protocol_errors = 0
        self._channel = Channel(
            endpoint,
            context=context,
            identity=identity,
            keyring=keyring,
            timeout_s=heartbeat_timeout_s,
            listener=self,
        )
        self._talk = self._channel.talk
        self._accept = accept
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._on_status = on_status
        self._on_orphan = on_orphan
        self._errands = Errands()
        self._recalls = Recalls()
        self._open = OpenRequests()
        self._take_metrics: Callable[[str], None] | None = None
        self._watchers: dict[Callable[[str], None], None] = {}
        self._loop = asyncio.get_running_loop()
        self._vigil = Vigil(
            self._open,
            self._loop.time(),
            heartbeat_timeout_s=heartbeat_timeout_s,
            stall_timeout_s=stall_timeout_s,
            first_token_timeout_s=first_token_timeout_s,
        )
        self._connect()

    # --- what others use -----------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether it is connected, and this frontend knows its card and Status."""
        return self.state is LinkState.READY and not self.awaits_status

    @property
    def num_open(self) -> int:
        """Requests of this frontend that have not ended."""
        return len(self._open)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that wait to be computed there, as far as is known.

        The worker's own count includes other frontends' but is up to a second old: what
        of it was this frontend's is known as it is now, without what should be cached.
        Of others' prompts as much should be cached as of this frontend's.
        """
        opened = self._open
        others = round(self.num_others_tokens * opened.uncached_share)
        return opened.num_uncached_tokens + others

    @property
    def usable(self) -> bool:
        """Whether a request may be sent here."""
        return (
            self.is_ready
            and not self.objection
            and not self._vigil.is_suspect(self._loop.time())
        )

    @property
    def obstacle(self) -> str:
        """Why no request may be sent here, for the operator; empty: one may."""
        if self.usable:
            return ""
        if self.state is not LinkState.READY:
            return self.reason or self.state.value
        if self.awaits_status:
            return "waiting for what its Status is"
        return self.objection or f"has stalled within the last {SUSPECT_S:.0f} s"

    def submit(self, message: Submit, reply: Reply, num_cached_tokens: int = 0) -> None:
        """Send a request; *reply* hears of its end exactly once.

        Args:
            message: The request.
            reply: Who hears what comes.
            num_cached_tokens: Of its ids, what the worker should have cached.

        Raises:
            MessageTooLarge: The request is above the limit; nothing was sent.
            ConnectionError: The worker cannot be reached; nothing was sent.
        """
        if self.state is not LinkState.READY:
            msg = f"worker {self.worker_id} is not connected ({self.state.value})"
            raise ConnectionError(msg)
        self._vigil.opened(self._loop.time())
        self._open.add(message, reply, num_cached_tokens)
        try:
            sent = self._channel.send(message)
        except ProtocolError:
            self._open.forget(message.request_id)
            raise
        if not sent:
            self._open.forget(message.request_id)
            msg = f"worker {self.worker_id} does not take messages"
            raise ConnectionError(msg)

    def redirect(self, request_id: str, reply: Reply) -> None:
        """Have *reply* hear what comes of a request from now on, if it is open."""
        self._open.redirect(request_id, reply)

    def began(self, request_id: str) -> None:
        """Take note that a request has brought its first token."""
        self._open.began(request_id)

    def cancel(self, request_id: str) -> None:
        """Ask for a request's end; it still comes to its reply."""
        if request_id in self._open:
            self._channel.send(Cancel(request_id))

    def release_kv(self, message: ReleaseKV) -> bool:
        """Pass a release on; returns whether it was sent."""
        return self.state is LinkState.READY and self._channel.send(message)

    def scrape(self, take: Callable[[str], None]) -> bool:
        """Ask what the engine measures; return whether that was sent.

        Args:
            take: Called with the text, once, if it comes; replaced by the next call.
        """
        if self.state is not LinkState.READY:
            return False
        self._take_metrics = take
        return self.can(METRICS) and self._channel.send(ScrapeMetrics())

    def discard(self, hidden_states_path: str) -> None:
        """Have a file deleted that no client will hear of."""
        if self.captures and self.state is LinkState.READY:
            self._channel.send(Discard(hidden_states_path))

    def client_knows(self, hidden_states_path: str) -> None:
        """Let a file age from now on: its client has heard of it."""
        if self.can(CAPTURE_TOLD) and self.state is LinkState.READY:
            self._channel.send(Told(hidden_states_path))

    def administer(self, message: Admin) -> asyncio.Future[AdminDone]:
        """Send an admin call; the future brings its end, also if the worker is lost."""
        future = self._errands.add(message.request_id)
        if not self.can(ADMIN):
            text = "it is of an older release, without an admin plane"
            self._errands.end(message.request_id, text, "unsupported")
            return future
        try:
            sent = self.state is LinkState.READY and self._channel.send(message)
        except ProtocolError as error:
            self._errands.end(message.request_id, str(error), "invalid")
            return future
        if not sent:
            text = f"it is not connected ({self.state.value})"
            self._errands.end(message.request_id, text, "lost")
        return future

    def recall(self, message: Recall, take: TakeRecalled) -> bool:
        """Ask what is kept of a generation; return whether that was sent.

        Args:
            message: The question.
            take: Called with the answer, once, also if the worker is lost; what it
                returns hears what the generation brings from then on.
        """
        if self.state is not LinkState.READY or not self.can(JOURNAL):
            return False
        self._recalls.add(message.request_id, take)
        if self._channel.send(message):
            return True
        self._recalls.forget(message.request_id)
        return False

    def forget_recall(self, request_id: str) -> None:
        """Wait for the answer to a question no longer."""
        self._recalls.forget(request_id)

    def disown(self, request_id: str) -> None:
        """Let go of what a question has brought here too late for who had asked it."""
        self._channel.send(LetGo(request_id))

    def let_go(self, request_id: str) -> None:
        """Have a request end here, and its generation go on; the end still comes."""
        if request_id in self._open:
            self._channel.send(LetGo(request_id))

    @property
    def reads_any(self) -> bool:
        """Whether a request here still has to read KV."""
        return self._open.reads_any

    def reads(self, handover: JsonObject) -> bool:
        """Return whether a request here still has to read this KV."""
        return self._open.reads(handover)

    def try_again(self) -> None:
        """Ask a worker again that was refused: what was wrong with it may be over."""
        if self.state is LinkState.REFUSED:
            self._talk.speak_soon()

    def watch(self, lost: Callable[[str], None]) -> None:
        """Have *lost* called with the reason, once, if the worker is lost."""
        self._watchers[lost] = None

    def unwatch(self, lost: Callable[[str], None]) -> None:
        """Take back a ``watch``, if there is one."""
        self._watchers.pop(lost, None)

    def tick(self) -> None:
        """Do what time asks for: call every heartbeat interval."""
        now = self._loop.time()
        self._vigil.look(now)
        if self.state is LinkState.HELLO:
            if self._talk.hello_due(now):
                self._say_hello()
        elif self.state is LinkState.REFUSED:
            if self._talk.hello_due(now):
                # Under a new name: the worker may hear the old one no more.
                self._reset(self.reason)
        elif self.state is LinkState.READY:
            self._watch_over(now)

    def _watch_over(self, now: float) -> None:
        """Beat, and give the worker up, or requests there, if it is time."""
        vigil = self._vigil
        if vigil.silence(now):
            self._channel.read()  # what came while this process was busy
        reason = vigil.silence(now) or vigil.stall(now)
        if reason is not None:
            self._reset(reason)
            return
        if vigil.beat_due(now):
            self._channel.send(Ping(self._talk.hello.incarnation))
        text, stuck = vigil.take_stuck(now)
        for request_id, reply in stuck.items():
            self._channel.send(Cancel(request_id))
            reply.lost(f"worker {self.worker_id} brought {text}")

    def close(self, reason: str) -> None:
        """Say goodbye and end every open request as lost."""
        if self.state is LinkState.CLOSED:
            return
        if self.state is LinkState.READY:
            self._channel.send(Bye(reason))
        self._channel.close()
        self._lose(LinkState.CLOSED, reason)

    # --- the socket ----------------------------------------------------------------

    def connected(self) -> None:
        """Begin the handshake; called by the socket."""
        self._say_hello()

    def disconnected(self) -> None:
        """Give up what is open; called by the socket, which goes on trying."""
        self._talk.broke()
        self._lose(LinkState.CONNECTING, "connection lost")

    def handshake_failed(self, reason: str) -> None:
        """Try again in a while, with the next key if there are several."""
        self._channel.num_keys_tried += 1
        self._channel.close()
        self._refuse(reason, HANDSHAKE_AGAIN_S)

    def received(self, data: bytes) -> None:
        """Take a message; called by the socket."""
        now = self._loop.time()
        self._vigil.heard(now)
        try:
            message = decode_from_worker(data)
            if isinstance(message, Batch):
                self._take_batch(message, now)
            else:
                self._handle(message)
        except RemoteProtocolError as error:
            self.num_protocol_errors += 1
            reason = f"broke the protocol: {error}"
            if self.state is LinkState.HELLO:  # what it understood it would refuse
                reason += " (is it a worker, of the same tokenwire release?)"
            _log.error("worker %s %s", self.worker_id, reason)
            self._begin_anew(reason)
        except ProtocolError as error:
            self._begin_anew(str(error))

    def _connect(self) -> None:
        try:
            self._channel.open()
        except Incompatible as error:
            self._refuse(str(error))

    def _begin_anew(self, reason: str) -> None:
        """Reset for what the worker has sent: at once, or in a while if it goes on so."""
        pause_s = self._talk.pause_after_breach(self._loop.time())
        if not pause_s:
            self._reset(reason)
            return
        self._hang_up(reason)
        self._refuse(reason, pause_s)

    def _reset(self, reason: str) -> None:
        """Give this connection up and start a new one."""
        self._hang_up(reason)
        self._connect()

    def _hang_up(self, reason: str) -> None:
        if self.state is LinkState.READY:
            # If it is heard, what is open there ends at once.
            self._channel.send(Bye(reason[:MAX_ERROR_CHARS]))
        self._channel.close()
        self._lose(LinkState.CONNECTING, reason)

    # --- messages ------------------------------------------------------------------

    def _say_hello(self) -> None:
        now = self._loop.time()
        self._talk.be_quiet(now)
        if self._channel.send(self._talk.hello):
            self._vigil.begin(now)
            self._talk.said_hello()
            self._set_state(LinkState.HELLO, "waiting for the worker's card")

    def _handle(self, message: Card | Refused | BetweenBatches) -> None:
        if self.state is LinkState.HELLO and isinstance(message, Load):
            self._say_hello()  # the worker knows us, but its card is lost
            return
        if not isinstance(message, Card | Refused):
            if self.state is not LinkState.READY:
                return  # from before the connection broke
            self._talk.incoming.check(message)
        match message:
            case Load():
                self._take_load(message)
            case Status():
                self._take_status(message)
            case AdminDone():
                self._errands.done(message)
            case Recalled():
                reply = self._recalls.answered(message)
                if reply is not None:
                    self._vigil.opened(self._loop.time())
                    num_tokens = message.num_new_tokens
                    self._open.follow(message.request_id, reply, num_tokens)
            case OrphanedKV():
                self._take_orphan(message)
            case KVBlocks():
                self.told_blocks(message)
            case MetricsText():
                take, self._take_metrics = self._take_metrics, None
                if take is not None:
                    take(message.text)
            case Card():
                self._take_card(message)
            case Refused():
                if self.state is LinkState.READY:
                    # The worker restarted behind the same connection, or dropped us.
                    reason = f"the worker no longer knows us: {message.reason}"
                    self._begin_anew(reason)
                else:
                    self._refuse(message.reason)
            case EngineDead():
                _log.error("worker %s: engine died: %s", self.worker_id, message.reason)
                self._lose(LinkState.CONNECTING, f"engine died: {message.reason}")

    def _take_batch(self, batch: Batch, now: float) -> None:
        """Take what an engine step has brought: as a rule tokens, and no end."""
        self._vigil.batch(now)
        if self.state is not LinkState.READY:
            return  # from before the connection broke
        self._talk.incoming.check(batch)
        if batch.finished:
            self._take_ends(batch)
        else:
            self._open.take(batch)

    def _take_ends(self, batch: Batch) -> None:
        ends = [
            end
            for end in batch.finished
            if end.handover is not None or end.kv_transfer_params is not None
        ]
        awaited = {end.request_id for end in ends if end.request_id in self._open}
        self._open.take(batch)
        for end in ends:
            if end.request_id not in awaited:
                self._take_late(end)
            elif end.handover is not None:
                self._settle(end.request_id)  # its reply has passed it on
        self._vigil.ended()

    def _take_late(self, end: Finished) -> None:
        """Free what a leg leaves behind that was given up before."""
        if end.handover is not None:
            self._take_orphan(OrphanedKV(end.request_id, end.handover))
        path = saved_path(end.kv_transfer_params)
        if path is not None:
            self.discard(path)

    def _take_orphan(self, orphan: OrphanedKV) -> None:
        if self._on_orphan is not None and self._on_orphan(orphan):
            self._settle(orphan.request_id)

    def _settle(self, request_id: str) -> None:
        if self.can(ORPHANED_KV):
            self._channel.send(Settled(request_id))

    def _take_card(self, card: Card) -> None:
        self._talk.got_card()
        try:
            self._accept(card)
        except Incompatible as error:
            self._channel.send(Bye(str(error)[:MAX_ERROR_CHARS]))  # for its log, too
            self._refuse(str(error))
            return
        self.told_card(card)
        self._vigil.stands = False
        self._set_state(LinkState.READY, "")
        if self.blocks is not None:
            self._channel.send(WatchKV())
        _log.info(
            "worker %s (%s, %s %s) is ready at %s",
            card.worker_id,
            card.role.value,
            card.engine,
            card.engine_version,
            self.endpoint,
        )
        if not self.awaits_status:
            self._take_status(Status(card.weight_version))
            self._tell_ready()

    def _tell_ready(self) -> None:
        if self._on_ready is not None:
            self._on_ready()

    def _take_status(self, status: Status) -> None:
        is_first = self.awaits_status
        self.told_status(status)
        self._vigil.look(self._loop.time())  # how long it has stood so far
        self._vigil.stands = self.stands
        if self._on_status is not None:
            self._on_status()
        if is_first:
            self._tell_ready()

    def _take_load(self, load: Load) -> None:
        if self.card is not None and load.incarnation != self.card.incarnation:
            self._begin_anew("the worker was restarted")
            return
        self._vigil.load(load, self._loop.time())
        drains = load.draining and not self.load.draining
        self.told_load(load, len(self._open), self._open.num_prompt_tokens)
        if drains and self._on_status is not None:
            self._on_status()  # whether it stands concerns nobody any more

    def _refuse(self, reason: str, again_s: float = HELLO_AGAIN_S) -> None:
        if self.reason != reason:
            _log.error("%s: not used: %s", self.endpoint, reason)
        self._talk.be_quiet(self._loop.time(), again_s)
        self._set_state(LinkState.REFUSED, reason)

    def _lose(self, state: LinkState, reason: str) -> None:
        if self.state is LinkState.READY and state is not LinkState.CLOSED:
            _log.warning(
                "worker %s is lost (%s), %d requests with it",
                self.worker_id,
                reason,
                len(self._open),
            )
        worker_id = self.worker_id
        was_ready = self.state is LinkState.READY
        self._set_state(state, reason)
        text = f"worker {worker_id} was lost: {reason}"
        self._open.lose_all(text)
        self.forget_blocks()
        self._errands.lose_all(text)
        self._recalls.lose_all()
        self._vigil.ended()
        watchers, self._watchers = self._watchers, {}
        for lost in watchers:
            lost(text)
        if was_ready and self._on_lost is not None:
            self._on_lost()

    def _set_state(self, state: LinkState, reason: str) -> None:
        self.state = state
        self.reason = reason


TICK_S = HEARTBEAT_INTERVAL_S / 2
"""How often to call ``Link.tick``: a loss is seen at most this much late."""
