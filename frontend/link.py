"""A connection to one worker: handshake, liveness, open requests."""

from __future__ import annotations

import asyncio
import enum
import logging
import secrets
from collections.abc import Callable

from tokenwire.protocol.codec import decode_from_worker, encode
from tokenwire.protocol.errors import (
    Incompatible,
    ProtocolError,
    RemoteProtocolError,
    SequenceError,
)
from tokenwire.protocol.limits import (
    HEARTBEAT_INTERVAL_S,
    HEARTBEAT_TIMEOUT_S,
    MAX_ERROR_CHARS,
)
from tokenwire.protocol.liveness import Liveness
from tokenwire.protocol.messages import (
    ORPHANED_KV,
    PROTOCOL_VERSION,
    Batch,
    Bye,
    Cancel,
    Card,
    EngineDead,
    FromFrontend,
    FromWorker,
    Hello,
    JsonObject,
    Load,
    OrphanedKV,
    Ping,
    Refused,
    ReleaseKV,
    Settled,
    Submit,
)
from tokenwire.protocol.numbering import Incoming, Outgoing

from .dealer import Context, Dealer
from .keyring import LOOPBACK_ONLY, Keyring
from .opened import OpenRequests
from .prefixes import CHUNK_TOKENS, MAX_CHUNKS, Prefixes
from .reply import Reply
from .stall import FIRST_TOKEN_TIMEOUT_S, STALL_TIMEOUT_S, SUSPECT_S, Stall

__all__ = ["TICK_S", "Link", "LinkState"]

_log = logging.getLogger(__name__)

LOOKS = 8
"""At each open request within its timeout: the last one is late by an eighth of it."""

HELLO_AGAIN_S = 10.0
"""After a refusal; an operator may have fixed the worker behind this address."""

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


class Link:
    """A connection to one worker; reconnects for ever, and says when it is ready.

    Args:
        endpoint: Where the worker listens, ``tcp://host:port``.
        context: The process's ZeroMQ context.
        identity: This frontend's id and incarnation.
        keyring: Says with which keys it connects, if it may.
        accept: Checks a card; raises ``Incompatible`` with a sentence.
        heartbeat_timeout_s: Silence after which the worker is lost.
        stall_timeout_s: The least time without a token, while an output is under way,
            after which its engine counts as stalled; longer where steps are long.
        first_token_timeout_s: The same while no request has a token yet.
        on_ready: Called whenever it becomes ready.
        on_lost: Called whenever it no longer is.
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
        keyring: Keyring = LOOPBACK_ONLY,
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        first_token_timeout_s: float = FIRST_TOKEN_TIMEOUT_S,
        on_ready: Callable[[], None] | None = None,
        on_lost: Callable[[], None] | None = None,
        on_orphan: Callable[[OrphanedKV], bool] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.state = LinkState.CONNECTING
        self.card: Card | None = None
        self.load = Load("")
        self.prefixes = Prefixes()  # what its engine may have cached
        self.num_open_at_load = 0  # requests of this frontend when it came
        self.is_leaving = False  # has left the list; what it runs may end
        self.reason = ""  # why it is not ready, for the operator
        self.num_protocol_errors = 0
        self._context = context
        self._frontend_id, self._incarnation = identity
        self._link_id = secrets.token_hex(4)
        self._accept = accept
        self._keyring = keyring
        self._turn = 0  # which of several keys is the worker's
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._on_orphan = on_orphan
        self._stall = Stall(stall_timeout_s, first_token_timeout_s)
        self._suspect_until = 0.0
        self._stuck_s, self._next_look = first_token_timeout_s, 0.0
        self._open = OpenRequests()
        self._watchers: dict[Callable[[str], None], None] = {}
        self._loop = asyncio.get_running_loop()
        self._timeout_s = heartbeat_timeout_s
        self._liveness = Liveness(self._loop.time(), timeout_s=heartbeat_timeout_s)
        self._next_hello = 0.0
        self._num_cards_due = 0  # Hellos of this connection without a card
        self._incoming, self._outgoing = Incoming(), Outgoing()
        self._dealer: Dealer | None = None
        self._connect()

    # --- what others use -----------------------------------------------------------

    @property
    def worker_id(self) -> str:
        """The worker's own name, or its address while that is unknown."""
        return self.card.worker_id if self.card is not None else self.endpoint

    @property
    def weight_version(self) -> str | None:
        """What the worker calls its weights; None while it is unknown."""
        return self.card.weight_version if self.card is not None else None

    @property
    def num_open(self) -> int:
        """Requests of this frontend that have not ended."""
        return len(self._open)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that wait at a prefill worker, as far as is known.

        The worker's own count includes other frontends' but is up to a second old.
        """
        return max(self._open.num_prompt_tokens, self.load.num_waiting_tokens)

    @property
    def usable(self) -> bool:
        """Whether a request may be sent here."""
        return (
            self.state is LinkState.READY
            and not self.is_leaving
            and not self.load.draining
            and self._loop.time() >= self._suspect_until
        )

    def submit(self, message: Submit, reply: Reply) -> None:
        """Send a request; *reply* hears of its end exactly once.

        Raises:
            MessageTooLarge: The request is above the limit; nothing was sent.
            ConnectionError: The worker cannot be reached; nothing was sent.
        """
        if self.state is not LinkState.READY:
            msg = f"worker {self.worker_id} is not connected ({self.state.value})"
            raise ConnectionError(msg)
        if not self._open:
            self._stall.begin(self._loop.time())
        self._open.add(message, reply)
        try:
            sent = self._send(message)
        except ProtocolError:
            self._open.forget(message.request_id)
            raise
        if not sent:
            self._open.forget(message.request_id)
            msg = f"worker {self.worker_id} does not take messages"
            raise ConnectionError(msg)

    def cancel(self, request_id: str) -> None:
        """Ask for a request's end; it still comes to its reply."""
        if request_id in self._open:
            self._send(Cancel(request_id))

    def release_kv(self, message: ReleaseKV) -> bool:
        """Pass a release on; returns whether it was sent."""
        return self.state is LinkState.READY and self._send(message)

    def reads(self, handover: JsonObject) -> bool:
        """Return whether a request here still has to read this KV."""
        return self._open.reads(handover)

    def try_again(self) -> None:
        """Ask a worker again that was refused: what was wrong with it may be over."""
        if self.state is LinkState.REFUSED:
            self._next_hello = 0.0

    def watch(self, lost: Callable[[str], None]) -> None:
        """Have *lost* called with the reason, once, if the worker is lost."""
        self._watchers[lost] = None

    def unwatch(self, lost: Callable[[str], None]) -> None:
        """Take back a ``watch``, if there is one."""
        self._watchers.pop(lost, None)

    def tick(self) -> None:
        """Do what time asks for: call every heartbeat interval."""
        now = self._loop.time()
        if self._liveness.slept(now) and self._open:
            self._stall.begin(now)
            self._open.look_anew(now)
        if self.state is LinkState.HELLO:
            if now >= self._next_hello:
                self._say_hello()
        elif self.state is LinkState.REFUSED:
            if now >= self._next_hello:
                # Under a new name: the worker may hear the old one no more.
                self._reset(self.reason)
        elif self.state is LinkState.READY:
            if self._liveness.lost(now):
                self._read()  # what came while this process was busy
            silence = self._liveness.silence_s(now)
            if silence > self._liveness.timeout_s:
                self._reset(f"silent for {silence:.1f} s")
            elif (stalled_s := self._stalled_s(now)) is not None:
                # It may be the one request that its engine cannot get over; whatever
                # else it has can go on elsewhere.
                self._suspect_until = now + SUSPECT_S
                self._reset(f"no token for {stalled_s:.1f} s")
            else:
                if self._liveness.beat_due(now):
                    self._send(Ping(self._incarnation))
                self._lose_stuck(now)

    def _lose_stuck(self, now: float) -> None:
        """Have requests go on elsewhere that the engine alone has forgotten."""
        if now < self._next_look:
            return
        self._next_look = now + self._stuck_s / LOOKS
        for request_id, reply in self._open.take_stuck(now, self._stuck_s).items():
            self._send(Cancel(request_id))
            reply.lost(
                f"worker {self.worker_id} brought no token for {self._stuck_s:.0f} s, "
                "only for others"
            )

    def _stalled_s(self, now: float) -> float | None:
        """Return for how long open requests got no token, if that is too long."""
        if not self._open or self._stall.silence_s(now, under_way=True) is None:
            return None  # so most of the time, and no request need be looked at
        return self._stall.silence_s(now, under_way=self._open.under_way)

    def close(self, reason: str) -> None:
        """Say goodbye and end every open request as lost."""
        if self.state is LinkState.CLOSED:
            return
        if self.state is LinkState.READY:
            self._send(Bye(reason))
        self._drop_socket()
        self._lose(LinkState.CLOSED, reason)

    # --- the socket ----------------------------------------------------------------

    def connected(self) -> None:
        """Begin the handshake; called by the socket."""
        self._say_hello()

    def disconnected(self) -> None:
        """Give up what is open; called by the socket, which goes on trying."""
        self._num_cards_due = 0
        self._lose(LinkState.CONNECTING, "connection lost")

    def handshake_failed(self, reason: str) -> None:
        """Try again in a while, with the next key if there are several."""
        self._turn += 1
        self._num_cards_due = 0
        self._drop_socket()
        self._refuse(reason, HANDSHAKE_AGAIN_S)

    def received(self, data: bytes) -> None:
        """Take a message; called by the socket."""
        now = self._loop.time()
        self._liveness.heard(now)
        try:
            message = decode_from_worker(data)
            if type(message) is Batch:
                self._stall.batch(now)
            self._handle(message)
        except RemoteProtocolError as error:
            self.num_protocol_errors += 1
            _log.error("worker %s broke the protocol: %s", self.worker_id, error)
            self._reset(f"broke the protocol: {error}")
        except ProtocolError as error:
            self._reset(str(error))

    def _connect(self) -> None:
        try:
            self._dealer = Dealer(
                self.endpoint,
                context=self._context,
                # A new one each time: a ROUTER ignores a second peer with a known one.
                identity=f"{self._frontend_id}:{secrets.token_hex(4)}".encode(),
                curve=self._keyring.curve_for(self.endpoint, self._turn),
                timeout_s=self._timeout_s,
                listener=self,
            )
        except Incompatible as error:
            self._refuse(str(error))

    def _drop_socket(self) -> None:
        dealer, self._dealer = self._dealer, None
        if dealer is not None:
            dealer.close()

    def _reset(self, reason: str) -> None:
        """Give this connection up and start a new one."""
        if self.state is LinkState.READY:
            # If it is heard, what is open there ends at once.
            self._send(Bye(reason[:MAX_ERROR_CHARS]))
        self._stall.idle()
        self._num_cards_due = 0
        self._drop_socket()
        self._lose(LinkState.CONNECTING, reason)
        self._connect()

    def _send(self, message: FromFrontend) -> bool:
        if self._dealer is None:
            return False
        if not self._dealer.send(encode(self._outgoing.numbered(message))):
            return False
        self._outgoing.sent(message)
        return True

    def _read(self) -> None:
        if self._dealer is not None:
            self._dealer.read()

    # --- messages ------------------------------------------------------------------

    def _say_hello(self) -> None:
        now = self._loop.time()
        self._next_hello = now + HELLO_AGAIN_S
        hello = Hello(
            PROTOCOL_VERSION,
            self._frontend_id,
            self._incarnation,
            [ORPHANED_KV],
            link_id=self._link_id,
        )
        if self._send(hello):
            self._liveness = Liveness(now, timeout_s=self._timeout_s)
            self._outgoing = Outgoing()
            self._num_cards_due += 1
            self._set_state(LinkState.HELLO, "waiting for the worker's card")

    def _handle(self, message: FromWorker) -> None:
        if self.state is LinkState.HELLO and isinstance(message, Load):
            self._say_hello()  # the worker knows us, but its card is lost
            return
        if isinstance(message, Batch | Load | OrphanedKV | EngineDead):
            if self.state is not LinkState.READY:
                return  # from before the connection broke
            self._incoming.check(message)
        match message:
            case Batch():
                handed_over = [
                    end.request_id
                    for end in message.finished
                    if end.handover is not None and end.request_id in self._open
                ]
                self._open.take(message)
                for request_id in handed_over:
                    self._settle(request_id)  # its reply has passed it on
                if not self._open:
                    self._stall.idle()
            case Load():
                self._take_load(message)
            case OrphanedKV():
                if self._on_orphan is not None and self._on_orphan(message):
                    self._settle(message.request_id)
            case Card():
                self._take_card(message)
            case Refused():
                if self.state is LinkState.READY:
                    # The worker restarted behind the same connection, or dropped us.
                    self._reset(f"the worker no longer knows us: {message.reason}")
                else:
                    self._refuse(message.reason)
            case EngineDead():
                _log.error("worker %s: engine died: %s", self.worker_id, message.reason)
                self._lose(LinkState.CONNECTING, f"engine died: {message.reason}")

    def _settle(self, request_id: str) -> None:
        if self.card is not None and ORPHANED_KV in self.card.capabilities:
            self._send(Settled(request_id))

    def _take_card(self, card: Card) -> None:
        if not self._num_cards_due:
            msg = "a card that was not asked for: the worker has begun anew"
            raise SequenceError(msg)
        self._num_cards_due -= 1
        self._incoming = Incoming()
        try:
            self._accept(card)
        except Incompatible as error:
            self._send(Bye(str(error)[:MAX_ERROR_CHARS]))  # for its log, too
            self._refuse(str(error))
            return
        self.card = card
        self.load = Load(card.incarnation)
        room = card.num_kv_blocks * card.block_size // CHUNK_TOKENS
        self.prefixes = Prefixes(min(room or MAX_CHUNKS, MAX_CHUNKS))
        self.num_open_at_load = 0
        self._set_state(LinkState.READY, "")
        _log.info(
            "worker %s (%s, %s %s) is ready at %s",
            card.worker_id,
            card.role.value,
            card.engine,
            card.engine_version,
            self.endpoint,
        )
        if self._on_ready is not None:
            self._on_ready()

    def _take_load(self, load: Load) -> None:
        if self.card is not None and load.incarnation != self.card.incarnation:
            self._reset("the worker was restarted")
            return
        self._stall.steps(load.num_steps, self._loop.time())
        self.load = load
        self.num_open_at_load = len(self._open)

    def _refuse(self, reason: str, again_s: float = HELLO_AGAIN_S) -> None:
        if self.reason != reason:
            _log.error("%s: not used: %s", self.endpoint, reason)
        self._next_hello = self._loop.time() + again_s
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
